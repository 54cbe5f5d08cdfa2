"""What programs write in every step, beside `sv.all_reduce(x)`: `syncvar-launch --workers 2 bench/peers/everyday_syncvar.py`.

Every kind sums 8 bytes (lists and dicts a few more). They are timed in turns, a slice of the time each, because one is told
as a multiple of another: the machine must not be another one in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from peer_syncvar import syncvar_team
from timing import Case, arguments, finish, measure
from values import Values

import syncvar as sv

if TYPE_CHECKING:
    from collections.abc import Callable

SLICES = 5
BYTES = 8


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    team = syncvar_team()
    cases = _cases(sv.MirroredStrategy())
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in cases}
    for _ in range(SLICES):
        for kind, (case, dtype, size) in cases.items():
            values = Values.sized("all_reduce", dtype, size, team.rank, team.world)
            found[kind].append(measure(team, case, values, chosen.seconds / SLICES))
    results = [{"kind": kind, **min(times, key=lambda one: float(one["median_us"]))} for kind, times in found.items()]
    finish(team, chosen, results)


def _cases(strategy: sv.Strategy) -> dict[str, tuple[Case, str, int]]:
    """Return kind -> (case, dtype, bytes)."""
    with strategy.scope():
        inside = _variable()
    return {
        "all_reduce(x)": (_of_value(sv.all_reduce), "float32", BYTES),
        "all_reduce(x, timeout=5.0)": (_of_value(lambda x: sv.all_reduce(x, timeout=5.0)), "float32", BYTES),
        "all_reduce(1.0)": (_of_value(sv.all_reduce, lambda x: float(x[0])), "float64", BYTES),
        "all_reduce([1.0, 2.0, 3.0])": (_of_value(sv.all_reduce, np.ndarray.tolist), "float64", 3 * BYTES),
        'all_reduce({"loss": 1.0, "n": 2.0})': (_of_dict(), "float64", 2 * BYTES),
        "v.assign_add(x)": (_of_variable(_variable()), "float32", BYTES),
        "v.assign_add(x) in run": (_of_variable(inside, within=strategy.run), "float32", BYTES),
        'strategy.reduce("SUM", 1.0, axis=None)': (
            _of_value(lambda x: strategy.reduce("SUM", x, axis=None), lambda x: float(x[0])), "float64", BYTES,
        ),
    }  # fmt: skip


def _variable() -> sv.Variable:
    return sv.Variable(
        np.zeros(BYTES // 4, np.float32),
        synchronization=sv.VariableSynchronization.ON_WRITE,
        aggregation=sv.VariableAggregation.SUM,
    )


def _of_value(call: Callable[[Any], Any], form: Callable[[np.ndarray[Any, Any]], Any] = np.asarray) -> Case:
    """Return the case of a call with what `form` makes of an array."""
    box: list[Any] = [None, None]

    def fill(numbers: Any) -> None:
        box[0] = form(np.asarray(numbers))

    def made() -> None:
        box[1] = call(box[0])

    return Case(fill, made, lambda: np.reshape(box[1], -1))


def _of_dict() -> Case:
    box: list[Any] = [None, {}]

    def fill(numbers: Any) -> None:
        box[0] = dict(zip(("loss", "n"), np.asarray(numbers).tolist(), strict=True))

    def made() -> None:
        box[1] = sv.all_reduce(box[0])

    return Case(fill, made, lambda: np.array([box[1]["loss"], box[1]["n"]]))


def _of_variable(v: sv.Variable, **more: Any) -> Case:
    x = np.zeros(v.shape, v.dtype)

    def fill(numbers: Any) -> None:
        np.copyto(x, numbers, casting="unsafe")
        v.assign(np.zeros_like(x))  # an earlier slice has left something

    return Case(fill, lambda: v.assign_add(x), lambda: v.read_value(copy=False), in_place=True, **more)


if __name__ == "__main__":
    main()
