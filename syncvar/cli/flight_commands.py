"""The commands that read flight records: `syncvar explain` and `syncvar trace merge`.

The trace is in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open. A process
of it is a rank, a row is a group (more rows if its calls overlap), a slice is an operation. A slice
inside it is the wait for the last rank. An arrow leads from the start of that rank's slice to the
end of each slice that waited. Long arrows from one rank mean that it is late.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.cli.explain import explain_records
from syncvar.cli.printed_tables import explain_code, is_error_code
from syncvar.cli.record_files import (
    FlightRecord,
    calls_of,
    clock_lines,
    load,
    names_of,
    newest,
    number_of,
)
from syncvar.cli.wait_analysis import describe_waits
from syncvar.core.errors import ConfigError
from syncvar.core.output_files import JOBS_MAX, find_job, state_folder
from syncvar.core.process_ids import is_server, process_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from syncvar.runtime.call_record import Event

_EVENTS_ROW = 0
COMMANDS = ("trace", "explain")
_JOB_ID = re.compile("[0-9a-f]{8}")


def merge_records(records: Sequence[FlightRecord]) -> dict[str, Any]:
    """Return the trace of the records of all ranks, ready for JSON."""
    zero = min((record.events[0].began_ns for record in records if record.events), default=0)
    events: list[dict[str, Any]] = []
    groups = names_of(records)
    for record in records:
        label = process_name(record.rank)
        if record.generation:
            label += f" generation {record.generation}"
        pid = _pid_of(record)
        events.append(_about("process_name", pid, 0, label))
        events.append(_about("process_sort_index", pid, 0, pid, "sort_index"))
        events.append(_about("process_labels", pid, 0, record.host, "labels"))
        rows, names = _rows(record, groups)
        events += [_about("thread_name", pid, row, name) for row, name in sorted(names.items())]
        for event in record.events:
            events += _drawn(record, event, pid, rows[event], zero)
    for generation in sorted({record.generation for record in records}):
        some = [record for record in records if record.generation == generation]
        events += _arrows(some, zero, len(events))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "job": records[0].job if records else "",
            "begins_at_ns": zero,
            "clocks": clock_lines(records),
        },
    }


def _pid_of(record: FlightRecord) -> int:
    return record.generation * 1_000_000 + record.rank


def _about(title: str, pid: int, tid: int, value: Any, key: str = "name") -> dict[str, Any]:
    return {"ph": "M", "name": title, "pid": pid, "tid": tid, "args": {key: value}}


def _rows(record: FlightRecord, groups: dict[int, str]) -> tuple[dict[Event, int], dict[int, str]]:
    """Return the row of each event, and the names of the rows; overlapping calls get extra rows."""
    rows: dict[Event, int] = {}
    names: dict[int, str] = {}
    lanes: dict[int, list[tuple[int, int]]] = {}  # group -> (row, end of its last slice)
    for event in record.events:
        if event.state == "noted":
            rows[event], names[_EVENTS_ROW] = _EVENTS_ROW, "events"
            continue
        known = lanes.setdefault(event.group, [])
        end = event.ended_ns or record.written
        for index, (row, busy) in enumerate(known):
            if busy <= event.began_ns:
                known[index] = (row, end)
                rows[event] = row
                break
        else:
            row = 1 + sum(map(len, lanes.values()))
            name = "questions" if event.group < 0 else groups.get(event.group, "a group")
            names[row] = name + (f", {len(known) + 1}" if known else "")
            known.append((row, end))
            rows[event] = row
    return rows, names


def _us(ns: int, zero: int) -> float:
    return (ns - zero) / 1000


def _drawn(
    record: FlightRecord, event: Event, pid: int, row: int, zero: int
) -> list[dict[str, Any]]:
    name = event.collective or event.label
    at: dict[str, Any] = {"name": name, "pid": pid, "tid": row, "ts": _us(event.began_ns, zero)}
    if event.state == "noted":
        return [at | {"ph": "i", "s": "p", "cat": "event", "args": {"detail": event.detail}}]
    number = event.call if event.call < 0 else number_of([record], event.group, event.call)
    arguments: dict[str, Any] = {
        "what": event.label,
        "group": event.group,
        "call": number,
        "bytes": event.nbytes,
        "path": event.path,
        "state": event.state,
        "thread": event.thread,
    }
    if event.detail:
        arguments["detail"] = event.detail
    lasted = max(event.ended_ns or record.written, event.began_ns) - event.began_ns
    return [at | {"ph": "X", "cat": "operation", "dur": lasted / 1000, "args": arguments}]


def _arrows(records: Sequence[FlightRecord], zero: int, first: int) -> list[dict[str, Any]]:
    """Return the waits and the arrows of the calls of one attempt.

    The numbers of the arrows begin with `first`. Perfetto takes no other names for them.
    """
    by_rank = {record.rank: record for record in records}
    rows = {record.rank: _rows(record, {})[0] for record in records}
    drawn: list[dict[str, Any]] = []
    for group, calls in calls_of(records).items():
        for call, events in calls.items():
            if len(events) < 2 or len({event.fingerprint for event in events.values()}) > 1:
                continue
            last = max(events, key=lambda rank: (events[rank].began_ns, rank))
            entered = events[last].began_ns
            start = _point(by_rank[last], rows[last][events[last]], entered, zero)
            for rank, event in sorted(events.items()):
                end = event.ended_ns
                if rank == last or not event.began_ns < entered < end:
                    continue  # it did not wait
                point = _point(by_rank[rank], rows[rank][event], event.began_ns, zero)
                about = {"args": {"for_rank": last, "call": number_of(records, group, call)}}
                wait = {"ph": "X", "cat": "wait", "name": f"wait for rank {last}"}
                drawn.append(point | wait | about | {"dur": (entered - event.began_ns) / 1000})
                arrow = {"cat": "waited for", "name": "came", "id": first + len(drawn)}
                drawn.append(start | arrow | {"ph": "s"})
                head = {"ph": "f", "bp": "e", "ts": _us(max(end - 1, entered), zero)}
                drawn.append(point | arrow | head)
    return drawn


def _point(record: FlightRecord, row: int, ns: int, zero: int) -> dict[str, Any]:
    return {"pid": _pid_of(record), "tid": row, "ts": _us(ns, zero)}


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
        help="explain an error code; or name the first call in which ranks diverged (exit code 1 "
        "if there is one, else 0)",
    )
    explain.add_argument(
        "records",
        nargs="*",
        metavar="CODE|JOB|DIR|FILE",
        help="error code such as SV-301; or job id in the block of a failed job (default: the "
        "latest); or folders with flight-rank<r>.json, or such files",
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
    if chosen.command == "explain" and len(chosen.records) == 1:
        (word,) = chosen.records
        if is_error_code(word) and not os.path.exists(word):
            print(explain_code(word), end="")
            return 0
    records = load(_of_job(chosen.records) if chosen.command == "explain" else chosen.records)
    if chosen.command == "explain":
        text, has_diverged = explain_records(records)
        print(text, end="")
        return int(has_diverged)
    try:
        _write_trace(chosen.output, merge_records(records))
    except OSError as error:
        raise ConfigError(f"{chosen.output}: {error.strerror}") from error
    for line in clock_lines(records):
        sys.stderr.write(f"syncvar: {line}\n")
    count = sum(len(record.events) for record in records)
    servers = sum(is_server(record.rank) for record in records)
    more = f" and {servers} server{'s' * (servers > 1)}" if servers else ""
    print(
        f"{chosen.output}: {count} events of {len(records) - servers} ranks{more}; open it in "
        "ui.perfetto.dev or chrome://tracing"
    )
    print("\n".join(describe_waits(newest(records))).lstrip("\n"))
    return 0
