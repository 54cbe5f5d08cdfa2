"""Several arrays in one all-reduce: the long ones one after another where they lie, the others as one vector.

The others are read as their concatenation, piece by piece, straight into what a rank publishes, and the result is stored
piece by piece where it belongs. Where pieces begin and end depends on the counts only, and is worked out once. Of the long
ones the ranks first tell each other where they lie in the arena.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.arena.channels import SEGMENT_BYTES
from syncvar.execution.lower_reduce import owner_bounds
from syncvar.runtime.phases import agreed
from syncvar.runtime.shared_reduce import (
    Placed,
    Vector,
    bring_first,
    combine,
    is_direct,
    reduce_owned,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.runtime.kernels import Combiner

_ALONE_BYTES = 256 << 10  # of an array that is reduced by itself: below, its own phases cost more than copying it
_WORD = np.dtype(np.uint64)
_ALONE_MAX = SEGMENT_BYTES // (2 * _WORD.itemsize)  # whose places fit into a segment

__all__ = ["Fused", "Piece", "fused_in", "fused_out", "pieces", "reduce_fused"]


class Piece(NamedTuple):
    """A part of one array: elements [start, stop) of array number `array`, at `place` of the stretch asked for."""

    array: int
    start: int
    stop: int
    place: int


class Fused(NamedTuple):
    """Arrays that are reduced together.

    Args:
        sources: Flat arrays, what this rank brings.
        targets: Flat arrays of the same counts, where the result goes.
        accumulate: dtype in which they are combined.
        divisor: What the combination is divided by; 0 for nothing.
        apply: A target becomes apply(target, combination); None sets it.
    """

    sources: Sequence[NDArray[Any]]
    targets: Sequence[NDArray[Any]]
    accumulate: np.dtype[Any]
    divisor: int = 0
    apply: np.ufunc | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each array."""
        return tuple([source.size for source in self.sources])

    @property
    def nbytes(self) -> int:
        """Bytes of what this rank brings."""
        return sum([source.nbytes for source in self.sources])

    def only(self, places: Sequence[int]) -> Fused:
        """Return the same for some of the arrays."""
        return self._replace(
            sources=[self.sources[place] for place in places], targets=[self.targets[place] for place in places]
        )


