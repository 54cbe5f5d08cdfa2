"""Model and data parallelism together: a network of two stages over the ranks of a mesh.

    syncvar-launch --workers 4 -m syncvar.examples.model_parallel

The ranks form a mesh of N/2 rows and two columns. The two ranks of a row hold one copy of the network, its first layer on the left
and its second on the right: activations go right by `sv.send`, their gradients come back left. The ranks of a column hold the
same layer and see other examples; their gradients are averaged by an all-reduce of the column. Each rank's layer is a pair of NONE
variables: it exists on some ranks only, in as many shapes as there are stages, and nothing about it is ever sent by itself.

Left and right work at the same time on different micro-batches (the schedule of GPipe: all forward, then all backward). The
losses are those of the same network in one process. Source: Huang et al. 2019, "GPipe".
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncvar as sv

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Layer = tuple[NDArray[Any], NDArray[Any]]  # matrix and bias

ROWS, INPUTS, HIDDEN, OUTPUTS = 64, 8, 32, 3  # ROWS: of a step, over all ranks
MICRO_BATCHES = 4  # of a row of the mesh, in each step
STEPS = 30
LEARNING_RATE, MOMENTUM = 0.1, 0.9
LEFT, RIGHT = 0, 1


class Batch(NamedTuple):
    """Rows of inputs, and what the network should make of them."""

    inputs: NDArray[Any]
    targets: NDArray[Any]


def make_batch(step: int) -> Batch:
    """Return the whole batch of a step, the same everywhere."""
    inputs = np.random.default_rng(step).normal(size=(ROWS, INPUTS))
    return Batch(inputs, np.sin(inputs[:, :OUTPUTS] + inputs[:, OUTPUTS : 2 * OUTPUTS]))


def make_layers() -> tuple[Layer, Layer]:
    """Return both layers as they are at first, the same everywhere."""
    draw = np.random.default_rng(7)
    left = draw.normal(size=(INPUTS, HIDDEN)) / np.sqrt(INPUTS), np.zeros(HIDDEN)
    right = draw.normal(size=(HIDDEN, OUTPUTS)) / np.sqrt(HIDDEN), np.zeros(OUTPUTS)
    return left, right


def forward_left(layer: Layer, inputs: NDArray[Any]) -> NDArray[Any]:
    """Return the activations of the first layer."""
    hidden: NDArray[Any] = np.tanh(inputs @ layer[0] + layer[1])
    return hidden


def backward_left(inputs: NDArray[Any], hidden: NDArray[Any], back: NDArray[Any]) -> Layer:
    """Return the gradients of the first layer, given those of its activations."""
    back = back * (1 - hidden * hidden)
    return inputs.T @ back, back.sum(axis=0)


def both_ways_right(
    layer: Layer, hidden: NDArray[Any], targets: NDArray[Any]
) -> tuple[float, NDArray[Any], Layer]:
    """Return the summed loss of some rows, the gradients of the activations and those of the second layer."""
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
    """One rank's part of the network.

    Args:
        grid: A mesh of any number of rows and two columns, called "data" and "stage".
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
        """Train on this rank's share of a batch; returns the mean loss of the whole batch on the right, 0 on the left."""
        inputs = np.array_split(
            np.array_split(batch.inputs, self.rows_of_mesh)[self.row], MICRO_BATCHES
        )
        targets = np.array_split(
            np.array_split(batch.targets, self.rows_of_mesh)[self.row], MICRO_BATCHES
        )
        layer = self.matrix.local_value(), self.bias.local_value()
        if self.side == LEFT:
            loss, gradients = 0.0, self._left(layer, inputs)
        else:
            loss, gradients = self._right(layer, targets)
        # The sum over the column: every rank's gradients are of its rows' share of the mean over all rows.
        matrix, bias, total = sv.all_reduce([*gradients, np.float64(loss)], group=self.peers)
        self.optimizer.apply_gradients([(matrix, self.matrix), (bias, self.bias)])
        return float(total) / ROWS

    def _left(self, layer: Layer, inputs: list[NDArray[Any]]) -> list[NDArray[Any]]:
        held = []
        for tag, part in enumerate(inputs):
            hidden = forward_left(layer, part)
            held.append(hidden)
            sv.send(hidden, RIGHT, tag=tag, group=self.pair)
        total: list[NDArray[Any]] = [np.zeros_like(array) for array in layer]
        for tag, (part, hidden) in enumerate(zip(inputs, held, strict=True)):
            back = sv.recv(RIGHT, tag=tag, group=self.pair)
            total = [
                old + new for old, new in zip(total, backward_left(part, hidden, back), strict=True)
            ]
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
    """Train on the ranks of the world; returns the losses on the right ranks, zeros on the left ones.

    Raises:
        ConfigError: An odd number of ranks.
    """
    if sv.world_size() % 2:
        raise sv.ConfigError(
            f"the network has two stages, which {sv.world_size()} ranks cannot share: run with --workers 2 or 4"
        )
    stage = NetworkStage(sv.mesh((-1, 2), names=("data", "stage")))
    return [stage.step(make_batch(step)) for step in range(steps)]


def main() -> None:
    """Run as one worker."""
    losses = train()
    if sv.rank() == RIGHT:
        expected = one_process()
        off = float(np.abs(np.array(losses) / expected - 1).max())
        print(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; one process: {expected[0]:.4f} -> {expected[-1]:.4f}"
        )
        print(f"workers={sv.world_size()} steps={STEPS} largest_difference={off:.1e}", flush=True)
        if not off < 1e-9:
            sys.exit("the losses are not those of one process")


if __name__ == "__main__":
    main()
