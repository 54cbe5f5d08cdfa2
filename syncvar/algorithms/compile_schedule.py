"""Compile schedules for links, and for shared memory.

Over links a round is messages to world ranks. In shared memory it is a publication of ranges, from
which other ranks read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.schedule import (
    Buffer,
    Chunk,
    Copy,
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
)
from syncvar.core.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncvar.algorithms.schedule import Round, Step

OVERWRITE, INCOMING_LEFT, INCOMING_RIGHT = 0, 1, 2


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
    another way. WORK of an all-to-all then has the received blocks only.
    """

    rounds: tuple[LinkRound, ...]
    work_count: int
    scratch_count: int
    algorithm: str = ""
    in_place: tuple[LinkRound, ...] | None = None

    @property
    def only_sends(self) -> bool:
        """Whether this rank only sends parts of WORK, and writes nothing."""
        return not any(one.incoming or one.local for one in self.rounds)


def compile_for_links(
    schedule: Schedule, members: Sequence[int], input_count: int | None = None
) -> LinkSchedule:
    """Compile a schedule whose peers are ranks of the group with these world ranks.

    `input_count` is given for an all-to-all: so many elements at the start of WORK are only read.
    """
    rounds = []
    for steps in schedule.rounds:
        sends: list[tuple[int, int, int, int]] = []
        incoming: dict[int, Incoming] = {}
        local: list[Copy | Reduce] = []
        for step in steps:
            if isinstance(step, Copy | Reduce):
                local.append(step)
                continue
            peer, chunk = members[step.peer], step.chunk
            buffer = int(chunk.buffer)
            if isinstance(step, Send):
                sends.append((peer, buffer, chunk.start, chunk.stop))
                continue
            mode = OVERWRITE
            if isinstance(step, RecvReduce):
                mode = INCOMING_LEFT if step.incoming_left else INCOMING_RIGHT
            incoming[peer] = Incoming(mode, buffer, chunk.start, chunk.stop, buffer)
        rounds.append(LinkRound(tuple(sends), incoming, tuple(local)))
    if input_count is None:
        in_place = _in_place_rounds(rounds, schedule.work_count)
    else:
        in_place = tuple(_with_input_buffer(one, input_count) for one in rounds)
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
        combined = {
            peer: one
            for peer, one in incoming.items()
            if one.buffer == work and one.mode != OVERWRITE
        }
        reads = [(start, stop) for _, buffer, start, stop in sends if buffer == work]
        reads += [(one.start, one.stop) for one in combined.values()]
        homes = {}
        for start, stop in reads:
            if any(low <= start and stop <= high for low, high in written):
                homes[start, stop] = work
            elif not any(low < stop and start < high for low, high in written):
                homes[start, stop] = Buffer.INPUT
            else:
                return None
        redirected = tuple(
            (peer, homes[start, stop] if buffer == work else buffer, start, stop)
            for peer, buffer, start, stop in sends
        )
        for peer, one in combined.items():
            combined[peer] = one._replace(operand=homes[one.start, one.stop])
        rewritten.append(LinkRound(redirected, {**incoming, **combined}, local))
        for one in incoming.values():
            if one.buffer == work and one.start < one.stop:
                written = _joined(written, one.start, one.stop)
    return tuple(rewritten) if written == [(0, work_count)] else None


def _with_input_buffer(one: LinkRound, input_count: int) -> LinkRound:
    """Return a round with the first elements of WORK in the input buffer, and the others alone."""

    def moved(chunk: Chunk) -> Chunk:
        if chunk.buffer != Buffer.WORK:
            return chunk
        if chunk.stop <= input_count:
            return chunk._replace(buffer=Buffer.INPUT)
        return Chunk(chunk.start - input_count, chunk.stop - input_count)

    sends = []
    for peer, buffer, start, stop in one.sends:
        chunk = moved(Chunk(start, stop, Buffer(buffer)))
        sends.append((peer, int(chunk.buffer), chunk.start, chunk.stop))
    incoming = {}
    for peer, wanted in one.incoming.items():
        chunk = moved(Chunk(wanted.start, wanted.stop, Buffer(wanted.buffer)))
        buffer = int(chunk.buffer)
        incoming[peer] = Incoming(wanted.mode, buffer, chunk.start, chunk.stop, buffer)
    local = tuple(
        step._replace(source=moved(step.source), target=moved(step.target)) for step in one.local
    )
    return LinkRound(tuple(sends), incoming, local)


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


