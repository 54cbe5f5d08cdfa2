"""The commands that read flight records: `syncvar trace merge` and `syncvar explain`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.cli.explain_text import explain_records
from syncvar.cli.record_files import load
from syncvar.cli.trace import merge_records, stragglers, unaligned_hosts
from syncvar.core.errors import ConfigError
from syncvar.core.output_files import JOBS_MAX, find_job, state_folder
from syncvar.core.process_ids import is_server

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


COMMANDS = ("trace", "explain")
_JOB_ID = re.compile("[0-9a-f]{8}")
_STRAGGLERS = 4  # lines; the first is the rank to look at


def add_options(commands: Any) -> None:
    """Add the commands to those of `syncvar`."""
    trace = commands.add_parser("trace", help="make a trace of all ranks from their flight records")
    parts = trace.add_subparsers(dest="part", required=True, metavar="merge")
    merge = parts.add_parser(
        "merge", help="merge flight records into one trace, for ui.perfetto.dev"
    )
    merge.add_argument(
        "records",
        nargs="+",
        metavar="DIR|FILE",
        help="folders with flight-rank<r>.json, or such files",
    )
    merge.add_argument(
        "-o",
        "--output",
        default="trace.json",
        metavar="FILE",
        help="where the trace goes (trace.json)",
    )
    explain = commands.add_parser(
        "explain",
        help="name the first call in which ranks diverged; exit code 1 if there is one, else 0",
    )
    explain.add_argument(
        "records",
        nargs="*",
        metavar="JOB|DIR|FILE",
        help="job id in the block of a failed job (default: the latest); or folders with "
        "flight-rank<r>.json, or such files",
    )


def _of_job(names: list[str]) -> list[str]:
    """Return the paths of the records: those of the named job, or of the newest one."""
    is_job = len(names) == 1 and _JOB_ID.fullmatch(names[0]) and not os.path.exists(names[0])
    job = names[0] if is_job else ""
    if names and not job:
        return names
    found = find_job(os.environ, job)
    if found is None:
        folder = state_folder(os.environ).path
        title = f"job {job}" if job else "any job"
        raise ConfigError(
            "there are no flight records of "
            f"{title}{f' in {folder}' if folder else ''}: ranks write "
            f"them when something goes wrong (those of the last {JOBS_MAX} such jobs are kept); "
            "those of a job with --log-dir are in that folder"
        )
    return [str(found)]


def _write_trace(path: str, trace: Mapping[str, Any]) -> None:
    """Write a trace: a regular file atomically, a pipe or a device in place."""
    is_replaced = not os.path.exists(path) or os.path.isfile(path)
    target = f"{path}.{os.getpid()}.tmp" if is_replaced else path
    try:
        with open(target, "w", encoding="utf-8") as file:
            json.dump(trace, file, separators=(",", ":"))
        if is_replaced:
            os.replace(target, path)
    except OSError:
        if is_replaced:
            Path(target).unlink(missing_ok=True)
        raise


def run(chosen: argparse.Namespace) -> int:
    """Run a command; return the exit code."""
    records = load(_of_job(chosen.records) if chosen.command == "explain" else chosen.records)
    if chosen.command == "explain":
        text, has_diverged = explain_records(records)
        print(text, end="")
        return int(has_diverged)
    try:
        _write_trace(chosen.output, merge_records(records))
    except OSError as error:
        raise ConfigError(f"{chosen.output}: {error.strerror}") from error
    hosts = unaligned_hosts(records)
    if hosts:
        sys.stderr.write(
            f"syncvar: the clocks of hosts {', '.join(hosts)} are not known to be the same\n"
        )
    count = sum(len(record.events) for record in records)
    servers = sum(is_server(record.rank) for record in records)
    more = f" and {servers} server{'s' * (servers > 1)}" if servers else ""
    print(
        f"{chosen.output}: {count} events of {len(records) - servers} ranks{more}; open it in "
        "ui.perfetto.dev or chrome://tracing"
    )
    for rank, calls, seconds in stragglers(records)[:_STRAGGLERS]:
        print(
            f"rank {rank} came last to {calls} call{'s' * (calls != 1)}; others waited up to "
            f"{seconds:.3g} s for it in all"
        )
    return 0
