"""Hogwild: all workers update the same weights in shared memory, without locks or messages.

    syncvar-launch --workers 4 -m syncvar.examples.hogwild

The weights are one `sv.shared_array`. For each of its rows a worker reads the weights of the row's
features, computes a gradient and writes them back. Workers meet only after each epoch, to reduce
the learning rate. This works because rows are sparse: two workers seldom use the same feature at
the same time.

What a worker may see, and why it does no harm:

* An element has at most 8 bytes and is aligned, so a read is never torn: it returns a value that
  some worker wrote.
* A read of several weights is no snapshot: it may contain part of another worker's step. The
  gradient is then that of weights between two steps.
* `weights[features] -= step` reads, subtracts and writes. It overwrites what other workers wrote to
  these features in between. That loses one feature's step of one row, among thousands.
* After `sv.barrier()` every worker sees all earlier writes.

The task is logistic regression on generated rows. For comparison `solve` finds the best weights
with synchronous steps: all rows in each step, and one all-reduce of the gradients.

Source: Niu, Recht, Re, Wright 2011, "Hogwild!: a lock-free approach to parallelizing stochastic
gradient descent".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, FEATURES, IN_A_ROW = 4000, 200, 8
EPOCHS, LEARNING_RATE, DECAY = 6, 0.2, 0.5
STEPS, STEP_RATE, MOMENTUM = 120, 30.0, 0.9  # for the synchronous solution


class SparseRows(NamedTuple):
    """Sparse rows: indices and values of features, [rows, IN_A_ROW]; labels -1 or 1, [rows]."""

    features: NDArray[Any]
    values: NDArray[Any]
    labels: NDArray[Any]

    def part(self, rows: slice) -> SparseRows:
        """Return some of the rows."""
        return SparseRows(self.features[rows], self.values[rows], self.labels[rows])


class HogwildResult(NamedTuple):
    """Mean losses of the shared weights and of the best weights, and the number of row steps."""

    loss: float
    best: float
    steps: int


def make_rows(seed: int = 0) -> SparseRows:
    """Return all rows, the same on every worker; labels are random, with a logistic model."""
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
    """Return the best weights, computed by all workers with synchronous steps. Collective."""
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
    """Update the shared weights with the gradient of one row."""
    margin = label * float(weights[features] @ values)
    weights[features] += rate * label / (1 + np.exp(margin)) * values


def train(rows: SparseRows, epochs: int = EPOCHS) -> HogwildResult:
    """Train on this worker's rows; every worker returns the same result.

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
        sv.barrier()  # all workers reduce the rate together
    steps = int(sv.all_reduce(epochs * len(mine.labels)))
    return HogwildResult(mean_loss(weights, rows), mean_loss(solve(rows), rows), steps)


def main() -> None:
    """Train and print the losses; every worker runs it."""
    result = train(make_rows())
    if sv.rank() == 0:
        print(
            f"mean loss of the shared weights {result.loss:.4f}, "
            f"of the synchronous solution {result.best:.4f} (of zero weights: {np.log(2):.4f})\n"
            f"workers={sv.world_size()} steps={result.steps} without a lock",
            flush=True,
        )


if __name__ == "__main__":
    main()
