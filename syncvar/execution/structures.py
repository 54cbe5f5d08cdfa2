"""Several arrays in one all-reduce: the long ones one after another where they lie, the others as one vector.

Where the pieces of the others begin and end depends on the counts only, and is worked out once, by their program. Of the
long ones the ranks first tell each other where they lie in the arena.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from syncvar.arena.channels import SEGMENT_BYTES
from syncvar.execution.phases import agreed
from syncvar.execution.reductions import Placed, bring_first, is_direct, reduce_owned, reduce_shared

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncvar.arena.channel import Channel
    from syncvar.execution.reductions import Vector

_ALONE_BYTES = 256 << 10  # of an array that is reduced by itself: below, its own phases cost more than copying it
_WORD = np.dtype(np.uint64)
_ALONE_MAX = SEGMENT_BYTES // (2 * _WORD.itemsize)  # whose places fit into a segment

__all__ = ["reduce_fused"]


def reduce_fused(channel: Channel, opening: tuple[int, int] | None, vector: Vector) -> Generator[int, None, bool]:
    """Combine arrays of all ranks in shared memory, as `reduce_shared` does one.

    Args:
        channel: This rank's.
        opening: (call, check) where this is the first stage of a call; None for a later one.
        vector: The arrays.

    Yields:
        What the others have to reach.

    Returns:
        Whether everybody has read what this rank has put; the same on all ranks.
    """
    is_small = opening is not None and is_direct(vector.nbytes, channel.size)
    alone, joined = ((), ()) if is_small else _divided(vector.counts, vector.accumulate.itemsize)
    if not alone:
        return (yield from reduce_shared(channel, opening, vector))
    channel.reserve_segments()
    sides = yield from _reduce_alone(channel, opening, vector.only(alone))
    if not joined:
        return True
    rest = vector.only(joined)
    bring_first(channel, rest, sides[channel.rank])
    yield channel.publish()
    return (yield from reduce_owned(channel, rest, Placed.nowhere(channel.size, 0)._replace(sides=sides)))


@lru_cache(maxsize=256)
def _divided(counts: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which arrays are reduced by themselves, and which together."""
    alone = tuple([place for place, count in enumerate(counts) if count * itemsize >= _ALONE_BYTES][:_ALONE_MAX])
    taken = set(alone)
    return alone, tuple([place for place in range(len(counts)) if place not in taken])


def _reduce_alone(channel: Channel, opening: tuple[int, int] | None, several: Vector) -> Generator[int, None, list[int]]:
    """Reduce long arrays one after another; returns on which side each rank brings its next segment."""
    rank, size = channel.rank, channel.size
    vectors = [several.only([place]) for place in range(len(several.sources))]
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
