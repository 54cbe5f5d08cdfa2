"""Calls whose ranks take blocks from each other, as programs: all-gather, broadcast, reduce-scatter, all-to-all.

A rank brings blocks of one length, and each other rank takes those that are for it, or combines them:

* **slots**: short blocks are put side by side with phase 0, and taken from there.
* **where they lie**: blocks are read where their owner has told that they are, and stay until everybody has read them.
* **windows**: long blocks that cannot be read where they lie are put and taken window by window, on two sides in turn.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from syncvar.execution.program import (
    Await,
    Code,
    Copy,
    Fold,
    Instruction,
    Kind,
    Memory,
    Program,
    Publish,
    Stretch,
    assemble,
)

__all__ = ["Move", "Way", "lower_move", "move_code"]


class Way(IntEnum):
    """How blocks come from one rank to the others."""

    SLOTS = 0
    LYING = 1
    WINDOWS = 2


class Move(NamedTuple):
    """What a rank brings and takes.

    Args:
        rank: In the group.
        elements: Of each block.
        window: Elements of each block that go through cells at a time.
        puts: Blocks that this rank brings for others: SOURCE 0, 1, ...
        takes: (peer, which of its blocks) for each block that it takes, to TARGET 0, 1, ...
        keeps: It also brings a block for itself: the SOURCE after those for others.
        folds: What it takes and brings for itself is combined, in the order of ranks, into TARGET 0; else what it brings for
            itself goes to the TARGET after those that it takes.
        converts: What it brings for itself has another dtype than what is combined.
        makes_first: What is combined has another dtype than the target.
    """

    rank: int
    elements: int
    window: int
    puts: int
    takes: tuple[tuple[int, int], ...]
    keeps: bool = False
    folds: bool = False
    converts: bool = False
    makes_first: bool = False


@lru_cache(maxsize=256)
def move_code(move: Move, way: Way, *, has_told: bool = False, some_told: bool = False) -> Code:
    """Return what `lower_move` does, made ready for a runner."""
    return assemble(lower_move(move, way, has_told=has_told, some_told=some_told))


def lower_move(move: Move, way: Way, *, has_told: bool = False, some_told: bool = False) -> Program:
    """Return a rank's program of moving blocks.

    Args:
        move: What it brings and takes.
        way: How.
        has_told: This rank has told with phase 0 where its blocks lie, and has yet to put their first windows.
        some_told: Some rank has.

    Example:
        >>> move = Move(rank=0, elements=5, window=3, puts=1, takes=((1, 0),))
        >>> [type(step).__name__ for step in lower_move(move, Way.WINDOWS).steps]
        ['Copy', 'Copy', 'Publish', 'Await', 'Copy']
    """
    if way == Way.SLOTS:
        opening = [Copy(_source(place, 0, move.elements), _slot(move, move.rank, place)) for place in range(move.puts)]
        return Program(tuple(opening), tuple(_take(move, [_slot(move, *take) for take in move.takes], 0)))
    if way == Way.LYING:
        lying = [Stretch(Memory(Kind.LYING, *take), 0, move.elements) for take in move.takes]
        return Program((), (*_take(move, lying, 0), Publish(), Await()))
    first = _put(move, 0)
    steps: list[Instruction] = [] if not some_told else [*(first if has_told else ()), Publish(), Await()]
    windows = -(-move.elements // move.window)
    for window in range(windows):
        steps += _put(move, window + 1)
        length = min(move.window, move.elements - window * move.window)
        steps += _take(move, [_cell(move, *take, window, length) for take in move.takes], window * move.window)
        if window < windows - 1:
            steps += [Publish(), Await()]
    return Program(() if has_told else tuple(first), tuple(steps), (windows - 1) & 1 if move.puts else None, is_read=False)


def _source(place: int, start: int, length: int) -> Stretch:
    return Stretch(Memory(Kind.SOURCE, -1, place), start, length)


def _slot(move: Move, rank: int, place: int) -> Stretch:
    return Stretch(Memory(Kind.SLOT, rank), place * move.elements, move.elements)


def _cell(move: Move, rank: int, place: int, window: int, length: int) -> Stretch:
    return Stretch(Memory(Kind.CELLS, rank, window & 1), place * move.window, length)


def _put(move: Move, window: int) -> list[Copy]:
    """Return what puts a window of all blocks."""
    start = window * move.window
    length = min(move.window, move.elements - start)
    if length <= 0:
        return []
    return [Copy(_source(place, start, length), _cell(move, move.rank, place, window, length)) for place in range(move.puts)]


def _take(move: Move, parts: list[Stretch], start: int) -> list[Instruction]:
    """Return what is done with parts of the blocks that are taken, from an element of them on."""
    length = parts[0].length if parts else move.elements - start
    own = _source(move.puts, start, length)
    if not move.folds:
        copies: list[Instruction] = [
            Copy(part, Stretch(Memory(Kind.TARGET, -1, place), start, length)) for place, part in enumerate(parts)
        ]
        if move.keeps and start == 0:
            whole = _source(move.puts, 0, move.elements)
            copies.append(Copy(whole, Stretch(Memory(Kind.TARGET, -1, len(parts)), 0, move.elements)))
        return copies
    steps: list[Instruction] = []
    if move.converts:
        converted = Stretch(Memory(Kind.SCRATCH, -1, 1), 0, length)
        steps.append(Copy(own, converted))
        own = converted
    target = Stretch(Memory(Kind.TARGET), start, length)
    made = Stretch(Memory(Kind.SCRATCH), 0, length) if move.makes_first else target
    steps.append(Fold((*parts[: move.rank], own, *parts[move.rank :]), made))
    return steps if made is target else [*steps, Copy(made, target)]
