"""The all-reduce in shared memory: the plans "direct" (small) and "owners" (long), read and written where the data lie.

Sums follow the tree T(0, n) over ranks, so `reproducible=True` costs nothing here and the bytes are equal on all ranks.

* **small**: each rank publishes its vector in its slot and sums all slots itself; one phase.
* **into all**: every rank's target lies in shared memory: each owner sums its part of all sources and writes the sum (or what
  becomes of the target with it) into all targets. Where the sources lie there too, two phases do; where source and
  target are the same array it is reduced in place, with no copy. What becomes of a target is worked out from that target
  itself: copies that have come to differ stay different, as on other ways, so that somebody can still find it.
* **by segments**: the vector is cut into segments that stay in the caches. In one phase each rank sums its part of
  segment k, brings segment k+1, and afterwards takes the others' sums of segment k. Sources that lie in shared memory are
  read where they are. Half types travel as they are: each owner widens what it sums, and rounds the sum once.

Several arrays of one kind are one vector, the concatenation of them. Where long ones lie in shared memory, the ranks tell each other where,
and reduce them one after another; the others are put together. Short vectors of several kinds lie side by side in the slots, also beside
one long vector, with which they ride.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native.constants import AT_PAGE, SLOT_ALIGN_BYTES, MemoryKind
from syncvar.algorithms.selection import choose
from syncvar.runtime.programs.arithmetic import Arithmetic
from syncvar.runtime.programs.buffer_location import ShmRef
from syncvar.runtime.programs.compile_reduce import (
    EVERYWHERE,
    BufferPlacement,
    Cells,
    ResultPlacement,
    reduce_code,
)
from syncvar.runtime.programs.program_runner import agreed, native_of, open_code, run_code
from syncvar.shm.channel_table import SEGMENT_BYTES, WIDE_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.core.reduce_ops import Combiner
    from syncvar.runtime.programs.instructions import CompiledProgram
    from syncvar.shm.group_channel import Channel

__all__ = [
    "PlacedBuffers",
    "ReduceBuffers",
    "cells_of",
    "combine_small",
    "flat_of",
    "in_one_exchange",
    "is_alone",
    "is_direct",
    "places_of",
    "reduce_published",
    "reduce_shared",
    "reduce_small",
    "teach",
]

_NOWHERE = 0  # in a published word only: nothing lies at offset 0 but shared memory's header
_APART = 1  # likewise, of several arrays: long ones lie in shared memory, so that each rank has to tell of each where it lies
_BLOCK_BYTES = 256 << 10  # what one owner sums before it writes it to all targets
_NATIVE_BLOCK_BYTES = 32 << 10
_CELLS, _LAG = (
    8,
    4,
)  # of a segment, where all ranks run programs in C; and how many may wait to be read
_SUMS_ALL_MAX = 2  # ranks that sum all cells each; of more, each combines its part
_ALONE_BYTES = (
    256 << 10
)  # of one of several arrays that is reduced by itself: below, its own phases cost more than copying it
_WORD = np.dtype(np.uint64)
_ALONE_MAX = SEGMENT_BYTES // (2 * _WORD.itemsize)  # whose places fit into a segment


def is_direct(nbytes: int, size: int) -> bool:
    """Return whether everybody sums a vector of this size, rather than each rank its part."""
    return choose("all_reduce", nbytes, size, shared=True).algorithm == "direct"


class ReduceBuffers(NamedTuple):
    """What a rank brings to a reduction, and where the result goes: the concatenation of flat arrays.

    Args:
        sources: Arrays of one dtype; each may be its target itself, but overlap none otherwise.
        targets: Arrays of the same counts, of one dtype.
        how: What becomes of the terms.
        ends: Which ranks end with what; where this rank ends with nothing, its targets have no elements.
    """

    sources: Sequence[NDArray[Any]]
    targets: Sequence[NDArray[Any]]
    how: Arithmetic
    ends: ResultPlacement = EVERYWHERE

    @classmethod
    def of(
        cls,
        sources: Sequence[NDArray[Any]],
        targets: Sequence[NDArray[Any]],
        ufunc: Combiner,
        accumulate: np.dtype[Any],
        divisor: int = 0,
        apply: np.ufunc | None = None,
        ends: ResultPlacement = EVERYWHERE,
    ) -> ReduceBuffers:
        """Return the vector of such arrays, combined as `Arithmetic` says: halves travel as they are, and the owner widens them."""
        brought = sources[0].dtype
        is_widened = brought != accumulate and targets[0].dtype == brought and apply is None
        how = Arithmetic(ufunc, brought if is_widened else accumulate, accumulate, divisor, apply)
        return cls(sources, targets, how, ends)

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each array."""
        return tuple([source.size for source in self.sources])

    @property
    def nbytes(self) -> int:
        """Bytes of what is combined."""
        return sum(self.counts) * self.how.accumulate.itemsize

    @property
    def suits_native(self) -> bool:
        """Whether the C runner takes it; the same on all ranks that make the same call."""
        return (
            self.sources[0].dtype == self.how.wire == self.targets[0].dtype
            and self.how.suits_native
        )

    def only(self, places: Sequence[int]) -> ReduceBuffers:
        """Return the same for some of the arrays."""
        return self._replace(
            sources=[self.sources[place] for place in places],
            targets=[self.targets[place] for place in places],
        )

    def told(self, channel: Channel, side: int) -> tuple[int, int]:
        """Return the words by which this rank tells where its arrays lie; what has to be brought comes on this side.

        `PlacedBuffers.from_words` reads them; nothing else may take such a word for an offset.
        """
        if len(self.sources) > 1:
            lie = any(
                channel.shm.locate(array) is not None
                for array in (*self.sources, *self.targets)
                if is_alone(array)
            )
            return (_APART if lie else _NOWHERE) << 1 | side, _NOWHERE
        x, out = self.sources[0], self.targets[0]
        source = channel.shm.locate(x) if x.dtype == self.how.wire else None
        target = source if out is x else channel.shm.locate(out)
        if out is x and self.ends != EVERYWHERE:  # others read it while it is written over
            source = None
        return (source or _NOWHERE) << 1 | side, target or _NOWHERE


