"""Medians, spreads and ratios, and the tables made of them."""

from __future__ import annotations

from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from comparison.libraries import MPI

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from comparison.libraries import Library
    from comparison.rounds import Plan, Times

__all__ = [
    "COLLECTIVES",
    "KINDS",
    "Spread",
    "compare",
    "grid",
    "number",
    "size_name",
    "spread",
    "tables",
]

KINDS = ("private", "resident", "variable", "plain variable")
COLLECTIVES = {
    "all_reduce": {
        "private": "private arrays: sv.all_reduce(x, out=out), Allreduce(x, out), torch all_reduce(tensor) in place",
        "resident": "resident arrays: x = sv.empty(...); sv.all_reduce(x, out=x). The peers: private arrays",
        "variable": "v.assign_add(x); v.read_value(copy=False) in strategy.run. The peers: MPI, private arrays",
        "plain variable": "v.assign_add(x); v.read_value(copy=False) outside every scope. The peers: MPI, private arrays",
    },
    "broadcast": {
        "private": "sv.broadcast(x, out=x), Bcast(x), torch broadcast(tensor); size: the vector; the slowest rank",
        "resident": "x = sv.empty(...); sv.broadcast(x, out=x). The peers: private arrays",
    },
    "all_gather": {
        "private": "sv.all_gather(x, out=out), Allgather(x, out), torch on one tensor; size: the gathered vector",
        "resident": "x, out of sv.empty; sv.all_gather(x, out=out). The peers: private arrays",
    },
    "reduce_scatter": {
        "private": "sv.reduce_scatter(x, out=out), Reduce_scatter_block(x, out), torch on one tensor; size: x",
        "resident": "x, out of sv.empty; sv.reduce_scatter(x, out=out). The peers: private arrays",
    },
    "all_to_all": {
        "private": "sv.all_to_all(x), into out where it takes that; Alltoall(x, out), torch all_to_all_single; size: x",
        "resident": "x of sv.empty; the same calls. The peers: private arrays",
    },
}
"""The collectives, the kinds of syncvar's calls of each, and what they are compared with."""

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
    """Return one row for each collective, kind and size.

    `ratio` is the median of the best peer divided by syncvar's: above 1, syncvar is faster.
    `ratio_by_round` compares with the same peer round by round, which shows whether the machine
    drifted; `ratio_by_batch` takes the times of batches of calls instead of single calls.
    """
    rows = []
    for work in plan.works:
        rivals = rivals_of(work.kind, peers)
        for size in work.sizes:
            own = times.of("syncvar", work, size)
            theirs = {peer: found for peer in rivals if (found := times.of(peer, work, size))}
            row: dict[str, Any] = {
                "workers": times.workers,
                "collective": work.collective,
                "kind": work.kind,
                "size": size,
            }
            row["us"] = {peer: spread(found.values()) for peer, found in theirs.items()}
            if own:
                row["us"]["syncvar"] = spread(own.values())
            if own and theirs:
                best = min(theirs, key=lambda peer: row["us"][peer][1])
                batch = [times.of(one, work, size, "batch_us") for one in (best, "syncvar")]
                row["best"] = best
                row["ratio"] = row["us"][best][1] / row["us"]["syncvar"][1]
                row["ratio_by_round"] = spread(
                    theirs[best][one] / own[one] for one in own if one in theirs[best]
                )
                row["ratio_by_batch"] = median(batch[0].values()) / median(batch[1].values())
            rows.append(row)
    return rows


def rivals_of(kind: str, peers: Iterable[str]) -> list[str]:
    """Return the peers that a kind is compared with: variables with MPI alone."""
    return [peer for peer in peers if not kind.endswith("variable") or peer in MPI]


def tables(
    times: Times, plan: Plan, libraries: Sequence[Library], rows: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the lines of all tables of one number of workers."""
    labels = {library.name: library.label for library in libraries}
    lines = [f"{times.workers} workers, {plan.dtype}; median us of a call (quartiles over rounds)"]
    for work in plan.works:
        lines += ["", f"{work.collective}, {COLLECTIVES[work.collective][work.kind]}"]
        if work.kind in times.skipped:
            lines.append(f"  not measured: {times.skipped[work.kind]}")
            continue
        names = ["syncvar", *rivals_of(work.kind, (name for name in labels if name != "syncvar"))]
        head = [
            "size",
            *(labels[name] for name in names),
            "best peer",
            "ratio",
            "by round",
            "by batch",
        ]
        body = []
        for row in rows:
            if (row["collective"], row["kind"]) != (work.collective, work.kind):
                continue
            cells = [_cell(times, name, row) for name in names]
            if "best" in row:
                low, _, high = row["ratio_by_round"]
                best = [
                    labels[row["best"]],
                    f"{row['ratio']:.2f}",
                    f"{low:.2f}-{high:.2f}",
                    f"{row['ratio_by_batch']:.2f}",
                ]
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
        lines += [
            f"  {library.label:<10} no {name}: {why}"
            for name, why in times.refused.get(library.name, {}).items()
        ]
    return lines


def grid(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Return a table with right-aligned columns, the last `left` of them left-aligned."""
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    signs = [">"] * (len(head) - left) + ["<"] * left
    return [
        "  ".join(
            f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths, strict=True)
        ).rstrip()
        for line in (head, *body)
    ]


def _cell(times: Times, library: str, row: dict[str, Any]) -> str:
    if library not in row["us"]:
        return "no" if row["collective"] in times.refused.get(library, {}) else "-"
    low, middle, high = map(number, row["us"][library])
    return f"{middle} ({low}-{high})"


def number(value: float) -> str:
    """Return a number with three digits or more."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
