"""An all-reduce of 64 MiB beside the machine's memory-traffic limit, measured in turns.

The limit is what a plain NumPy copy reaches on all cores at once, each byte counted as read and as
written. Of an all-reduce the traffic is counted that no algorithm can avoid: each rank's array is
read once, and each rank's result is written once, 2 * workers * 64 MiB. What passes through shared
memory in between is not counted, so that the share says how far from the limit a call is for
whatever reason.
"""

from __future__ import annotations

from functools import partial

from comparison.libraries import script
from comparison.part import Part, Setting, failures
from comparison.rounds import Plan, Times, Work, interleave, turn, written_by
from comparison.table import grid, spread

__all__ = ["traffic"]

SIZE = 64 << 20
KINDS = ("private", "resident")


def traffic(setting: Setting) -> Part:
    """Time a copy on all cores and the all-reduce, in turns, for each number of workers."""
    part = Part([], [])
    body = []
    effort = setting.effort
    works = {kind: Work("all_reduce", kind, (SIZE,)) for kind in KINDS}
    plan = Plan(tuple(works.values()), "float32", effort)
    for workers in setting.workers:
        copy = [setting.syncvar.python, script("traffic_copy.py"), "--seconds", str(effort.seconds)]
        turns = {
            "copy": partial(written_by, copy, effort.timeout, {}),
            "syncvar": partial(
                turn, setting.syncvar, workers, plan.arguments("syncvar"), effort.timeout
            ),
        }
        found = interleave(f"{workers} workers, memory traffic", turns, effort.rounds)
        part.report.append({"workers": workers, "problems": found.problems})
        part.lines += failures(found.problems)
        part.failed = part.failed or bool(found.problems)
        if not all(found.results.values()):
            continue
        limit = spread(one["bytes_per_second"] for one in found.results["copy"])
        cores = found.results["copy"][0]["cores"]
        part.report[-1]["copy_bytes_per_second"] = limit
        body.append(["-", f"copy on {cores} cores", "-", f"{limit[1] / 1e9:.1f}", "100%"])
        times = Times(workers)
        for index, result in enumerate(found.results["syncvar"], 1):
            times.take("syncvar", index, result)
        for kind, work in works.items():
            seconds = spread(times.of("syncvar", work, SIZE).values())[1] / 1e6
            rate = 2 * workers * SIZE / seconds
            part.report[-1][kind] = {
                "seconds": seconds,
                "bytes_per_second": rate,
                "share": rate / limit[1],
            }
            body.append(
                [
                    str(workers),
                    kind,
                    f"{1e3 * seconds:.2f}",
                    f"{rate / 1e9:.1f}",
                    f"{rate / limit[1]:.0%}",
                ]
            )
    title = "memory traffic of an all_reduce of 64 MiB (its arrays read and written once) beside a plain copy on all cores"
    part.lines = [
        title,
        *part.lines,
        *grid(["workers", "kind", "ms", "GB/s", "of the limit"], body),
    ]
    return part
