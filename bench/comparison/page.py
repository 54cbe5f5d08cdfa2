"""The tables of a run in Markdown, as they stand in bench/results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comparison.host_table import tables
from comparison.table import KINDS, size_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Report = Mapping[str, Any]

__all__ = ["over_hosts", "page"]

WORDS = {
    "private": "ordinary arrays, `out=` given",
    "resident": "`sv.empty`, in place",
    "variable": "`v.assign_add(x)` and a read, in `run`",
    "plain variable": "the same in plain code",
}
MISSED = " †"
BEST = ", against best peer"  # of any kind: the ratio that the tables show


def page(report: Report) -> list[str]:
    """Return the tables of a report, as `compare.py --json` writes it; a number that misses its bound has a dagger."""
    missed = {one["what"] for one in report.get("bounds", ()) if one["verdict"] == "MISSED"}
    rows = [row for one in report.get("comparison", ()) for row in one["rows"] if "ratio" in row]
    return [
        *_all_reduce(rows, missed),
        *_moves(rows, missed),
        *_everyday(report.get("everyday", ()), missed),
        *over_hosts(report),
        *_others(report),
    ]


def _all_reduce(rows: Sequence[Report], missed: set[str]) -> list[str]:
    mine = [row for row in rows if row["collective"] == "all_reduce"]
    keys = sorted({(row["workers"], KINDS.index(row["kind"])) for row in mine})
    lines = [
        (f"{workers} workers, {WORDS[KINDS[kind]]}", _of(mine, workers=workers, kind=KINDS[kind]))
        for workers, kind in keys
    ]
    return _table("all_reduce: fastest peer / ours (ours in us)", lines, missed)


def _moves(rows: Sequence[Report], missed: set[str]) -> list[str]:
    mine = [row for row in rows if row["collective"] != "all_reduce" and row["kind"] == "private"]
    names = list(dict.fromkeys(row["collective"] for row in mine))
    workers = sorted({row["workers"] for row in mine})
    lines = [
        (f"{name}, {count} workers", _of(mine, collective=name, workers=count))
        for name in names
        for count in workers
    ]
    return _table("ordinary arrays: fastest peer / ours (ours in us)", lines, missed)


def _everyday(parts: Iterable[Report], missed: set[str]) -> list[str]:
    lines: list[str] = []
    for part in parts:
        workers = part["workers"]
        made = []
        for row in part["rows"]:
            if "syncvar" not in row["us"]:
                continue
            what = f"{row['row']}, {size_name(row['size'])}, {workers} workers"
            times = f"{row['times'][1]:.2f}{_mark(what in missed)}" if "times" in row else ""
            ratio = f"{row['ratio']:.2f}{_mark(what + BEST in missed)}" if "ratio" in row else ""
            made.append(
                f"| `{row['row']}` | {size_name(row['size'])} | {_number(row['us']['syncvar'][1])} "
                f"| {times} | {ratio} |"
            )
        if made:
            lines += [
                f"| {workers} workers | size | us | x `all_reduce(x)` | fastest peer / ours |",
                "|---|---|---|---|---|",
                *made,
                "",
            ]
    return lines


def over_hosts(report: Report) -> list[str]:
    """Return the tables over several hosts, with a line about the run."""
    lines = []
    if "machine" in report and "hosts" in report:
        machine, turns = report["machine"], f"{report['rounds']} rounds of {report['seconds']} s"
        busy = ", on a busy machine" if machine["busy"] else ""
        lines += [
            f"Run of {machine['date'][:10]}, {machine['revision']}, {turns} a call{busy}.",
            "",
        ]
    for title, head, body in tables(report.get("hosts", {}).get("rows", ())):
        texts = ["| " + " | ".join(row) + " |" for row in (head, *body)]
        lines += [f"**{title}**", "", texts[0], "|---" * len(head) + "|", *texts[1:], ""]
    return lines


def _others(report: Report) -> list[str]:
    """Return the numbers that have a bound and stand in no other table, and how many bounds were reached."""
    bounds = report.get("bounds", ())
    rows = report.get("hosts", {}).get("rows", ())
    in_rows = {one["what"] for row in rows for one in row["bounds"]}
    shown = [
        one
        for one in bounds
        if not one["what"].endswith(BEST)
        and "all_reduce(x)" not in one["bound"]["unit"]
        and one["what"] not in in_rows
    ]
    lines = [
        f"| {one['what']} | {_number(one['value'])}{_mark(one['verdict'] == 'MISSED')} | "
        f"{'<=' if one['bound']['at_most'] else '>='} {one['bound']['must']:g} "
        f"{one['bound']['unit']} |"
        for one in shown
        if one["value"] is not None
    ]
    words = [one["verdict"] for one in bounds]
    done = words.count("aim") + words.count("reached")
    count = f"Of {len(words)} bounds {done} were reached, {words.count('MISSED')} missed, {words.count('not measured')} not measured."
    return [
        *(["| | measured | bound |", "|---|---|---|", *lines, ""] if lines else []),
        *([count] if words else []),
    ]


def _of(rows: Iterable[Report], **wanted: Any) -> dict[int, Report]:
    return {
        row["size"]: row
        for row in rows
        if all(row[name] == value for name, value in wanted.items())
    }


def _table(
    title: str, lines: Sequence[tuple[str, Mapping[int, Report]]], missed: set[str]
) -> list[str]:
    sizes = sorted({size for _, found in lines for size in found})
    if not sizes:
        return []
    body = [
        f"| {name} | {' | '.join(_cell(found.get(size), missed) for size in sizes)} |"
        for name, found in lines
    ]
    return [
        f"| {title} | {' | '.join(map(size_name, sizes))} |",
        f"|{'---|' * (len(sizes) + 1)}",
        *body,
        "",
    ]


def _cell(row: Report | None, missed: set[str]) -> str:
    if row is None:
        return ""
    place = f"{row['collective']} {row['kind']}, {row['workers']} workers, {size_name(row['size'])}"
    return f"{row['ratio']:.2f} ({_number(row['us']['syncvar'][1])}){_mark(place + BEST in missed)}"


def _mark(is_missed: bool) -> str:  # noqa: FBT001
    return MISSED if is_missed else ""


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"
