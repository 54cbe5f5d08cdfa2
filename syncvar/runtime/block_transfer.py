"""Calls that move blocks between ranks of one host: no header, and one or two copies of each byte.

All-gather and broadcast have one block for all ranks, reduce-scatter and all-to-all one for each
rank. Every rank copies or combines its blocks from the other ranks, on one of three paths:

* **slots**: small blocks go into the slots of their ranks with phase 0.
* **direct**: ranks publish the locations of their blocks, in shared memory (`sv.empty`) or in their
  own memory if all can read it (`shm/channel_table.py`). One copy, two phases: blocks stay
  until all ranks have read them. Reductions read blocks in shared memory only.
* **cells** otherwise: blocks go cell by cell, with `lag` cells on each of two sides in turn.

With cells a rank writes `lag` - 1 cells ahead of those it takes. Invariant: a rank that has
published phase p has written the cells up to p, and taken those before p - lag + 1. It waits for
phase t of the others before it takes their cell t. In the next turn it may write cell t + lag: all
ranks have taken cell t - lag, which it overwrites.

Some differences between ranks are legal, as lengths in an all-gather. A number published beside the
check, the **detail**, covers them. If details differ, no rank copies anything, and the call
continues on the slow path with a header.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache, reduce
from math import prod
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native.constants import ADDRESS, OFFER_BITS, BlockOffer, MemoryKind, Need
from syncvar.runtime.arithmetic import Arithmetic
from syncvar.runtime.instructions import (
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
from syncvar.runtime.program_runner import (
    RemoteRef,
    ShmRef,
    SlotProgram,
    native_of,
    open_code,
    place_of,
    reading,
    run_code,
)
from syncvar.shm.channel_table import MASK, SEGMENT_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.core.reduce_ops import Combiner
    from syncvar.shm.group_channel import GroupChannel

    Starts = tuple[tuple[int, ...], tuple[int, ...]]

# The cells of all blocks of a rank fill half a segment, so that they stay in the caches.
_LAG = 16  # cells of a side with two ranks: 32 KiB in each
_WIDE_LAG = 4  # with more ranks, which may share cores: they yield to each other less often
_PLAIN_LAG = 2  # if a rank runs programs in Python, whose steps take longer
_NATIVE_SLOT_BYTES = 8 << 10  # up to here small slots are faster if programs run in C
_READ_BYTES = 512 << 10  # from here on reading one of several blocks is faster than cells
_LONE = 128  # the same for a single block: so many times _READ_BYTES

NO_RESULT: NDArray[Any] = np.empty(0, np.uint8)
"""`Blocks.output` of a rank that gets no result."""

# Published beside the check is a mark: the side of the first cells << OFFER_BITS | `BlockOffer`.
_READS, _RESIDENT, _LOCATED = map(int, BlockOffer)
_OFFER = _READS | _RESIDENT | _LOCATED


class TransferPath(IntEnum):
    """How blocks get from one rank to the others."""

    SLOTS = 0
    DIRECT = 1
    CELLS = 2


class Move(NamedTuple):
    """Blocks that a rank publishes and takes."""

    rank: int
    elements: int
    cell: int  # elements of each block that go through a cell
    lag: int  # cells on each side, at least 2
    blocks: int  # largest number of blocks that a rank of the group publishes
    puts: int  # blocks that this rank publishes: SOURCE 0, 1, ...
    # (peer, index of its block) for each block that it takes, to TARGET 0, 1, ...
    takes: tuple[tuple[int, int], ...]
    keeps: bool = False  # it also has a block for itself: the SOURCE after the others
    # It combines the blocks it takes and its own, in rank order, into TARGET 0. Else its own block
    # goes to the TARGET after those it takes.
    folds: bool = False
    converts: bool = False  # its own block has another dtype than the combination
    makes_first: bool = False  # the combination has another dtype than the target
    # Start of each SOURCE in SOURCE 0, and of each TARGET in TARGET 0, if they are parts of one
    # array; None if they are arrays of their own
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

    `has_published`: this rank has published locations with phase 0, but not written cells.
    `some_published`: some rank has.

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
    publishing: list[Instruction] = (
        [*(opening if has_published else ()), Publish(), Await()] if some_published else []
    )
    last_side = ((turns - 1) // move.lag) & 1 if move.puts and turns else None
    copies = () if has_published else tuple(opening)
    return Program(copies, (*publishing, *_by_cells(move, turns)), last_side, is_read=False)


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
    own = [move.own(MemoryKind.SOURCE, place, start, length) for place in puts]
    return [CopyInstruction(own[place], move.part(way, move.rank, place, turn)) for place in puts]


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
    output = Span(Memory(MemoryKind.SCRATCH), 0, length) if move.makes_first else target
    steps.append(Combine((*parts[: move.rank], own, *parts[move.rank :]), output))
    return steps if output is target else [*steps, CopyInstruction(output, target)]


def cells_of_blocks(
    elements: int, itemsize: int, blocks: int, size: int, *, are_native: bool
) -> tuple[int, int]:
    """Return how many elements of each block fit into a cell, and how many cells a side has."""
    row = itemsize * max(1, blocks)
    lag = _PLAIN_LAG if not are_native else _LAG if size == 2 else _WIDE_LAG
    return max(1, min(elements, SEGMENT_BYTES // 2 // lag // row)), lag


def fits_slots(nbytes: int, *, are_native: bool) -> bool:
    """Return whether blocks of `nbytes` in all go into the small slot of a rank."""
    return nbytes <= (_NATIVE_SLOT_BYTES if are_native else SMALL_BYTES)


def is_worth_reading(nbytes: int, puts: int, takes: int, *, are_native: bool) -> bool:
    """Return whether reading a block from its rank's memory is faster than cells.

    With cells, a rank that publishes several blocks does alone what readers would do in parallel; a
    rank that takes several blocks reads alone what the others would have written in parallel. One
    block goes through cells faster than the kernel finds its pages. `puts` and `takes` are the
    largest numbers of blocks that a rank publishes and takes.
    """
    if not are_native:
        return True
    if puts > 1:
        return nbytes >= (_READ_BYTES if takes == 1 else 4 * _READ_BYTES)
    return takes == 1 and nbytes >= _LONE * _READ_BYTES


class TransferLayout(NamedTuple):
    """Properties that calls of one kind share."""

    # Number that ranks compare for inputs that may differ; with unequal details nobody copies. 0:
    # this input cannot be moved this way. None: inputs must not differ.
    detail: int | None
    dtype: np.dtype[Any]  # dtype of the elements in shared memory
    shape: tuple[int, ...] = ()
    blocks: int = 0  # largest number of blocks that a rank of the group publishes
    # (peer, index of its block) for each block to take; in rank order if the call combines
    takes: tuple[tuple[int, int], ...] = ()
    most_takes: int = 1  # largest number of blocks that a rank of the group takes
    ufunc: Combiner | None = None  # combines two operands; None for calls that only move
    divisor: int = 0  # divisor of the combination; 0 for none

    @property
    def elements(self) -> int:
        """Elements of each block."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of as many blocks as a rank publishes at most."""
        return self.elements * self.blocks * self.dtype.itemsize

    @property
    def is_small(self) -> bool:
        """Whether the blocks of a rank fit into its small slot."""
        return self.nbytes <= SMALL_BYTES

    def goes_by_slots(self, channel: GroupChannel) -> bool:
        """Return whether the blocks of a rank go into its small slot."""
        return fits_slots(self.nbytes, are_native=channel.are_native)

    def is_read(self, channel: GroupChannel) -> bool:
        """Return whether long blocks are read from the memory of their ranks."""
        if channel.reach is None or self.ufunc is not None:
            return False
        nbytes, are_native = self.elements * self.dtype.itemsize, channel.are_native
        return is_worth_reading(nbytes, self.blocks, self.most_takes, are_native=are_native)

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic of the call."""
        return Arithmetic(self.ufunc, self.dtype, self.dtype, self.divisor)

    def check_of(self, check: int) -> int:
        """Return the check of a call with the detail."""
        return check if self.detail is None else (check + self.detail) & MASK

    def code(
        self,
        channel: GroupChannel,
        blocks: Blocks,
        way: TransferPath,
        starts: Starts | None = None,
        **published: bool,
    ) -> CompiledProgram:
        """Return the program of this rank; see `move_code`."""
        folds, own = self.ufunc is not None, blocks.own
        elements, itemsize, are_native = self.elements, self.dtype.itemsize, channel.are_native
        cell, lag = cells_of_blocks(
            elements, itemsize, self.blocks, channel.size, are_native=are_native
        )
        move = Move(
            channel.rank,
            elements,
            cell,
            lag,
            max(1, self.blocks),
            len(blocks.outgoing),
            self.takes,
            keeps=own is not None and (folds or blocks.own_target is not None),
            folds=folds,
            converts=folds and own is not None and own.dtype != self.dtype,
            makes_first=folds and blocks.targets[0].dtype != self.dtype,
            starts=starts,
        )
        return move_code(move, way, **published)


class Blocks(NamedTuple):
    """Arrays of one call, each of the layout's shape."""

    output: Any
    outgoing: Sequence[NDArray[Any]] = ()  # blocks that this rank publishes
    # Contiguous outputs of the blocks it takes; for a reduction one array
    targets: Sequence[NDArray[Any]] = ()
    own: NDArray[Any] | None = None  # block that this rank keeps
    own_target: NDArray[Any] | None = None  # output of that block; None for none, and in reductions
    # The caller gets a list of so many parts of the result, cut evenly along axis 0; 0: the result
    # itself
    parts: int = 0

    @property
    def result(self) -> Any:
        """The caller's result."""
        if not self.parts:
            return self.output
        rows = len(self.output) // self.parts
        return [self.output[part * rows : (part + 1) * rows] for part in range(self.parts)]


