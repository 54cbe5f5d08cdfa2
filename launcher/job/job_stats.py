"""The totals of all ranks for `--stats`: reading, merging and the table."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from syncvar.core.output_files import TOTALS
from syncvar.core.process_ids import process_list
from syncvar.runtime.flight_recorder.call_stats import bus_factor
from syncvar_launcher.io.output import escape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_TITLE = (
    "syncvar: totals of all calls; time in seconds over the ranks, bandwidth in GB/s by the mean"
)
_HEAD = (
    "call", "size", "ranks", "calls", "bytes", "mean", "min", "max", "waiting", "algbw", "busbw",
)  # fmt: skip
_ROWS_MAX = 14
_FILE_NBYTES_MAX = 16 << 20
_TEXTS, _NUMBERS = ("call", "ranks"), ("group", "size", "class", "calls", "nbytes", "ns", "failed")


def read_totals(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the totals in a folder by rank or server number; skip other files."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(TOTALS)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if path.stat().st_size > _FILE_NBYTES_MAX:
                continue
            told = json.loads(path.read_bytes())
            rows = [
                row
                for row in told["rows"]
                if all(type(row[n]) is str for n in _TEXTS)
                and all(type(row[n]) is int for n in _NUMBERS)
            ]
            found.setdefault(int(told["rank"]), []).extend(rows)
    return found


def merged(told: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row for each kind of call, sorted by mean time, the longest first.

    The columns of a row:

    - "call", "ranks", "size" of the group, "failed" calls.
    - "class": upper end of the size class in bytes.
    - "calls" and "nbytes": those of the rank with most.
    - "min_s", "mean_s", "max_s": time in these calls, over the ranks.
    - "waiting": share of the mean time beyond the fastest rank's. It is a lower bound.
    - "algbw", "busbw": GB/s by the mean time; null if unknown.
    """
    cells: dict[tuple[str, str, int, int, int], list[dict[str, Any]]] = {}
    for rows in told.values():
        here: dict[tuple[str, str, int, int, int], dict[str, Any]] = {}
        for row in rows:  # a rank that has met again reports the same group twice
            key = (row["call"], row["ranks"], row["size"], row["group"], row["class"])
            if key in here:
                for name in ("calls", "nbytes", "ns", "failed"):
                    here[key][name] += row[name]
            else:
                here[key] = dict(row)
        for key, row in here.items():
            cells.setdefault(key, []).append(row)
    result = []
    for (call, ranks, size, _, end), rows in cells.items():
        times = [row["ns"] / 1e9 for row in rows]
        mean = sum(times) / len(times)
        nbytes = max(row["nbytes"] for row in rows)
        is_known = all(row["nbytes"] >= 0 for row in rows) and nbytes > 0 and mean > 0
        rate = nbytes / mean / 1e9 if is_known else None
        factor = bus_factor(call.partition("(")[0], size)
        result.append(
            {
                "call": call,
                "ranks": ranks,
                "size": size,
                "class": end,
                "calls": max(row["calls"] for row in rows),
                "nbytes": nbytes if is_known else None,
                "min_s": min(times),
                "mean_s": mean,
                "max_s": max(times),
                "waiting": (1 - min(times) / mean if mean > 0 else 0.0) if len(rows) > 1 else None,
                "algbw": rate if factor else None,
                "busbw": rate * factor if rate is not None and factor else None,
                "failed": sum(row["failed"] for row in rows),
            }
        )
    return sorted(result, key=lambda row: -row["mean_s"])


def table(rows: Sequence[dict[str, Any]], missing: Sequence[int] = ()) -> str:
    """Write the rows of `merged` as a table of at most 20 lines.

    It names the ranks and servers without totals.
    """
    if not rows and missing:
        return f"syncvar: no totals: {process_list(missing)} ended before writing them\n"
    if not rows:
        return "syncvar: no calls to add up\n"
    cells = [_HEAD] + [_cells(row) for row in rows[:_ROWS_MAX]]
    rest = rows[_ROWS_MAX:]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_TITLE]
    lines += [
        "  "
        + "  ".join(
            f"{cell:<{w}}" if i < 3 else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    if rest:
        calls, time_s = (sum(row[name] for row in rest) for name in ("calls", "mean_s"))
        lines.append(
            f"  {len(rest)} more kinds: {calls} calls, {time_s:.3f} s (--stats=FILE has all)"
        )
    lines.append(
        "  waiting: share of the mean time beyond that of the rank that took least, a lower bound"
    )
    if missing:
        lines.append(f"  {process_list(missing)} told nothing")
    return "".join(f"{line}\n" for line in lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    share = "-" if row["waiting"] is None else f"{100 * row['waiting']:.0f}%"
    total = "-" if row["nbytes"] is None else _bytes(row["nbytes"])
    times = (f"{row[name]:.3f}" for name in ("mean_s", "min_s", "max_s"))
    size = "-" if row["nbytes"] is None else f"<= {_bytes(row['class'])}"
    return (
        escape(row["call"])[:40],
        size,
        escape(row["ranks"])[:20],
        str(row["calls"]),
        total,
        *times,
        share,
        rate(row["algbw"]),
        rate(row["busbw"]),
    )


def _bytes(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
