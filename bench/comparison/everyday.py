"""What programs write, as they write it, beside what other libraries' programs write for it: the rows of `peers/rows.py`."""

from __future__ import annotations

import runpy
from functools import partial
from typing import TYPE_CHECKING, Any

from comparison.bounds import Bound, Verdict, judge
from comparison.libraries import MPI, script
from comparison.part import Part, Setting, failures
from comparison.rounds import interleave, turn
from comparison.table import grid, number, size_name, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from comparison.table import Spread

__all__ = ["WORKER", "everyday", "judged"]

WORKER = "rows_worker.py"
ROWS, GROUPS, PLAIN = (
    runpy.run_path(script("rows.py"))[name] for name in ("ROWS", "GROUPS", "PLAIN")
)
STEP, WRITE = "strategy.run(step) of one v.assign_add(x)", "v.assign_add(x) in run"
LARGEST = {"torch": 1 << 20}
"""Of libraries that would take most of the time of a run."""
SMALLEST = 8
Times = dict[tuple[str, int], list[float]]
"""By row and size the times of a library, one for each round, in us."""


def everyday(setting: Setting) -> Part:
    """Measure all rows with each library in its turn, for each number of workers."""
    part = Part([], [])
    for workers in setting.workers:
        turns = {
            name: partial(
                turn,
                one,
                workers,
                _arguments(name, setting),
                setting.effort.timeout,
                script(WORKER),
            )
            for name, one in setting.present.items()
            if name in ("syncvar", *MPI, "torch")
        }
        found = interleave(f"{workers} workers, every day", turns, setting.effort.rounds)
        times = {name: _times(results) for name, results in found.results.items()}
        labels = {name: one.label for name, one in setting.present.items() if name in turns}
        rows = compared(times)
        part.report.append({"workers": workers, "rows": rows, "problems": found.problems})
        part.lines += [*_tables(rows, labels, workers), *failures(found.problems)]
        for name, results in found.results.items():
            refused = results[0].get("refused", {}) if results else {}
            part.lines += [f"  {labels[name]} no {call}: {why}" for call, why in refused.items()]
        part.lines.append("")
        part.verdicts += judged(rows, workers)
        part.failed = part.failed or "syncvar" in found.problems
    part.lines += [
        (
            "ratio: fastest peer / syncvar, above 1 syncvar is faster; x plain: syncvar's time as a "
            "multiple of its sv.all_reduce(x) in the same run"
        )
    ]
    return part


def compared(times: Mapping[str, Times]) -> list[dict[str, Any]]:
    """Return one entry for each row and size: the spreads by library, the best peer, and syncvar's multiple of a plain call."""
    own = times["syncvar"]
    made = []
    for row in ROWS:
        for size in row.sizes:
            key = row.title, size
            us = {name: spread(found[key]) for name, found in times.items() if found.get(key)}
            one: dict[str, Any] = {"group": row.group, "row": row.title, "size": size, "us": us}
            if "syncvar" in us:
                best = min(
                    (name for name in us if name != "syncvar"),
                    key=lambda name: us[name][1],
                    default=None,
                )
                if best is not None:
                    one["best"], one["ratio"] = best, us[best][1] / us["syncvar"][1]
                if plain := own.get((PLAIN, size)):
                    one["times"] = spread(
                        mine / base for mine, base in zip(own[key], plain, strict=True)
                    )
            made.append(one)
    return made


def judged(rows: Sequence[Mapping[str, Any]], workers: int) -> list[Verdict]:
    """Return the numbers of the rows that have a bound."""
    by_title = {row.title: row for row in ROWS}
    made = []
    for one in rows:
        row = by_title[one["row"]]
        what = f"{one['row']}, {size_name(one['size'])}, {workers} workers"
        if row.times is not None:
            bound = Bound(row.times, None, "x all_reduce(x)", at_most=True)
            made.append(Verdict(what, one["times"][1] if "times" in one else None, bound))
        if row.ratio is not None:
            made.append(
                Verdict(f"{what}, against best peer", one.get("ratio"), Bound(row.ratio, 1))
            )
    own = {
        one["row"]: one["us"]["syncvar"][1]
        for one in rows
        if one["size"] == SMALLEST and "syncvar" in one["us"]
    }
    beyond = own[STEP] - own[WRITE] if {STEP, WRITE} <= own.keys() else None
    return [*made, judge("everyday run", beyond, f"{STEP}, 8 B, {workers} workers, beyond {WRITE}")]


def _tables(
    rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str], workers: int
) -> list[str]:
    lines = []
    for group, title in GROUPS.items():
        head = [*labels.values(), "best peer", "ratio", "x plain", "size", "call"]
        body = []
        for one in rows:
            if one["group"] == group:
                cells = [_cell(one["us"].get(name)) for name in labels]
                best = [labels[one["best"]], f"{one['ratio']:.2f}"] if "best" in one else ["-", "-"]
                plain = f"{one['times'][1]:.2f}" if "times" in one else "-"
                body.append([*cells, *best, plain, size_name(one["size"]), one["row"]])
        lines += [
            (
                f"{title}, {workers} workers; median us of a call, the slowest rank's (quartiles over "
                "rounds)"
            ),
            *grid(head, body, left=1),
            "",
        ]
    return lines


def _cell(us: Spread | None) -> str:
    return "-" if us is None else "{1} ({0}-{2})".format(*map(number, us))


def _times(results: Sequence[Mapping[str, Any]]) -> Times:
    made: Times = {}
    for result in results:
        for one in result["results"]:
            made.setdefault((one["row"], one["size"]), []).append(one["us"])
    return made


def _arguments(name: str, setting: Setting) -> list[str]:
    library = "mpi" if name in MPI else name
    limit = ["--largest", str(LARGEST[name])] if name in LARGEST else []
    return ["--library", library, "--seconds", str(setting.effort.seconds), *limit]
