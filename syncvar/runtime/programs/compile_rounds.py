"""Plans as programs: each round is a publication that others take their parts of.

What is short goes into slots with phase 0. Everything else goes through cells, window by window, on two sides in turn:
window k of a call is published as its k-th phase, and whoever publishes the next one has taken it.
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

    from syncvar.algorithms.schedule import Chunk
    from syncvar.algorithms.shm_rounds import Publication, Take

__all__ = ["lower_rounds"]

_MEMORIES = {Buffer.WORK: Memory(MemoryKind.TARGET), Buffer.SCRATCH: Memory(MemoryKind.SCRATCH)}


def lower_rounds(rounds: Sequence[Publication], rank: int, window: int, small: int = 0) -> Program:
    """Return a rank's program of a plan.

    Args:
        rounds: The plan, as publications.
        rank: Whose they are.
        window: Elements of a cell.
        small: Elements up to which the first publication goes into slots with phase 0. 0 where phase 0 has been published: then the
            first window is put by the opening, and the steps begin when it has been published by all.

    Example:
        >>> from syncvar.algorithms.builders import build_all
        >>> from syncvar.algorithms.shm_rounds import publications
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
                steps += _taken(take, whole, 0)
        elif publication.longest:
            for low in range(0, publication.longest, window):
                put = _put(
                    publication.ranges,
                    Memory(MemoryKind.CELLS, rank, windows & 1),
                    low,
                    min(publication.length, low + window),
                )
                if small or windows:
                    steps += [*put, Publish(), Await()]
                else:
                    opening = put
                steps += _taken_of(publication, low, low + window, windows & 1)
                windows += 1
        else:
            steps += [Publish(), Await()] if small or windows else []
            windows += 1
        for step in publication.local:
            source, target = _stretch(step.source), _stretch(step.target)
            if isinstance(step, Copy):
                steps.append(CopyInstruction(source, target))
            else:
                steps.append(_combined(source, target, step.source_left))
    return Program(tuple(opening), tuple(steps), (windows - 1) & 1 if windows else None)


def _taken_of(publication: Publication, low: int, high: int, side: int) -> Iterable[Instruction]:
    """Return what a rank takes of elements [low, high) of the publications of the others."""
    for take in publication.takes:
        start, stop = max(low, take.start), min(high, take.start + take.target.count)
        if stop > start:
            part = Span(Memory(MemoryKind.CELLS, take.peer, side), start - low, stop - start)
            yield from _taken(take, part, start - take.start)


def _put(ranges: Iterable[Chunk], into: Memory, low: int, high: int) -> list[CopyInstruction]:
    """Return what copies elements [low, high) of a publication to the beginning of a memory."""
    made, begin = [], 0
    for chunk in ranges:
        start, stop = max(low, begin), min(high, begin + chunk.count)
        if stop > start:
            made.append(
                CopyInstruction(
                    _stretch(chunk).cut(start - begin, stop - begin),
                    Span(into, start - low, stop - start),
                )
            )
        begin += chunk.count
    return made


def _taken(take: Take, part: Span, first: int) -> list[Instruction]:
    """Return what a rank does with a part of what it takes, from an element of it on."""
    target = _stretch(take.target).cut(first, first + part.length)
    if not part.length:
        return []
    if isinstance(take.step, RecvReduce):
        return [_combined(part, target, take.step.incoming_left)]
    return [CopyInstruction(part, target)]


def _combined(source: Span, target: Span, is_left: bool) -> Combine:
    return Combine((source, target) if is_left else (target, source), target)


def _stretch(chunk: Chunk) -> Span:
    return Span(_MEMORIES[chunk.buffer], chunk.start, chunk.count)