# -- shared memory ---------------------------------------------------------------------------------
#
# A rank publishes the ranges that it sends one after another, each once. The receiver computes the
# position of its part from the schedules of all ranks. Publishing copies. If a schedule begins with
# a local round that only copies what it sends next, `publications` drops that round and publishes
# the original range.


class Take(NamedTuple):
    """A read from another rank's publication."""

    peer: int  # the publishing rank of the group
    start: int  # first element in its publication
    target: Chunk  # the chunk to write
    step: Recv | RecvReduce  # the step of the schedule: a Recv overwrites, a RecvReduce combines


class Publication(NamedTuple):
    """One round of one rank."""

    ranges: tuple[Chunk, ...]  # the published ranges, in order
    length: int  # elements of these ranges
    longest: int  # elements of the longest publication of this round on any rank
    takes: tuple[Take, ...]  # the reads from other ranks
    local: tuple[Copy | Reduce, ...]  # local steps after the reads


def publications(schedules: Sequence[Schedule], rank: int) -> tuple[Publication, ...]:
    """Return the rounds of a rank as publications, given the schedules of all ranks.

    Raises:
        PlanError: A receive has no send.

    Example:
        >>> from syncvar.algorithms.builders import build_all
        >>> first, second = publications(build_all("all_reduce", "owners", 2, count=6), 0)
        >>> [(chunk.start, chunk.stop) for chunk in first.ranges], first.takes[0].start
        ([(3, 6)], 0)
    """
    all_rounds = _without_copies([schedule.rounds for schedule in schedules])
    rounds = []
    for number, steps in enumerate(all_rounds[rank]):
        layouts = [_layout(rounds_of_one[number]) for rounds_of_one in all_rounds]
        takes = []
        for step in steps:
            if isinstance(step, Recv | RecvReduce):
                sends = _sends(all_rounds[step.peer][number])
                sent = next((send for send in sends if send.peer == rank), None)
                if sent is None:
                    raise PlanError(
                        f"round {number}: rank {step.peer} sends nothing to rank {rank}"
                    )
                takes.append(Take(step.peer, layouts[step.peer][sent.chunk], step.chunk, step))
        counts = [sum(chunk.count for chunk in layout) for layout in layouts]
        local = tuple(step for step in steps if isinstance(step, Copy | Reduce))
        rounds.append(
            Publication(tuple(layouts[rank]), counts[rank], max(counts), tuple(takes), local)
        )
    return tuple(rounds)


def _without_copies(all_rounds: Sequence[tuple[Round, ...]]) -> Sequence[tuple[Round, ...]]:
    """Return the rounds of all ranks without a first round that only copies what the second sends.

    Only those sends may read the copies, and no transfer of that round may write to the originals,
    because ranks publish and read long ranges piece by piece.
    """
    shortened = []
    for rounds in all_rounds:
        if len(rounds) < 2:
            return all_rounds
        origins: dict[Chunk, Chunk] = {}
        for step in rounds[0]:
            if not isinstance(step, Copy) or step.target.buffer != Buffer.SCRATCH:
                return all_rounds
            origins[step.target] = step.source
        second = tuple(
            Send(step.peer, origins.get(step.chunk, step.chunk)) if isinstance(step, Send) else step
            for step in rounds[1]
        )
        used = [
            chunk for steps in (second, *rounds[2:]) for step in steps for chunk in _chunks(step)
        ]
        written = [step.chunk for step in second if isinstance(step, Recv | RecvReduce)]
        if _meet(used, origins) or _meet(written, origins.values()):
            return all_rounds
        shortened.append((second, *rounds[2:]))
    return shortened


def _chunks(step: Step) -> tuple[Chunk, ...]:
    return (step.source, step.target) if isinstance(step, Copy | Reduce) else (step.chunk,)


def _meet(some: Iterable[Chunk], others: Iterable[Chunk]) -> bool:
    others = list(others)
    return any(
        one.buffer == other.buffer and one.start < other.stop and other.start < one.stop
        for one in some
        for other in others
    )


def _sends(steps: Round) -> list[Send]:
    return [step for step in steps if isinstance(step, Send)]


def _layout(steps: Round) -> dict[Chunk, int]:
    """Return the position of each distinct sent chunk in the publication."""
    sent = {step.chunk for step in _sends(steps)}
    chunks = sorted(sent, key=lambda c: (c.buffer, c.start, c.stop))
    places: dict[Chunk, int] = {}
    start = 0
    for chunk in chunks:
        places[chunk] = start
        start += chunk.count
    return places
