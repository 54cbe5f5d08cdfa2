"""Collectives of one host whose ranks bring the same: no header, and each byte is copied once or twice.

All-gather and broadcast have one block for everybody, reduce-scatter and all-to-all one for each other rank. Every rank
takes from the others what is for it, to where the caller wants it:

* **small** blocks are put side by side where the others see them; one phase.
* **where they lie**: ranks tell each other where their blocks are, in shared memory (`sv.empty`) or in their own memory where
  all can read it (`shm/cross_process_read.py`), and take them there: one copy, two phases. What is combined is taken from the
  shared memory only: it needs no copy there, and one from a rank's own memory.
* **by cells** else: put and taken cell by cell, on two sides in turn, so that what lies in shared memory stays in the caches.

What may differ between ranks without being wrong (lengths of an all-gather, say) is the **detail**, a number published
beside the check: where the details differ nothing is taken, and the call goes on in the general way, with a header.
"""

from __future__ import annotations

from functools import reduce
from math import prod
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native.constants import ADDRESS, BlockOffer
from syncvar.runtime.programs.arithmetic import Arithmetic
from syncvar.runtime.programs.buffer_location import RemoteRef, ShmRef, place_of
from syncvar.runtime.programs.compile_transfer import Move, TransferPath, move_code
from syncvar.runtime.programs.program_runner import (
    DISAGREE,
    native_of,
    open_code,
    reading,
    run_code,
)
from syncvar.shm.channel_table import MASK, SEGMENT_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.runtime.programs.instructions import CompiledProgram
    from syncvar.shm.group_channel import Channel

    Starts = tuple[tuple[int, ...], tuple[int, ...]]
    from syncvar.core.reduce_ops import Combiner

__all__ = [
    "NOTHING",
    "Blocks",
    "Movement",
    "TransferLayout",
    "cells_of_blocks",
    "fits_slots",
    "is_worth_reading",
    "move_published",
    "move_shared",
    "take_blocks",
    "teach_moves",
]

# Cells of half a segment, for all blocks that a rank puts: so what lies in them stays in the caches of the cores. Measured on one machine.
_LAG = 16  # with two ranks: 32 KiB in each
_WIDE_LAG = 4  # with more, which may share cores: they give way to each other less often
_PLAIN_LAG = 2  # where a runner is Python, whose steps take longer
_NATIVE_SLOT_BYTES = 8 << 10  # up to these small slots are faster where programs run in C
_READ_BYTES = (
    512 << 10
)  # from this on one of several blocks of a rank is read where it lies faster than it goes by cells
_LONE = (
    128  # so many times as long is a block that its rank puts for all others, or for the only one
)

NOTHING: NDArray[Any] = np.empty(0, np.uint8)
"""What a rank ends with that gets nothing, as `Blocks.made`."""


