"""Medians, spreads and ratios, and the tables made of them."""

from __future__ import annotations

from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from comparison.libraries import Library
    from comparison.rounds import Plan, Times

__all__ = ["Spread", "compare", "grid", "size_name", "tables"]

KINDS = {
    "private": "private arrays: sv.all_reduce(x, out=out), Allreduce(x, out), torch all_reduce(tensor) in place",
    "resident": "resident arrays: x = sv.empty(...); sv.all_reduce(x, out=x). The peers: private arrays",
    "variable": "v.assign_add(x); v.read_value(copy=False) in strategy.run. The peers: MPI, private arrays",
}
Spread = tuple[float, float, float]
"""Lower quartile, median, upper quartile."""


def size_name(size: int) -> str:
    """Return a size for people.

    Example:
        >>> size_name(8), size_name(65536), size_name(1 << 26)
        ('8 B', '64 KiB', '64 MiB')
    """
    for unit, bits in (("MiB", 20), ("KiB", 10)):
        if size >= 1 << bits and size % (1 << bits) == 0:
            return f"{size >> bits} {unit}"
    return f"{size} B"


def spread(values: Iterable[float]) -> Spread:
    """Return the quartiles; of one value, that value."""
    found = list(values)
    if len(found) < 2:
        return (found[0], found[0], found[0])
    low, middle, high = quantiles(found, n=4, method="inclusive")
    return (low, middle, high)


def compare(times: Times, plan: Plan, peers: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for each kind and size that syncvar has times of.

    `ratio` is the median of the best peer divided by syncvar's: above 1, syncvar is faster. `ratio_by_round` compares
    with the same peer round by round, which shows whether the machine drifted; `ratio_by_batch` takes the times of
    batches of calls instead of single calls.
    """
    rows = []
    for kind in plan.kinds:
        rivals = [peer for peer in peers if kind != "variable" or peer != "torch"]
        for size in plan.sizes:
            own = times.of("syncvar", kind, size)
            theirs = {peer: found for peer in rivals if (found := times.of(peer, "private", size))}
            row: dict[str, Any] = {"workers": times.workers, "kind": kind, "size": size}
            row["us"] = {peer: spread(found.values()) for peer, found in theirs.items()}
            if own:
                row["us"]["syncvar"] = spread(own.values())
            if own and theirs:
                best = min(theirs, key=lambda peer: row["us"][peer][1])
                batch = [times.of(*key, size, "batch_us") for key in ((best, "private"), ("syncvar", kind))]
                row["best"] = best
                row["ratio"] = row["us"][best][1] / row["us"]["syncvar"][1]
                row["ratio_by_round"] = spread(theirs[best][one] / own[one] for one in own if one in theirs[best])
                row["ratio_by_batch"] = median(batch[0].values()) / median(batch[1].values())
            rows.append(row)
    return rows


def tables(times: Times, plan: Plan, libraries: Sequence[Library], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of all tables of one number of workers."""
    labels = {library.name: library.label for library in libraries}
    lines = [f"{times.workers} workers, all-reduce (sum) of float32; median us of a call (quartiles over rounds)"]
    for kind in plan.kinds:
        lines += ["", KINDS[kind]]
        if kind in times.skipped:
            lines.append(f"  not measured: {times.skipped[kind]}")
            continue
        names = [name for name in labels if kind != "variable" or name != "torch"]
        head = ["size", *(labels[name] for name in names), "best peer", "ratio", "by round", "by batch"]
        body = []
        for row in (row for row in rows if row["kind"] == kind):
            cells = [_cell(row["us"].get(name)) for name in names]
            if "best" in row:
                low, _, high = row["ratio_by_round"]
                best = [labels[row["best"]], f"{row['ratio']:.2f}", f"{low:.2f}-{high:.2f}", f"{row['ratio_by_batch']:.2f}"]
            else:
                best = ["-"] * 4
            body.append([size_name(row["size"]), *cells, *best])
        lines += grid(head, body)
    lines += ["", "ratio: best peer / syncvar, above 1 syncvar is faster. Started as:"]
    for library in libraries:
        problem = times.problems.get(library.name, "")
        if not problem.startswith("MISSING"):
            lines.append(f"  {library.label:<10} {library.started_as(times.workers)}")
        if problem:
            lines.append(f"  {library.label:<10} {problem}")
    return lines


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Return a table with right-aligned columns."""
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in (head, *body)]


def _cell(value: Spread | None) -> str:
    if value is None:
        return "-"
    low, middle, high = map(_number, value)
    return f"{middle} ({low}-{high})"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
