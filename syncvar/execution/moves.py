"""Collectives of one host whose ranks bring the same: no header, and each byte is copied once or twice.

All-gather and broadcast have one block for everybody, reduce-scatter and all-to-all one for each other rank. Every rank
takes from the others what is for it, to where the caller wants it:

* **small** blocks are put side by side where the others see them; one phase.
* **where they lie**: ranks tell each other where their blocks are, in the arena (`sv.empty`) or in their own memory where
  all can read it (`arena/reaching.py`), and take them there: one copy, two phases. What is combined is taken from the
  arena only: it needs no copy there, and one from a rank's own memory.
* **by cells** else: put and taken cell by cell, on two sides in turn, so that what lies in the arena stays in the caches.

What may differ between ranks without being wrong (lengths of an all-gather, say) is the **detail**, a number published
beside the check: where the details differ nothing is taken, and the call goes on in the general way, with a header.
"""

from __future__ import annotations

from functools import reduce
from math import prod
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.arena.channels import MASK, SEGMENT_BYTES, SMALL_BYTES
from syncvar.errors import InternalError
from syncvar.execution.addresses import ADDRESS, Gone, place_of, read
from syncvar.execution.lower_moves import Move, Way, move_code
from syncvar.execution.phases import DISAGREE, NEVER
from syncvar.execution.program import Kind
from syncvar.execution.reductions import copier, folder, storer
from syncvar.execution.running import Arithmetic, Lying, Reached, found_in, native_of, open_code, run_code
from syncvar.kernel import UNREAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.channel import Channel
    from syncvar.execution.kernels import Combiner
    from syncvar.execution.program import Code

__all__ = ["NOTHING", "Blocks", "Fold", "Layout", "Movement", "Said", "cells_of_blocks", "fits_slots", "is_worth_reading", "move_published", "move_shared", "said_of", "take_blocks", "teach_moves"]

# Cells of half a segment, for all blocks that a rank puts: so what lies in them stays in the caches of the cores. Measured on one machine.
_LAG = 16  # with two ranks: 32 KiB in each
_WIDE_LAG = 4  # with more, which may share cores: they give way to each other less often
_PLAIN_LAG = 2  # where a runner is Python, whose steps take longer
_NATIVE_SLOT_BYTES = 8 << 10  # up to these small slots are faster where programs run in C
_READ_BYTES = 4 << 20  # from this on a block is read where it lies faster than it goes by cells, one for each rank

NOTHING: NDArray[Any] = np.empty(0, np.uint8)
"""What a rank ends with that gets nothing, as `Blocks.made`."""


class Fold(NamedTuple):
    """How what comes in is combined, of a reduce-scatter.

    Args:
        ufunc: Combines two operands.
        divisor: What the combination is divided by; 0 for nothing.
    """

    ufunc: Combiner
    divisor: int = 0