def cells_of_blocks(
    elements: int, itemsize: int, blocks: int, size: int, *, are_native: bool
) -> tuple[int, int]:
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
    by cells the others bring. One block is copied into cells and out of them, at once, faster than the system finds its pages.

    Args:
        nbytes: Of each block.
        puts: Largest number of blocks that a rank of the group puts.
        takes: Largest number of blocks that a rank of the group takes.
        are_native: Programs run in C on all ranks.
    """
    if not are_native:
        return True
    if puts > 1:
        return nbytes >= (_READ_BYTES if takes == 1 else 4 * _READ_BYTES)
    return takes == 1 and nbytes >= _LONE * _READ_BYTES


class TransferLayout(NamedTuple):
    """What calls of one kind have in common.

    Args:
        detail: Says what this rank brings, for a call in which that may differ: unequal details take nothing. 0 stands
            for what cannot be moved this way; None for a call in which nothing may differ.
        dtype: Of the elements in shared memory.
        shape: Of each block.
        blocks: Largest number of blocks that a rank of the group puts.
        takes: (peer, which of its blocks) for each block to take; of a call that combines in the order of ranks.
        most_takes: Largest number of blocks that a rank of the group takes.
        ufunc: Combines two operands; None for calls that only move.
        divisor: What the combination is divided by; 0 for nothing.
    """

    detail: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    blocks: int = 0
    takes: tuple[tuple[int, int], ...] = ()
    most_takes: int = 1
    ufunc: Combiner | None = None
    divisor: int = 0

    @property
    def elements(self) -> int:
        """Elements of each block."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of as many blocks as a rank puts at most."""
        return self.elements * self.blocks * self.dtype.itemsize

    @property
    def is_small(self) -> bool:
        """Whether the blocks of a rank have room in its small slot."""
        return self.nbytes <= SMALL_BYTES

    def goes_by_slots(self, channel: Channel) -> bool:
        """Return whether the blocks of a rank go into its small slot."""
        return fits_slots(self.nbytes, are_native=channel.are_native)

    def is_read(self, channel: Channel) -> bool:
        """Return whether long blocks are read in the memory of their ranks."""
        if channel.reach is None or self.ufunc is not None:
            return False
        return is_worth_reading(
            self.elements * self.dtype.itemsize,
            self.blocks,
            self.most_takes,
            are_native=channel.are_native,
        )

    @property
    def how(self) -> Arithmetic:
        """What becomes of the blocks."""
        return Arithmetic(self.ufunc, self.dtype, self.dtype, self.divisor)

    def check_of(self, check: int) -> int:
        """Return the check of a call with the detail."""
        return check if self.detail is None else (check + self.detail) & MASK

    def code(
        self,
        channel: Channel,
        blocks: Blocks,
        way: TransferPath,
        starts: Starts | None = None,
        **told: bool,
    ) -> CompiledProgram:
        """Return what a rank does with its blocks, as a program; see `move_code`."""
        folds, own = self.ufunc is not None, blocks.own
        cell, lag = cells_of_blocks(
            self.elements,
            self.dtype.itemsize,
            self.blocks,
            channel.size,
            are_native=channel.are_native,
        )
        move = Move(
            channel.rank,
            self.elements,
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
        return move_code(move, way, **told)


class Blocks(NamedTuple):
    """The arrays of one call, each of the layout's shape.

    Args:
        made: The result.
        outgoing: What this rank puts.
        targets: Where what it takes goes, contiguous; of a call that combines one array, for the combination.
        own: What this rank brings for itself.
        own_target: Where it goes; None for nowhere, or in a call that combines.
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

    __slots__ = ("arrays", "blocks", "is_done", "layout")

    def __init__(self, layout: TransferLayout, blocks: Blocks) -> None:
        self.layout = layout
        self.blocks = blocks
        brought = blocks.outgoing if blocks.own is None else (*blocks.outgoing, blocks.own)
        targets = (
            blocks.targets if blocks.own_target is None else (*blocks.targets, blocks.own_target)
        )
        sources = [
            np.ascontiguousarray(block).reshape(-1) for block in brought
        ]  # alive until the others have taken them
        self.arrays = sources, [target.reshape(-1) for target in targets]
        self.is_done = (
            False  # else the details differ, and the call has to go on in the general way
        )

    @property
    def outgoing(self) -> list[NDArray[Any]]:
        """What the others take."""
        return self.arrays[0][: len(self.blocks.outgoing)]


# What a rank offers, or 0: it can read the memory of all; its blocks, if any, lie in shared memory; it has blocks, has told where,
# and put none. It is published beside the check, in a mark: the side of the rank's first cells << 3 | its offer.
_READS, _RESIDENT, _LOCATED = map(int, BlockOffer)
_OFFER = _READS | _RESIDENT | _LOCATED


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
    mark = _put_blocks(channel, movement)
    try:
        yield channel.begin(call, movement.layout.check_of(check), check, mark)
        yield from take_blocks(channel, check, movement)
    except BaseException:
        _keep_told(channel, check, movement, mark)
        raise


def move_published(
    channel: Channel, check: int, movement: Movement, run: Iterator[int] | None
) -> Iterator[int]:
    """Go on with a call of long blocks that the C runner has published, and with its run, if it has begun one."""
    mark = channel.arrays()[1][channel.rank]
    try:
        if run is None:
            yield channel.last
            yield from take_blocks(channel, check, movement)
            return
        told = ((peer, channel.told_place(peer, place)) for peer, place in movement.layout.takes)
        yield from reading(channel, run, ((peer, place) for peer, place in told if place & ADDRESS))
        movement.is_done = True
    except BaseException:
        _keep_told(channel, check, movement, mark)
        raise


def _keep_told(channel: Channel, check: int, movement: Movement, mark: int) -> None:
    is_refused = channel.is_reached(channel.last) and channel.disagreeing(
        movement.layout.check_of(check)
    )
    if mark & _OFFER and movement.outgoing and not is_refused:
        channel.keep(movement)  # others may still be reading what this rank has told them of


def teach_moves(
    channel: Channel, layout: TransferLayout, blocks: Blocks, starts: Starts, native: Any
) -> bool:
    """Tell the C runner of a call of long blocks what it does; returns whether it takes that.

    Args:
        channel: This rank's.
        layout: What such calls have in common.
        blocks: Of such a call.
        starts: Where they begin in the arrays of a call, see `Move`.
        native: The call.
    """
    for pattern, way in enumerate((TransferPath.CELLS, TransferPath.DIRECT)):
        code = layout.code(channel, blocks, way, starts)
        program = native_of(code, layout.how)
        if program is None:
            return False
        native.learn(
            pattern, False, False, -1 if code.last_side is None else code.last_side, program
        )
    return True


def _put_blocks(channel: Channel, movement: Movement) -> int:
    """Put what goes with phase 0; returns the mark that is published with it."""
    layout, blocks = movement.layout, movement.blocks
    if layout.goes_by_slots(channel):
        open_code(
            channel,
            layout.code(channel, blocks, TransferPath.SLOTS),
            layout.how,
            movement.arrays,
            channel.side ^ 1,
        )
        return 0
    side = channel.tail ^ 1
    flat = movement.outgoing
    if flat:
        channel.reserve_segments()
    offer = _tell(channel, layout, flat)
    if flat and not offer:
        open_code(
            channel,
            layout.code(channel, blocks, TransferPath.CELLS),
            layout.how,
            movement.arrays,
            side,
        )
        channel.tail = side
    return side << 3 | offer


def _tell(channel: Channel, layout: TransferLayout, blocks: Sequence[NDArray[Any]]) -> int:
    """Tell where blocks lie, if they can be taken there; returns the offer, 0 where they have to go by cells."""
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
    channel.tell_places(places)
    return offer if places else offer & ~_LOCATED


def take_blocks(channel: Channel, check: int, movement: Movement) -> Iterator[int]:
    """Take what is for this rank, when all ranks have published phase 0; put and publish what does not go with it."""
    layout, blocks = movement.layout, movement.blocks
    sources, marks = channel.arrays()
    if channel.disagreeing(layout.check_of(check)):
        if layout.detail is None or any(source != check for source in sources):
            yield DISAGREE
        return
    if layout.detail == 0:
        return
    sides = tuple([mark >> 3 for mark in marks])
    offers = [mark & _OFFER for mark in marks]
    if layout.goes_by_slots(channel):
        code = layout.code(channel, blocks, TransferPath.SLOTS)
        sides = channel.sides()
    elif reduce(and_, offers) & (
        _READS | _RESIDENT
    ):  # all can take them where they lie, in one way or another
        code = layout.code(channel, blocks, TransferPath.DIRECT)
    else:
        has_told = offers[channel.rank] != 0 and len(blocks.outgoing) > 0
        code = layout.code(
            channel,
            blocks,
            TransferPath.CELLS,
            has_told=has_told,
            some_told=any(offer & _LOCATED for offer in offers),
        )
        if code.last_side is not None:
            channel.tail = (sides[channel.rank] & 1) ^ code.last_side

    def lying(_kind: int, rank: int, place: int) -> ShmRef | RemoteRef:
        told = channel.told_place(rank, place)
        return RemoteRef(rank, told, layout.dtype) if told & ADDRESS else ShmRef(told, layout.dtype)

    yield from run_code(channel, code, layout.how, movement.arrays, sides, lying=lying)
    movement.is_done = True
