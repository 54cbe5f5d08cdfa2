"""Compile transfers: all-gather, broadcast, reduce-scatter and all-to-all, on one of three paths.

A rank publishes blocks of one length, and each other rank copies or combines those for it:

* **slots**: short blocks are written with phase 0, and taken from the slots.
* **direct**: blocks are read at the locations that their owners published, and must stay until all
  ranks have read them.
* **cells**: long blocks go cell by cell, with `lag` cells on each of two sides in turn.

With cells a rank writes `lag` - 1 cells ahead of those it takes. Invariant: a rank that has
published phase p has written the cells up to p, and taken those before p - lag + 1. It waits for
phase t of the others before it takes their cell t. In the next turn it may write cell t + lag: all
ranks have taken cell t - lag, which it overwrites.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from syncvar._native.constants import MemoryKind
from syncvar.runtime.programs.instructions import (
    Await,
    Combine,
    CompiledProgram,
    CopyInstruction,
    Instruction,
    Memory,
    Program,
    Publish,
    Span,
    assemble,
    in_cell,
)


class TransferPath(IntEnum):
    """How blocks get from one rank to the others."""

    SLOTS = 0
    DIRECT = 1
    CELLS = 2


class Move(NamedTuple):
    """Blocks that a rank publishes and takes.

    Args:
        rank: This rank in the group.
        elements: Elements of each block.
        cell: Elements of each block that go through a cell.
        lag: Cells on each side, at least 2.
        blocks: Largest number of blocks that a rank of the group publishes.
        puts: Blocks that this rank publishes: SOURCE 0, 1, ...
        takes: (peer, index of its block) for each block that it takes, to TARGET 0, 1, ...
        keeps: It also has a block for itself: the SOURCE after the others.
        folds: It combines the blocks it takes and its own, in rank order, into TARGET 0. Else its
            own block goes to the TARGET after those it takes.
        converts: Its own block has another dtype than the combination.
        makes_first: The combination has another dtype than the target.
        starts: Start of each SOURCE in SOURCE 0, and of each TARGET in TARGET 0, if they are parts
            of one array; None if they are arrays of their own.
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
    starts: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def length(self, turn: int) -> int:
        """Return how many elements of a block go through the cell of a turn."""
        return max(0, min(self.cell, self.elements - turn * self.cell))

    def own(self, kind: MemoryKind, place: int, start: int, length: int) -> Span:
        """Return a span of a SOURCE or TARGET."""
        if self.starts is None:
            return Span(Memory(kind, -1, place), start, length)
        return Span(Memory(kind), self.starts[kind == MemoryKind.TARGET][place] + start, length)

    def part(self, way: TransferPath, rank: int, place: int, turn: int) -> Span:
        """Return the span from which others take a part of a rank's block."""
        if way == TransferPath.DIRECT:
            return Span(Memory(MemoryKind.PEER_SOURCE, rank, place), 0, self.elements)
        if way == TransferPath.SLOTS:
            return Span(Memory(MemoryKind.SLOT, rank), place * self.elements, self.elements)
        return in_cell(
            rank, turn, self.lag, self.blocks * self.cell, place * self.cell, self.length(turn)
        )


@lru_cache(maxsize=256)
def move_code(
    move: Move, way: TransferPath, *, has_published: bool = False, some_published: bool = False
) -> CompiledProgram:
    """Compile `lower_move`."""
    return assemble(
        lower_move(move, way, has_published=has_published, some_published=some_published)
    )


def lower_move(
    move: Move, way: TransferPath, *, has_published: bool = False, some_published: bool = False
) -> Program:
    """Return a rank's program of a transfer.

    Args:
        move: The blocks.
        way: The path.
        has_published: This rank has published locations with phase 0, but not written cells.
        some_published: Some rank has published locations.

    Example:
        >>> move = Move(rank=0, elements=5, cell=3, lag=2, blocks=1, puts=1, takes=((1, 0),))
        >>> [type(step).__name__ for step in lower_move(move, TransferPath.CELLS).steps]
        ['CopyInstruction', 'Publish', 'CopyInstruction', 'Await', 'CopyInstruction']
    """
    if way != TransferPath.CELLS:
        move = move._replace(cell=move.elements)
        steps = (*_keep(move, 0), *_take(move, way, 0))
        if way == TransferPath.SLOTS:
            return Program(tuple(_put(move, way, 0)), steps)
        return Program((), (*steps, Publish(), Await()))
    turns = -(-move.elements // move.cell)
    opening = _put(move, way, 0)
    told: list[Instruction] = (
        [*(opening if has_published else ()), Publish(), Await()] if some_published else []
    )
    last_side = ((turns - 1) // move.lag) & 1 if move.puts and turns else None
    copies = () if has_published else tuple(opening)
    return Program(copies, (*told, *_by_cells(move, turns)), last_side, is_read=False)


def _by_cells(move: Move, turns: int) -> list[Instruction]:
    """Return the steps after all ranks have written their first cells."""
    ahead = move.lag - 1
    # Before its end a rank knows that all ranks have taken so many cells.
    heard = max(0, turns - 1) // move.lag * move.lag
    final = heard + ahead if heard else turns - 1  # the last phase
    steps: list[Instruction] = [*_keep(move, 0)]

    def put(turn: int) -> list[Instruction]:
        return [*_put(move, TransferPath.CELLS, turn), Publish(), *_keep(move, turn)]

    for turn in range(1, min(ahead, turns)):
        steps += put(turn)
    for turn in range(turns):
        if turn + ahead <= final:
            steps += put(turn + ahead)
        if turn and (move.takes or turn + move.lag < turns):
            steps.append(Await(min(turn + ahead, final) - turn))
        steps += _take(move, TransferPath.CELLS, turn)
    if heard and (final > turns - 1 or not move.takes):
        steps.append(Await())
    return steps


def _put(move: Move, way: TransferPath, turn: int) -> list[CopyInstruction]:
    """Return the copies that write a part of all blocks."""
    start, length = turn * move.cell, move.length(turn)
    puts = range(move.puts if length else 0)
    return [
        CopyInstruction(
            move.own(MemoryKind.SOURCE, place, start, length),
            move.part(way, move.rank, place, turn),
        )
        for place in puts
    ]


def _keep(move: Move, turn: int) -> list[CopyInstruction]:
    """Return the copies of the same part of this rank's own block to the result."""
    start, length = turn * move.cell, move.length(turn)
    if move.folds or not move.keeps or not length:
        return []
    source = move.own(MemoryKind.SOURCE, move.puts, start, length)
    return [CopyInstruction(source, move.own(MemoryKind.TARGET, len(move.takes), start, length))]


def _take(move: Move, way: TransferPath, turn: int) -> list[Instruction]:
    """Return the steps for a part of the blocks that are taken."""
    start, length = turn * move.cell, move.length(turn)
    parts = [move.part(way, *take, turn) for take in move.takes]
    if not move.folds:
        return [
            CopyInstruction(part, move.own(MemoryKind.TARGET, place, start, length))
            for place, part in enumerate(parts)
        ]
    own = move.own(MemoryKind.SOURCE, move.puts, start, length)
    steps: list[Instruction] = []
    if move.converts:
        converted = Span(Memory(MemoryKind.SCRATCH, -1, 1), 0, length)
        steps.append(CopyInstruction(own, converted))
        own = converted
    target = move.own(MemoryKind.TARGET, 0, start, length)
    made = Span(Memory(MemoryKind.SCRATCH), 0, length) if move.makes_first else target
    steps.append(Combine((*parts[: move.rank], own, *parts[move.rank :]), made))
    return steps if made is target else [*steps, CopyInstruction(made, target)]
