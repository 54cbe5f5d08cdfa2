"""Elastic averaging SGD: workers train on their own weights, tied by a spring to a shared center.

    syncvar-launch --workers 4 -m syncvar.examples.easgd

A worker's weights are a NONE variable. The center is an ON_WRITE variable with aggregation SUM.
Every PERIOD steps each worker computes the elastic difference e = alpha * (own - center). It
subtracts e from its own weights and adds it to the center:

    own    <- own - e                       assign_sub of a NONE variable: no message
    center <- center + sum of all e         assign_add of an ON_WRITE SUM variable: one all-reduce

The result is the center. It averages over workers and over time, so it has less noise than a
worker's weights. `beta` = workers * alpha must be at most 1, or the center overshoots; the paper
takes 0.9.

Source: Zhang, Choromanska, LeCun 2015, "Deep learning with elastic averaging SGD", equations 3 and
4 (synchronous form), with momentum as in EAMSGD. The task is that of `local_sgd`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import syncvar as sv
from syncvar.examples.local_sgd import (
    BATCH,
    LEARNING_RATE,
    MOMENTUM,
    NOISE,
    RegressionData,
    gradient_of,
    make_data,
)

STEPS, PERIOD = 400, 4
BETA = 0.9  # part of the way from the center to the workers' mean that one averaging covers


class EasgdResult(NamedTuple):
    """Errors of center and workers, distance of the center from the truth, spread of workers."""

    center_loss: float
    worker_loss: float
    distance: float
    spread: float


def mean_squared_error(weights: np.ndarray, data: RegressionData) -> float:
    """Return the mean squared error over all rows."""
    error = data.inputs @ weights - data.targets
    return float(error @ error) / len(error)


def pull(own: sv.Variable, center: sv.Variable, alpha: float) -> None:
    """Apply the elastic force once, to a worker's weights and to the center. Collective."""
    difference = np.float32(alpha) * (own.local_value() - center.local_value())
    own.assign_sub(difference)
    center.assign_add(difference)


def train(
    data: RegressionData, steps: int = STEPS, period: int = PERIOD, beta: float = BETA
) -> EasgdResult:
    """Train on this worker's rows; every worker returns the same result."""
    if not 0 < beta <= 1:
        raise sv.ConfigError(
            f"beta must be in (0, 1], not {beta}: above 1 the center overshoots the workers' mean"
        )
    rank, workers = sv.rank(), sv.world_size()
    mine = np.array_split(np.arange(len(data.targets)), workers)[rank]
    start = np.zeros(data.inputs.shape[1], np.float32)
    own = sv.Variable(start, name="own", synchronization=sv.VariableSynchronization.NONE)
    center = sv.Variable(
        start,
        name="center",
        synchronization=sv.VariableSynchronization.ON_WRITE,
        aggregation=sv.VariableAggregation.SUM,
    )
    optimizer = sv.optimizers.Nesterov(LEARNING_RATE, MOMENTUM)
    draw = np.random.default_rng(1 + rank)
    for step in range(steps):
        if step % period == 0:
            pull(own, center, beta / workers)
        rows = draw.choice(mine, BATCH)
        gradient = gradient_of(own.local_value(), data.inputs[rows], data.targets[rows])
        optimizer.apply_gradients([(gradient, own)])
    pull(own, center, beta / workers)
    value = center.local_value()
    losses = sv.all_reduce(mean_squared_error(own.local_value(), data), "mean")
    spread = sv.all_reduce(float(np.abs(own.local_value() - value).max()), "max")
    distance = float(np.abs(value - data.truth).max())
    return EasgdResult(mean_squared_error(value, data), float(losses), distance, float(spread))


def main() -> None:
    """Train and print the result; every worker runs it."""
    result = train(make_data())
    if sv.rank() == 0:
        print(
            f"mean squared error of the center {result.center_loss:.4f}, "
            f"of the workers {result.worker_loss:.4f} (of the noise {NOISE**2:.4f})\n"
            f"largest error of a weight of the center {result.distance:.3f}, "
            f"largest distance of a worker from the center {result.spread:.3f}\n"
            f"workers={sv.world_size()} steps={STEPS} period={PERIOD}",
            flush=True,
        )


if __name__ == "__main__":
    main()
