"""Who waited for whom, and what a step consisted of, from the flight records of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.cli.record_files import calls_of, duration, members_of, run_of
from syncvar.core.process_ids import is_server, rank_list
from syncvar.protocol.wait_shares import CallTimes, RankWindow, wait_shares
from syncvar.runtime.call_record import row_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncvar.cli.record_files import FlightRecord
    from syncvar.runtime.call_record import Event

_COLUMNS_MAX = 8
_ROWS_MAX = 16
_PARTS_MAX = 8
_SHARE_MIN = 0.005


def wait_matrix(records: Sequence[FlightRecord]) -> tuple[float, dict[int, dict[int, float]]]:
    """Return the seconds that all records cover, and each rank's share of waits by late rank.

    All records cover the time from the latest first event to the earliest time of writing.
    """
    begin = max((record.events[0].began_ns for record in records if record.events), default=0)
    end = min((record.written for record in records if record.events), default=0)
    if end <= begin:
        return 0.0, {}
    windows = {
        record.rank: RankWindow(
            begin,
            end,
            [
                CallTimes(event.group, event.call, event.began_ns, event.ended_ns)
                for event in record.events
                if event.group >= 0 and event.call >= 0
            ],
        )
        for record in records
        if record.events
    }
    return (end - begin) / 1e9, wait_shares(windows, members_of(records))


class PathPart(NamedTuple):
    """A part of the critical path: a rank that computes, or a call that moves data."""

    label: str
    nanoseconds: int


class CriticalPath(NamedTuple):
    """What a span of time consisted of: making any part shorter makes the whole shorter."""

    title: str
    nanoseconds: int
    parts: tuple[PathPart, ...]


def critical_path(records: Sequence[FlightRecord]) -> CriticalPath | None:
    """Return the critical path of the last complete step, or of all calls of the largest group.

    A step is a block of `strategy.run` that all ranks have completed. The rank that enters a call
    last holds up all others: its time before the call counts, then the time in the call.
    """
    members = members_of(records)
    known = {record.rank for record in records if record.events}
    found: list[tuple[int, int, int, dict[int, dict[int, Event]]]] = []
    for group, calls in calls_of(records).items():
        ranks = set(members.get(group, ()))
        complete = {
            call: events
            for call, events in calls.items()
            if ranks == events.keys() <= known
            and {one.state for one in events.values()} == {"done"}
        }
        if len(ranks) > 1 and len(complete) > 1:
            found.append((len(ranks), len(complete), group, complete))
    if not found:
        return None
    _, _, group, complete = max(found, key=lambda one: one[:2])
    numbers = sorted(complete)
    one_of = next(record for record in records if record.rank in complete[numbers[0]])
    runs = {call: run_of(one_of, group, call) for call in numbers}
    steps = sorted({run for run in runs.values() if run is not None})
    title = f"{len(numbers)} calls of {rank_list(complete[numbers[0]])}"
    if len(steps) > 1:  # the last one may go on
        block = [call for call in numbers if runs[call] == steps[-2]]
        before = [call for call in numbers if call < block[0]]
        numbers = [*before[-1:], *block]
        title = "the last complete step"
    return _path(title, [complete[number] for number in numbers]) if len(numbers) > 1 else None


def _path(title: str, calls: Sequence[Mapping[int, Event]]) -> CriticalPath:
    """Return the path from the end of the first call to the end of the last one."""
    spent: dict[str, int] = {}
    begin = max(event.ended_ns for event in calls[0].values())
    now = begin
    for events in calls[1:]:
        late = max(events, key=lambda rank: (events[rank].began_ns, rank))
        arrived = max(now, events[late].began_ns)
        end = max(arrived, *(event.ended_ns for event in events.values()))
        for label, length in (
            (f"rank {late} outside of calls", arrived - now),
            (row_name(events[late]), end - arrived),
        ):
            spent[label] = spent.get(label, 0) + length
        now = end
    parts = sorted(
        (PathPart(label, length) for label, length in spent.items()),
        key=lambda one: -one.nanoseconds,
    )
    return CriticalPath(title, now - begin, tuple(parts))


def describe_waits(records: Iterable[FlightRecord]) -> list[str]:
    """Return the lines about waits and the critical path; empty if no rank waited."""
    ranks = [record for record in records if not is_server(record.rank)]
    seconds, shares = wait_matrix(ranks)
    costs: dict[int, float] = {}
    for waits in shares.values():
        for late, share in waits.items():
            costs[late] = costs.get(late, 0.0) + share
    lates = sorted(sorted(costs, key=lambda one: -costs[one])[:_COLUMNS_MAX])
    lines = []
    if any(cost >= _SHARE_MIN for cost in costs.values()):
        heads = [f"rank {late}" for late in lates]
        lines = ["", f"waits, in shares of the last {seconds:.3g} s that all records cover"]
        lines.append("  " + "for".rjust(9) + "".join(head.rjust(10) for head in heads))
        for rank, waits in sorted(shares.items())[:_ROWS_MAX]:
            cells = [
                "-" if rank == late else f"{100 * waits.get(late, 0.0):.0f} %" for late in lates
            ]
            lines.append(f"  {f'rank {rank}'.rjust(9)}" + "".join(cell.rjust(10) for cell in cells))
        if len(shares) > _ROWS_MAX:
            lines.append(f"  and {len(shares) - _ROWS_MAX} more ranks")
    path = critical_path(ranks)
    if path is not None and path.nanoseconds:
        lines += ["", f"critical path of {path.title}, {duration(path.nanoseconds)}"]
        for part in path.parts[:_PARTS_MAX]:
            share = part.nanoseconds / path.nanoseconds
            if share >= _SHARE_MIN:
                lines.append(f"  {share:4.0%}  {duration(part.nanoseconds)}  {part.label}")
    return lines