@lru_cache(maxsize=256)
def pieces(counts: tuple[int, ...], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the pieces of the elements [start, stop) of the concatenation of arrays with these counts.

    Example:
        >>> [tuple(piece) for piece in pieces((2, 0, 3), 1, 4)]
        [(0, 1, 2, 0), (2, 0, 2, 1)]
    """
    found = []
    begin = 0
    for index, count in enumerate(counts):
        low, high = max(start, begin), min(stop, begin + count)
        if high > low:
            found.append(Piece(index, low - begin, high - begin, low - start))
        begin += count
        if begin >= stop:
            break
    return tuple(found)


def fused_in(arrays: Sequence[NDArray[Any]], counts: tuple[int, ...], start: int, stop: int, into: NDArray[Any]) -> None:
    """Copy the elements [start, stop) of the concatenation of flat arrays into `into`."""
    if stop - start == sum(counts) and into.dtype == arrays[0].dtype:
        np.concatenate(arrays, out=into)
        return
    for index, first, last, place in pieces(counts, start, stop):
        into[place : place + last - first] = arrays[index][first:last]


def fused_out(
    arrays: Sequence[NDArray[Any]],
    counts: tuple[int, ...],
    start: int,
    value: NDArray[Any],
    apply: np.ufunc | None,
) -> None:
    """Store `value` as the elements from `start` on of the concatenation of flat arrays."""
    is_plain = apply is not None and arrays[0].dtype == value.dtype
    for index, first, last, place in pieces(counts, start, start + value.size):
        target = arrays[index]
        count = last - first
        if count != target.size:
            target = target[first:last]
        part = value[place : place + count]
        if apply is None:
            target[...] = part
        elif is_plain:
            apply(target, part, out=target)
        else:
            apply(target, part, out=target, casting="same_kind")


def reduce_fused(
    channel: Channel, opening: tuple[int, int] | None, fused: Fused, ufunc: Combiner
) -> Iterator[int]:
    """Combine arrays of all ranks in shared memory, as `reduce_shared` does one.

    Args:
        channel: This rank's.
        opening: (call, check) where this is the first stage of a call; None for a later one.
        fused: The arrays.
        ufunc: Combines two operands.

    Yields:
        What the others have to reach.
    """
    count = sum(fused.counts)
    rank, size = channel.rank, channel.size
    dtype = fused.accumulate
    if opening is not None and is_direct(count * dtype.itemsize, size):
        sources, targets, _, divisor, apply = fused
        counts = fused.counts
        fused_in(sources, counts, 0, count, channel.small(rank, channel.side ^ 1, count, dtype))
        call, check = opening
        yield from agreed(channel, check, channel.begin(call, check))
        total = np.empty(count, dtype)
        combine(channel.smalls_now(count, dtype), ufunc, total)
        fused_out(targets, counts, 0, total / divisor if divisor else total, apply)
        return
    channel.reserve_segments()
    alone, joined = _divided(fused.counts, dtype.itemsize)
    if alone:
        sides = yield from _reduce_alone(channel, opening, fused.only(alone), ufunc)
        if joined:
            yield from _reduce_joined(channel, None, fused.only(joined), ufunc, sides)
    else:
        sides = [channel.tail ^ 1 if opening is not None else channel.next_parity()] * size
        yield from _reduce_joined(channel, opening, fused, ufunc, sides)


@lru_cache(maxsize=256)
def _divided(counts: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which arrays are reduced by themselves, and which together."""
    alone = tuple([place for place, count in enumerate(counts) if count * itemsize >= _ALONE_BYTES][:_ALONE_MAX])
    taken = set(alone)
    return alone, tuple([place for place in range(len(counts)) if place not in taken])


def _reduce_alone(
    channel: Channel, opening: tuple[int, int] | None, fused: Fused, ufunc: Combiner
) -> Generator[int, None, list[int]]:
    """Reduce long arrays one after another; returns on which side each rank brings its next segment."""
    rank, size = channel.rank, channel.size
    vectors = [
        Vector(source, target, ufunc, fused.accumulate, fused.divisor, fused.apply)
        for source, target in zip(fused.sources, fused.targets, strict=True)
    ]
    side = channel.tail ^ 1 if opening is not None else channel.next_parity()
    told = [vector.told(channel, side ^ 1) for vector in vectors]  # others may still be reading the table on this side
    length = 2 * len(told)
    channel.segment(rank, side, length, _WORD).reshape(-1, 2)[...] = told
    if opening is not None:
        call, check = opening
        yield from agreed(channel, check, channel.begin(call, check, side))
        sides, _ = channel.arrays()
    else:
        yield channel.publish()
        sides = [side] * size
    tables = [channel.segment(other, sides[other], length, _WORD).tolist() for other in range(size)]
    for index, vector in enumerate(vectors):
        placed = Placed.from_words([table[2 * index] for table in tables], [table[2 * index + 1] for table in tables])
        if placed.go_by_segments:
            if placed.sources[rank] is None:
                bring_first(channel, vector, placed.sides[rank])
            yield channel.publish()  # and the others have taken the results of the vector before
        yield from reduce_owned(channel, vector, placed, goes_on=True)
    return [one ^ 1 for one in sides]


def _reduce_joined(
    channel: Channel, opening: tuple[int, int] | None, fused: Fused, ufunc: Combiner, sides: list[int]
) -> Iterator[int]:
    """Reduce the concatenation of arrays by segments.

    Args:
        channel: This rank's.
        opening: As in `reduce_fused`.
        fused: The arrays.
        ufunc: Combines two operands.
        sides: Of the first segment of each rank; with an opening only that of this rank counts.

    Yields:
        What the others have to reach.
    """
    sources, targets, dtype, divisor, apply = fused
    counts = fused.counts
    rank, size = channel.rank, channel.size
    count = sum(counts)
    per_segment = SEGMENT_BYTES // dtype.itemsize
    first = min(count, per_segment)
    fused_in(sources, counts, 0, first, channel.segment(rank, sides[rank], first, dtype))
    if opening is not None:
        call, check = opening
        yield from agreed(channel, check, channel.begin(call, check, sides[rank]))
        sides, _ = channel.arrays()
    else:
        yield channel.publish()
    start = segment = 0
    while True:
        stop = min(count, start + per_segment)
        parts = owner_bounds(stop - start, size)
        low, high = parts[rank]
        terms = [
            channel.segment(other, (base + segment) & 1, high - low, dtype, low) for other, base in enumerate(sides)
        ]
        made = channel.segment(rank, 2 + (segment & 1), high - low, dtype)
        combine(terms, ufunc, made)
        if divisor:
            np.divide(made, divisor, out=made)
        fused_out(targets, counts, start + low, made, apply)
        if stop < count:
            following = min(count, stop + per_segment)
            slot = channel.segment(rank, (sides[rank] + segment + 1) & 1, following - stop, dtype)
            fused_in(sources, counts, stop, following, slot)
        yield channel.publish()
        for distance in range(1, size):
            other = (rank + distance) % size
            low, high = parts[other]
            taken = channel.segment(other, 2 + (segment & 1), high - low, dtype)
            fused_out(targets, counts, start + low, taken, apply)
        if stop >= count:
            return
        start = stop
        segment += 1