def flat_of(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return flat views of arrays, and flat copies of those that are not contiguous."""
    return [
        array
        if array.ndim == 1 and array.flags.c_contiguous
        else np.ascontiguousarray(array).reshape(-1)
        for array in arrays
    ]


class PlacedBuffers(NamedTuple):
    """What all ranks have told of a vector, in their order.

    Args:
        sources: Where `x` lies in shared memory; `_NOWHERE` where it is brought.
        targets: Where `out` lies there, or `_NOWHERE`.
        sides: Of the first cells of what is brought, above bit 0 the page where they begin.
    """

    sources: Sequence[int]
    targets: Sequence[int]
    sides: tuple[int, ...]

    @classmethod
    def from_words(cls, sources: Sequence[int], targets: Sequence[int]) -> PlacedBuffers:
        """Read what `ReduceBuffers.told` of all ranks has returned, or the C runner of theirs has told."""
        places = [_NOWHERE if word & AT_PAGE else word >> 1 for word in sources]
        return cls(
            places,
            targets,
            tuple([word ^ AT_PAGE if word & AT_PAGE else word & 1 for word in sources]),
        )

    @property
    def places(self) -> BufferPlacement:
        """What a program has to know of it."""
        sources = frozenset([rank for rank, place in enumerate(self.sources) if place != _NOWHERE])
        in_place = any(self.sources[rank] == self.targets[rank] for rank in sources)
        return BufferPlacement(sources, into_all=_are_known(self.targets), by_owners=in_place)


def _are_known(places: Sequence[int]) -> bool:
    return _NOWHERE not in places


def reduce_shared(
    channel: Channel,
    opening: tuple[int, int] | None,
    vector: ReduceBuffers,
    riders: Sequence[ReduceBuffers] = (),
) -> Generator[int, None, bool]:
    """Combine a vector of all ranks.

    Args:
        channel: This rank's.
        opening: (call, check) where this is the first stage of a call; None for a later one.
        vector: What is combined.
        riders: Small vectors of other kinds, which are combined in the same call: they lie in the slots. For the first stage only.

    Yields:
        What the others have to reach.

    Returns:
        Whether everybody has read what this rank has put; the same on all ranks.
    """
    if opening is not None and not riders and is_direct(vector.nbytes, channel.size):
        yield from reduce_small(channel, opening, (vector,))
        return True
    channel.reserve_segments()
    if opening is None:
        return (yield from _reduce_later(channel, vector))
    call, check = opening
    side = channel.tail ^ 1
    source, target = vector.told(channel, side)
    if source >> 1 == _NOWHERE:
        _bring_first(channel, vector, side)
    _put_small(channel, riders)
    yield from agreed(channel, check, channel.begin(call, check, source, target))
    yield from combine_small(channel, riders)
    return (yield from _reduce_told(channel, vector))


def _reduce_told(
    channel: Channel, vector: ReduceBuffers, native: Any = None
) -> Generator[int, None, bool]:
    """Go on with a call of which all ranks have told where their arrays lie; teach the C runner what is done with such."""
    placed = PlacedBuffers.from_words(*channel.arrays())
    if len(vector.sources) > 1 and any(placed.sources):
        return (yield from _reduce_later(channel, vector))
    if native is not None:
        teach(channel, vector, placed.places, native)
    return (yield from _reduce_placed(channel, vector, placed))


def _reduce_later(channel: Channel, vector: ReduceBuffers) -> Generator[int, None, bool]:
    """Reduce a vector when phase 0 is over, and everybody has read what was put before: long arrays by themselves, where they lie."""
    sides = (channel.next_parity(),) * channel.size
    alone, joined = _divided(vector.counts, vector.how.accumulate.itemsize)
    if alone:
        sides = yield from _reduce_alone(channel, vector.only(alone))
        if not joined:
            return True
        vector = vector.only(joined)
    _bring_first(channel, vector, sides[channel.rank])
    yield channel.publish()
    return (
        yield from _reduce_placed(
            channel, vector, PlacedBuffers.from_words(sides, [_NOWHERE] * channel.size)
        )
    )


@lru_cache(maxsize=256)
def _divided(counts: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which of several arrays are reduced by themselves, and which together."""
    alone = (
        tuple(
            [place for place, count in enumerate(counts) if count * itemsize >= _ALONE_BYTES][
                :_ALONE_MAX
            ]
        )
        if len(counts) > 1
        else ()
    )
    return alone, tuple([place for place in range(len(counts)) if place not in set(alone)])


def is_alone(array: NDArray[Any]) -> bool:
    """Return whether one of several arrays is reduced by itself where it lies in shared memory, on this rank or another one."""
    return array.nbytes >= _ALONE_BYTES


def _reduce_alone(
    channel: Channel, several: ReduceBuffers
) -> Generator[int, None, tuple[int, ...]]:
    """Reduce long arrays one after another; returns on which side each rank brings its next segment."""
    rank, size = channel.rank, channel.size
    vectors = [several.only([place]) for place in range(len(several.sources))]
    side = channel.next_parity()
    told = [
        vector.told(channel, side ^ 1) for vector in vectors
    ]  # others may still be reading the table on this side
    length = 2 * len(told)
    channel.segment(rank, side, length, _WORD).reshape(-1, 2)[...] = told
    yield channel.publish()
    sides = [side] * size
    tables = [channel.segment(other, sides[other], length, _WORD).tolist() for other in range(size)]
    for index, vector in enumerate(vectors):
        placed = PlacedBuffers.from_words(
            [table[2 * index] for table in tables], [table[2 * index + 1] for table in tables]
        )
        if not (
            _are_known(placed.sources) and _are_known(placed.targets)
        ):  # results, or what is brought, go by way of segments
            if placed.sources[rank] == _NOWHERE:
                _bring_first(channel, vector, placed.sides[rank])
            yield channel.publish()  # and the others have taken the results of the vector before
        yield from _reduce_placed(channel, vector, placed, goes_on=True)
    return tuple([one ^ 1 for one in sides])


def reduce_published(
    channel: Channel,
    check: int,
    vector: ReduceBuffers,
    native: Any,
    riders: Sequence[ReduceBuffers] = (),
) -> Iterator[int]:
    """Go on with a call that the C runner has published; teach it what is done with vectors that lie as these do."""
    yield from agreed(channel, check, channel.last)
    yield from combine_small(channel, riders)
    yield from _reduce_told(channel, vector, native)


def teach(channel: Channel, vector: ReduceBuffers, places: BufferPlacement, native: Any) -> None:
    """Tell the C runner of a call what is done with vectors that lie in some way."""
    code = _code(channel, vector, places)
    sources = sum(1 << rank for rank in places.sources)
    native.learn(
        sources,
        places.into_all,
        places.by_owners,
        -1 if code.last_side is None else code.last_side,
        native_of(code, vector.how),
    )


def _bring_first(channel: Channel, vector: ReduceBuffers, side: int) -> None:
    """Put the first cells of a vector where the others see them."""
    code = _code(channel, vector, _NOWHERE_ELSE)
    open_code(channel, code, vector.how, vector[:2], side)
    if code.opening:
        channel.tail = side


_NOWHERE_ELSE = BufferPlacement()


def _reduce_placed(
    channel: Channel, vector: ReduceBuffers, placed: PlacedBuffers, *, goes_on: bool = False
) -> Generator[int, None, bool]:
    """Combine a vector, when all ranks know where the arrays of all lie.

    Args:
        channel: This rank's.
        vector: What is combined.
        placed: Where they lie; the first cells of what has to be brought have been published.
        goes_on: More of the call follows.

    Yields:
        What the others have to reach.

    Returns:
        Whether everybody has read this rank's cells; the same on all ranks.
    """
    code = _code(channel, vector, placed.places._replace(goes_on=goes_on))
    if code.last_side is not None:
        channel.tail = (placed.sides[channel.rank] & 1) ^ code.last_side
    how, kind_of_target = vector.how, vector.targets[0].dtype

    def lying(kind: int, rank: int, _place: int) -> ShmRef:
        return (
            ShmRef(placed.sources[rank], how.wire)
            if kind == MemoryKind.PEER_SOURCE
            else ShmRef(placed.targets[rank], kind_of_target)
        )

    yield from run_code(channel, code, how, vector[:2], placed.sides, lying=lying)
    return code.is_read


def _code(channel: Channel, vector: ReduceBuffers, places: BufferPlacement) -> CompiledProgram:
    wire, is_everywhere = vector.how.wire, vector.ends == EVERYWHERE
    places = places._replace(
        into_all=places.into_all and is_everywhere,
        by_owners=places.by_owners and is_everywhere,
        converts=vector.sources[0].dtype != wire,
        makes_first=_makes_first(vector, wire),
    )
    cells, block = cells_of(
        channel.size, wire.itemsize, are_native=channel.are_native and vector.suits_native
    )
    return reduce_code(channel.rank, channel.size, vector.counts, cells, places, block, vector.ends)


def cells_of(size: int, itemsize: int, *, are_native: bool) -> tuple[Cells, int]:
    """Return how a group cuts long vectors, and elements of the blocks that owners combine at once.

    Args:
        size: Of the group.
        itemsize: Of an element, in bytes.
        are_native: Programs run in C on all its ranks.
    """
    if are_native:
        return Cells(
            SEGMENT_BYTES // _CELLS // itemsize, _LAG, size <= _SUMS_ALL_MAX
        ), _NATIVE_BLOCK_BYTES // itemsize
    return Cells(SEGMENT_BYTES // itemsize), _BLOCK_BYTES // itemsize


def _makes_first(vector: ReduceBuffers, wire: np.dtype[Any]) -> bool:
    """Return whether what is combined cannot be made in a target: as it is of a scan where that is one of several terms."""
    is_term = vector.ends.is_prefix and any(
        target is source for target, source in zip(vector.targets, vector.sources, strict=True)
    )
    return vector.how.apply is not None or vector.targets[0].dtype != wire or is_term


def places_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return where small vectors of several kinds begin in a slot, and how many bytes they take together.

    Example:
        >>> places_of([8, 24, 4])
        ((0, 16, 48), 52)
    """
    starts, stop = [], 0
    for nbytes in sizes:
        starts.append(-(-stop // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES)
        stop = starts[-1] + nbytes
    return tuple(starts), stop


def _are_side_by_side(sizes: Sequence[int], size: int) -> bool:
    """Return whether vectors of several kinds are reduced at once: all that a rank brings fits into the slot that nobody tells.

    Args:
        sizes: Bytes of each vector in the slot.
        size: Of the group.
    """
    together = places_of(sizes)[1]
    return together <= WIDE_BYTES and is_direct(together, size)


def in_one_exchange(sizes: Sequence[int], size: int) -> tuple[bool, int | None]:
    """Return whether vectors of different kinds are reduced at once, and which of them as a long one, while the others go through slots.

    Args:
        sizes: Bytes of each vector in a slot.
        size: Of the group.

    Returns:
        (True, None) where all are side by side; (True, place of the long one); (False, None) where several are too long, so that one
        vector is reduced after the other.
    """
    if _are_side_by_side(sizes, size):
        return True, None
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    are_short = is_direct(places_of([*sizes[:longest], *sizes[longest + 1 :]])[1], size)
    return (True, longest) if are_short else (False, None)


def reduce_small(
    channel: Channel, opening: tuple[int, int], vectors: Sequence[ReduceBuffers]
) -> Iterator[int]:
    """Combine small vectors of all ranks, side by side in one slot; see `reduce_shared`, whose call they make up."""
    call, check = opening
    _put_small(channel, vectors)
    yield from agreed(channel, check, channel.begin(call, check))
    yield from combine_small(channel, vectors, places_of([vector.nbytes for vector in vectors])[1])


def _put_small(channel: Channel, vectors: Sequence[ReduceBuffers]) -> None:
    """Put small vectors into the slot that this rank publishes next."""
    side = channel.side ^ 1
    own, (starts, _) = (
        channel.small_offset(channel.rank, side),
        places_of([vector.nbytes for vector in vectors]),
    )
    for vector, start in zip(vectors, starts, strict=True):
        code, how = _code_of_small(channel, vector)
        open_code(channel, code, how, vector[:2], side, (own + start,) * channel.size)


def combine_small(
    channel: Channel, vectors: Sequence[ReduceBuffers], nbytes: int = 0
) -> Iterator[int]:
    """Combine such vectors when all ranks have put theirs.

    Args:
        channel: This rank's.
        vectors: What is combined.
        nbytes: Of all, where each rank puts wide ones in a slot that it tells; 0 where they lie in the slot that nobody tells.
    """
    slots, (starts, _) = channel.slots_now(nbytes), places_of([vector.nbytes for vector in vectors])
    for vector, start in zip(vectors, starts, strict=True):
        code, how = _code_of_small(channel, vector)
        yield from run_code(
            channel, code, how, vector[:2], channel.sides(), tuple([slot + start for slot in slots])
        )


def _code_of_small(channel: Channel, vector: ReduceBuffers) -> tuple[CompiledProgram, Arithmetic]:
    how = vector.how._replace(wire=vector.how.accumulate)  # nothing is saved by halves
    return reduce_code(
        channel.rank,
        channel.size,
        vector.counts,
        None,
        BufferPlacement(makes_first=_makes_first(vector, how.wire)),
        1,
        vector.ends,
    ), how
