"""Calls whose ranks take blocks from each other, as programs: all-gather, broadcast, reduce-scatter, all-to-all.

A rank brings blocks of one length, and each other rank takes those that are for it, or combines them:

* **slots**: short blocks are put side by side with phase 0, and taken from there.
* **where they lie**: blocks are read where their owner has told that they are, and stay until everybody has read them.
* **cells**: long blocks are put and taken cell by cell, `lag` cells on each of two sides in turn.

By cells a rank is `lag` - 1 cells ahead of what it takes. When it has published phase p it has put the cells up to p, and
taken those before p - lag + 1. It waits for phase t of the others before it takes their cell t; then cell t + lag may be put
after that, in the next turn: what it writes over, cell t - lag, has been taken by all.
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
    CELLS = 2


class Move(NamedTuple):
    """What a rank brings and takes.

    Args:
        rank: In the group.
        elements: Of each block.
        cell: Elements of each block that go through a cell.
        lag: Cells on each side, at least 2.
        blocks: Largest number of blocks that a rank of the group brings for others.
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
    cell: int
    lag: int
    blocks: int
    puts: int
    takes: tuple[tuple[int, int], ...]
    keeps: bool = False
    folds: bool = False
    converts: bool = False
    makes_first: bool = False


@lru_cache(maxsize=256)
def move_code(
    move: Move, way: Way, *, has_told: bool = False, some_told: bool = False, starts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
) -> Code:
    """Return what `lower_move` does, made ready for a runner.

    Args:
        move: What a rank brings and takes.
        way: How.
        has_told: As for `lower_move`.
        some_told: As for `lower_move`.
        starts: All SOURCEs are parts of SOURCE 0, and all TARGETs of TARGET 0: the first element of each; None where they are
            arrays of their own.
    """
    program = lower_move(move, way, has_told=has_told, some_told=some_told)
    return assemble(program if starts is None else _laid(program, *starts))


