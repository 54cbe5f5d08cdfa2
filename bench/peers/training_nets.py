"""The networks of `training_task` in torch, and its steps that are the same whoever combines the gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from training_task import CHANNELS, CLASSES, HIDDEN, MOMENTUM, SIDE, initial_weights

if TYPE_CHECKING:
    import numpy as np
    from training_task import Task

__all__ = ["inputs", "loss_of", "momentum", "network", "scores"]


def network(net: str) -> nn.Module:
    """Return a network with the first weights."""
    if net == "mlp":
        made = nn.Sequential(nn.Linear(SIDE * SIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    else:
        channels = CHANNELS[net]
        layers: list[nn.Module] = [nn.Unflatten(1, (1, SIDE, SIDE))]
        for before, after in pairwise((1, *channels)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        last = nn.Linear(channels[-1] * (SIDE // 2) ** 2, CLASSES)
        made = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), last)
    with torch.no_grad():
        for parameter, value in zip(made.parameters(), initial_weights(net), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return made


def momentum(module: nn.Module, task: Task) -> torch.optim.Optimizer:
    """Return torch's optimizer of a network."""
    return torch.optim.SGD(module.parameters(), lr=task.learning_rate, momentum=MOMENTUM)


def inputs(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Any:
    """Return pairs of tensors, one for each step."""
    return zip(torch.from_numpy(images), torch.from_numpy(labels), strict=True)


def loss_of(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return nn.functional.cross_entropy(module(images), labels)


def scores(module: nn.Module, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the scores of images."""
    with torch.no_grad():
        found: np.ndarray[Any, Any] = module(torch.from_numpy(images)).numpy()
    return found
