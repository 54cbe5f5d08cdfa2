"""All-reduces over two hosts with a link of 1 Gbit/s, beside gloo; and how often each byte crosses it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from comparison.bounds import judge
from comparison.libraries import script
from comparison.namespaces import MBIT, NoHosts, gigabit
from comparison.part import Part, Setting, failures
from comparison.rounds import Plan, Times, Work, interleave, written_by
from comparison.table import grid, number, size_name, spread

if TYPE_CHECKING:
    from comparison.bounds import Verdict
    from comparison.libraries import Library
    from comparison.namespaces import Several
    from comparison.rounds import Turn

__all__ = ["hosts"]

HOSTS = 2
EACH = (1, 2)
"""Workers on each host."""
JUDGED = 1
"""Of them, those that the bounds are for."""
SMALL, LARGE = (8, 64 << 10, 1 << 20), 16 << 20
WORK = Work("all_reduce", "private", (*SMALL, LARGE))
CROSSING = 2
"""Workers on each host when the bytes are counted."""


def hosts(setting: Setting) -> Part:
    """Time all-reduces over two hosts in turns with gloo, and count what each host sends."""
    try:
        with gigabit(HOSTS) as several:
            return _measured(setting, several)
    except NoHosts as problem:
        return Part(
            {"problems": {"hosts": str(problem)}},
            [f"hosts: not measured: {problem}"],
            _verdicts({}, None),
        )


def _measured(setting: Setting, several: Several) -> Part:
    plan = Plan((WORK,), "float32", setting.effort)
    contestants = [
        setting.present[name] for name in ("syncvar", "torch") if name in setting.present
    ]
    turns: dict[str, Turn] = {
        _name(library, each): partial(
            written_by,
            [*several.start(library, each), library.script, *plan.arguments(library.name)],
            setting.effort.timeout,
            several.environment(library),
        )
        for each in EACH
        for library in contestants
    }
    counting = f"{_name(setting.syncvar, CROSSING)}, bytes"
    command = [*several.start(setting.syncvar, CROSSING), script("crossing_syncvar.py")]
    turns[counting] = partial(written_by, command, setting.effort.timeout, {})
    found = interleave("hosts", turns, setting.effort.rounds)

    title = f"all_reduce over {HOSTS} hosts with a link of {MBIT / 1000:g} Gbit/s, syncvar encrypted; median us of a call (quartiles over rounds)"
    failed = any(name.startswith(setting.syncvar.label) for name in found.problems)
    part = Part({"problems": found.problems}, [title], failed=failed)
    medians: dict[tuple[str, int, int], float] = {}
    body = []
    for each in EACH:
        times = Times(HOSTS * each)
        for library in contestants:
            for index, result in enumerate(found.results[_name(library, each)], 1):
                times.take(library.name, index, result)
        for size in WORK.sizes:
            cells = []
            for library in contestants:
                rounds = times.of(library.name, WORK, size)
                if rounds:
                    low, middle, high = part.report[f"{_name(library, each)}, {size}"] = spread(
                        rounds.values()
                    )
                    medians[library.name, each, size] = middle
                    cells.append(f"{number(middle)} ({number(low)}-{number(high)})")
                else:
                    cells.append("-")
            ratio = _ratio(medians, each, size)
            body.append(
                [
                    f"{HOSTS} x {each}",
                    size_name(size),
                    *cells,
                    "-" if ratio is None else f"{ratio:.2f}",
                ]
            )
    part.lines += grid(["workers", "size", *(one.label for one in contestants), "ratio"], body)
    crossed = None
    if found.results[counting]:
        crossed = max(max(one["sent"]) / one["bytes"] for one in found.results[counting])
        part.report["crossed"] = crossed
        part.lines.append(
            f"{HOSTS} x {CROSSING}: the host that sends most sends {crossed:.3f} bytes for each "
            "byte of the vector"
        )
    part.lines += failures(found.problems)
    part.verdicts += _verdicts(medians, crossed)
    return part


def _verdicts(medians: dict[tuple[str, int, int], float], crossed: float | None) -> list[Verdict]:
    place = f"all_reduce over {HOSTS} hosts x {JUDGED} worker"
    found = [
        judge(
            "hosts small",
            _ratio(medians, JUDGED, size),
            f"{place}, {size_name(size)}, against gloo",
        )
        for size in SMALL
    ]
    found.append(
        judge(
            "hosts large",
            _ratio(medians, JUDGED, LARGE),
            f"{place}, {size_name(LARGE)}, against gloo",
        )
    )
    what = f"all_reduce over {HOSTS} hosts x {CROSSING} workers: bytes that a host sends"
    return [*found, judge("hosts bytes", crossed, what)]


def _ratio(medians: dict[tuple[str, int, int], float], each: int, size: int) -> float | None:
    """Return gloo's time divided by syncvar's, where both are known."""
    own, theirs = medians.get(("syncvar", each, size)), medians.get(("torch", each, size))
    return theirs / own if own and theirs else None


def _name(library: Library, each: int) -> str:
    return f"{library.label}, {HOSTS} x {each}"
