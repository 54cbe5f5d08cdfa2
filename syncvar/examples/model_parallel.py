"""Model and data parallelism together: a network of two stages on the ranks of a mesh.

    syncvar-launch --workers 4 -m syncvar.examples.model_parallel

The N ranks form a mesh of N/2 rows and two columns. Each row holds one copy of the network, its
first layer on the left rank and its second on the right. Activations go right by `sv.send`, their
gradients go left. The ranks of a column hold the same layer and see different examples; an
all-reduce over the column averages their gradients. A layer is a pair of NONE variables, so ranks
may have variables of different shapes.

Left and right work at the same time on different micro-batches, in the order of GPipe: all forward,
then all backward. The losses equal those of the same network in one process. Source: Huang et al.
2019, "GPipe".
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Layer = tuple[NDArray[Any], NDArray[Any]]  # matrix and bias

ROWS, INPUTS, HIDDEN, OUTPUTS = 64, 8, 32, 3  # ROWS: per step, over all ranks
MICRO_BATCHES = 4  # per step, for each row of the mesh
STEPS = 30
LEARNING_RATE, MOMENTUM = 0.1, 0.9
LEFT, RIGHT = 0, 1


class Batch(NamedTuple):
    """Rows of inputs and their targets."""

    inputs: NDArray[Any]
    targets: NDArray[Any]


def make_batch(step: int) -> Batch:
    """Return the whole batch of a step, the same on every rank."""
    inputs = np.random.default_rng(step).normal(size=(ROWS, INPUTS))
    return Batch(inputs, np.sin(inputs[:, :OUTPUTS] + inputs[:, OUTPUTS : 2 * OUTPUTS]))


def make_layers() -> tuple[Layer, Layer]:
    """Return the initial layers, the same on every rank."""
    draw = np.random.default_rng(7)
    left = draw.normal(size=(INPUTS, HIDDEN)) / np.sqrt(INPUTS), np.zeros(HIDDEN)
    right = draw.normal(size=(HIDDEN, OUTPUTS)) / np.sqrt(HIDDEN), np.zeros(OUTPUTS)
    return left, right


def forward_left(layer: Layer, inputs: NDArray[Any]) -> NDArray[Any]:
    """Return the activations of the first layer."""
    hidden: NDArray[Any] = np.tanh(inputs @ layer[0] + layer[1])
    return hidden


def backward_left(inputs: NDArray[Any], hidden: NDArray[Any], back: NDArray[Any]) -> Layer:
    """Return the gradients of the first layer, from those of its activations."""
    back = back * (1 - hidden * hidden)
    return inputs.T @ back, back.sum(axis=0)


def both_ways_right(
    layer: Layer, hidden: NDArray[Any], targets: NDArray[Any]
) -> tuple[float, NDArray[Any], Layer]:
    """Return the loss of some rows, and gradients of the activations and the second layer."""
    error = hidden @ layer[0] + layer[1] - targets
    scaled = error * (2 / ROWS)
    return (
        float((error * error).sum()),
        scaled @ layer[0].T,
        (hidden.T @ scaled, scaled.sum(axis=0)),
    )


def one_process(steps: int = STEPS) -> list[float]:
    """Return the losses of the same network in one process, without syncvar."""
    layers = make_layers()
    parameters = [array for layer in layers for array in layer]
    velocities = [np.zeros_like(array) for array in parameters]
    losses = []
    for step in range(steps):
        batch = make_batch(step)
        left, right = (parameters[0], parameters[1]), (parameters[2], parameters[3])
        hidden = forward_left(left, batch.inputs)
        loss, back, right_gradients = both_ways_right(right, hidden, batch.targets)
        gradients = [*backward_left(batch.inputs, hidden, back), *right_gradients]
        losses.append(loss / ROWS)
        velocities = [MOMENTUM * old + new for old, new in zip(velocities, gradients, strict=True)]
        parameters = [
            old - LEARNING_RATE * by for old, by in zip(parameters, velocities, strict=True)
        ]
    return losses


class NetworkStage:
    """One rank's stage of the network.

    Args:
        grid: Mesh of any number of rows and two columns, with axes "data" and "stage".
    """

    def __init__(self, grid: sv.Mesh) -> None:
        self.row, self.side = grid.coordinates
        self.rows_of_mesh = grid.shape[0]
        self.pair, self.peers = grid.axis("stage"), grid.axis("data")
        matrix, bias = make_layers()[self.side]
        none = sv.VariableSynchronization.NONE
        self.matrix = sv.Variable(matrix, name="matrix", synchronization=none)
        self.bias = sv.Variable(bias, name="bias", synchronization=none)
        self.optimizer = sv.optimizers.Momentum(LEARNING_RATE, MOMENTUM)

    def step(self, batch: Batch) -> float:
        """Train on this rank's part of a batch; return the mean loss (0 on the left)."""
        inputs, targets = (
            np.array_split(np.array_split(part, self.rows_of_mesh)[self.row], MICRO_BATCHES)
            for part in (batch.inputs, batch.targets)
        )
        layer = self.matrix.local_value(), self.bias.local_value()
        if self.side == LEFT:
            loss, gradients = 0.0, self._left(layer, inputs)
        else:
            loss, gradients = self._right(layer, targets)
        # A sum, because each rank has divided its gradients by the number of rows.
        matrix, bias, total = sv.all_reduce([*gradients, np.float64(loss)], group=self.peers)
        self.optimizer.apply_gradients([(matrix, self.matrix), (bias, self.bias)])
        return float(total) / ROWS

    def _left(self, layer: Layer, inputs: list[NDArray[Any]]) -> list[NDArray[Any]]:
        activations = []
        for tag, part in enumerate(inputs):
            hidden = forward_left(layer, part)
            activations.append(hidden)
            sv.send(hidden, RIGHT, tag=tag, group=self.pair)
        total: list[NDArray[Any]] = [np.zeros_like(array) for array in layer]
        for tag, (part, hidden) in enumerate(zip(inputs, activations, strict=True)):
            back = sv.recv(RIGHT, tag=tag, group=self.pair)
            gradients = backward_left(part, hidden, back)
            total = [old + new for old, new in zip(total, gradients, strict=True)]
        return total

    def _right(self, layer: Layer, targets: list[NDArray[Any]]) -> tuple[float, list[NDArray[Any]]]:
        loss = 0.0
        total: list[NDArray[Any]] = [np.zeros_like(array) for array in layer]
        for tag, part in enumerate(targets):
            hidden = sv.recv(LEFT, tag=tag, group=self.pair)
            more, back, gradients = both_ways_right(layer, hidden, part)
            sv.send(back, LEFT, tag=tag, group=self.pair)
            loss += more
            total = [old + new for old, new in zip(total, gradients, strict=True)]
        return loss, total


def train(steps: int = STEPS) -> list[float]:
    """Train on all ranks; return the losses on the right ranks, zeros on the left ones.

    Raises:
        ConfigError: The number of ranks is odd.
    """
    if sv.world_size() % 2:
        raise sv.ConfigError(
            f"the network has two stages, which {sv.world_size()} ranks cannot share: "
            f"run with --workers 2 or 4"
        )
    stage = NetworkStage(sv.mesh((-1, 2), names=("data", "stage")))
    return [stage.step(make_batch(step)) for step in range(steps)]


def main() -> None:
    """Train and compare with one process; every worker runs it."""
    losses = train()
    if sv.rank() == RIGHT:
        expected = one_process()
        difference = float(np.abs(np.array(losses) / expected - 1).max())
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(f"one process: {expected[0]:.4f} -> {expected[-1]:.4f}")
        print(
            f"workers={sv.world_size()} steps={STEPS} largest_difference={difference:.1e}",
            flush=True,
        )
        if not difference < 1e-9:
            sys.exit("the losses differ from those of one process")


if __name__ == "__main__":
    main()
