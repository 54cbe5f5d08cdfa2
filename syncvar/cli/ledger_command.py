"""`syncvar ledger`: the calls, bytes and time of a job by variable and program line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError
from syncvar.runtime.call_ledger import VIEWS, Ledger, compare_ledgers, ledger_table
from syncvar.shm.segment_file import format_bytes

if TYPE_CHECKING:
    import argparse

    from syncvar.runtime.call_ledger import LedgerChange


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FOLDER_OR_FILE",
        help="what syncvar-launch --ledger, SYNCVAR_LEDGER or Ledger.save wrote; two are compared, "
        "the older first",
    )
    parser.add_argument("--by", choices=VIEWS, help="add up the rows by one property")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(chosen: argparse.Namespace) -> int:
    """Print the ledger of all ranks, or what two ledgers differ in."""
    if len(chosen.files) == 2:
        old, new = map(load_ledger, chosen.files)
        changes = compare_ledgers(old, new)
        data: Any = [change._asdict() for change in changes]
        text = changes_table(changes)
    else:
        ledger = Ledger().merge(*map(load_ledger, chosen.files))
        rows = ledger.by(chosen.by) if chosen.by else ledger.rows
        data = {"ranks": list(ledger.ranks), "rows": [row._asdict() for row in rows]}
        text = ledger_table(ledger, rows)
    print(json.dumps(data, indent=1) if chosen.json else text)
    return 0


def load_ledger(name: str) -> Ledger:
    """Return the ledger in a file, or those of all ranks in a folder."""
    path = Path(name)
    if not path.is_dir():
        return Ledger.load(path)
    found = sorted(path.glob("ledger-rank*.json"))
    if not found:
        raise ConfigError(
            f"{name}: there is no ledger (ledger-rank0.json, …) in this folder; "
            f"syncvar-launch --ledger {name} writes one for each rank at the end of the job"
        )
    return Ledger().merge(*map(Ledger.load, found))


def changes_table(changes: list[LedgerChange]) -> str:
    """Return what has changed as a table, the largest growth of bytes first."""
    pairs = [(calls, size) for calls, size in zip(changes[::2], changes[1::2], strict=True)]
    changed = [pair for pair in pairs if any(one.old != one.new for one in pair)]
    changed.sort(key=lambda pair: pair[1].old - pair[1].new)
    table = [("variable", "collective", "site", "calls", "", "bytes", "")]
    for calls, size in changed:
        names = calls.variable or "-", calls.collective, calls.site or "-"
        sizes = f"{format_bytes(size.old)} -> {format_bytes(size.new)}"
        counts = f"{calls.old} -> {calls.new}"
        table.append((*names, counts, _growth(calls), sizes, _growth(size)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    equal = f"{len(pairs) - len(changed)} kinds of calls have the same calls and bytes"
    return "\n".join([*(lines if changed else ()), equal])


def _growth(change: LedgerChange) -> str:
    if change.old == change.new:
        return "same"
    return f"{change.new / change.old - 1:+.1%}" if change.old else "new"
