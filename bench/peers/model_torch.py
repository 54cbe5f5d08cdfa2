"""Averaging ResNet-50's gradients with torch over gloo: `torchrun --nproc-per-node 2 bench/peers/model_torch.py`.

Kinds: "ddp" (a backward pass through DistributedDataParallel with its default buckets), "backward"
    (the same pass
without synchronization, under `no_sync`; what is left of "ddp" without it is the price of the
synchronization) and "flat" (one `dist.all_reduce` of a vector of all, a sum). The backward pass
computes nothing: one function gives each parameter the gradient that was made before.
"""

from __future__ import annotations

import contextlib
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from model import mean_of, pieces_case, shapes
from peer_torch import torch_team
from timing import Case, Team, arguments, finish, measure


class Given(torch.autograd.Function):
    """A loss whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        """Return a loss that depends on all parameters."""
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients."""
        return (None, *ctx.gradients)


class Model(torch.nn.Module):
    """Parameters of given shapes."""

    def __init__(self, model: list[tuple[int, ...]], gradients: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(shape) for shape in model])
        self.gradients = gradients

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        return Given.apply(self.gradients, *self.weights)


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    team = torch_team()
    model = shapes()
    results = []
    for kind in ("ddp", "backward", "flat"):
        case = _flat(model) if kind == "flat" else _ddp(model, is_synchronized=kind == "ddp")
        results.append(
            {"kind": kind, **measure(team, case, _values(kind, model, team), chosen.seconds)}
        )
    finish(team, chosen, results, threads=torch.get_num_threads())
    dist.destroy_process_group()


def _values(kind: str, model: list[tuple[int, ...]], team: Team) -> Any:
    if kind == "backward":  # each rank keeps its own
        return mean_of(model, 0, 1)
    return mean_of(model, team.rank, team.world, "mean" if kind == "ddp" else "sum")


def _ddp(model: list[tuple[int, ...]], *, is_synchronized: bool) -> Case:
    gradients = [torch.zeros(shape) for shape in model]
    module = Model(model, gradients)
    parallel = torch.nn.parallel.DistributedDataParallel(module)

    def call() -> None:
        for weight in module.weights:
            weight.grad = None
        with contextlib.nullcontext() if is_synchronized else parallel.no_sync():
            parallel().backward()

    return pieces_case(
        [gradient.numpy() for gradient in gradients],
        call,
        lambda: [weight.grad.numpy() for weight in module.weights],
    )


def _flat(model: list[tuple[int, ...]]) -> Case:
    vector = torch.zeros(sum(map(prod, model)))
    return pieces_case(
        [vector.numpy()], lambda: dist.all_reduce(vector), lambda: [vector.numpy()], in_place=True
    )


if __name__ == "__main__":
    main()
