"""Compiles a schedule for links: world ranks as peers, and the steps of a round by type.

`syncvar.runtime.planner` does the same for shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.schedule import Buffer, Copy, Recv, RecvReduce, Reduce, Schedule, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

OVERWRITE, INCOMING_LEFT, INCOMING_RIGHT = 0, 1, 2
_INPUT = 2  # number of the input buffer, beside those of the schedule


class Incoming(NamedTuple):
    """The target of a received chunk: it overwrites the range, or is combined with the operand."""

    mode: int
    buffer: int
    start: int
    stop: int
    operand: int  # buffer of what is combined with the incoming value


class LinkRound(NamedTuple):
    """A round over links: chunks to send, chunks to receive, then local steps."""

    sends: tuple[tuple[int, int, int, int], ...]  # peer in the world, buffer, start, stop
    incoming: dict[int, Incoming]  # by peer in the world
    local: tuple[Copy | Reduce, ...]


class LinkSchedule(NamedTuple):
    """A schedule for links.

    `in_place` has the rounds for an empty WORK buffer: they read the input in place until something
    overwrites it. It is None if the schedule does not write all of WORK, or reads the input in
    another way.
    """

    rounds: tuple[LinkRound, ...]
    work_count: int
    scratch_count: int
    algorithm: str = ""
    in_place: tuple[LinkRound, ...] | None = None


def compile_for_links(schedule: Schedule, members: Sequence[int]) -> LinkSchedule:
    """Compile a schedule whose peers are ranks of the group with these world ranks."""
    rounds = []
    for steps in schedule.rounds:
        sends: list[tuple[int, int, int, int]] = []
        incoming: dict[int, Incoming] = {}
        local: list[Copy | Reduce] = []
        for step in steps:
            if isinstance(step, Copy | Reduce):
                local.append(step)
                continue
            chunk = step.chunk
            peer = members[step.peer]
            if isinstance(step, Send):
                sends.append((peer, int(chunk.buffer), chunk.start, chunk.stop))
            elif isinstance(step, Recv):
                incoming[peer] = Incoming(
                    OVERWRITE, int(chunk.buffer), chunk.start, chunk.stop, int(chunk.buffer)
                )
            elif isinstance(step, RecvReduce):
                mode = INCOMING_LEFT if step.incoming_left else INCOMING_RIGHT
                incoming[peer] = Incoming(
                    mode, int(chunk.buffer), chunk.start, chunk.stop, int(chunk.buffer)
                )
        rounds.append(LinkRound(tuple(sends), incoming, tuple(local)))
    in_place = _in_place_rounds(rounds, schedule.work_count)
    counts = schedule.work_count, schedule.scratch_count
    return LinkSchedule(tuple(rounds), *counts, schedule.algorithm, in_place)


def _in_place_rounds(rounds: Sequence[LinkRound], work_count: int) -> tuple[LinkRound, ...] | None:
    """Return the rounds with each read of unwritten WORK turned to the input buffer."""
    work = int(Buffer.WORK)
    written: list[tuple[int, int]] = []  # ranges, in order, no two of which touch
    rewritten = []
    for sends, incoming, local in rounds:
        if any(
            chunk.buffer == Buffer.WORK for step in local for chunk in (step.source, step.target)
        ):
            return None
        reads = [(start, stop) for _, buffer, start, stop in sends if buffer == work]
        reads += [
            (one.start, one.stop)
            for one in incoming.values()
            if one.buffer == work and one.mode != OVERWRITE
        ]
        homes = {}
        for start, stop in reads:
            if any(low <= start and stop <= high for low, high in written):
                homes[start, stop] = work
            elif not any(low < stop and start < high for low, high in written):
                homes[start, stop] = _INPUT
            else:
                return None
        rewritten.append(
            LinkRound(
                tuple(
                    (peer, homes[start, stop] if buffer == work else buffer, start, stop)
                    for peer, buffer, start, stop in sends
                ),
                {
                    peer: one._replace(operand=homes[one.start, one.stop])
                    if one.buffer == work and one.mode != OVERWRITE
                    else one
                    for peer, one in incoming.items()
                },
                local,
            )
        )
        for one in incoming.values():
            if one.buffer == work and one.start < one.stop:
                written = _joined(written, one.start, one.stop)
    return tuple(rewritten) if written == [(0, work_count)] else None


def _joined(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges with one more, and touching ranges merged.

    Example:
        >>> _joined([(0, 2), (4, 6), (9, 10)], 2, 4)
        [(0, 6), (9, 10)]
    """
    separate = [(low, high) for low, high in ranges if high < start or stop < low]
    near = [one for one in ranges if one not in separate]
    merged = min([start, *(low for low, _ in near)]), max([stop, *(high for _, high in near)])
    return sorted([*separate, merged])
