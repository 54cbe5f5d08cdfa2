"""1 000 ON_WRITE variables of 100 floats: one grouped call beside a blocking all-reduce for each."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from comparison.bounds import judge
from comparison.libraries import script
from comparison.part import Part, Setting, failures
from comparison.rounds import interleave, turn, written_by
from comparison.table import grid, number, spread

if TYPE_CHECKING:
    from comparison.bounds import Verdict

__all__ = ["grouped"]

VARIABLES = 1000
ENVIRONMENTS = {"shm": {}, "zmq": {"SYNCVAR_TRANSPORT": "zmq"}}
ALONE = "world of one"


def grouped(setting: Setting) -> Part:
    """Measure both ways on each transport, and the grouped call in a world of one, in turns."""
    effort, syncvar = setting.effort, setting.syncvar
    workers = setting.workers[0]
    arguments = ["--seconds", str(effort.seconds)]
    name = script("grouped_syncvar.py")
    turns = {
        transport: partial(turn, syncvar, workers, arguments, effort.timeout, name, env)
        for transport, env in ENVIRONMENTS.items()
    }
    turns[ALONE] = partial(written_by, [syncvar.python, name, *arguments], effort.timeout, {})
    results, problems = interleave("grouped writes", turns, effort.rounds)
    times: dict[str, dict[str, Any]] = {}
    body = []
    for way, found in results.items():
        if not found:
            continue
        rows = [{row["kind"]: row["median_us"] for row in one["results"]} for one in found]
        times[way] = {kind: spread(row[kind] for row in rows) for kind in rows[0]}
        times[way]["transfers"] = max(max(one["operations"], one["frames"]) for one in found)
        write, calls = (times[way][kind][1] for kind in ("grouped", "calls"))
        counted = (
            "-"
            if way == ALONE
            else f"{median(one['operations'] for one in found):g}, {median(one['frames'] for one in found):g}"
        )
        body.append(
            [
                way,
                number(write),
                number(calls),
                f"{write / calls:.3f}",
                f"{write / VARIABLES:.2f}",
                counted,
            ]
        )
    lines = [
        (
            f"{VARIABLES} ON_WRITE variables of 100 floats: sv.assign_add_all of all, beside "
            f"{VARIABLES} sv.all_reduce; {workers} workers, median us"
        )
    ]
    lines += grid(
        ["way", "grouped", "calls", "grouped / calls", "us for each", "operations, frames"], body
    )
    lines += [
        (
            "  Python cost: in a world of one, where a call sends nothing, the whole time of the call "
            "for each variable"
        ),
        *failures(problems),
    ]
    return Part({"ways": times, "problems": problems}, lines, _verdicts(times), bool(problems))


def _verdicts(times: dict[str, dict[str, Any]]) -> list[Verdict]:
    found = []
    for transport in ENVIRONMENTS:
        one = times.get(transport)
        what = f"{VARIABLES} variables in a grouped call, {transport}"
        found.append(
            judge(
                "grouped transfers",
                one and one["transfers"],
                f"{what}: operations or frames with a payload",
            )
        )
        ratio = one and one["grouped"][1] / one["calls"][1]
        found.append(judge(f"grouped {transport}", ratio, f"{what}: against as many all-reduces"))
    alone = times.get(ALONE)
    cost = alone and alone["grouped"][1] / VARIABLES
    return [
        *found,
        judge(
            "grouped python", cost, f"{VARIABLES} variables in a grouped call: Python cost of each"
        ),
    ]