class Movement:
    """A call that moves blocks: its layout, its arrays, and whether it is done.

    `slots` is the program of blocks that go by slots, if the call is repeated.
    """

    __slots__ = ("arrays", "blocks", "is_done", "layout", "slots")

    def __init__(
        self, layout: TransferLayout, blocks: Blocks, slots: SlotProgram | None = None
    ) -> None:
        self.layout, self.blocks, self.slots = layout, blocks, slots
        inputs = blocks.outgoing if blocks.own is None else (*blocks.outgoing, blocks.own)
        targets = (
            blocks.targets if blocks.own_target is None else (*blocks.targets, blocks.own_target)
        )
        # Kept alive until the others have taken them.
        sources = [np.ascontiguousarray(block).reshape(-1) for block in inputs]
        self.arrays = sources, [target.reshape(-1) for target in targets]
        self.is_done = False  # it stays so if the details differ

    @property
    def outgoing(self) -> list[NDArray[Any]]:
        """Blocks that the others take."""
        return self.arrays[0][: len(self.blocks.outgoing)]


def move_shared(
    channel: GroupChannel, opening: tuple[int, int], movement: Movement
) -> Iterator[int]:
    """Publish and take blocks in a call (call, check); yield the needs."""
    call, check = opening
    mark = _put_blocks(channel, movement)
    try:
        yield channel.begin(call, movement.layout.check_of(check), check, mark)
        yield from take_blocks(channel, check, movement)
    except BaseException:
        _keep_published(channel, check, movement, mark)
        raise


