"""EASGD, elastic averaging: every worker explores on its own, tied by a spring to a center that all share.

    syncvar-launch --workers 4 -m syncvar.examples.easgd

A worker's weights are a NONE variable. The center is an ON_WRITE variable with aggregation SUM. Every PERIOD steps each worker
takes the same elastic difference e = alpha * (own - center) off its own weights and adds it to the center:

    own    <- own - e                       assign_sub of a NONE variable: no message
    center <- center + sum of all e         assign_add of an ON_WRITE SUM variable: one all-reduce

This is the synchronous form, equations 3 and 4 of Zhang, Choromanska, LeCun 2015, "Deep learning with elastic averaging SGD",
with momentum for the workers as in their EAMSGD. `beta` = workers * alpha must be at most 1, or the center overshoots;
the paper takes 0.9. The center is the result: it is an average over workers and over time, and so quieter than each of them.

The task is that of `local_sgd`.
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
BETA = 0.9  # share of the way to the workers' mean that the center goes each time


class EasgdResult(NamedTuple):
    """Errors of the center and of the workers' mean, how far the center is from the truth, how far workers are from it."""

    center_loss: float
    worker_loss: float
    distance: float
    spread: float


def mean_squared_error(weights: np.ndarray, data: RegressionData) -> float:
    """Return the error over all rows."""
    error = data.inputs @ weights - data.targets
    return float(error @ error) / len(error)


def pull(own: sv.Variable, center: sv.Variable, alpha: float) -> None:
    """Let the spring act once, on a worker's own weights and on the center. Collective."""
    difference = np.float32(alpha) * (own.local_value() - center.local_value())
    own.assign_sub(difference)
    center.assign_add(difference)


def train(
    data: RegressionData, steps: int = STEPS, period: int = PERIOD, beta: float = BETA
) -> EasgdResult:
    """Train on this worker's rows; the outcome is the same on every worker.

    Raises:
        ConfigError: A beta outside (0, 1].
    """
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
    """Run as one worker."""
    outcome = train(make_data())
    if sv.rank() == 0:
        print(
            f"mean squared error of the center {outcome.center_loss:.4f}, of the workers {outcome.worker_loss:.4f} "
            f"(of the noise {NOISE**2:.4f})\nthe center is off by at most {outcome.distance:.3f}, workers stray by up to "
            f"{outcome.spread:.3f}\nworkers={sv.world_size()} steps={STEPS} period={PERIOD}",
            flush=True,
        )


if __name__ == "__main__":
    main()
