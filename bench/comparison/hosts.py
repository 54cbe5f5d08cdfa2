"""Collectives over several hosts beside the peers, and how often each byte crosses a link."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from comparison.bounds import judge, short
from comparison.host_table import COLUMNS, Cell, Scene, judge_call, tables
from comparison.libraries import script
from comparison.namespaces import NoHosts, gigabit
from comparison.part import Part, Setting, failures
from comparison.rounds import Plan, Work, interleave, written_by
from comparison.table import Spread, grid, spread

if TYPE_CHECKING:
    from comparison.namespaces import Several
    from comparison.rounds import Turn

__all__ = ["hosts"]

CROSSING = Scene(2, 2, 1000)
"""Where the bytes are counted."""
OPTIONS = {
    "syncvar": ("--bind", "none"),
    "unencrypted": ("--bind", "none", "--encryption", "control-only"),
    "links": ("--bind", "none"),
}
ENVIRONMENT = {"links": {"SYNCVAR_TRANSPORT": "zmq"}}


class Contestant(NamedTuple):
    """One column in one scene."""

    scene: Scene
    column: str

    @property
    def name(self) -> str:
        """Return it for people."""
        return f"{self.scene.name}, {COLUMNS[self.column]}"


def hosts(setting: Setting) -> Part:
    """Time collectives over several hosts in turns with the peers, and count what a host sends."""
    part = Part({"problems": {}, "rows": [], "crossed": None}, [])
    times: dict[Cell, Spread] = {}
    try:
        for count in dict.fromkeys(scene.hosts for scene in setting.scenes):
            with gigabit(count) as several:
                if count == CROSSING.hosts:
                    _count(setting, several, part)
                scenes = [scene for scene in setting.scenes if scene.hosts == count]
                for mbit in dict.fromkeys(scene.mbit for scene in scenes):
                    several.set_rate(mbit)
                    alike = [scene for scene in scenes if scene.mbit == mbit]
                    times.update(_measured(setting, several, alike, part))
    except NoHosts as problem:
        part.report["problems"]["hosts"] = f"not measured: {problem}"
    _judge(setting, times, part)
    part.failed = any("syncvar" in name for name in part.report["problems"])
    return part


def _measured(
    setting: Setting, several: Several, scenes: list[Scene], part: Part
) -> dict[Cell, Spread]:
    """Return the times in scenes with the same links, which take turns too."""
    turns = {
        one.name: _turn(setting, several, one)
        for scene in scenes
        for one in (Contestant(scene, column) for column in scene.columns)
        if _library(one.column) in setting.present
    }
    found = interleave("hosts", turns, setting.effort.rounds)
    part.report["problems"].update(found.problems)
    values: dict[Cell, list[float]] = {}
    for scene in scenes:
        for column in scene.columns:
            for result in found.results.get(Contestant(scene, column).name, ()):
                for row in result["results"]:
                    cell = Cell(scene, row["collective"], row["size"], column)
                    values.setdefault(cell, []).append(row["median_us"])
    return {cell: spread(rounds) for cell, rounds in values.items()}


def _turn(setting: Setting, several: Several, one: Contestant) -> Turn:
    library = setting.present[_library(one.column)]
    sizes: dict[str, tuple[int, ...]] = {}
    for collective, size in one.scene.calls:
        sizes[collective] = (*sizes.get(collective, ()), size)
    works = tuple(Work(collective, "private", found) for collective, found in sizes.items())
    plan = Plan(works, "float32", setting.effort)
    start = several.start(library, one.scene.each, *OPTIONS.get(one.column, ()))
    command = [*start, library.script, *plan.arguments(library.name)]
    environment = {**several.environment(library), **ENVIRONMENT.get(one.column, {})}
    return partial(written_by, command, setting.effort.timeout, environment)


def _library(column: str) -> str:
    return "syncvar" if column in OPTIONS else column


def _count(setting: Setting, several: Several, part: Part) -> None:
    """Count the bytes that a host sends in an all-reduce."""
    command = [*several.start(setting.syncvar, CROSSING.each), script("crossing_syncvar.py")]
    found, problem = written_by(command, setting.effort.timeout, {})
    if found is None:
        part.report["problems"]["syncvar, bytes"] = problem
    else:
        part.report["crossed"] = max(found["sent"]) / found["bytes"]


def _judge(setting: Setting, times: dict[Cell, Spread], part: Part) -> None:
    """Add the rows, the tables and the verdicts."""
    medians = {cell: middle for cell, (_, middle, _) in times.items()}
    for scene in setting.scenes:
        for collective, size in scene.calls:
            verdicts = judge_call(scene, collective, size, medians)
            us: dict[str, Any] = {
                column: [float(f"{time:.4g}") for time in times[cell]]
                for column in COLUMNS
                if (cell := Cell(scene, collective, size, column)) in times
            }
            row = {"scene": scene.name, "collective": collective, "size": size, "us": us}
            bounds = [{"what": one.what, "text": short(one)} for one in verdicts]
            part.report["rows"].append({**row, "bounds": bounds})
            part.verdicts += verdicts
    if times:
        for title, head, body in tables(part.report["rows"]):
            part.lines += ["", f"{title}; medians", *grid(head, body, left=1)]
    crossed = part.report["crossed"]
    what = f"all_reduce over {CROSSING.hosts} hosts x {CROSSING.each} workers: bytes a host sends"
    part.verdicts.append(judge("hosts bytes", crossed, what))
    part.lines += failures(part.report["problems"])