def cells_of_blocks(elements: int, itemsize: int, blocks: int, size: int, *, are_native: bool) -> tuple[int, int]:
    """Return how many elements of each block go through a cell, and how many cells there are on a side.

    Args:
        elements: Of each block.
        itemsize: Of an element, in bytes.
        blocks: That a rank puts, at most.
        size: Of the group.
        are_native: Programs run in C on all ranks.
    """
    row = itemsize * max(1, blocks)
    lag = _PLAIN_LAG if not are_native else _LAG if size == 2 else _WIDE_LAG
    return max(1, min(elements, SEGMENT_BYTES // 2 // lag // row)), lag


def fits_slots(nbytes: int, *, are_native: bool) -> bool:
    """Return whether so many bytes of a rank's blocks go into its small slot, where all ranks or not all run programs in C."""
    return nbytes <= (_NATIVE_SLOT_BYTES if are_native else SMALL_BYTES)


def is_worth_reading(nbytes: int, puts: int, takes: int, *, are_native: bool) -> bool:
    """Return whether a block of so many bytes is better read in the memory of its rank than sent by way of cells.

    A rank that puts several blocks does by cells what all others do at once when they read; one that takes several reads alone what
    by cells the others bring.

    Args:
        nbytes: Of each block.
        puts: Largest number of blocks that a rank of the group puts.
        takes: Largest number of blocks that a rank of the group takes.
        are_native: Programs run in C on all ranks.
    """
    if not are_native:
        return True
    if takes > 1:
        return puts > 1 and nbytes >= _READ_BYTES // 2
    return nbytes >= (_READ_BYTES // 8 if puts > 1 else _READ_BYTES)


class Layout(NamedTuple):
    """What calls of one kind have in common.

    Args:
        detail: Says what this rank brings, for a call in which that may differ: unequal details take nothing. 0 stands
            for what cannot be moved this way; None for a call in which nothing may differ.
        dtype: Of the elements in shared memory.
        shape: Of each block.
        blocks: Largest number of blocks that a rank of the group puts.
        takes: (peer, which of its blocks) for each block to take; with `fold` in the order of ranks.
        fold: How what comes in is combined; None for calls that only move.
        most_takes: Largest number of blocks that a rank of the group takes.
    """

    detail: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    blocks: int = 0
    takes: tuple[tuple[int, int], ...] = ()
    fold: Fold | None = None
    most_takes: int = 1

    @property
    def elements(self) -> int:
        """Elements of each block."""
        return prod(self.shape)

    @property
    def is_small(self) -> bool:
        """Whether the blocks of a rank have room in its small slot."""
        return self.elements * self.blocks * self.dtype.itemsize <= SMALL_BYTES

    def goes_by_slots(self, channel: Channel) -> bool:
        """Return whether the blocks of a rank go into its small slot."""
        return fits_slots(self.elements * self.blocks * self.dtype.itemsize, are_native=channel.are_native)

    def is_read(self, channel: Channel) -> bool:
        """Return whether long blocks are read in the memory of their ranks."""
        if channel.reach is None or self.fold is not None:
            return False
        return is_worth_reading(self.elements * self.dtype.itemsize, self.blocks, self.most_takes, are_native=channel.are_native)

    @property
    def arithmetic(self) -> Arithmetic:
        """What becomes of the blocks."""
        if self.fold is None:
            return Arithmetic(None, self.dtype, self.dtype)
        return Arithmetic(self.fold.ufunc, self.dtype, self.dtype, self.fold.divisor)

    def code(self, channel: Channel, blocks: Blocks, way: Way, **how: Any) -> Code:
        """Return what a rank does with its blocks, as a program; see `move_code`."""
        folds, own = self.fold is not None, blocks.own
        cell, lag = cells_of_blocks(self.elements, self.dtype.itemsize, self.blocks, channel.size, are_native=channel.are_native)
        move = Move(
            channel.rank, self.elements, cell, lag, max(1, self.blocks), len(blocks.outgoing), self.takes,
            keeps=own is not None and (folds or blocks.own_target is not None), folds=folds,
            converts=folds and own is not None and own.dtype != self.dtype,
            makes_first=folds and blocks.targets[0].dtype != self.dtype,
        )  # fmt: skip
        return move_code(move, way, **how)


class Blocks(NamedTuple):
    """The arrays of one call, each of the layout's shape.

    Args:
        made: The result.
        outgoing: What this rank puts.
        targets: Where what it takes goes, contiguous; with a fold one array, for the combination.
        own: What this rank brings for itself.
        own_target: Where it goes; None for nowhere, or with a fold.
        parts: The caller gets a list of so many parts of the result, cut evenly along axis 0; 0: the result as it is.
    """

    made: Any
    outgoing: Sequence[NDArray[Any]] = ()
    targets: Sequence[NDArray[Any]] = ()
    own: NDArray[Any] | None = None
    own_target: NDArray[Any] | None = None
    parts: int = 0

    @property
    def result(self) -> Any:
        """What the caller gets."""
        if not self.parts:
            return self.made
        rows = len(self.made) // self.parts
        return [self.made[part * rows : (part + 1) * rows] for part in range(self.parts)]


class Movement:
    """A call that moves blocks: its layout, its arrays, and whether it has come to an end."""

    __slots__ = ("blocks", "is_done", "layout", "sources")

    def __init__(self, layout: Layout, blocks: Blocks) -> None:
        self.layout = layout
        self.blocks = blocks
        brought = blocks.outgoing if blocks.own is None else (*blocks.outgoing, blocks.own)
        self.sources = [np.ascontiguousarray(block).reshape(-1) for block in brought]  # alive until the others have taken them
        self.is_done = False  # else the details differ, and the call has to go on in the general way

    @property
    def outgoing(self) -> list[NDArray[Any]]:
        """What the others take."""
        return self.sources[: len(self.blocks.outgoing)]


class Said(NamedTuple):
    """What a rank has published of a call.

    Args:
        check: Of the call.
        full: The check with the detail.
        side: Of its first cells; above bit 0 where they begin on it, as a number of pages.
        offer: What can be done with its blocks: READS, RESIDENT and TOLD.
    """

    check: int
    full: int
    side: int
    offer: int

    @property
    def mark(self) -> int:
        """What is published beside the check."""
        return self.side << 3 | self.offer


# What a rank offers, or 0: it can read the memory of all; its blocks, if any, lie in the arena; it has blocks, has told where,
# and put none.
READS, RESIDENT, TOLD = 1, 2, 4


def said_of(layout: Layout, check: int, side: int = 0, offer: int = 0) -> Said:
    """Return what a rank says of a call."""
    return Said(check, check if layout.detail is None else (check + layout.detail) & MASK, side, offer)


def move_shared(channel: Channel, opening: tuple[int, int], movement: Movement) -> Iterator[int]:
    """Put, publish and take; `movement.is_done` tells whether there was anything to take.

    Args:
        channel: This rank's end of the group's channels.
        opening: (call, check) of the call, which has published nothing yet.
        movement: What is moved.

    Yields:
        What the others have to reach.
    """
    call, check = opening
    said = _put_blocks(channel, check, movement)
    try:
        yield channel.begin(call, said.full, check, said.mark)
        yield from take_blocks(channel, said, movement)
    except BaseException:
        _keep_told(channel, said, movement)
        raise


def move_published(channel: Channel, check: int, movement: Movement, run: Iterator[int] | None) -> Iterator[int]:
    """Go on with a call of long blocks that the C runner has published, and with its run, if it has begun one."""
    mark = channel.arrays()[1][channel.rank]
    said = said_of(movement.layout, check, mark >> 3, mark & (READS | RESIDENT | TOLD))
    try:
        if run is None:
            yield channel.last
            yield from take_blocks(channel, said, movement)
            return
        for need in run:
            if need == UNREAD:
                _read_again(channel, movement.layout.takes)
            yield need
        movement.is_done = True
    except BaseException:
        _keep_told(channel, said, movement)
        raise


def _read_again(channel: Channel, takes: Sequence[tuple[int, int]]) -> None:
    """Raise what is wrong with reading where ranks have told."""
    for peer, place in takes:
        told = channel.told_place(peer, place)
        if told & ADDRESS:
            read(channel, peer, told, np.empty(1, np.uint8), hold=True)
    raise InternalError("the memory of another rank could not be read, and can be")


def _keep_told(channel: Channel, said: Said, movement: Movement) -> None:
    is_refused = channel.is_reached(channel.last) and channel.disagreeing(said.full)
    if said.offer and movement.outgoing and not is_refused:
        channel.keep(movement)  # others may still be reading what this rank has told them of


def teach_moves(channel: Channel, layout: Layout, blocks: Blocks, starts: tuple[tuple[int, ...], tuple[int, ...]], native: Any) -> bool:
    """Tell the C runner of a call of long blocks what it does; returns whether it takes that.

    Args:
        channel: This rank's.
        layout: What such calls have in common.
        blocks: Of such a call.
        starts: Where they begin in the arrays of a call, see `move_code`.
        native: The call.
    """
    for pattern, way in enumerate((Way.CELLS, Way.LYING)):
        code = layout.code(channel, blocks, way, starts=starts)
        program = native_of(code, layout.arithmetic)
        if program is None:
            return False
        native.learn(pattern, False, False, -1 if code.last_side is None else code.last_side, program)
    return True


def _put_blocks(channel: Channel, check: int, movement: Movement) -> Said:
    """Put what goes with phase 0; returns what is published with it."""
    layout = movement.layout
    if layout.goes_by_slots(channel):
        code = layout.code(channel, movement.blocks, Way.SLOTS)
        _open(channel, movement, code, channel.side ^ 1)
        return said_of(layout, check)
    side = channel.tail ^ 1
    flat = movement.outgoing
    if flat:
        channel.reserve_segments()
    offer = _tell(channel, layout, flat)
    if flat and not offer:
        code = layout.code(channel, movement.blocks, Way.CELLS)
        _open(channel, movement, code, side)
        channel.tail = side
    return said_of(layout, check, side, offer)


def _tell(channel: Channel, layout: Layout, blocks: Sequence[NDArray[Any]]) -> int:
    """Tell where blocks lie, if they can be taken there; returns the offer, 0 where they have to go by cells."""
    offer = READS | RESIDENT | TOLD if layout.is_read(channel) else RESIDENT | TOLD
    places = []
    for block in blocks:
        if block.dtype != layout.dtype:
            return 0
        place = place_of(channel, block)
        if place is None:
            return 0
        if place & ADDRESS:
            offer &= ~RESIDENT
        if offer == TOLD:
            return 0
        places.append(place)
    channel.tell_places(places)
    return offer if places else offer & ~TOLD


def take_blocks(channel: Channel, said: Said, movement: Movement) -> Iterator[int]:
    """Take what is for this rank, when all ranks have published phase 0; put and publish what does not go with it."""
    layout = movement.layout
    sources, marks = channel.arrays()
    if channel.disagreeing(said.full):
        if layout.detail is None or any(source != said.check for source in sources):
            yield DISAGREE
        return
    if layout.detail == 0:
        return
    sides = tuple([mark >> 3 for mark in marks])
    offers = [mark & (READS | RESIDENT | TOLD) for mark in marks]
    if layout.goes_by_slots(channel):
        code = layout.code(channel, movement.blocks, Way.SLOTS)
        sides = channel.sides()
    elif reduce(and_, offers) & (READS | RESIDENT):  # all can take them where they lie, in one way or another
        code = layout.code(channel, movement.blocks, Way.LYING)
    else:
        has_told = said.offer != 0 and len(movement.outgoing) > 0
        code = layout.code(channel, movement.blocks, Way.CELLS, has_told=has_told, some_told=any(offer & TOLD for offer in offers))
        if code.last_side is not None:
            channel.tail = (said.side & 1) ^ code.last_side
    found = _found(channel, movement, code, sides)
    native, copy = _native(channel, layout, code, found), copier()
    try:
        how = layout.arithmetic
        yield from run_code(channel, code, found, native, copy, storer(how, copy), folder(how))
    except Gone:
        yield NEVER
    movement.is_done = True


def _open(channel: Channel, movement: Movement, code: Code, side: int) -> None:
    """Make the copies that come before phase 0, into cells or the slot of this side."""
    found = _found(channel, movement, code, channel.own_side(side))
    open_code(channel, code, found, _native(channel, movement.layout, code, found), copier())


def _found(channel: Channel, movement: Movement, code: Code, sides: tuple[int, ...]) -> list[Any]:
    """Return the memories of a program; None for those that are not known yet."""
    layout, blocks = movement.layout, movement.blocks
    dtype = layout.dtype
    found = found_in(channel, code, sides, dtype)
    for number, kind, rank, place, count in code.own:
        if kind == _SOURCE:
            found[number] = movement.sources[place]
        elif kind == _TARGET:
            target = blocks.targets[place] if place < len(blocks.targets) else blocks.own_target
            found[number] = NOTHING if target is None else target.reshape(-1)
        elif kind == _SCRATCH:
            found[number] = np.empty(count, dtype)
        elif sides[rank] >= 0:
            told = channel.told_place(rank, place)
            found[number] = Reached(rank, told ^ ADDRESS, dtype) if told & ADDRESS else Lying(told, dtype)
    return found


_SOURCE, _TARGET, _SCRATCH = map(int, (Kind.SOURCE, Kind.TARGET, Kind.SCRATCH))


def _native(channel: Channel, layout: Layout, code: Code, found: Sequence[Any]) -> Any:
    """Return the program for the C runner, or None where not all arrays are such as it takes."""
    if not channel.is_native:
        return None
    for array in found:
        if isinstance(array, np.ndarray) and not (array.dtype == layout.dtype and array.flags.carray):
            return None
    return native_of(code, layout.arithmetic)
