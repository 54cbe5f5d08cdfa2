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
from syncvar.runtime.crowd import copy_holding, crowd
from syncvar.runtime.kernels import quiet
from syncvar.runtime.phases import DISAGREE, NEVER
from syncvar.runtime.shared_reduce import combine, copier
from syncvar.runtime.whereabouts import ADDRESS, Gone, place_of, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.runtime.kernels import Combiner

__all__ = [
    "Blocks", "Fold", "Layout", "Movement", "Said", "are_taken_in_place", "folded", "move_shared", "put_blocks", "said_of",
    "take_blocks", "take_where_they_lie", "tell",
]  # fmt: skip

_WINDOWS = 4  # in a segment: of all blocks that a rank puts side by side


class Fold(NamedTuple):
    """How what comes in is combined, of a reduce-scatter.

    Args:
        ufunc: Combines two operands.
        divisor: What the combination is divided by; 0 for nothing.
    """

    ufunc: Combiner
    divisor: int = 0


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
        return min(self.elements, max(1, SEGMENT_BYTES // _WINDOWS // (self.dtype.itemsize * self.blocks)))


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

    __slots__ = ("blocks", "is_done", "layout", "outgoing")

    def __init__(self, layout: Layout, blocks: Blocks) -> None:
        self.layout = layout
        self.blocks = blocks
        self.outgoing: list[NDArray[Any]] = []  # flat, alive until the others have taken them; not of small blocks
        self.is_done = False  # else the details differ, and the call has to go on in the general way


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
    said = put_blocks(channel, check, movement)
    try:
        yield channel.begin(call, said.full, check, said.mark)
        yield from take_blocks(channel, said, movement)
    except BaseException:
        is_refused = channel.is_reached(channel.last) and channel.disagreeing(said.full)
        if movement.outgoing and not is_refused:
            channel.keep(movement)  # others may still be reading what this rank has told them of
        raise


def put_blocks(channel: Channel, check: int, movement: Movement) -> Said:
    """Put what goes with phase 0; returns what is published with it."""
    layout, outgoing = movement.layout, movement.blocks.outgoing
    if layout.is_small:
        count = layout.elements
        if outgoing:
            slot = channel.small(channel.rank, channel.side ^ 1, count * len(outgoing), layout.dtype)
            for place, block in enumerate(outgoing):
                slot[place * count : (place + 1) * count] = block.reshape(-1)
        return said_of(layout, check)
    side = channel.tail ^ 1
    flat = movement.outgoing = _flat(outgoing)
    if flat:
        channel.reserve_segments()
    offer = tell(channel, layout, flat)
    if flat and not offer:
        _put(channel, layout, flat, side, 0, copier())
    return said_of(layout, check, side, offer)


def tell(channel: Channel, layout: Layout, blocks: Sequence[NDArray[Any]]) -> int:
    """Tell where blocks lie, if they can be taken there; returns the offer, 0 where they have to go by windows."""
    offer = RESIDENT | TOLD if channel.reach is None or layout.fold is not None else READS | RESIDENT | TOLD
    places = []
    for block in blocks:
        if block.dtype != layout.dtype or not block.flags.c_contiguous:
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
    layout, blocks = movement.layout, movement.blocks
    sources, marks = channel.arrays()
    if channel.disagreeing(said.full):
        if layout.detail is None or any(source != said.check for source in sources):
            yield DISAGREE
        return
    if layout.detail == 0:
        return
    copy = copier()
    targets = [target.reshape(-1) for target in blocks.targets]
    own = None if blocks.own is None else blocks.own.reshape(-1)
    if layout.is_small:
        _keep(blocks, copy)
        count, dtype = layout.elements, layout.dtype
        parts = [
            channel.small(peer, channel.side_of(peer), count * (place + 1), dtype)[place * count :]
            for peer, place in layout.takes
        ]
        _take(layout, channel.rank, parts, targets, own, copy)
    else:
        offers = [mark & 7 for mark in marks]
        if are_taken_in_place(reduce(and_, offers)):
            places = [channel.told_place(peer, place) for peer, place in layout.takes]
            try:
                take_where_they_lie(channel, layout, places, blocks)
            except Gone:
                yield NEVER
            yield channel.publish()
        else:
            _keep(blocks, copy)
            if any(offers):  # the first window is still to come
                if blocks.outgoing and said.offer:
                    movement.outgoing = movement.outgoing or _flat(blocks.outgoing)
                    _put(channel, layout, movement.outgoing, said.side, 0, copy)
                yield channel.publish()
            yield from _take_by_windows(channel, movement, [mark >> 3 for mark in marks], targets, own, copy)
    movement.is_done = True


def are_taken_in_place(common: int) -> bool:
    """Return whether blocks are taken where they lie, from what all ranks offer alike."""
    return common > TOLD


def _keep(blocks: Blocks, copy: Any) -> None:
    """Copy what this rank brings for itself."""
    if blocks.own_target is not None and blocks.own is not None:
        copy(blocks.own_target.reshape(-1), blocks.own.reshape(-1))


def take_where_they_lie(channel: Channel, layout: Layout, places: Sequence[int], blocks: Blocks) -> None:
    """Take blocks that others leave in place until all have published the next phase; keep what is this rank's own.

    Raises:
        Gone: A rank's process is no more.
    """
    hold = crowd.holds()
    copy = copy_holding if hold else np.copyto
    dtype, count = layout.dtype, layout.elements
    if layout.fold is not None:
        own = None if blocks.own is None else blocks.own.reshape(-1)
        parts = [channel.resident(place, count, dtype) for place in places]
        with quiet():  # what overflows is infinite, on all ranks
            folded(layout.fold, dtype, channel.rank, parts, own, blocks.targets[0].reshape(-1))
        return
    for (peer, _), place, target in zip(layout.takes, places, blocks.targets, strict=True):
        if place & ADDRESS:
            read(channel, peer, place, target, hold=hold)
        else:
            copy(target.reshape(-1), channel.resident(place, count, dtype))
    _keep(blocks, copy)


def _take_by_windows(
    channel: Channel,
    movement: Movement,
    sides: list[int],
    targets: list[NDArray[Any]],
    own: NDArray[Any] | None,
    copy: Any,
) -> Iterator[int]:
    layout, outgoing = movement.layout, movement.outgoing
    count, dtype, width = layout.elements, layout.dtype, layout.width
    side = sides[channel.rank]
    window = start = 0
    while True:
        stop = min(count, start + width)
        if stop < count and outgoing:
            _put(channel, layout, outgoing, side ^ 1, stop, copy)
        parts = [
            channel.segment(peer, (sides[peer] + window) & 1, stop - start, dtype, place * width)
            for peer, place in layout.takes
        ]
        into = [target[start:stop] for target in targets]
        _take(layout, channel.rank, parts, into, own if own is None else own[start:stop], copy)
        if stop >= count:
            return
        yield channel.publish()
        start, side = stop, side ^ 1
        window += 1


def _flat(blocks: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return blocks as flat arrays in one piece."""
    return [np.ascontiguousarray(block).reshape(-1) for block in blocks]


def _put(channel: Channel, layout: Layout, outgoing: list[NDArray[Any]], side: int, start: int, copy: Any) -> None:
    width = layout.width
    stop = min(layout.elements, start + width)
    for place, block in enumerate(outgoing):
        copy(channel.segment(channel.rank, side, stop - start, layout.dtype, place * width), block[start:stop])
    channel.tail = side


def _take(
    layout: Layout,
    rank: int,
    parts: list[NDArray[Any]],
    targets: list[NDArray[Any]],
    own: NDArray[Any] | None,
    copy: Any,
) -> None:
    if layout.fold is None:
        for part, target in zip(parts, targets, strict=True):
            copy(target, part)
    else:
        folded(layout.fold, layout.dtype, rank, parts, own, targets[0])


def folded(
    fold: Fold, dtype: np.dtype[Any], rank: int, parts: Sequence[NDArray[Any]], own: Any, target: NDArray[Any]
) -> None:
    """Combine what the other ranks have put, and what this one brings for itself, in the order of ranks.

    Args:
        fold: How.
        dtype: In which is combined.
        rank: This process in the group.
        parts: Of the other ranks, in their order.
        own: Of this rank.
        target: Where the combination goes; it is none of the operands.
    """
    terms = list(parts)
    terms.insert(rank, own if own.dtype == dtype else own.astype(dtype))
    made = target if target.dtype == dtype else np.empty(target.shape, dtype)
    combine(terms, fold.ufunc, made)
    if fold.divisor:
        np.divide(made, fold.divisor, out=made)
    if made is not target:
        target[...] = made
