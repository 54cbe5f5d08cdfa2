"""Matrix factorization with embeddings on parameter servers; workers never wait for each other.

    syncvar-launch --workers 3 --servers 2 --server-replicas 1 -m syncvar.examples.embedding

The model of a rating is the dot product of a user's vector and an item's vector. The two tables of
vectors are partitioned by rows over the servers. A worker reads the rows of its batch in one round
trip and pushes the gradients of these rows. The servers apply Adagrad with their own slots.
Workers do not wait for each other (staleness None). With `--server-replicas 1` the job survives
the failure of a server: its replica takes over.

The ratings are generated from random vectors, plus noise of deviation NOISE. So NOISE is the
smallest possible error on held-out ratings. Source: Koren, Bell, Volinsky 2009, "Matrix
factorization techniques for recommender systems".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import syncvar as sv

USERS, ITEMS, RANK = 300, 200, 4
RATINGS, HELD_OUT, NOISE = 20_000, 2_000, 0.1
EPOCHS, BATCH, LEARNING_RATE = 20, 500, 0.3


class Ratings(NamedTuple):
    """Users (int64), items (int64) and ratings (float32), three arrays of equal length."""

    users: np.ndarray
    items: np.ndarray
    values: np.ndarray

    def part(self, rows: np.ndarray | slice) -> Ratings:
        """Return the ratings of some rows."""
        return Ratings(self.users[rows], self.items[rows], self.values[rows])


def make_ratings(count: int, seed: int) -> Ratings:
    """Return random ratings; users and items are the same for every seed."""
    truth = np.random.default_rng(0)
    of_users, of_items = truth.normal(size=(USERS, RANK)), truth.normal(size=(ITEMS, RANK))
    drawn = np.random.default_rng(seed)
    users, items = drawn.integers(USERS, size=count), drawn.integers(ITEMS, size=count)
    values = (of_users[users] * of_items[items]).sum(1) + NOISE * drawn.normal(size=count)
    return Ratings(users, items, values.astype(np.float32))


def root_mean_square(users: np.ndarray, items: np.ndarray, ratings: Ratings) -> float:
    """Return the root mean square error of two tables on ratings."""
    error = (users[ratings.users] * items[ratings.items]).sum(1) - ratings.values
    return float(np.sqrt(error @ error / error.size))


def train(strategy: sv.ParameterServerStrategy, epochs: int = EPOCHS) -> float:
    """Train on this worker's ratings; return the final error on held-out ratings."""
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
    """Train and print the error; every worker runs it."""
    strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=None)
    error = train(strategy)
    if sv.rank() == 0:
        print(f"error on held-out ratings: {error:.3f} (deviation of the noise: {NOISE})")


if __name__ == "__main__":
    main()
