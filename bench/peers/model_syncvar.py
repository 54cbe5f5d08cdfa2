"""Averaging ResNet-50's gradients with syncvar: `syncvar-launch --workers 2 bench/peers/model_syncvar.py`.

Kinds: "private" (one all_reduce of the list of 161 arrays, in place), "resident" (the same with
    arrays of `sv.empty`)
and "variable" (`sv.assign_add_all` of 161 ON_WRITE, MEAN variables in a step of a strategy).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from model import mean_of, pieces_case, shapes
from peer_syncvar import syncvar_team
from timing import Case, arguments, finish, measure

import syncvar as sv

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("private", "resident", "variable")


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    team = syncvar_team()
    strategy = sv.MirroredStrategy()
    model = shapes()
    values = mean_of(model, team.rank, team.world)
    results = []
    for kind in KINDS:
        case = (
            _variables(strategy, model)
            if kind == "variable"
            else _arrays(model, sv.empty if kind == "resident" else np.empty)
        )
        results.append({"kind": kind, **measure(team, case, values, chosen.seconds)})
    finish(team, chosen, results)


def _arrays(model: list[tuple[int, ...]], empty: Callable[..., np.ndarray[Any, Any]]) -> Case:
    gradients = [empty(shape, np.float32) for shape in model]
    return pieces_case(
        gradients,
        lambda: sv.all_reduce(gradients, "mean", out=gradients),
        lambda: gradients,
        in_place=True,
    )


def _variables(strategy: sv.Strategy, model: list[tuple[int, ...]]) -> Case:
    gradients = [np.empty(shape, np.float32) for shape in model]
    with strategy.scope():
        variables = [
            sv.Variable(
                np.zeros(shape, np.float32),
                synchronization=sv.VariableSynchronization.ON_WRITE,
                aggregation=sv.VariableAggregation.MEAN,
            )
            for shape in model
        ]
    return pieces_case(
        gradients,
        lambda: sv.assign_add_all(zip(variables, gradients, strict=True)),
        lambda: [variable.read_value(copy=False) for variable in variables],
        in_place=True,
        within=strategy.run,
    )


if __name__ == "__main__":
    main()
