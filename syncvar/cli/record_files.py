"""Flight records, read from their files and joined by group, call and rank. Pure except `load`."""

from __future__ import annotations

import bisect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import ConfigError
from syncvar.core.output_files import RECORDS, is_record
from syncvar.core.process_ids import is_server, rank_list
from syncvar.core.stack_dump import StackFrame
from syncvar.runtime.call_record import COLUMNS, Event
from syncvar.runtime.recorder import FORMAT, ordinal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncvar.runtime.recorder import Gap


_LARGEST = 64 << 20


class FlightRecord(NamedTuple):
    """The flight record of one rank or server; times are nanoseconds of rank 0's clock."""

    rank: int  # its rank, or the number of a server's process
    world_size: int  # number of ranks
    generation: int  # version of the membership
    job: str  # identity of the job
    host: str  # its host
    boot: str  # identity of the host's boot: ranks of one boot share a clock
    reason: str  # why the record was written
    is_final: bool  # whether the rank made no later calls
    is_whole: bool  # whether the record begins with the rank's first event
    written: int  # time of writing
    clock_error: int  # by how much its times may be wrong beside the launcher's clock; -1: unknown
    groups: Mapping[int, tuple[int, ...]]  # members of its groups
    gaps: Mapping[int, Sequence[Gap]]  # for each group, ranges of numbers that belong to no call
    runs: Mapping[int, frozenset[int]]  # for each group, the first numbers of runs with calls
    # For each live thread its name and place in the program
    threads: Mapping[int, Mapping[str, str]]
    stack: tuple[StackFrame, ...]  # stack of the main thread, innermost first; empty if unknown
    events: tuple[Event, ...]  # events, oldest first
    worker: int = -1  # number of the worker in an elastic job, where ranks change


def as_record(data: Mapping[str, Any]) -> FlightRecord:
    """Return the record in a file's data."""
    if data["format"] != FORMAT:
        raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
    offset = int(data["clock_offset_ns"])
    columns = {name: index for index, name in enumerate(data["columns"])}
    fields = [
        (field, columns[title])
        for field, title in zip(Event._fields, COLUMNS, strict=True)
        if title in columns or field not in Event._field_defaults
    ]
    events = []
    for row in data["events"]:
        event = Event(**{field: row[index] for field, index in fields})
        ended = event.ended_ns + offset if event.ended_ns else 0
        events.append(event._replace(began_ns=event.began_ns + offset, ended_ns=ended))
    return FlightRecord(
        rank=int(data["rank"]),
        world_size=int(data["world_size"]),
        generation=int(data["generation"]),
        job=str(data["job"]),
        host=str(data["host"]),
        boot=str(data["boot"]),
        reason=str(data["reason"]),
        is_final=bool(data["is_final"]),
        is_whole=bool(data["is_whole"]),
        written=int(data["written_ns"]) + offset,
        clock_error=int(data.get("clock_error_ns", -1)),
        groups={int(group): tuple(members) for group, members in data["groups"].items()},
        gaps={
            int(group): [(int(first), int(count)) for first, count in gaps]
            for group, gaps in data.get("gaps", {}).items()
        },
        runs={
            int(group): frozenset(int(first) for first in runs)
            for group, runs in data.get("runs", {}).items()
        },
        threads={int(ident): dict(about) for ident, about in data["threads"].items()},
        stack=tuple(
            StackFrame(str(file), int(line), str(name))
            for file, line, name in data.get("stack", ())
        ),
        events=tuple(sorted(events, key=lambda event: event.began_ns)),
        worker=int(data.get("worker", -1)),
    )


def clock_lines(records: Iterable[FlightRecord]) -> list[str]:
    """Return a line about the clocks of several hosts; none if the ranks have one clock."""
    clocks: dict[str, list[FlightRecord]] = {}
    for record in records:
        clocks.setdefault(record.boot, []).append(record)
    if len(clocks) < 2:
        return []
    hosts = ", ".join(sorted(some[0].host for some in clocks.values()))
    errors = [
        min((one.clock_error for one in some if one.clock_error >= 0), default=None)
        for some in clocks.values()
    ]
    measured = sorted(error for error in errors if error is not None)
    if len(measured) < len(errors):
        return [f"the clocks of hosts {hosts} may differ: nobody has compared them"]
    within = duration(sum(measured[-2:]))
    return [f"times of hosts {hosts} are those of one clock, within {within}"]


