"""Matrix factorisation with embeddings on servers: who likes what, learned by workers that never wait for each other.

    syncvar-launch --workers 3 --servers 2 --server-replicas 1 -m syncvar.examples.embedding

Each rating is modelled as the product of a user's and an item's vector (Koren, Bell, Volinsky 2009, "Matrix factorization techniques
for recommender systems"). The two tables of vectors are cut by rows over the servers. A worker looks up the rows of its batch in
one round trip, and pushes the gradients of these rows; the servers make the step, Adagrad with their own slots. No worker
waits for another one (staleness None), and with `--server-replicas 1` a server may die meanwhile: its mirror goes on.

The ratings are generated: vectors of RANK numbers for each user and item, their product, and noise of NOISE. So the best error
on ratings that were left out is known: NOISE.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import syncvar as sv

USERS, ITEMS, RANK = 300, 200, 4
RATINGS, HELD_OUT, NOISE = 20_000, 2_000, 0.1
EPOCHS, BATCH, LEARNING_RATE = 20, 500, 0.3


class Ratings(NamedTuple):
    """Who, what, and how much: int64, int64 and float32, all of one length."""

    users: np.ndarray
    items: np.ndarray
    values: np.ndarray

    def part(self, rows: np.ndarray | slice) -> Ratings:
        """Return some of them."""
        return Ratings(self.users[rows], self.items[rows], self.values[rows])


def make_ratings(count: int, seed: int) -> Ratings:
    """Return ratings of the same users and items for every seed."""
    truth = np.random.default_rng(0)
    of_users, of_items = truth.normal(size=(USERS, RANK)), truth.normal(size=(ITEMS, RANK))
    drawn = np.random.default_rng(seed)
    users, items = drawn.integers(USERS, size=count), drawn.integers(ITEMS, size=count)
    values = (of_users[users] * of_items[items]).sum(1) + NOISE * drawn.normal(size=count)
    return Ratings(users, items, values.astype(np.float32))


def root_mean_square(users: np.ndarray, items: np.ndarray, ratings: Ratings) -> float:
    """Return the error of two tables on ratings."""
    error = (users[ratings.users] * items[ratings.items]).sum(1) - ratings.values
    return float(np.sqrt(error @ error / error.size))


def train(strategy: sv.ParameterServerStrategy, epochs: int = EPOCHS) -> float:
    """Train on this worker's ratings; returns the error on those that were left out, when all workers have ended."""
    start = np.random.default_rng(1)
    with strategy.scope():
        users = sv.Variable(0.5 * start.normal(size=(USERS, RANK)).astype(np.float32), name="users")
        items = sv.Variable(0.5 * start.normal(size=(ITEMS, RANK)).astype(np.float32), name="items")
    optimizer = sv.optimizers.Adagrad(LEARNING_RATE)
    mine = make_ratings(RATINGS, seed=1).part(slice(sv.rank(), None, sv.world_size()))
    order = np.random.default_rng(sv.rank())
    for epoch in range(epochs):
        shuffled = order.permutation(mine.values.size)
        for begin in range(0, shuffled.size, BATCH):
            batch = mine.part(shuffled[begin : begin + BATCH])
            u, i = strategy.read_all([(users, batch.users), (items, batch.items)])
            error = ((u * i).sum(1) - batch.values)[:, None]
            gradients = ((batch.users, error * i), (batch.items, error * u))
            optimizer.apply_gradients(zip(gradients, (users, items), strict=True))
        strategy.tick()
        if sv.rank() == 0:
            print(f"epoch {epoch + 1}", flush=True)
    sv.barrier()
    of_users, of_items = strategy.snapshot([users, items])
    return root_mean_square(of_users, of_items, make_ratings(HELD_OUT, seed=2))


def main() -> None:
    """Train, and print the error."""
    strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=None)
    error = train(strategy)
    if sv.rank() == 0:
        print(f"error on ratings that were left out: {error:.3f} (the noise is {NOISE})")


if __name__ == "__main__":
    main()
