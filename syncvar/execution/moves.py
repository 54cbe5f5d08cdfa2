"""Collectives of one host whose ranks bring the same: no header, and each byte is copied once or twice.

All-gather and broadcast have one block for everybody, reduce-scatter and all-to-all one for each other rank. Every rank
takes from the others what is for it, to where the caller wants it:

* **small** blocks are put side by side where the others see them; one phase.
* **where they lie**: ranks tell each other where their blocks are, in the arena (`sv.empty`) or in their own memory where
  all can read it (`arena/reaching.py`), and take them there: one copy, two phases. What is combined is taken from the
  arena only: it needs no copy there, and one from a rank's own memory.
* **by windows** else: put and taken window by window, on two sides in turn.

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
from syncvar.execution.addresses import ADDRESS, Gone, place_of
from syncvar.execution.lower_moves import Move, Way, move_code
from syncvar.execution.phases import DISAGREE, NEVER
from syncvar.execution.program import Kind
from syncvar.execution.reductions import copier, folder, storer
from syncvar.execution.running import Arithmetic, Lying, Reached, found_in, native_of, open_code, run_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.execution.kernels import Combiner
    from syncvar.execution.program import Code

__all__ = ["Blocks", "Fold", "Layout", "Movement", "Said", "move_shared", "said_of", "take_blocks", "window_of"]

_WINDOWS = 4  # in a segment: of all blocks that a rank puts side by side
_NOTHING: NDArray[Any] = np.empty(0, np.uint8)


class Fold(NamedTuple):
    """How what comes in is combined, of a reduce-scatter.

    Args:
        ufunc: Combines two operands.
        divisor: What the combination is divided by; 0 for nothing.
    """

    ufunc: Combiner
    divisor: int = 0


def window_of(elements: int, itemsize: int, blocks: int) -> int:
    """Return how many elements of each block go through cells at a time, where a rank puts at most so many blocks."""
    return max(1, min(elements, SEGMENT_BYTES // _WINDOWS // (itemsize * max(1, blocks))))


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
    """

    detail: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    blocks: int = 0
    takes: tuple[tuple[int, int], ...] = ()
    fold: Fold | None = None

    @property
    def elements(self) -> int:
        """Elements of each block."""
        return prod(self.shape)

    @property
    def is_small(self) -> bool:
        """Whether the blocks of a rank go into its small slot."""
        return self.elements * self.blocks * self.dtype.itemsize <= SMALL_BYTES

    @property
    def width(self) -> int:
        """Elements of each block in one window."""
        return window_of(self.elements, self.dtype.itemsize, self.blocks)

    @property
    def arithmetic(self) -> Arithmetic:
        """What becomes of the blocks."""
        if self.fold is None:
            return Arithmetic(None, self.dtype, self.dtype)
        return Arithmetic(self.fold.ufunc, self.dtype, self.dtype, self.fold.divisor)

    def code(self, rank: int, blocks: Blocks, way: Way, **told: bool) -> Code:
        """Return what a rank does with its blocks, as a program; see `lower_move`."""
        folds, own = self.fold is not None, blocks.own
        move = Move(
            rank, self.elements, self.width, len(blocks.outgoing), self.takes,
            keeps=own is not None and (folds or blocks.own_target is not None), folds=folds,
            converts=folds and own is not None and own.dtype != self.dtype,
            makes_first=folds and blocks.targets[0].dtype != self.dtype,
        )  # fmt: skip
        return move_code(move, way, **told)


class Blocks(NamedTuple):
    """The arrays of one call, each of the layout's shape.

    Args:
        made: The result.
        outgoing: What this rank puts.
        targets: Where what it takes goes, contiguous; with a fold one array, for the combination.
        own: What this rank brings for itself.
        own_target: Where it goes; None for nowhere, or with a fold.
    """

    made: Any
    outgoing: Sequence[NDArray[Any]] = ()
    targets: Sequence[NDArray[Any]] = ()
    own: NDArray[Any] | None = None
    own_target: NDArray[Any] | None = None


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
        side: Of its first window.
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


# What a rank offers, or 0: it can read the memory of all; its blocks, if any, lie in the arena; it has told where, and put
# none.
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
        is_refused = channel.is_reached(channel.last) and channel.disagreeing(said.full)
        if said.offer and movement.outgoing and not is_refused:
            channel.keep(movement)  # others may still be reading what this rank has told them of
        raise


def _put_blocks(channel: Channel, check: int, movement: Movement) -> Said:
    """Put what goes with phase 0; returns what is published with it."""
    layout, rank = movement.layout, channel.rank
    if layout.is_small:
        code = layout.code(rank, movement.blocks, Way.SLOTS)
        _open(channel, movement, code, channel.side ^ 1)
        return said_of(layout, check)
    side = channel.tail ^ 1
    flat = movement.outgoing
    if flat:
        channel.reserve_segments()
    offer = _tell(channel, layout, flat)
    if flat and not offer:
        code = layout.code(rank, movement.blocks, Way.WINDOWS)
        _open(channel, movement, code, side)
        channel.tail = side
    return said_of(layout, check, side, offer)


def _tell(channel: Channel, layout: Layout, blocks: Sequence[NDArray[Any]]) -> int:
    """Tell where blocks lie, if they can be taken there; returns the offer, 0 where they have to go by windows."""
    offer = RESIDENT | TOLD if channel.reach is None or layout.fold is not None else READS | RESIDENT | TOLD
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
    return offer


def take_blocks(channel: Channel, said: Said, movement: Movement) -> Iterator[int]:
    """Take what is for this rank, when all ranks have published phase 0; put and publish what does not go with it."""
    layout, rank = movement.layout, channel.rank
    sources, marks = channel.arrays()
    if channel.disagreeing(said.full):
        if layout.detail is None or any(source != said.check for source in sources):
            yield DISAGREE
        return
    if layout.detail == 0:
        return
    sides = tuple([mark >> 3 for mark in marks])
    offers = [mark & 7 for mark in marks]
    if layout.is_small:
        code = layout.code(rank, movement.blocks, Way.SLOTS)
        sides = channel.sides()
    elif reduce(and_, offers) > TOLD:  # all can take them where they lie, in one way or another
        code = layout.code(rank, movement.blocks, Way.LYING)
    else:
        has_told = said.offer != 0 and len(movement.outgoing) > 0
        code = layout.code(rank, movement.blocks, Way.WINDOWS, has_told=has_told, some_told=any(offers))
        if code.last_side is not None:
            channel.tail = said.side ^ code.last_side
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
            found[number] = _NOTHING if target is None else target.reshape(-1)
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