def move_published(
    channel: GroupChannel, check: int, movement: Movement, run: Iterator[int] | None
) -> Iterator[int]:
    """Continue a call of long blocks that the C extension has published, and perhaps begun."""
    mark = channel.arrays()[1][channel.rank]
    try:
        if run is None:
            yield channel.last
            yield from take_blocks(channel, check, movement)
            return
        locations = (
            (peer, channel.block_location(peer, place)) for peer, place in movement.layout.takes
        )
        yield from reading(
            channel, run, ((peer, place) for peer, place in locations if place & ADDRESS)
        )
        movement.is_done = True
    except BaseException:
        _keep_published(channel, check, movement, mark)
        raise


def _keep_published(channel: GroupChannel, check: int, movement: Movement, mark: int) -> None:
    is_refused = channel.is_reached(channel.last) and channel.disagreeing(
        movement.layout.check_of(check)
    )
    if mark & _OFFER and movement.outgoing and not is_refused:
        channel.keep(movement)  # others may still be reading the published blocks


def add_native_programs(
    channel: GroupChannel, layout: TransferLayout, blocks: Blocks, starts: Starts, native: Any
) -> bool:
    """Give C the programs of long blocks that begin at `starts`; return whether it takes them."""
    into_all = by_owners = False
    for pattern, way in enumerate((TransferPath.CELLS, TransferPath.DIRECT)):
        code = layout.code(channel, blocks, way, starts)
        program = native_of(code, layout.arithmetic)
        if program is None:
            return False
        last_side = -1 if code.last_side is None else code.last_side
        native.add_program(pattern, into_all, by_owners, last_side, program)
    return True


