"""The task of `torch_module`, `torch_gradients` and `jax_gradients`: classify two spirals."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    # (weights, points, labels) -> mean loss, and the gradient of each weight
    Gradients = Callable[[list[NDArray[Any]], NDArray[Any], NDArray[Any]], tuple[float, list[Any]]]

HIDDEN = 32
# Matrix and bias of three layers.
SHAPES = ((4, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, 2), (2,))
BATCH = 96  # rows per step, over all workers
STEPS = 300
LEARNING_RATE = 0.01


class Points(NamedTuple):
    """Points as rows of x, y, x², y², and labels 0 and 1."""

    inputs: NDArray[Any]
    labels: NDArray[Any]


class Trained(NamedTuple):
    """Result of a run; `digest` is the SHA-256 of the weights."""

    loss: float
    accuracy: float
    digest: str


def make_points(count: int = 600, seed: int = 0) -> Points:
    """Return points on two arms that wind around each other, the same on every worker."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    radius = np.sqrt(draw.uniform(0.05, 1, count))
    angle = 6 * radius + np.pi * labels + draw.normal(0, 0.12, count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return Points(np.concatenate([points, points**2], axis=1).astype(np.float32), labels)


def initial_weights(seed: int = 1) -> list[NDArray[Any]]:
    """Return the initial weights, the same on every worker."""
    draw = np.random.default_rng(seed)

    def layer(shape: tuple[int, ...]) -> NDArray[Any]:
        is_bias = len(shape) == 1
        return np.zeros(shape) if is_bias else draw.normal(0, np.sqrt(2 / shape[0]), shape)

    return [layer(shape).astype(np.float32) for shape in SHAPES]


def train(
    points: Points, gradients: Gradients, accuracy: Callable[..., float], steps: int = STEPS
) -> Trained:
    """Train on all workers: each computes the gradients of its rows, syncvar does the rest.

    Args:
        points: All points.
        gradients: Function that computes the mean loss of some rows and its gradients.
        accuracy: Function (weights, points, labels) -> fraction of correct labels.
        steps: Number of steps.
    """
    rank, workers = sv.rank(), sv.world_size()
    variables = [
        sv.Variable(value, name=f"weight{number}") for number, value in enumerate(initial_weights())
    ]
    optimizer = sv.optimizers.Adam(LEARNING_RATE, clip_norm=5.0)
    draw = np.random.default_rng(2)  # all workers draw the same batches, and take their part
    loss = 0.0  # of the last step, summed over this worker's rows
    for _ in range(steps):
        mine = np.array_split(draw.choice(len(points.labels), BATCH), workers)[rank]
        weights = [variable.read_value(copy=False) for variable in variables]
        own, found = gradients(weights, points.inputs[mine], points.labels[mine])
        # Parts may be uneven (with five workers): weight= makes it the mean over the whole batch.
        optimizer.apply_gradients(zip(found, variables, strict=True), weight=len(mine))
        loss = own * len(mine)
    total = float(sv.all_reduce(loss)) / BATCH
    values = [variable.read_value() for variable in variables]
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    return Trained(total, accuracy(values, points.inputs, points.labels), digest)


def report(trained: Trained, library: str) -> None:
    """Print the result on rank 0, or exit if the workers' weights differ."""
    digests = sv.all_gather_object(trained.digest)
    if len(set(digests)) != 1:
        raise SystemExit(f"the workers' weights differ: {digests}")
    if sv.rank() == 0:
        print(
            f"gradients by {library}: loss {trained.loss:.4f} accuracy={trained.accuracy:.3f} "
            f"workers={sv.world_size()} weights_sha256={trained.digest[:16]}",
            flush=True,
        )
