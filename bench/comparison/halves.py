"""Half types beside float32: the same count of elements, private arrays, syncvar alone."""

from __future__ import annotations

from functools import partial

from comparison.bounds import judge
from comparison.part import Part, Setting, failures
from comparison.rounds import Plan, Times, Work, interleave, turn
from comparison.table import grid, number, spread

__all__ = ["halves"]

COUNT = 1 << 20
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def halves(setting: Setting) -> Part:
    """Time an all-reduce of 1 Mi elements of each type, in turns, for each number of workers."""
    part = Part(
        [],
        [
            (
                "all_reduce of 1 Mi elements by dtype, private arrays; median us of a call (quartiles "
                "over rounds)"
            )
        ],
    )
    body = []
    for workers in setting.workers:
        works = {
            name: Work("all_reduce", "private", (COUNT * size,)) for name, size in ITEMSIZES.items()
        }
        plans = {name: Plan((work,), name, setting.effort) for name, work in works.items()}
        turns = {
            name: partial(
                turn, setting.syncvar, workers, plan.arguments("syncvar"), setting.effort.timeout
            )
            for name, plan in plans.items()
        }
        found = interleave(f"{workers} workers, half types", turns, setting.effort.rounds)
        row: dict[str, object] = {"workers": workers, "problems": found.problems}
        medians: dict[str, float] = {}
        for name, work in works.items():
            times = Times(workers)
            for index, result in enumerate(found.results[name], 1):
                times.take("syncvar", index, result)
            if times.rows:
                low, medians[name], high = row[name] = spread(
                    times.of("syncvar", work, work.sizes[0]).values()
                )
                ratio = medians[name] / medians["float32"] if "float32" in medians else float("nan")
                cell = f"{number(medians[name])} ({number(low)}-{number(high)})"
                body.append([str(workers), name, cell, f"{ratio:.2f}"])
        for name in ("float16", "bfloat16"):
            is_there = name in medians and "float32" in medians
            ratio_or_none = medians[name] / medians["float32"] if is_there else None
            part.verdicts.append(
                judge("half", ratio_or_none, f"{name}, 1 Mi elements, {workers} workers")
            )
        part.report.append(row)
        part.lines += failures(found.problems)
        part.failed = part.failed or bool(found.problems)
    part.lines += grid(["workers", "dtype", "us", "/ float32"], body)
    return part
