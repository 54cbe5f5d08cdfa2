"""Where ranks parted: the first call that they did not all make, told from their flight records."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.cli.record_files import calls_of, lost_ranks, members_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from syncvar.cli.record_files import FlightRecord
    from syncvar.runtime.flight_recorder.call_record import Event


_DEADLOCK = "deadlock: "  # in the arbiter's verdict
_FINAL = ("PeerLost", "DeadlineExceeded", "GroupBroken")  # after these a rank makes no more calls


class Divergence(NamedTuple):
    """A call that some ranks made, and others did not.

    Args:
        group: Identity of the group.
        call: Number of the call.
        made: By rank, what it did as this call.
        absent: Ranks of which it is known that they did not enter the call.
        began: When the first rank entered it.
    """

    group: int
    call: int
    made: Mapping[int, Event]
    absent: tuple[int, ...]
    began: int


def kind_of(detail: str) -> str:
    """Return the class of the error in the detail of an event."""
    return detail.split(":", 1)[0]


def divergences(records: Sequence[FlightRecord]) -> list[Divergence]:
    """Return the first divergence of each group: the earliest first, but those behind which nobody was held up last.

    A call diverges when ranks made it with other fingerprints, or when a rank of which a record is there did not
    enter it, or when it is known that a rank had ended before. What lies before the beginning of a full ring is not known, and neither is what a rank did after a record
    that was made in the middle of its run.

    Args:
        records: Of one generation.
    """
    groups = members_of(records)
    by_rank = {record.rank: record for record in records}
    every: list[Divergence] = []
    for group, calls in calls_of(records).items():
        numbers = {
            record.rank: [event.call for event in record.events if event.group == group]
            for record in records
        }
        for call, made in calls.items():
            began = min(event.began_ns for event in made.values())
            absent = tuple(
                rank
                for rank in groups.get(group, ())
                if rank not in made
                and (
                    _would_know(by_rank[rank], numbers[rank], call, began)
                    if rank in by_rank
                    else rank in _ended_before(made.values())
                )
            )
            every.append(Divergence(group, call, made, absent, began))
    found: dict[int, Divergence] = {}
    for one in _without_excuse(every):
        found.setdefault(one.group, one)
    return sorted(found.values(), key=lambda one: (_is_done(one), one.began, one.group))


def _without_excuse(every: Sequence[Divergence]) -> list[Divergence]:
    """Return the calls that diverge.

    A rank may have missed a call because it was held up in another one. That is an excuse if nobody is to blame for
    the other one: all whose records are there have made it, or were held up themselves in calls of this kind. Ranks
    that hold each other up have no excuse.
    """
    suspects = [one for one in every if one.absent or _differs(one)]
    held: dict[
        int, list[Event]
    ] = {}  # by rank, the calls that hold it up for good, or did for a while
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
            and all(_held_up(held.get(rank, ()), one, blamed) for rank in one.absent)
        ]
        if not excused:
            return suspects
        suspects = [one for one in suspects if one not in excused]
        blamed = {(one.group, one.call) for one in suspects}


def _is_done(one: Divergence) -> bool:
    """Return whether nobody minds: a message may be sent, or a root be done, long before the others come."""
    return all(event.state == "done" for event in one.made.values())


def _differs(one: Divergence) -> bool:
    return len({event.fingerprint for event in one.made.values()}) > 1


def _held_up(held: Sequence[Event], one: Divergence, blamed: Container[tuple[int, int]]) -> bool:
    return any(
        (event.group, event.call) not in blamed
        and (
            event.state == "started"
            or event.ended_ns > one.began
            or kind_of(event.detail) in _FINAL
        )
        for event in held
    )


def cycle_of(found: Sequence[Divergence]) -> dict[int, Divergence]:
    """Return the ranks that were told of a deadlock, each with the call in which it waits for the next one, the last for the first.

    Nobody parted from the others then. Empty where what diverged first is something else.
    """
    waits: dict[int, Divergence] = {}
    for one in found:
        for rank, event in one.made.items():
            if (
                one.absent
                and kind_of(event.detail) == "MismatchError"
                and _DEADLOCK in event.detail.split("\n", 1)[0]
            ):
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
    """Return the ranks that had ended before a call, as those heard who waited in it."""
    return [
        rank for event in events for rank, lost in lost_ranks(event.detail).items() if lost.did_end
    ]


def _would_know(record: FlightRecord, numbers: Sequence[int], call: int, began: int) -> bool:
    """Return whether a call that is not in a record was not entered by its rank."""
    if (
        not record.is_final
        and not record.written > began
        and not any(number > call for number in numbers)
    ):
        return False  # the record was made before
    if record.is_whole:
        return True
    if numbers and min(numbers) < call:
        return True
    return bool(record.events) and record.events[0].began_ns < began and not numbers
