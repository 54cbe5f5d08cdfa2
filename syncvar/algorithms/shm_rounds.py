"""Schedules in shared memory: a rank publishes each sent range once, and receivers read it there.

Over links each send is a message. In shared memory a rank publishes the ranges that it sends one
after another, each once. The receiver computes the position of its part from the schedules of all
ranks.

Publishing copies. If a schedule begins with a local round that only copies what it sends next,
`publications` drops that round and publishes the original range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.schedule import Buffer, Copy, Recv, RecvReduce, Reduce, Send
from syncvar.core.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncvar.algorithms.schedule import Chunk, Round, Schedule, Step


class Take(NamedTuple):
    """A read from another rank's publication.

    Args:
        peer: The publishing rank of the group.
        start: First element in its publication.
        target: The chunk to write.
        step: The step of the schedule: a Recv overwrites, a RecvReduce combines.
    """

    peer: int
    start: int
    target: Chunk
    step: Recv | RecvReduce


class Publication(NamedTuple):
    """One round of one rank.

    Args:
        ranges: The published ranges, in order.
        length: Elements of these ranges.
        longest: Elements of the longest publication of this round on any rank.
        takes: The reads from other ranks.
        local: Local steps after the reads.
    """

    ranges: tuple[Chunk, ...]
    length: int
    longest: int
    takes: tuple[Take, ...]
    local: tuple[Copy | Reduce, ...]


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
                sent = next(
                    (send for send in _sends(all_rounds[step.peer][number]) if send.peer == rank),
                    None,
                )
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

    Only those sends may read the copies, and they must send whole copies. No transfer of the second
    round may write to the originals, because ranks publish and read long ranges piece by piece.
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
    chunks = sorted(
        {step.chunk for step in _sends(steps)}, key=lambda c: (c.buffer, c.start, c.stop)
    )
    places: dict[Chunk, int] = {}
    start = 0
    for chunk in chunks:
        places[chunk] = start
        start += chunk.count
    return places
