"""Collectives in shared memory whose ranks bring the same: no header, no buffer in between, each byte in and out once.

Every rank puts blocks side by side where the others see them, publishes, and takes from the others what is for it, to
where the caller wants it: all-gather and broadcast put one block for everybody, reduce-scatter and all-to-all one for
each other rank. Small blocks take one phase; longer ones go window by window, on two sides in turn.

What may differ between ranks without being wrong (lengths of an all-gather, say) is the **detail**, a number published
beside the check: where the details differ nothing is taken, and the call goes on in the general way, with a header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.arena.channels import MASK, SEGMENT_BYTES, SMALL_BYTES
from syncvar.runtime.crowd import copy_holding, crowd
from syncvar.runtime.phases import DISAGREE
from syncvar.runtime.shared_reduce import combine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.runtime.kernels import Combiner

__all__ = ["Fold", "Movement", "move_shared"]

_WINDOWS = 2  # in a segment: of all blocks that a rank puts side by side


class Fold(NamedTuple):
    """How what comes in is combined, of a reduce-scatter.

    Args:
        ufunc: Combines two operands.
        own: This rank's own block, flat.
        out: Where the combination goes, flat.
        divisor: What it is divided by; 0 for nothing.
    """

    ufunc: Combiner
    own: NDArray[Any]
    out: NDArray[Any]
    divisor: int = 0


class Movement:
    """What a call puts and takes.

    Args:
        detail: Says what this rank brings, for a call in which that may differ: unequal details take nothing. 0 stands
            for what cannot be moved this way; None for a call in which nothing may differ.
        dtype: Of the elements in shared memory.
        count: Elements of each block.
        blocks: Largest number of blocks that a rank of the group puts.
        outgoing: Flat blocks that this rank puts.
        incoming: (peer, which of its blocks, flat array to write to) for each block to take; with `fold` in the order of
            ranks, and the arrays are not looked at.
        local: (target, source) of what is copied within this rank, flat.
        fold: How what comes in is combined; None for calls that only move.
    """

    __slots__ = ("blocks", "count", "detail", "dtype", "fold", "incoming", "is_done", "local", "outgoing")

    def __init__(
        self,
        detail: int | None,
        dtype: np.dtype[Any],
        count: int = 0,
        blocks: int = 0,
        outgoing: Sequence[NDArray[Any]] = (),
        incoming: Sequence[tuple[int, int, NDArray[Any]]] = (),
        local: Sequence[tuple[NDArray[Any], NDArray[Any]]] = (),
        fold: Fold | None = None,
    ) -> None:
        self.detail = detail
        self.dtype = dtype
        self.count = count
        self.blocks = blocks
        self.outgoing = outgoing
        self.incoming = incoming
        self.local = local
        self.fold = fold
        self.is_done = False  # else the details differ, and the call has to go on in the general way


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
    detail, count, dtype = movement.detail, movement.count, movement.dtype
    copy: Any = copy_holding if crowd.holds() else np.copyto
    rank = channel.rank
    is_small = count * movement.blocks * dtype.itemsize <= SMALL_BYTES
    side = 0
    if is_small:
        if movement.outgoing:
            slot = channel.small(rank, channel.side ^ 1, count * len(movement.outgoing), dtype)
            for place, block in enumerate(movement.outgoing):
                copy(slot[place * count : (place + 1) * count], block)
    else:
        side = channel.tail ^ 1
        if movement.outgoing:
            channel.reserve_segments()
            _put(channel, movement, side, 0, copy)
    said = check if detail is None else (check + detail) & MASK
    reached = channel.begin(call, said, 0 if detail is None else check, side)
    yield reached
    sources, sides = channel.arrays()
    if channel.disagreeing(said):
        if detail is None or any(source != check for source in sources):
            yield DISAGREE
        return
    if detail == 0:
        return
    for target, source in movement.local:
        copy(target, source)
    if is_small:
        _take(movement, [
            channel.small(peer, channel.side_of(peer), count * (place + 1), dtype)[place * count :]
            for peer, place, _ in movement.incoming
        ], 0, count, rank, copy)  # fmt: skip
        movement.is_done = True
        return
    width = _width(movement)
    window = start = 0
    while True:
        stop = min(count, start + width)
        if stop < count and movement.outgoing:
            _put(channel, movement, side ^ 1, stop, copy)
        _take(movement, [
            channel.segment(peer, (sides[peer] + window) & 1, stop - start, dtype, place * width)
            for peer, place, _ in movement.incoming
        ], start, stop, rank, copy)  # fmt: skip
        if stop >= count:
            movement.is_done = True
            return
        yield channel.publish()
        start, side = stop, side ^ 1
        window += 1


def _width(movement: Movement) -> int:
    """Return how many elements of each block go in one window."""
    return min(movement.count, max(1, SEGMENT_BYTES // _WINDOWS // (movement.dtype.itemsize * movement.blocks)))


def _put(channel: Channel, movement: Movement, side: int, start: int, copy: Any) -> None:
    width = _width(movement)
    stop = min(movement.count, start + width)
    for place, block in enumerate(movement.outgoing):
        copy(channel.segment(channel.rank, side, stop - start, movement.dtype, place * width), block[start:stop])
    channel.tail = side


def _take(movement: Movement, parts: list[NDArray[Any]], start: int, stop: int, rank: int, copy: Any) -> None:
    """Take the elements [start, stop) of each block, which lie at the beginning of `parts`."""
    count = stop - start
    fold = movement.fold
    if fold is None:
        for part, (_, _, target) in zip(parts, movement.incoming, strict=True):
            copy(target[start:stop], part[:count])
        return
    terms = [part[:count] for part in parts]
    terms.insert(rank, fold.own[start:stop].astype(movement.dtype, copy=False))
    out = fold.out[start:stop]
    made = out if out.dtype == movement.dtype else np.empty(count, movement.dtype)
    combine(terms, fold.ufunc, made)
    if fold.divisor:
        np.divide(made, fold.divisor, out=made)
    if made is not out:
        out[...] = made
