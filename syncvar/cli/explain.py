"""The first call in which ranks diverged, found from their flight records, for `explain_text`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.cli.record_files import calls_of, lost_ranks, members_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from syncvar.cli.record_files import FlightRecord
    from syncvar.runtime.call_record import Event


_DEADLOCK = "deadlock: "  # in the error of the deadlock detector
_FINAL = ("PeerLost", "DeadlineExceeded", "GroupBroken")  # after these a rank makes no more calls


class Divergence(NamedTuple):
    """A call that some ranks made, and others did not.

    Args:
        group: Identity of the group.
        call: Number of the call.
        made: Rank -> its event of this call.
        absent: Ranks that certainly did not enter the call.
        began: Time of the first entry.
    """

    group: int
    call: int
    made: Mapping[int, Event]
    absent: tuple[int, ...]
    began: int


def kind_of(detail: str) -> str:
    """Return the error class in the detail of an event."""
    return detail.split(":", 1)[0]


def divergences(records: Sequence[FlightRecord]) -> list[Divergence]:
    """Return the first divergence of each group, the earliest first, harmless ones last.

    A call diverges if fingerprints differ, if a rank with a record did not enter it, or if a rank
    had ended before. The time before a full ring, and after a record from the middle of a run, is
    unknown.
    """
    groups = members_of(records)
    by_rank = {record.rank: record for record in records}
    every: list[Divergence] = []
    for group, calls in calls_of(records).items():
        numbers = {
            record.rank: [event.call for event in record.events if event.group == group]
            for record in records
        }
        for call, events in calls.items():
            began = min(event.began_ns for event in events.values())
            absent = []
            for rank in groups.get(group, ()):
                if rank in events:
                    continue
                if rank not in by_rank:
                    absent += [rank] if rank in _ended_before(events.values()) else []
                elif _would_know(by_rank[rank], numbers[rank], call, began):
                    absent.append(rank)
            every.append(Divergence(group, call, events, tuple(absent), began))
    found: dict[int, Divergence] = {}
    for one in _without_excuse(every):
        found.setdefault(one.group, one)
    return sorted(found.values(), key=lambda one: (_is_done(one), one.began, one.group))


def _without_excuse(every: Sequence[Divergence]) -> list[Divergence]:
    """Return the calls that diverge.

    A rank may have missed a call because another call blocked it. That excuses it if that other
    call does not diverge itself, or is excused too. Ranks that block each other have no excuse.
    """
    suspects = [one for one in every if one.absent or _differs(one)]
    held: dict[int, list[Event]] = {}  # rank -> calls that block it, or did for a while
    for one in every:
        for rank, event in one.made.items():
            if event.state != "done":
                held.setdefault(rank, []).append(event)
    blamed = {(one.group, one.call) for one in suspects}
    while True:
        excused = [
            one
            for one in suspects
            if not _differs(one)
            and all(_is_blocked(held.get(rank, ()), one, blamed) for rank in one.absent)
        ]
        if not excused:
            return suspects
        suspects = [one for one in suspects if one not in excused]
        blamed = {(one.group, one.call) for one in suspects}


def _is_done(one: Divergence) -> bool:
    """Return whether no rank waited: a send, or a root, may be done before the others enter."""
    return all(event.state == "done" for event in one.made.values())


def _differs(one: Divergence) -> bool:
    return len({event.fingerprint for event in one.made.values()}) > 1


def _is_blocked(held: Sequence[Event], one: Divergence, blamed: Container[tuple[int, int]]) -> bool:
    return any(
        (event.group, event.call) not in blamed
        and (event.ended_ns > one.began or event.state == "started" or _is_final(event))
        for event in held
    )


def _is_final(event: Event) -> bool:
    return kind_of(event.detail) in _FINAL


def cycle_of(found: Sequence[Divergence]) -> dict[int, Divergence]:
    """Return the ranks of a deadlock with their calls, each waiting for the next in a cycle.

    Empty if the first divergence is something else.
    """
    waits: dict[int, Divergence] = {}
    for one in found:
        for rank, event in one.made.items():
            is_mismatch = one.absent and kind_of(event.detail) == "MismatchError"
            if is_mismatch and _DEADLOCK in event.detail.split("\n", 1)[0]:
                waits.setdefault(rank, one)
    path: list[int] = []
    rank = next((rank for rank, one in waits.items() if one is found[0]), -1)
    while rank in waits and rank not in path:
        path.append(rank)
        rank = next((other for other in waits[rank].absent if other in waits), -1)
    if rank not in path:
        return {}
    path = path[path.index(rank) :]
    first = path.index(min(path))
    return {rank: waits[rank] for rank in (*path[first:], *path[:first])}


def _ended_before(events: Iterable[Event]) -> list[int]:
    """Return the ranks that had ended before a call, by the errors of those that waited in it."""
    return [
        rank for event in events for rank, lost in lost_ranks(event.detail).items() if lost.did_end
    ]


def _would_know(record: FlightRecord, numbers: Sequence[int], call: int, began: int) -> bool:
    """Return whether a call missing in a record was certainly not entered by its rank."""
    is_later = record.written > began or any(number > call for number in numbers)
    if not record.is_final and not is_later:
        return False  # the record is older than the call
    if record.is_whole:
        return True
    if numbers and min(numbers) < call:
        return True
    return bool(record.events) and record.events[0].began_ns < began and not numbers
