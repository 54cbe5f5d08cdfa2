"""The commands that read flight records: `syncvar trace merge` and `syncvar explain`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.cli.explain import explained
from syncvar.cli.records import load
from syncvar.cli.trace import merged, stragglers, unaligned
from syncvar.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMANDS", "add_options", "run"]

COMMANDS = ("trace", "explain")
_STRAGGLERS = 4  # lines; the first is the rank to look at


def add_options(commands: Any) -> None:
    """Add the commands to those of `syncvar`."""
    trace = commands.add_parser("trace", help="make a trace of all ranks from their flight records")
    parts = trace.add_subparsers(dest="part", required=True, metavar="merge")
    merge = parts.add_parser("merge", help="merge flight records into one trace, for ui.perfetto.dev")
    merge.add_argument("records", nargs="+", metavar="DIR|FILE", help="folders with flight-rank<r>.json, or such files")
    merge.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="where the trace goes (trace.json)")
    explain = commands.add_parser(
        "explain", help="name the first call in which ranks parted; exit code 1 if there is one, 0 if there is none"
    )
    explain.add_argument("records", nargs="+", metavar="DIR|FILE", help="folders with flight-rank<r>.json, or such files")


def run(chosen: argparse.Namespace) -> int:
    """Run a command; returns the exit code.

    Raises:
        ConfigError: The records cannot be read, or the trace cannot be written.
    """
    records = load(chosen.records)
    if chosen.command == "explain":
        text, has_diverged = explained(records)
        print(text, end="")
        return int(has_diverged)
    draft = f"{chosen.output}.{os.getpid()}.tmp"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(merged(records), file, separators=(",", ":"))
        os.replace(draft, chosen.output)
    except OSError as error:
        Path(draft).unlink(missing_ok=True)
        raise ConfigError(f"{chosen.output}: {error.strerror}") from error
    hosts = unaligned(records)
    if hosts:
        sys.stderr.write(f"syncvar: the clocks of hosts {', '.join(hosts)} are not known to be the same\n")
    count = sum(len(record.events) for record in records)
    print(f"{chosen.output}: {count} events of {len(records)} ranks; open it in ui.perfetto.dev or chrome://tracing")
    for rank, calls, seconds in stragglers(records)[:_STRAGGLERS]:
        print(f"rank {rank} came last to {calls} call{'s' * (calls != 1)}; others waited up to {seconds:.3g} s for it in all")
    return 0
