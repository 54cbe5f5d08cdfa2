"""What programs write in every step: writes in plain code and in `run`, numbers, timeouts, beside `sv.all_reduce(x)`."""

from __future__ import annotations

from functools import partial
from typing import Any

from comparison.bounds import judge
from comparison.libraries import script
from comparison.part import Part, Setting, failures
from comparison.rounds import interleave, turn
from comparison.table import grid, number, spread

__all__ = ["everyday"]

PLAIN = "all_reduce(x)"
BOUNDS = {
    "v.assign_add(x)": "everyday write",
    "v.assign_add(x) in run": "everyday write",
    "all_reduce(1.0)": "everyday number",
    "all_reduce(x, timeout=5.0)": "everyday timeout",
}
"""The calls that have a bound, by the name of that."""


def everyday(setting: Setting) -> Part:
    """Measure all of them in one run of the workers, and again in every round; ratios are of times of the same run."""
    effort, workers = setting.effort, setting.workers[0]
    one = partial(turn, setting.syncvar, workers, ["--seconds", str(effort.seconds)], effort.timeout, script("everyday_syncvar.py"), {})
    results, problems = interleave("every day", {"syncvar": one}, effort.rounds)
    runs = [{row["kind"]: row["median_us"] for row in result["results"]} for result in results["syncvar"]]
    report: dict[str, Any] = {}
    body = []
    for kind in runs[0] if runs else ():
        times, ratios = spread(run[kind] for run in runs), spread(run[kind] / run[PLAIN] for run in runs)
        report[kind] = {"us": times, "ratio": ratios}
        body.append([f"{number(times[1])} ({number(times[0])}-{number(times[2])})", f"{ratios[1]:.2f}", f"{ratios[0]:.2f}-{ratios[2]:.2f}", kind])
    verdicts = [
        judge(bound, report[kind]["ratio"][1] if kind in report else None, f"{kind}, {workers} workers, against {PLAIN}")
        for kind, bound in BOUNDS.items()
    ]
    lines = [f"What is written in every step, 8 bytes, {workers} workers; median us of a call (quartiles over rounds), and as a multiple of {PLAIN} in the same run"]
    lines += [*grid(["us", "ratio", "by round", "call"], body, left=1), *failures(problems)]
    return Part({"calls": report, "problems": problems}, lines, verdicts, bool(problems))
