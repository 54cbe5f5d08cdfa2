"""Hogwild: all workers change one and the same weights, without a lock, a message or a wait.

    syncvar-launch --workers 4 -m syncvar.examples.hogwild

The weights are one `sv.shared_array`, in the memory that the workers of this host share. A worker takes one of its rows, reads the
weights of the row's features, and writes them back a step further. Nobody waits for anybody, until the end of an epoch. That works
because rows are sparse: two workers seldom have the same feature in hand. Source: Niu, Recht, Re, Wright 2011, "Hogwild!: a
lock-free approach to parallelizing stochastic gradient descent"; all meet after each epoch and make the rate smaller, as there.

What a worker may see, and why that is harmless here:

* An element is at most 8 bytes and lies at a multiple of its size: it is never torn, a read gives what somebody wrote.
* A row of weights is not one version: another worker's step may be there in part. The gradient is then that of weights between
  two steps.
* `weights[features] -= step` reads, subtracts and writes. What another worker writes to one of these features in between is lost:
  a step of one feature of one row, of which there are thousands.
* After `sv.barrier()` everything written before it is there.

The task is logistic regression on generated rows. The best weights are known: `solve` finds them with all rows in each step and
one all-reduce of the gradients, so synchronously.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, FEATURES, IN_A_ROW = 4000, 200, 8
EPOCHS, LEARNING_RATE, DECAY = 6, 0.2, 0.5
STEPS, STEP_RATE, MOMENTUM = 120, 30.0, 0.9  # of the synchronous solution


class SparseRows(NamedTuple):
    """Sparse rows: numbers of features, int64 [rows, IN_A_ROW], each once in a row; their values; labels -1 or 1."""

    features: NDArray[Any]
    values: NDArray[Any]
    labels: NDArray[Any]

    def part(self, rows: slice) -> SparseRows:
        """Return some of them."""
        return SparseRows(self.features[rows], self.values[rows], self.labels[rows])


class HogwildResult(NamedTuple):
    """Mean losses of the shared weights and of the best ones, and how many steps of rows were made by all workers."""

    loss: float
    best: float
    steps: int


def make_rows(seed: int = 0) -> SparseRows:
    """Return all rows, the same everywhere; the labels are drawn, so that no weights explain them all."""
    draw = np.random.default_rng(seed)
    features = np.stack([draw.choice(FEATURES, IN_A_ROW, replace=False) for _ in range(ROWS)])
    values = draw.normal(size=features.shape)
    truth = draw.normal(size=FEATURES)
    chance = 1 / (1 + np.exp(-(truth[features] * values).sum(1)))
    return SparseRows(features, values, np.where(draw.random(ROWS) < chance, 1.0, -1.0))


def mean_loss(weights: NDArray[Any], rows: SparseRows) -> float:
    """Return the mean logistic loss."""
    margins = rows.labels * (weights[rows.features] * rows.values).sum(1)
    return float(np.logaddexp(0.0, -margins).mean())


def solve(rows: SparseRows, steps: int = STEPS) -> NDArray[Any]:
    """Return the best weights, the same on every worker: each brings the gradient of its rows to every step. Collective."""
    mine = rows.part(slice(sv.rank(), None, sv.world_size()))
    weights, velocity = np.zeros(FEATURES), np.zeros(FEATURES)
    for _ in range(steps):
        margins = mine.labels * (weights[mine.features] * mine.values).sum(1)
        pull = -(mine.labels / (1 + np.exp(margins)))[:, None] * mine.values
        gradient = np.bincount(mine.features.ravel(), pull.ravel(), FEATURES) / len(rows.labels)
        velocity = MOMENTUM * velocity - STEP_RATE * (1 - MOMENTUM) * sv.all_reduce(gradient)
        weights = weights + velocity
    return weights


def step_of_row(
    weights: NDArray[Any], features: NDArray[Any], values: NDArray[Any], label: float, rate: float
) -> None:
    """Make one worker's step of one row in the weights that all share: read, compute, write."""
    margin = label * float(weights[features] @ values)
    weights[features] += rate * label / (1 + np.exp(margin)) * values


def train(rows: SparseRows, epochs: int = EPOCHS) -> HogwildResult:
    """Train on this worker's rows; the outcome is the same on every worker.

    Raises:
        ConfigError: The workers are on several hosts, or share no memory.
    """
    weights = sv.shared_array(FEATURES)
    mine = rows.part(slice(sv.rank(), None, sv.world_size()))
    order = np.random.default_rng(1 + sv.rank())
    for epoch in range(epochs):
        rate = LEARNING_RATE * DECAY**epoch
        for row in order.permutation(len(mine.labels)):
            step_of_row(weights, mine.features[row], mine.values[row], mine.labels[row], rate)
        sv.barrier()  # the rate falls for all at once
    steps = int(sv.all_reduce(epochs * len(mine.labels)))
    return HogwildResult(mean_loss(weights, rows), mean_loss(solve(rows), rows), steps)


def main() -> None:
    """Run as one worker."""
    outcome = train(make_rows())
    if sv.rank() == 0:
        print(
            f"mean loss of the shared weights {outcome.loss:.4f}, of the synchronous solution {outcome.best:.4f} "
            f"(of weights 0: {np.log(2):.4f})\nworkers={sv.world_size()} steps={outcome.steps} without a lock",
            flush=True,
        )


if __name__ == "__main__":
    main()