def load(names: Sequence[str]) -> list[FlightRecord]:
    """Read the records of a job, ordered by generation and rank."""
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        found = [path]
        if path.is_dir():
            found = sorted(one for one in path.glob(RECORDS) if is_record(one.name))
        if not found:
            raise ConfigError(
                f"{name}: there is no flight record (flight-rank0.json, …) in this folder"
            )
        paths += found
    records: dict[tuple[int, int], FlightRecord] = {}
    for path in paths:
        record = _read(path)
        other = records.get((record.generation, record.rank))
        if other is None or other.written < record.written:
            records[record.generation, record.rank] = record
    jobs = sorted({record.job for record in records.values()})
    if len(jobs) > 1:
        raise ConfigError(
            f"the records are of {len(jobs)} jobs ({', '.join(job[:8] for job in jobs)}): name "
            "those of one"
        )
    return [records[key] for key in sorted(records)]


def _read(path: Path) -> FlightRecord:
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"{path} is too large for a flight record")
        return as_record(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is not a flight record: {reason}") from error


def newest(records: Iterable[FlightRecord]) -> list[FlightRecord]:
    """Return the records of the last generation."""
    records = list(records)
    last = max((record.generation for record in records), default=0)
    return [record for record in records if record.generation == last]


def members_of(records: Iterable[FlightRecord]) -> dict[int, tuple[int, ...]]:
    """Return the members of every group in the records."""
    groups: dict[int, tuple[int, ...]] = {}
    for record in records:
        groups |= record.groups
    return dict(sorted(groups.items()))


def calls_of(records: Iterable[FlightRecord]) -> dict[int, dict[int, dict[int, Event]]]:
    """Return the events by group, call and rank."""
    calls: dict[int, dict[int, dict[int, Event]]] = {}
    for record in records:
        for event in record.events:
            if event.group >= 0 and event.call >= 0:
                calls.setdefault(event.group, {}).setdefault(event.call, {})[record.rank] = event
    return {group: dict(sorted(numbers.items())) for group, numbers in sorted(calls.items())}


def number_of(records: Iterable[FlightRecord], group: int, call: int) -> int:
    """Return the number of a call in its group, from 1, by the first record with the group."""
    gaps = next((record.gaps[group] for record in records if group in record.gaps), ())
    return ordinal(gaps, call)


def run_of(record: FlightRecord, group: int, call: int) -> int | None:
    """Return the first number of the run of `strategy.run` that a call is in; None for no run."""
    gaps = record.gaps.get(group, ())
    index = bisect.bisect_right(gaps, call, key=lambda gap: gap[0])
    first = gaps[index - 1][0] if index else 0
    return first if first in record.runs.get(group, ()) else None


def names_of(records: Iterable[FlightRecord]) -> dict[int, str]:
    """Return a name for every group, by its ranks, since a program does not know its identity.

    Groups of the same ranks are numbered in the order of their first calls.
    """
    records = list(records)
    firsts: dict[int, int] = {}
    messages = set()
    for event in (event for record in records for event in record.events):
        firsts[event.group] = min(event.began_ns, firsts.get(event.group, event.began_ns))
        if event.collective in ("send", "recv"):
            messages.add(event.group)
    names = {0: "the world"}
    alike: dict[tuple[int, ...], list[int]] = {}
    for group, members in members_of(records).items():
        if group in messages and len(members) == 2:
            names[group] = "send/recv between ranks {} and {}".format(*sorted(members))
        elif group:
            alike.setdefault(members, []).append(group)
    for members, groups in alike.items():
        for number, group in enumerate(sorted(groups, key=lambda one: firsts.get(one, 0)), 1):
            title = f"group {number}" if len(groups) > 1 else "the group"
            names[group] = f"{title} of {rank_list(members)}"
    return names


class LostRank(NamedTuple):
    """End of a rank without a record, as another rank learned it."""

    words: str  # text
    # Whether it ended between two calls, so that it would never have entered the next
    did_end: bool


def lost_ranks(event: Event) -> dict[int, LostRank]:
    """Return the failed rank that the error of a call names; empty for other errors."""
    status = event.lost_status
    if status is None or is_server(event.lost_rank):
        return {}
    words = f"killed by signal {-status}" if status < 0 else f"ended (exit {status})"
    return {event.lost_rank: LostRank(words, status >= 0)}


def duration(ns: float) -> str:
    """Format a time."""
    if abs(ns) < 1e6:
        return f"{ns / 1e3:.1f} us"
    return f"{ns / 1e6:.3f} ms" if abs(ns) < 1e9 else f"{ns / 1e9:.3f} s"
