"""Compile schedules: each round is a publication, of which the other ranks take their parts.

A short first publication goes into slots with phase 0. Everything else goes through cells, window
by window, on two sides in turn. Window k of a call is its k-th phase. Invariant: a rank publishes
the next phase only after it has taken this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar._native.constants import MemoryKind
from syncvar.algorithms.schedule import Buffer, Copy, RecvReduce
from syncvar.runtime.programs.instructions import (
    Await,
    Combine,
    CopyInstruction,
    Instruction,
    Memory,
    Program,
    Publish,
    Span,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncvar.algorithms.compile_schedule import Publication, Take
    from syncvar.algorithms.schedule import Chunk

_MEMORIES = {Buffer.WORK: Memory(MemoryKind.TARGET), Buffer.SCRATCH: Memory(MemoryKind.SCRATCH)}


def lower_rounds(rounds: Sequence[Publication], rank: int, window: int, small: int = 0) -> Program:
    """Return a rank's program of a schedule.

    Args:
        rounds: The schedule, as publications.
        rank: This rank.
        window: Elements of a cell.
        small: Elements up to which the first publication goes into slots with phase 0. 0 if phase 0
            has been published: the opening then writes the first window, and the steps begin after
                all
            ranks have published it.

    Example:
        >>> from syncvar.algorithms.builders import build_all
        >>> from syncvar.algorithms.compile_schedule import publications
        >>> plan = publications(build_all("all_reduce", "owners", 2, count=6), 0)
        >>> [type(step).__name__ for step in lower_rounds(plan, 0, 100).steps]
        ['CopyInstruction', 'Combine', 'CopyInstruction', 'Publish', 'Await', 'CopyInstruction']
    """
    opening: list[CopyInstruction] = []
    steps: list[Instruction] = []
    windows = 0
    for number, publication in enumerate(rounds):
        if number == 0 and small and publication.longest <= small:
            slot = Memory(MemoryKind.SLOT, rank)
            opening = _put(publication.ranges, slot, 0, publication.length)
            for take in publication.takes:
                whole = Span(Memory(MemoryKind.SLOT, take.peer), take.start, take.target.count)
                steps += _take_steps(take, whole, 0)
        elif publication.longest:
            for low in range(0, publication.longest, window):
                cells, high = Memory(MemoryKind.CELLS, rank, windows & 1), low + window
                put = _put(publication.ranges, cells, low, min(publication.length, high))
                if small or windows:
                    steps += [*put, Publish(), Await()]
                else:
                    opening = put
                steps += _takes_between(publication, low, low + window, windows & 1)
                windows += 1
        else:
            steps += [Publish(), Await()] if small or windows else []
            windows += 1
        for step in publication.local:
            source, target = _span(step.source), _span(step.target)
            if isinstance(step, Copy):
                steps.append(CopyInstruction(source, target))
            else:
                steps.append(_combined(source, target, step.source_left))
    return Program(tuple(opening), tuple(steps), (windows - 1) & 1 if windows else None)


def _takes_between(
    publication: Publication, low: int, high: int, side: int
) -> Iterable[Instruction]:
    """Yield the steps that take elements [low, high) of the publications of other ranks."""
    for take in publication.takes:
        start, stop = max(low, take.start), min(high, take.start + take.target.count)
        if stop > start:
            part = Span(Memory(MemoryKind.CELLS, take.peer, side), start - low, stop - start)
            yield from _take_steps(take, part, start - take.start)


def _put(ranges: Iterable[Chunk], into: Memory, low: int, high: int) -> list[CopyInstruction]:
    """Return the copies of elements [low, high) of a publication to the start of a memory."""
    made, begin = [], 0
    for chunk in ranges:
        start, stop = max(low, begin), min(high, begin + chunk.count)
        if stop > start:
            source = _span(chunk).cut(start - begin, stop - begin)
            made.append(CopyInstruction(source, Span(into, start - low, stop - start)))
        begin += chunk.count
    return made


def _take_steps(take: Take, part: Span, first: int) -> list[Instruction]:
    """Return the steps for a part of a take, whose element `first` is the start of the part."""
    target = _span(take.target).cut(first, first + part.length)
    if not part.length:
        return []
    if isinstance(take.step, RecvReduce):
        return [_combined(part, target, take.step.incoming_left)]
    return [CopyInstruction(part, target)]


def _combined(source: Span, target: Span, is_left: bool) -> Combine:
    return Combine((source, target) if is_left else (target, source), target)


def _span(chunk: Chunk) -> Span:
    return Span(_MEMORIES[chunk.buffer], chunk.start, chunk.count)
