"""Times of syncvar's all-reduce: `syncvar-launch --workers 2 bench/peers/peer_syncvar.py`.

Kinds: "private" (ordinary arrays), "resident" (arrays of `sv.empty`, reduced in place) and "variable" (a write to an
ON_WRITE variable in a step of a strategy, then a read).
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from timing import Case, Team, arguments, finish, measure, show_versions

import syncvar as sv

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    if chosen.versions:
        show_versions(syncvar=sv.__version__)
        return
    team = Team(sv.rank(), sv.world_size(), sv.barrier, lambda number: int(sv.broadcast(number)))
    if chosen.busy_thread:
        threading.Thread(target=_busy, daemon=True).start()
    strategy = sv.MirroredStrategy()
    makers: dict[str, Callable[..., Case]] = {
        "private": _private,
        "resident": _resident,
        "variable": partial(_variable, strategy),
    }
    skipped: dict[str, str] = {}
    if "resident" in chosen.kinds and not hasattr(sv, "empty"):
        skipped["resident"] = f"syncvar {sv.__version__} has no sv.empty"
    results: list[dict[str, Any]] = []
    for size in chosen.sizes:
        for kind in chosen.kinds:
            if kind in skipped:
                continue
            timing = partial(measure, team, makers[kind](size // 4), chosen.seconds)
            times = strategy.run(timing) if kind == "variable" else timing()
            results.append({"kind": kind, "size": size, **times})
    finish(team, chosen, results, skipped=skipped)


def _private(count: int) -> Case:
    x, out = np.empty(count, np.float32), np.full(count, np.nan, np.float32)
    return Case(x, lambda: sv.all_reduce(x, out=out), lambda: out)


def _resident(count: int) -> Case:
    x = sv.empty(count, np.float32)
    return Case(x, lambda: sv.all_reduce(x, out=x), lambda: x, in_place=True)


def _variable(strategy: sv.Strategy, count: int) -> Case:
    x = np.empty(count, np.float32)
    with strategy.scope():
        v = sv.Variable(
            np.zeros(count, np.float32),
            synchronization=sv.VariableSynchronization.ON_WRITE,
            aggregation=sv.VariableAggregation.SUM,
        )

    def call() -> None:
        v.assign_add(x)
        v.read_value(copy=False)

    return Case(x, call, lambda: v.read_value(copy=False), in_place=True)


def _busy() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
