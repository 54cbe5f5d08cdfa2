"""A plan made ready to run over links: peers are ranks of the world, and the steps of a round are sorted by what they do.

Plans in shared memory are made ready by `syncvar.runtime.programs.round_runner`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.schedule import Buffer, Copy, Recv, RecvReduce, Reduce, Schedule, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

OVERWRITE, INCOMING_LEFT, INCOMING_RIGHT = 0, 1, 2
_BROUGHT = 2  # number of the buffer beside those of the plan


class Incoming(NamedTuple):
    """What becomes of a chunk that comes over a link: it overwrites its place, or is combined with what an operand holds."""

    mode: int
    buffer: int
    start: int
    stop: int
    operand: int  # buffer of what is combined with the incoming value


class LinkRound(NamedTuple):
    """What is posted together: chunks that go, chunks that come, and what is done here after that."""

    sends: tuple[tuple[int, int, int, int], ...]  # peer in the world, buffer, start, stop
    incoming: dict[int, Incoming]  # by peer in the world
    local: tuple[Copy | Reduce, ...]


class Prepared(NamedTuple):
    """A plan made ready to run: peers are ranks of the world, steps are sorted by what they do.

    `apart` has the rounds for a work buffer that holds nothing yet: what a rank brings is read
    where it lies, until something is written in its place. None where the plan reads it in another
    way, or leaves some of it as it is.
    """

    rounds: tuple[LinkRound, ...]
    work_count: int
    scratch_count: int
    algorithm: str = ""
    apart: tuple[LinkRound, ...] | None = None


def prepare(plan: Schedule, members: Sequence[int]) -> Prepared:
    """Make a plan of a group ready to run."""
    rounds = []
    for steps in plan.rounds:
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
    return Prepared(
        tuple(rounds),
        plan.work_count,
        plan.scratch_count,
        plan.algorithm,
        _apart(rounds, plan.work_count),
    )


def _apart(rounds: Sequence[LinkRound], work_count: int) -> tuple[LinkRound, ...] | None:
    """Return the rounds with each read of what has not been written yet turned to the buffer of what is brought."""
    work = int(Buffer.WORK)
    written: list[tuple[int, int]] = []  # ranges, in order, no two of which touch
    made = []
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
                homes[start, stop] = _BROUGHT
            else:
                return None
        made.append(
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
    return tuple(made) if written == [(0, work_count)] else None


def _joined(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return ranges with one more among them, and with those put together that touch.

    Example:
        >>> _joined([(0, 2), (4, 6), (9, 10)], 2, 4)
        [(0, 6), (9, 10)]
    """
    apart = [(low, high) for low, high in ranges if high < start or stop < low]
    near = [one for one in ranges if one not in apart]
    return sorted(
        [
            *apart,
            (min([start, *(low for low, _ in near)]), max([stop, *(high for _, high in near)])),
        ]
    )
