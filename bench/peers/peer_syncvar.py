"""Times of syncvar's collectives: `syncvar-launch --workers 2 bench/peers/peer_syncvar.py`.

Kinds: "private" (ordinary arrays), "resident" (arrays of `sv.empty`; reduced and broadcast in
    place), "variable" (a write to
an ON_WRITE variable in a step of a strategy, then a read; for all_reduce) and "plain variable" (the
same outside every scope).
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
from timing import Case, Refused, Team, arguments, array_case, finish, measure_all, show_versions
from values import Values, numpy_dtype

import syncvar as sv

if TYPE_CHECKING:
    from collections.abc import Callable


def syncvar_team() -> Team:
    """Return the ranks of the job."""
    return Team(
        sv.rank(),
        sv.world_size(),
        sv.barrier,
        agree=lambda number: int(sv.broadcast(number)),
        largest=lambda number: int(sv.all_reduce(number, "max")),
    )


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    if chosen.versions:
        show_versions(syncvar=sv.__version__)
        return
    team = syncvar_team()
    if chosen.busy_thread:
        threading.Thread(target=_busy, daemon=True).start()
    strategy = sv.MirroredStrategy()
    skipped: dict[str, str] = {}
    if not hasattr(sv, "empty"):
        skipped["resident"] = f"syncvar {sv.__version__} has no sv.empty"
    chosen.measure = [work for work in chosen.measure if work[1] not in skipped]

    def make(kind: str, values: Values) -> Case:
        if not kind.endswith("variable"):
            return _of_arrays(
                sv.empty if kind == "resident" else np.empty, values, in_place=kind == "resident"
            )
        if values.collective != "all_reduce":
            raise Refused(f"the kind {kind} is for all_reduce")
        return _of_variable(strategy if kind == "variable" else None, values)

    results, refused = measure_all(team, chosen, make)
    finish(team, chosen, results, refused=refused, skipped=skipped)


def _of_arrays(
    empty: Callable[..., np.ndarray[Any, Any]], values: Values, *, in_place: bool
) -> Case:
    kind = numpy_dtype(values.dtype)
    x = empty(values.brought_count, kind)
    if values.collective == "broadcast":
        return array_case(x, lambda: sv.broadcast(x, out=x))
    if values.collective == "barrier":
        return array_case(x, sv.barrier)
    if values.collective == "all_reduce" and in_place:
        return array_case(x, lambda: sv.all_reduce(x, out=x), in_place=True)
    if values.collective == "all_to_all" and "out" not in signature(sv.all_to_all).parameters:
        box: list[Any] = []
        return Case(
            lambda numbers: np.copyto(x, numbers, casting="unsafe"),
            lambda: box.__setitem__(slice(None), [sv.all_to_all(x)]),
            lambda: np.concatenate(box[0]),
        )
    out = empty(values.result_count, kind)
    out.fill(0)
    call: Any = getattr(sv, values.collective)
    return array_case(x, lambda: call(x, out=out), out)


def _of_variable(strategy: sv.Strategy | None, values: Values) -> Case:
    """Return the case of a variable that is written in `run` of a strategy, or outside every scope."""
    kind = numpy_dtype(values.dtype)
    x = np.empty(values.count, kind)
    with nullcontext() if strategy is None else strategy.scope():
        v = sv.Variable(
            np.zeros(values.count, kind),
            synchronization=sv.VariableSynchronization.ON_WRITE,
            aggregation=sv.VariableAggregation.SUM,
        )

    def call() -> None:
        v.assign_add(x)
        v.read_value(copy=False)

    return Case(
        lambda numbers: np.copyto(x, numbers, casting="unsafe"),
        call,
        lambda: v.read_value(copy=False),
        in_place=True,
        within=None if strategy is None else strategy.run,
    )


def _busy() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