def _put_blocks(channel: GroupChannel, movement: Movement) -> int:
    """Write the blocks that go with phase 0; return the mark that is published with it."""
    layout, blocks = movement.layout, movement.blocks
    if layout.goes_by_slots(channel):
        _slots_of(channel, movement).put((movement.arrays,))
        return 0
    side = channel.tail ^ 1
    flat = movement.outgoing
    if flat:
        channel.reserve_segments()
    offer = _offer_blocks(channel, layout, flat)
    if flat and not offer:
        code = layout.code(channel, blocks, TransferPath.CELLS)
        open_code(channel, code, layout.arithmetic, movement.arrays, side)
        channel.tail = side
    return side << OFFER_BITS | offer


def slots_of_blocks(channel: GroupChannel, layout: TransferLayout, blocks: Blocks) -> SlotProgram:
    """Return the program of blocks that go by slots; it serves all blocks that are kept alike."""
    code = layout.code(channel, blocks, TransferPath.SLOTS)
    return SlotProgram(channel, [(code, layout.arithmetic, 0)])


def _slots_of(channel: GroupChannel, movement: Movement) -> SlotProgram:
    slots = movement.slots
    if slots is None:
        slots = movement.slots = slots_of_blocks(channel, movement.layout, movement.blocks)
    return slots


def _offer_blocks(
    channel: GroupChannel, layout: TransferLayout, blocks: Sequence[NDArray[Any]]
) -> int:
    """Publish the locations of blocks, if others can read them; return the offer, 0 for cells."""
    offer = _OFFER if layout.is_read(channel) else _RESIDENT | _LOCATED
    places = []
    for block in blocks:
        place = place_of(channel, block) if block.dtype == layout.dtype else None
        if place is None:
            return 0
        if place & ADDRESS:
            offer &= ~_RESIDENT
        if offer == _LOCATED:
            return 0
        places.append(place)
    channel.publish_locations(places)
    return offer if places else offer & ~_LOCATED


def take_blocks(channel: GroupChannel, check: int, movement: Movement) -> Iterator[int]:
    """Take this rank's blocks after phase 0 of all ranks; write and publish the rest."""
    layout, blocks = movement.layout, movement.blocks
    sources, marks = channel.arrays()
    if channel.disagreeing(layout.check_of(check)):
        if layout.detail is None or any(source != check for source in sources):
            yield Need.DISAGREE
        return
    if layout.detail == 0:
        return
    if layout.goes_by_slots(channel):
        _slots_of(channel, movement).run((movement.arrays,))
        movement.is_done = True
        return
    sides = tuple([mark >> OFFER_BITS for mark in marks])
    offers = [mark & _OFFER for mark in marks]
    if reduce(and_, offers) & (_READS | _RESIDENT):  # every rank can take every block directly
        code = layout.code(channel, blocks, TransferPath.DIRECT)
    else:
        has_published = offers[channel.rank] != 0 and len(blocks.outgoing) > 0
        some_published, path = any(offer & _LOCATED for offer in offers), TransferPath.CELLS
        code = layout.code(
            channel, blocks, path, has_published=has_published, some_published=some_published
        )
        if code.last_side is not None:
            channel.tail = (sides[channel.rank] & 1) ^ code.last_side

    def location_of(_kind: int, rank: int, place: int) -> ShmRef | RemoteRef:
        location = channel.block_location(rank, place)
        if location & ADDRESS:
            return RemoteRef(rank, location, layout.dtype)
        return ShmRef(location, layout.dtype)

    yield from run_code(
        channel, code, layout.arithmetic, movement.arrays, sides, location_of=location_of
    )
    movement.is_done = True