def lower_move(move: Move, way: Way, *, has_told: bool = False, some_told: bool = False) -> Program:
    """Return a rank's program of moving blocks.

    Args:
        move: What it brings and takes.
        way: How.
        has_told: This rank has told with phase 0 where its blocks lie, and has yet to put their first cells.
        some_told: Some rank has.

    Example:
        >>> move = Move(rank=0, elements=5, cell=3, lag=2, blocks=1, puts=1, takes=((1, 0),))
        >>> [type(step).__name__ for step in lower_move(move, Way.CELLS).steps]
        ['Copy', 'Publish', 'Copy', 'Await', 'Copy']
    """
    if way == Way.SLOTS:
        opening = [Copy(_source(place, 0, move.elements), _slot(move, move.rank, place)) for place in range(move.puts)]
        steps = [*_take(move, [_slot(move, *take) for take in move.takes], 0), *_keep(move, 0, move.elements)]
        return Program(tuple(opening), tuple(steps))
    if way == Way.LYING:
        lying = [Stretch(Memory(Kind.LYING, *take), 0, move.elements) for take in move.takes]
        return Program((), (*_keep(move, 0, move.elements), *_take(move, lying, 0), Publish(), Await()))
    turns = -(-move.elements // move.cell)
    opening = _put(move, 0)
    told: list[Instruction] = [*(opening if has_told else ()), Publish(), Await()] if some_told else []
    last_side = ((turns - 1) // move.lag) & 1 if move.puts and turns else None
    return Program(() if has_told else tuple(opening), (*told, *_by_cells(move, turns)), last_side, is_read=False)


def _by_cells(move: Move, turns: int) -> list[Instruction]:
    """Return what is done when all have put their first cells."""
    ahead = move.lag - 1
    heard = max(0, turns - 1) // move.lag * move.lag  # before its end a rank has heard that all have taken so many cells
    final = heard + ahead if heard else turns - 1  # the last phase
    steps: list[Instruction] = [*_keep_cell(move, 0)]
    for turn in range(1, min(ahead, turns)):
        steps += [*_put(move, turn), Publish(), *_keep_cell(move, turn)]
    for turn in range(turns):
        if turn + ahead <= final:
            steps += [*_put(move, turn + ahead), Publish(), *_keep_cell(move, turn + ahead)]
        if turn and (move.takes or turn + move.lag < turns):
            steps.append(Await(min(turn + ahead, final) - turn))
        steps += _take(move, [_cell(move, *take, turn) for take in move.takes], turn * move.cell)
    if heard and (final > turns - 1 or not move.takes):
        steps.append(Await())
    return steps


def _laid(program: Program, sources: tuple[int, ...], targets: tuple[int, ...]) -> Program:
    """Return the same program where all SOURCEs, and all TARGETs, are parts of one array."""
    starts = {Kind.SOURCE: sources, Kind.TARGET: targets}

    def moved(stretch: Stretch) -> Stretch:
        kind, _, place = stretch.memory
        return Stretch(Memory(kind), starts[kind][place] + stretch.start, stretch.length) if kind in starts else stretch

    def laid(step: Instruction) -> Instruction:
        if isinstance(step, Copy):
            return Copy(moved(step.source), moved(step.target))
        return Fold(tuple(map(moved, step.terms)), moved(step.target)) if isinstance(step, Fold) else step

    opening = tuple(Copy(moved(step.source), moved(step.target)) for step in program.opening)
    return program._replace(opening=opening, steps=tuple(map(laid, program.steps)))


def _source(place: int, start: int, length: int) -> Stretch:
    return Stretch(Memory(Kind.SOURCE, -1, place), start, length)


def _slot(move: Move, rank: int, place: int) -> Stretch:
    return Stretch(Memory(Kind.SLOT, rank), place * move.elements, move.elements)


def _length(move: Move, turn: int) -> int:
    return max(0, min(move.cell, move.elements - turn * move.cell))


def _cell(move: Move, rank: int, place: int, turn: int) -> Stretch:
    """Return where a rank puts a part of a block: side by side in a cell lie those of all its blocks."""
    width = move.cell * move.blocks
    return Stretch(Memory(Kind.CELLS, rank, turn // move.lag & 1), turn % move.lag * width + place * move.cell, _length(move, turn))


def _put(move: Move, turn: int) -> list[Copy]:
    """Return what puts a cell of all blocks."""
    if not _length(move, turn):
        return []
    return [Copy(_source(place, turn * move.cell, _length(move, turn)), _cell(move, move.rank, place, turn)) for place in range(move.puts)]


def _keep_cell(move: Move, turn: int) -> list[Copy]:
    """Return what copies to the result as much of the block that this rank brings for itself."""
    return _keep(move, turn * move.cell, _length(move, turn))


def _keep(move: Move, start: int, length: int) -> list[Copy]:
    if move.folds or not move.keeps or not length:
        return []
    return [Copy(_source(move.puts, start, length), Stretch(Memory(Kind.TARGET, -1, len(move.takes)), start, length))]


def _take(move: Move, parts: list[Stretch], start: int) -> list[Instruction]:
    """Return what is done with parts of the blocks that are taken, from an element of them on."""
    if not move.folds:
        return [Copy(part, Stretch(Memory(Kind.TARGET, -1, place), start, part.length)) for place, part in enumerate(parts)]
    length = parts[0].length if parts else move.elements - start
    own = _source(move.puts, start, length)
    steps: list[Instruction] = []
    if move.converts:
        converted = Stretch(Memory(Kind.SCRATCH, -1, 1), 0, length)
        steps.append(Copy(own, converted))
        own = converted
    target = Stretch(Memory(Kind.TARGET), start, length)
    made = Stretch(Memory(Kind.SCRATCH), 0, length) if move.makes_first else target
    steps.append(Fold((*parts[: move.rank], own, *parts[move.rank :]), made))
    return steps if made is target else [*steps, Copy(made, target)]
