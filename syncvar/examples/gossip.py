"""Gossip averaging: random pairs of workers average their weights, and no worker waits for all.

    syncvar-launch --workers 4 -m syncvar.examples.gossip

Each worker starts with its own random weights. In each round it makes an SGD step on its own rows.
Then it exchanges weights with its partner of this round, by `send` and `recv`, and both continue
with the mean of the two. A worker waits only for its partner, so pairs may be in different rounds.
All workers draw the pairs from the same seed and need no message for it. With an odd number of
workers one has no partner in a round.

An exchange keeps the mean over all workers and reduces their spread. Steps increase the spread;
their rate falls to zero, and the spread with it. The task is that of `local_sgd`.

Source: Boyd, Ghosh, Prabhakar, Shah 2006, "Randomized gossip algorithms". With SGD: Lian, Zhang,
Zhang, Liu 2018, "Asynchronous decentralized parallel stochastic gradient descent".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv
from syncvar.examples.local_sgd import BATCH, NOISE, RegressionData, gradient_of, make_data

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDS, LOOK_EVERY = 400, 100
LEARNING_RATE = 0.1  # in the first round; it falls to zero


class GossipResult(NamedTuple):
    """Error, distance from the truth, and the spread of the workers' weights at several times."""

    loss: float
    distance: float
    spreads: tuple[float, ...]


def partner_of(rank: int, order: NDArray[Any]) -> int | None:
    """Return a worker's partner when workers pair up in this order; None if it has none.

    Example:
        >>> order = np.array([4, 1, 0, 2, 3])
        >>> [partner_of(rank, order) for rank in range(5)]
        [2, 4, 0, None, 1]
    """
    index = int(np.flatnonzero(order == rank)[0]) ^ 1
    return int(order[index]) if index < len(order) else None


def average_with(partner: int, weights: NDArray[Any]) -> NDArray[Any]:
    """Return the mean of this worker's weights and its partner's; only the two take part."""
    if sv.rank() < partner:  # one of the two receives first, or two long sends would deadlock
        sv.send(weights, partner)
        theirs = sv.recv(partner)
    else:
        theirs = sv.recv(partner)
        sv.send(weights, partner)
    return (weights + theirs) / 2  # type: ignore[no-any-return]


def spread_of(weights: NDArray[Any]) -> tuple[NDArray[Any], float]:
    """Return the mean of all workers' weights, and the largest difference from it. Collective."""
    mean = sv.all_reduce(weights, "mean")
    return mean, float(sv.all_reduce(float(np.abs(weights - mean).max()), "max"))


def train(
    data: RegressionData,
    rounds: int = ROUNDS,
    look_every: int = LOOK_EVERY,
    rate: float = LEARNING_RATE,
) -> GossipResult:
    """Train on this worker's rows; every worker returns the same result."""
    rank, workers = sv.rank(), sv.world_size()
    mine = np.array_split(np.arange(len(data.targets)), workers)[rank]
    pairs = np.random.default_rng(0)  # same seed on every worker
    draw = np.random.default_rng(1 + rank)
    weights = draw.normal(size=data.inputs.shape[1:])
    mean, spread = spread_of(weights)
    spreads = [spread]
    for number in range(rounds):
        rows = draw.choice(mine, BATCH)
        step = gradient_of(weights, data.inputs[rows], data.targets[rows])
        weights -= rate * (1 - number / rounds) * step
        partner = partner_of(rank, pairs.permutation(workers))
        if partner is not None:
            weights = average_with(partner, weights)
        if (number + 1) % look_every == 0:
            mean, spread = spread_of(weights)
            spreads.append(spread)
    error = data.inputs @ mean - data.targets
    loss, distance = float(error @ error) / len(error), float(np.abs(mean - data.truth).max())
    return GossipResult(loss, distance, tuple(spreads))


def main() -> None:
    """Train and print the result; every worker runs it."""
    result = train(make_data())
    if sv.rank() == 0:
        spreads = " ".join(f"{spread:.5f}" for spread in result.spreads)
        print(
            f"mean squared error {result.loss:.4f} (of the noise {NOISE**2:.4f}), "
            f"weights off by at most {result.distance:.3f}\n"
            f"spread of the replicas: {spreads}\nworkers={sv.world_size()} rounds={ROUNDS}",
            flush=True,
        )


if __name__ == "__main__":
    main()
