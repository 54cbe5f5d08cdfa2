"""Local SGD: workers train on their own weights and average them every k steps.

    syncvar-launch --workers 4 -m syncvar.examples.local_sgd

The weights are NONE variables: each worker has its own values, and a step sends nothing. Every
PERIOD steps one all-reduce replaces them by their mean. So the workers send 1/PERIOD of the data,
and wait 1/PERIOD as often, as with averaged gradients. Each worker keeps its own momentum.

The task is linear regression. Each worker sees only its own rows of the data.

Source: McDonald, Hall, Mann 2010; Stich 2019, "Local SGD converges fast and communicates little";
McMahan et al. 2017 (federated averaging).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, FEATURES = 4096, 16  # of the whole data set
BATCH = 32  # rows per step of a worker
STEPS, PERIOD = 400, 8
LEARNING_RATE, MOMENTUM = 0.02, 0.9
NOISE = 0.1  # standard deviation of the noise on the targets


class RegressionData(NamedTuple):
    """Rows of features, their targets, and the true weights."""

    inputs: NDArray[Any]
    targets: NDArray[Any]
    truth: NDArray[Any]


class LocalSgdResult(NamedTuple):
    """Result; `spread` is the largest change of a weight by the last averaging."""

    loss: float
    distance: float
    spread: float
    averagings: int


def make_data(seed: int = 0) -> RegressionData:
    """Return the data of all workers, the same on every worker."""
    draw = np.random.default_rng(seed)
    inputs = draw.normal(size=(ROWS, FEATURES)).astype(np.float32)
    truth = draw.normal(size=FEATURES).astype(np.float32)
    targets = inputs @ truth + NOISE * draw.normal(size=ROWS).astype(np.float32)
    return RegressionData(inputs, targets.astype(np.float32), truth)


def gradient_of(weights: NDArray[Any], inputs: NDArray[Any], targets: NDArray[Any]) -> NDArray[Any]:
    """Return the gradient of half the mean squared error."""
    gradient: NDArray[Any] = inputs.T @ (inputs @ weights - targets) / np.float32(len(targets))
    return gradient


def average(variables: list[sv.Variable]) -> None:
    """Replace NONE variables by their mean over all workers, by one all-reduce. Collective."""
    means = sv.all_reduce([variable.local_value() for variable in variables], "mean")
    for variable, mean in zip(variables, means, strict=True):
        variable.assign(mean)


def train(data: RegressionData, steps: int = STEPS, period: int = PERIOD) -> LocalSgdResult:
    """Train on this worker's rows; every worker returns the same result."""
    rank, workers = sv.rank(), sv.world_size()
    mine = np.array_split(np.arange(len(data.targets)), workers)[rank]
    weights = sv.Variable(
        np.zeros(data.inputs.shape[1], np.float32),
        name="weights",
        synchronization=sv.VariableSynchronization.NONE,
    )
    optimizer = sv.optimizers.Momentum(LEARNING_RATE, MOMENTUM)
    draw = np.random.default_rng(1 + rank)  # each worker draws its own batches
    averagings, spread = 0, 0.0
    for step in range(1, steps + 1):
        rows = draw.choice(mine, BATCH)
        gradient = gradient_of(weights.local_value(), data.inputs[rows], data.targets[rows])
        optimizer.apply_gradients([(gradient, weights)])
        if step % period == 0 or step == steps:
            before = weights.local_value()
            average([weights])
            averagings += 1
            spread = float(np.abs(before - weights.local_value()).max())
    value = weights.local_value()
    error = data.inputs @ value - data.targets
    spread = float(sv.all_reduce(spread, "max"))
    loss, distance = float(error @ error) / len(error), float(np.abs(value - data.truth).max())
    return LocalSgdResult(loss, distance, spread, averagings)


def main() -> None:
    """Train and print the result; every worker runs it."""
    result = train(make_data())
    if sv.rank() == 0:
        print(
            f"mean squared error {result.loss:.4f} (of the noise {NOISE**2:.4f}), "
            f"weights off by at most {result.distance:.3f}, "
            f"workers apart by {result.spread:.4f} before the last averaging\n"
            f"workers={sv.world_size()} steps={STEPS} averagings={result.averagings}",
            flush=True,
        )


if __name__ == "__main__":
    main()
