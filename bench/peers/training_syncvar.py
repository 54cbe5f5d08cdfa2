"""Training with gradients by torch and the rest by syncvar: `syncvar-launch --workers 2 bench/peers/training_syncvar.py ...`.

Kinds:

* "optimizer": the weights are variables, the parameters views of them;
  `sv.optimizers.Momentum.apply_gradients` takes torch's gradients as they are.
* "all_reduce": torch's optimizer; its gradients are views of one array of `sv.empty`, which is
  averaged in place.
* "list": torch's optimizer; the list of torch's own gradients is averaged in place, nothing else is
  done.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peer_syncvar import syncvar_team
from timing import finish, show_versions
from training_nets import inputs, loss_of, momentum, network, scores
from training_task import MOMENTUM, arguments, initial_weights, measure

import syncvar as sv

if TYPE_CHECKING:
    from training_task import Array, Task


class _Network:
    def __init__(self, task: Task) -> None:
        self.net = network(task.net)
        self.parameters = list(self.net.parameters())

    def scores(self, images: Array) -> Any:
        """Return the scores of images."""
        return scores(self.net, images)


class ByOptimizer(_Network):
    """Weights as variables."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.strategy = sv.MirroredStrategy()
        with self.strategy.scope():
            self.variables = [sv.Variable(value) for value in initial_weights(task.net)]
        self.optimizer = sv.optimizers.Momentum(task.learning_rate, momentum=MOMENTUM)
        self.views: list[Any] = [None] * len(self.variables)

    def train(self, images: Array, labels: Array) -> None:
        """Make the steps."""
        for one, label in inputs(images, labels):
            self.strategy.run(self.step, args=(one, label))

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Make one step; in replica context."""
        self.look()
        gradients = torch.autograd.grad(loss_of(self.net, images, labels), self.parameters)
        self.optimizer.apply_gradients(
            zip([one.numpy() for one in gradients], self.variables, strict=True)
        )

    def look(self) -> None:
        """Let the parameters be views of the variables: those of the last step still are, unless somebody kept a reading."""
        for index, variable in enumerate(self.variables):
            view = variable.read_value(copy=False)
            if view is not self.views[index]:
                self.views[index] = view
                self.parameters[index].data = torch.from_numpy(view)

    def scores(self, images: Array) -> Any:
        """Return the scores of images."""
        self.look()
        return super().scores(images)


class ByAllReduce(_Network):
    """Gradients in one array of shared memory."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.optimizer = momentum(self.net, task)
        self.gradients = sv.zeros(
            sum(parameter.numel() for parameter in self.parameters), np.float32
        )
        self.flat = torch.from_numpy(self.gradients)
        pieces = self.flat.split([parameter.numel() for parameter in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    def train(self, images: Array, labels: Array) -> None:
        """Make the steps."""
        for one, label in inputs(images, labels):
            self.flat.zero_()
            loss_of(self.net, one, label).backward()
            sv.all_reduce(self.gradients, "mean", out=self.gradients)
            self.optimizer.step()


class ByList(_Network):
    """Gradients where torch puts them."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.optimizer = momentum(self.net, task)

    def train(self, images: Array, labels: Array) -> None:
        """Make the steps."""
        for one, label in inputs(images, labels):
            self.optimizer.zero_grad()
            loss_of(self.net, one, label).backward()
            gradients = [parameter.grad.numpy() for parameter in self.parameters]
            sv.all_reduce(gradients, "mean", out=gradients)
            self.optimizer.step()


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    if chosen.versions:
        show_versions(syncvar=sv.__version__, torch=torch.__version__)
        return
    # The parameters are only read: what changes the variables is the optimizer.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    team = syncvar_team()
    kinds = {"optimizer": ByOptimizer, "all_reduce": ByAllReduce, "list": ByList}
    finish(team, chosen, measure(team, chosen, kinds), threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
