"""Processes that syncvar-launch did not start, each as if on a host of its own: small all-reduces over tcp."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from comparison.bounds import judge
from comparison.libraries import script
from comparison.part import Part, Setting, failures
from comparison.rounds import Plan, Times, Work, interleave, written_by
from comparison.table import grid, number, size_name, spread

if TYPE_CHECKING:
    from comparison.libraries import Library

__all__ = ["joined"]

WORKERS = 2
WORK = Work("all_reduce", "private", (8, 64 << 10))
JOINED, LAUNCHED, TORCH = "syncvar, joined", "syncvar-launch --fake-hosts 2", "torch gloo"


def joined(setting: Setting) -> Part:
    """Time small all-reduces of processes that are told who they are by torchrun's variables, in turns with others."""
    plan = Plan((WORK,), "float32", setting.effort)
    syncvar, torch = setting.syncvar, setting.present.get("torch")
    launcher = [
        *syncvar.start(WORKERS),
        "--bind",
        "none",
        "--fake-hosts",
        str(WORKERS),
        syncvar.script,
    ]
    contestants = {JOINED: (syncvar, _by_variables(syncvar)), LAUNCHED: (syncvar, launcher)}
    if torch is not None:
        contestants[TORCH] = (torch, _by_variables(torch))
    turns = {
        name: partial(
            written_by,
            [*command, *plan.arguments(library.name)],
            setting.effort.timeout,
            {**library.environment(WORKERS), "OMP_NUM_THREADS": "1"},
        )
        for name, (library, command) in contestants.items()
    }
    found = interleave("joined", turns, setting.effort.rounds)
    lines = [
        (
            f"all_reduce of {WORKERS} processes over tcp on the loopback, each a host; median us of a "
            "call (quartiles over rounds)"
        )
    ]
    part = Part(
        {"problems": found.problems},
        lines,
        failed=not {JOINED, LAUNCHED}.isdisjoint(found.problems),
    )
    medians: dict[tuple[str, int], float] = {}
    body = []
    for name, (library, _) in contestants.items():
        times = Times(WORKERS)
        for index, result in enumerate(found.results[name], 1):
            times.take(library.name, index, result)
        for size in WORK.sizes if times.rows else ():
            low, middle, high = part.report[f"{name}, {size}"] = spread(
                times.of(library.name, WORK, size).values()
            )
            medians[name, size] = middle
            body.append([size_name(size), name, f"{number(middle)} ({number(low)}-{number(high)})"])
    for size in WORK.sizes:
        for bound, other in (("joined launcher", LAUNCHED), ("joined gloo", TORCH)):
            is_there = {(JOINED, size), (other, size)} <= medians.keys()
            ratio = medians[JOINED, size] / medians[other, size] if is_there else None
            part.verdicts.append(
                judge(
                    bound,
                    ratio,
                    f"all_reduce of {size_name(size)} over hosts, joined, against {other}",
                )
            )
    part.lines += [*grid(["size", "started", "us"], body), *failures(found.problems)]
    return part


def _by_variables(library: Library) -> list[str]:
    return [
        library.python,
        script("launch_by_variables.py"),
        "--hosts",
        "--workers",
        str(WORKERS),
        library.script,
    ]
