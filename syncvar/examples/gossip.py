"""Gossip averaging: random pairs of workers average their weights, and nobody ever waits for all.

    syncvar-launch --workers 4 -m syncvar.examples.gossip

Each worker has weights of its own, begun at random. In each round it makes a step on rows that only it has, then exchanges weights
with the partner of this round by `send` and `recv`, and both go on from the mean of the two. A worker waits for its partner alone;
so different pairs may be in different rounds. The pairs are drawn by a generator with the same seed on all workers, so that
nobody has to be asked; with an odd number one worker sits out.

An exchange leaves the mean over all workers as it is and makes the spread smaller; repeated, it leads all to the mean. Steps pull
workers apart; their rate falls to zero, and the spread with it. Source: Boyd, Ghosh, Prabhakar, Shah 2006, "Randomized gossip
algorithms"; with steps of SGD: Lian, Zhang, Zhang, Liu 2018, "Asynchronous decentralized parallel stochastic gradient descent".

The task is that of `local_sgd`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv
from syncvar.examples.local_sgd import BATCH, NOISE, RegressionData, gradient_of, make_data

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDS, LOOK_EVERY = 400, 100
LEARNING_RATE = 0.1  # of the first round; it falls to zero


class GossipResult(NamedTuple):
    """What a run came to; `spreads` are the largest differences of a worker's weights from the mean, at the looks in between."""

    loss: float
    distance: float
    spreads: tuple[float, ...]


def partner_of(rank: int, order: NDArray[Any]) -> int | None:
    """Return whom a worker meets where the workers pair up in this order; None for the one that is left over.

    Example:
        >>> order = np.array([4, 1, 0, 2, 3])
        >>> [partner_of(rank, order) for rank in range(5)]
        [2, 4, 0, None, 1]
    """
    place = int(np.flatnonzero(order == rank)[0]) ^ 1
    return int(order[place]) if place < len(order) else None


def average_with(partner: int, weights: NDArray[Any]) -> NDArray[Any]:
    """Return the mean of this worker's weights and its partner's, which makes the same call; no others take part."""
    if (
        sv.rank() < partner
    ):  # one of the two has to receive first, or long messages would wait for each other
        sv.send(weights, partner)
        theirs = sv.recv(partner)
    else:
        theirs = sv.recv(partner)
        sv.send(weights, partner)
    return (weights + theirs) / 2  # type: ignore[no-any-return]


def spread_of(weights: NDArray[Any]) -> tuple[NDArray[Any], float]:
    """Return the mean of all workers' weights and how far from it the farthest is. Collective: to look, not to learn."""
    mean = sv.all_reduce(weights, "mean")
    return mean, float(sv.all_reduce(float(np.abs(weights - mean).max()), "max"))


def train(
    data: RegressionData,
    rounds: int = ROUNDS,
    look_every: int = LOOK_EVERY,
    rate: float = LEARNING_RATE,
) -> GossipResult:
    """Train on this worker's rows; the outcome is the same on every worker."""
    rank, workers = sv.rank(), sv.world_size()
    mine = np.array_split(np.arange(len(data.targets)), workers)[rank]
    pairs = np.random.default_rng(0)  # the same on every worker
    draw = np.random.default_rng(1 + rank)
    weights = draw.normal(size=data.inputs.shape[1:])
    mean, spread = spread_of(weights)
    spreads = [spread]
    for number in range(rounds):
        rows = draw.choice(mine, BATCH)
        weights -= (
            rate
            * (1 - number / rounds)
            * gradient_of(weights, data.inputs[rows], data.targets[rows])
        )
        partner = partner_of(rank, pairs.permutation(workers))
        if partner is not None:
            weights = average_with(partner, weights)
        if (number + 1) % look_every == 0:
            mean, spread = spread_of(weights)
            spreads.append(spread)
    error = data.inputs @ mean - data.targets
    return GossipResult(
        float(error @ error) / len(error), float(np.abs(mean - data.truth).max()), tuple(spreads)
    )


def main() -> None:
    """Run as one worker."""
    outcome = train(make_data())
    if sv.rank() == 0:
        shown = " ".join(f"{spread:.5f}" for spread in outcome.spreads)
        print(
            f"mean squared error {outcome.loss:.4f} (of the noise {NOISE**2:.4f}), weights off by at most {outcome.distance:.3f}\n"
            f"spread of the replicas: {shown}\nworkers={sv.world_size()} rounds={ROUNDS}",
            flush=True,
        )


if __name__ == "__main__":
    main()
