"""Two spirals to tell apart: the task of `torch_module`, `torch_gradients` and `jax_gradients`, and how a worker takes part in it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    # (weights, points, labels) -> mean loss and the gradient of each weight
    Gradients = Callable[[list[NDArray[Any]], NDArray[Any], NDArray[Any]], tuple[float, list[Any]]]

HIDDEN = 32
SHAPES = (
    (4, HIDDEN),
    (HIDDEN,),
    (HIDDEN, HIDDEN),
    (HIDDEN,),
    (HIDDEN, 2),
    (2,),
)  # matrix, bias; three layers
BATCH = 96  # rows of a step, over all workers
STEPS = 300
LEARNING_RATE = 0.01


class Points(NamedTuple):
    """Points with two coordinates (and the squares of them), labels 0 and 1."""

    inputs: NDArray[Any]
    labels: NDArray[Any]


class Trained(NamedTuple):
    """What a run came to."""

    loss: float
    accuracy: float
    digest: str


def make_points(count: int = 600, seed: int = 0) -> Points:
    """Return points of two arms that wind around each other, the same on every worker."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    radius = np.sqrt(draw.uniform(0.05, 1, count))
    angle = 6 * radius + np.pi * labels + draw.normal(0, 0.12, count)
    places = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return Points(np.concatenate([places, places**2], axis=1).astype(np.float32), labels)


def initial_weights(seed: int = 1) -> list[NDArray[Any]]:
    """Return the weights at first, the same on every worker."""
    draw = np.random.default_rng(seed)
    return [
        (
            draw.normal(0, np.sqrt(2 / shape[0]), shape) if len(shape) == 2 else np.zeros(shape)
        ).astype(np.float32)
        for shape in SHAPES
    ]


def train(
    points: Points, gradients: Gradients, accuracy: Callable[..., float], steps: int = STEPS
) -> Trained:
    """Train on the workers of the world: each computes the gradients of its rows, syncvar does the rest.

    Args:
        points: All of them.
        gradients: Of the mean loss of some rows.
        accuracy: (weights, points, labels) -> share of the labels that are right.
        steps: How many.
    """
    rank, workers = sv.rank(), sv.world_size()
    variables = [
        sv.Variable(value, name=f"weight{number}") for number, value in enumerate(initial_weights())
    ]
    optimizer = sv.optimizers.Adam(LEARNING_RATE, clip_norm=5.0)
    draw = np.random.default_rng(
        2
    )  # all workers draw the same batches and take their own part of each
    loss = 0.0  # of the last step, summed over this worker's rows
    for _ in range(steps):
        mine = np.array_split(draw.choice(len(points.labels), BATCH), workers)[rank]
        weights = [variable.read_value(copy=False) for variable in variables]
        own, found = gradients(weights, points.inputs[mine], points.labels[mine])
        # Parts may be uneven (three workers, say): a mean by examples is that of the whole batch.
        optimizer.apply_gradients(zip(found, variables, strict=True), weight=len(mine))
        loss = own * len(mine)
    total = float(sv.all_reduce(loss)) / BATCH
    values = [variable.read_value() for variable in variables]
    made = hashlib.sha256(b"".join(value.tobytes() for value in values))
    return Trained(total, accuracy(values, points.inputs, points.labels), made.hexdigest())


def report(trained: Trained, library: str) -> None:
    """Print what a run came to, on rank 0, when all workers hold the same bytes.

    Raises:
        SystemExit: They do not.
    """
    digests = sv.all_gather_object(trained.digest)
    if len(set(digests)) != 1:
        raise SystemExit(f"the workers' weights differ: {digests}")
    if sv.rank() == 0:
        print(
            f"gradients by {library}: loss {trained.loss:.4f} accuracy={trained.accuracy:.3f} "
            f"workers={sv.world_size()} weights_sha256={trained.digest[:16]}",
            flush=True,
        )
