"""A network to train, the same for every library: data, batches, first weights, and how a training is timed.

Nothing here but NumPy. Weights are in torch's layout (a matrix is outputs x inputs, a kernel
outputs x inputs x rows x columns); the others turn theirs.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from timing import Team

__all__ = [
    "CHANNELS",
    "CLASSES",
    "HIDDEN",
    "MOMENTUM",
    "SIDE",
    "Array",
    "Task",
    "Trainer",
    "arguments",
    "initial_weights",
    "measure",
]

Array = np.ndarray[Any, Any]

SIDE = 8  # rows and columns of an image
HIDDEN = 64  # of the network "mlp"
CHANNELS = {"conv": (16,), "conv2": (16, 32)}  # of each convolution of the other networks
CLASSES = 10
MOMENTUM = 0.9
LARGE_BATCH = 32  # of a worker, from which on larger steps are taken
RATES = (0.01, 0.05)  # below it, from it on


class Task(NamedTuple):
    """What is trained: "mlp" or one of `CHANNELS`, by how many images of each worker in a step."""

    net: str
    rows: int

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of its momentum optimizer."""
        return RATES[self.rows >= LARGE_BATCH]


class Trainer(Protocol):
    """One network of one library."""

    def train(self, images: Array, labels: Array) -> None:
        """Make a step for each of this worker's batches: images (steps, rows, 64), labels (steps, rows)."""

    def scores(self, images: Array) -> Array:
        """Return the scores of the ten digits for images (rows, 64)."""


def arguments(text: str | None) -> argparse.Namespace:
    """Read the command line of a worker script."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument(
        "--train",
        action="append",
        metavar="NET/ROWS/STEPS",
        help="for instance mlp/8/1000; may be given again",
    )
    parser.add_argument(
        "--data", help="the digits: an .npz of train_images, train_labels, test_images, test_labels"
    )
    parser.add_argument("--result", help="file for the JSON of rank 0; without it, standard output")
    parser.add_argument(
        "--versions", action="store_true", help="print the versions as JSON and end"
    )
    return parser.parse_args()


def initial_weights(net: str) -> list[Array]:
    """Return weights and biases, layer by layer, in torch's layout; the same in every library."""
    draw = np.random.default_rng(1)

    def layer(*shape: int) -> list[Array]:
        inputs = int(np.prod(shape[1:]))
        return [
            draw.normal(0, np.sqrt(2 / inputs), shape).astype(np.float32),
            np.zeros(shape[0], np.float32),
        ]

    if net == "mlp":
        return [*layer(HIDDEN, SIDE * SIDE), *layer(CLASSES, HIDDEN)]
    channels = CHANNELS[net]
    made = [
        one for inputs, outputs in pairwise((1, *channels)) for one in layer(outputs, inputs, 3, 3)
    ]
    return [*made, *layer(CLASSES, channels[-1] * (SIDE // 2) ** 2)]


def measure(
    team: Team, chosen: argparse.Namespace, kinds: dict[str, Callable[[Task], Trainer]]
) -> list[dict[str, Any]]:
    """Train each network in each kind and return rank 0's times and the accuracies.

    The first epoch is the warm-up and counts as training, not as time. A step's time is that of the
    median epoch divided by its steps.
    """
    data = np.load(chosen.data)
    results = []
    for text in chosen.train:
        net, rows, steps = text.split("/")
        task = Task(net, int(rows))
        for kind, make in kinds.items():
            trainer = make(task)
            times, made = [], 0
            for number, (images, labels) in enumerate(_epochs(task, data, int(steps), team)):
                team.barrier()
                begin = time.perf_counter()
                trainer.train(images, labels)
                if number:
                    times.append((time.perf_counter() - begin) / len(images))
                made += len(images)
            right = trainer.scores(data["test_images"]).argmax(axis=1) == data["test_labels"]
            found = {"net": net, "rows": task.rows, "kind": kind, "steps": made}
            results.append({**found, "us": median(times) * 1e6, "accuracy": float(right.mean())})
    return results


def _epochs(task: Task, data: Any, steps: int, team: Team) -> Iterator[tuple[Array, Array]]:
    """Yield this worker's batches of whole epochs: one to warm up, then as many as give the steps."""
    images, labels = data["train_images"], data["train_labels"].astype(np.int64)
    batch = task.rows * team.world
    of_epoch = len(labels) // batch
    for number in range(1 + -(-steps // of_epoch)):
        order = np.random.default_rng((2, number)).permutation(len(labels))[: of_epoch * batch]
        mine = order.reshape(of_epoch, team.world, task.rows)[:, team.rank]
        yield images[mine], labels[mine]
