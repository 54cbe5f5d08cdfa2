"""All-reduce in shared memory: "direct" (small) and "owners" (long) read and write arrays in place.

Sums follow the tree T(0, n) over ranks. So `reproducible=True` costs nothing here, and the bytes
are equal on all ranks.

* **small**: each rank writes its vector into its slot and combines all slots; one phase.
* **into all**: all targets are in shared memory. Each owner combines its part of all inputs and
  writes it into all targets. Inputs in shared memory need two phases and no copy. With `apply`,
  each target is computed from itself, so replicas that differ stay different, and a check can find
  them.
* **cells**: the vector is cut into cells that stay in the caches. In one phase each rank combines
  its part of cell k, writes cell k+1, and then reads the combined cell k. Two ranks with the C
  extension combine all of each cell instead; see `compile_reduce`. Inputs in shared memory are
  read in place. Owners widen half types, and round the sum once.

Several arrays of one dtype are one vector, their concatenation. Long ones in shared memory are
reduced in place, one after the other; the rest is copied together. Small vectors of several dtypes
share the slots, also in a call with one long vector.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native.constants import AT_PAGE, SLOT_ALIGN_BYTES, MemoryKind, Need
from syncvar.algorithms.selection import choose
from syncvar.runtime.arithmetic import Arithmetic
from syncvar.runtime.compile_reduce import (
    EVERYWHERE,
    BufferPlacement,
    Cells,
    ResultPlacement,
    reduce_code,
)
from syncvar.runtime.program_runner import (
    ShmRef,
    SlotProgram,
    agreed,
    native_of,
    open_code,
    run_code,
)
from syncvar.shm.channel_table import SEGMENT_BYTES, WIDE_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.core.reduce_ops import Combiner
    from syncvar.runtime.instructions import CompiledProgram
    from syncvar.runtime.program_runner import Arrays
    from syncvar.shm.group_channel import GroupChannel

# Published words; no array has one of these offsets, where shared memory has its header.
_NOWHERE = 0
_SEPARATE = 1  # of several arrays: some long ones are in shared memory, and have to be published
_BLOCK_BYTES = 256 << 10  # combined by an owner before it writes them to all targets
_NATIVE_BLOCK_BYTES = 32 << 10
_CELLS, _LAG = 8, 4  # cells of a segment, and how many may be unread, if all ranks run in C
_SUMS_ALL_MAX = 2  # up to so many ranks each combines all cells; more ranks share the work
_SEPARATE_BYTES = 256 << 10  # from here on one of several arrays is worth phases of its own
_NO_PLACE = BufferPlacement()
_WORD = np.dtype(np.uint64)
_SEPARATE_MAX = SEGMENT_BYTES // (2 * _WORD.itemsize)  # arrays whose locations fit into a segment


def is_direct(nbytes: int, size: int) -> bool:
    """Return whether every rank combines a vector of this size, rather than its part only."""
    return choose("all_reduce", nbytes, size, shared=True).algorithm == "direct"


class ReduceBuffers(NamedTuple):
    """Input and output of a reduction on this rank: each the concatenation of flat arrays."""

    # Arrays of one dtype; each may be its own target, but must not overlap another one
    sources: Sequence[NDArray[Any]]
    # Arrays of the same counts, of one dtype; empty if this rank gets no result
    targets: Sequence[NDArray[Any]]
    arithmetic: Arithmetic
    ends: ResultPlacement = EVERYWHERE  # which ranks get which result

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
        """Return the buffers of arrays; half types are not widened in shared memory."""
        source_dtype = sources[0].dtype
        wire = accumulate
        if source_dtype != accumulate and targets[0].dtype == source_dtype and apply is None:
            wire = source_dtype
        arithmetic = Arithmetic(ufunc, wire, accumulate, divisor, apply)
        return cls(sources, targets, arithmetic, ends)

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each array."""
        return tuple([source.size for source in self.sources])

    @property
    def nbytes(self) -> int:
        """Bytes of the combination."""
        return sum(self.counts) * self.arithmetic.accumulate.itemsize

    @property
    def suits_native(self) -> bool:
        """Whether the C extension takes it; the same on all ranks that make the same call."""
        is_plain = self.sources[0].dtype == self.arithmetic.wire == self.targets[0].dtype
        return is_plain and self.arithmetic.suits_native

    def only(self, places: Sequence[int]) -> ReduceBuffers:
        """Return the same for some of the arrays."""
        return self._replace(
            sources=[self.sources[place] for place in places],
            targets=[self.targets[place] for place in places],
        )

    def words(self, channel: GroupChannel, side: int) -> tuple[int, int]:
        """Return the words that publish the locations of the arrays; copies go to cells of `side`.

        Only `BufferLocations.from_words` may read such a word: it is not an offset.
        """
        if len(self.sources) > 1:
            long = [array for array in (*self.sources, *self.targets) if is_separate(array)]
            are_known = any(channel.shm.locate(array) is not None for array in long)
            return (_SEPARATE if are_known else _NOWHERE) << 1 | side, _NOWHERE
        x, out = self.sources[0], self.targets[0]
        source = channel.shm.locate(x) if x.dtype == self.arithmetic.wire else None
        target = source if out is x else channel.shm.locate(out)
        if out is x and self.ends != EVERYWHERE:  # others would read it while it is overwritten
            source = None
        return (source or _NOWHERE) << 1 | side, target or _NOWHERE


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """Return a flat view of an array, or a flat copy of one that is not contiguous."""
    if array.ndim == 1 and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array).reshape(-1)


class BufferLocations(NamedTuple):
    """Published locations of the buffers of all ranks, in rank order."""

    sources: Sequence[int]  # offset of `x` in shared memory; `_NOWHERE` if it is copied
    targets: Sequence[int]  # offset of `out`, or `_NOWHERE`
    # Side of the first cells of a copied input; from bit 1 on the page where they begin
    sides: tuple[int, ...]

    @classmethod
    def from_words(cls, sources: Sequence[int], targets: Sequence[int]) -> BufferLocations:
        """Read the words of all ranks, from `ReduceBuffers.words` or from the C extension."""
        places = [_NOWHERE if word & AT_PAGE else word >> 1 for word in sources]
        sides = [word ^ AT_PAGE if word & AT_PAGE else word & 1 for word in sources]
        return cls(places, targets, tuple(sides))

    @property
    def places(self) -> BufferPlacement:
        """The placement, as a program needs it."""
        sources = frozenset([rank for rank, place in enumerate(self.sources) if place != _NOWHERE])
        in_place = any(self.sources[rank] == self.targets[rank] for rank in sources)
        return BufferPlacement(sources, into_all=_are_known(self.targets), by_owners=in_place)


def _are_known(places: Sequence[int]) -> bool:
    return _NOWHERE not in places


def reduce_shared(
    channel: GroupChannel,
    opening: tuple[int, int] | None,
    vector: ReduceBuffers,
    small_vectors: Sequence[ReduceBuffers] = (),
) -> Generator[int, None, bool]:
    """Combine a vector of all ranks; yield the needs.

    `opening` is (call, check) in the first stage of a call, else None. `small_vectors` have other
    dtypes and use the slots of the first stage. Returns whether all ranks have read this rank's
    cells; the same on all ranks.
    """
    if opening is not None and not small_vectors and is_direct(vector.nbytes, channel.size):
        yield from reduce_small(channel, opening, (vector,))
        return True
    channel.reserve_segments()
    if opening is None:
        return (yield from _reduce_later(channel, vector))
    call, check = opening
    side = channel.tail ^ 1
    source, target = vector.words(channel, side)
    if source >> 1 == _NOWHERE:
        _write_first(channel, vector, side)
    slots = slot_program(channel, small_vectors, uses_ring=False)
    small = [small_vector[:2] for small_vector in small_vectors]
    slots.put(small)
    yield from agreed(channel, check, channel.begin(call, check, source, target))
    slots.run(small)
    return (yield from _reduce_located(channel, vector))


def _reduce_located(
    channel: GroupChannel, vector: ReduceBuffers, native: Any = None
) -> Generator[int, None, bool]:
    """Continue after all ranks have published locations; show C this placement."""
    locations = BufferLocations.from_words(*channel.arrays())
    if len(vector.sources) > 1 and any(locations.sources):
        return (yield from _reduce_later(channel, vector))
    if native is not None:
        add_native_program(channel, vector, locations.places, native)
    return (yield from _reduce_with_locations(channel, vector, locations))


def _reduce_later(channel: GroupChannel, vector: ReduceBuffers) -> Generator[int, None, bool]:
    """Reduce a vector after phase 0: long arrays one by one in place, the rest together."""
    sides = (channel.next_parity(),) * channel.size
    alone, joined = _divided(vector.counts, vector.arithmetic.accumulate.itemsize)
    if alone:
        sides = yield from _reduce_separately(channel, vector.only(alone))
        if not joined:
            return True
        vector = vector.only(joined)
    _write_first(channel, vector, sides[channel.rank])
    yield channel.publish()
    locations = BufferLocations.from_words(sides, [_NOWHERE] * channel.size)
    return (yield from _reduce_with_locations(channel, vector, locations))


@lru_cache(maxsize=256)
def _divided(counts: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which of several arrays are reduced one by one, and which together."""
    long = [place for place, count in enumerate(counts) if count * itemsize >= _SEPARATE_BYTES]
    alone = tuple(long[:_SEPARATE_MAX]) if len(counts) > 1 else ()
    return alone, tuple([place for place in range(len(counts)) if place not in set(alone)])


def is_separate(array: NDArray[Any]) -> bool:
    """Return whether one of several arrays is long enough to be reduced by itself."""
    return array.nbytes >= _SEPARATE_BYTES


def _reduce_separately(
    channel: GroupChannel, several: ReduceBuffers
) -> Generator[int, None, tuple[int, ...]]:
    """Reduce long arrays one after another; return the side of each rank's next segment."""
    rank, size = channel.rank, channel.size
    vectors = [several.only([place]) for place in range(len(several.sources))]
    side = channel.next_parity()
    # Cells use the other side: ranks may still be reading the table on this one.
    own_table = [vector.words(channel, side ^ 1) for vector in vectors]
    length = 2 * len(own_table)
    channel.segment(rank, side, length, _WORD).reshape(-1, 2)[...] = own_table
    yield channel.publish()
    sides = [side] * size
    tables = [channel.segment(other, sides[other], length, _WORD).tolist() for other in range(size)]
    for index, vector in enumerate(vectors):
        locations = BufferLocations.from_words(
            [table[2 * index] for table in tables], [table[2 * index + 1] for table in tables]
        )
        # Otherwise inputs or results go through segments.
        if not (_are_known(locations.sources) and _are_known(locations.targets)):
            if locations.sources[rank] == _NOWHERE:
                _write_first(channel, vector, locations.sides[rank])
            yield channel.publish()  # also: the results of the vector before have been taken
        yield from _reduce_with_locations(channel, vector, locations, goes_on=True)
    return tuple([one ^ 1 for one in sides])


def reduce_published(
    channel: GroupChannel,
    check: int,
    vector: ReduceBuffers,
    native: Any,
    small_vectors: Sequence[ReduceBuffers] = (),
) -> Iterator[int]:
    """Continue a call that C has published, and show C this placement."""
    yield from agreed(channel, check, channel.last)
    slots = slot_program(channel, small_vectors, uses_ring=False)
    slots.run([small_vector[:2] for small_vector in small_vectors])
    yield from _reduce_located(channel, vector, native)


def add_native_program(
    channel: GroupChannel, vector: ReduceBuffers, places: BufferPlacement, native: Any
) -> None:
    """Give the C extension the program of a call for a placement of vectors."""
    code = _code(channel, vector, places)
    sources = sum(1 << rank for rank in places.sources)
    last_side, program = code.last_side, native_of(code, vector.arithmetic)
    last_side = -1 if last_side is None else last_side
    native.add_program(sources, places.into_all, places.by_owners, last_side, program)


def _write_first(channel: GroupChannel, vector: ReduceBuffers, side: int) -> None:
    """Write the first cells of a vector."""
    code = _code(channel, vector, _NO_PLACE)
    open_code(channel, code, vector.arithmetic, vector[:2], side)
    if code.opening:
        channel.tail = side


def _reduce_with_locations(
    channel: GroupChannel,
    vector: ReduceBuffers,
    locations: BufferLocations,
    *,
    goes_on: bool = False,
) -> Generator[int, None, bool]:
    """Combine a vector after all ranks know all locations; yield the needs.

    The first cells of copied inputs have been published. With `goes_on`, more of the call follows.
    Returns whether all ranks have read this rank's cells; the same on all ranks.
    """
    code = _code(channel, vector, locations.places._replace(goes_on=goes_on))
    if code.last_side is not None:
        channel.tail = (locations.sides[channel.rank] & 1) ^ code.last_side
    arithmetic, kind_of_target = vector.arithmetic, vector.targets[0].dtype

    def location_of(kind: int, rank: int, _place: int) -> ShmRef:
        if kind == MemoryKind.PEER_SOURCE:
            return ShmRef(locations.sources[rank], arithmetic.wire)
        return ShmRef(locations.targets[rank], kind_of_target)

    yield from run_code(
        channel, code, arithmetic, vector[:2], locations.sides, location_of=location_of
    )
    return code.is_read


def _code(channel: GroupChannel, vector: ReduceBuffers, places: BufferPlacement) -> CompiledProgram:
    wire, is_everywhere = vector.arithmetic.wire, vector.ends == EVERYWHERE
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
    """Return how a group cuts long vectors, and the elements that an owner combines at once."""
    if are_native:
        cells = Cells(SEGMENT_BYTES // _CELLS // itemsize, _LAG, size <= _SUMS_ALL_MAX)
        return cells, _NATIVE_BLOCK_BYTES // itemsize
    return Cells(SEGMENT_BYTES // itemsize), _BLOCK_BYTES // itemsize


def _makes_first(vector: ReduceBuffers, wire: np.dtype[Any]) -> bool:
    """Return whether a combination cannot be made in a target, as when it is a term of a scan."""
    is_term = vector.ends.is_prefix and any(
        target is source for target, source in zip(vector.targets, vector.sources, strict=True)
    )
    return vector.arithmetic.apply is not None or vector.targets[0].dtype != wire or is_term


def places_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the offsets of small vectors of several dtypes in a slot, and their total size.

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
    """Return whether vectors of several dtypes (`sizes` in bytes) fit into the fixed slot."""
    together = places_of(sizes)[1]
    return together <= WIDE_BYTES and is_direct(together, size)


def in_one_exchange(sizes: Sequence[int], size: int) -> tuple[bool, int | None]:
    """Return whether vectors of several dtypes are reduced at once, and which one is long.

    (True, None): all are small. (True, index): that one is long. (False, None): several are long,
    and they are reduced one after the other. `sizes` are their bytes in a slot.
    """
    if _are_side_by_side(sizes, size):
        return True, None
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    are_short = is_direct(places_of([*sizes[:longest], *sizes[longest + 1 :]])[1], size)
    return (True, longest) if are_short else (False, None)


def slot_program(
    channel: GroupChannel, vectors: Sequence[ReduceBuffers], *, uses_ring: bool
) -> SlotProgram:
    """Return the program of small vectors, which serves all vectors of their counts and dtypes.

    `uses_ring`: the C extension of a rank may put its vector into the ring of slots.
    """
    starts, nbytes = places_of([vector.nbytes for vector in vectors])
    parts = [
        (*_code_of_small(channel, vector), start)
        for vector, start in zip(vectors, starts, strict=True)
    ]
    return SlotProgram(channel, parts, nbytes if uses_ring else 0)


def reduce_small(
    channel: GroupChannel, opening: tuple[int, int], vectors: Sequence[ReduceBuffers]
) -> Iterator[int]:
    """Combine small vectors of all ranks in one slot: a whole call, see `reduce_shared`."""
    slots = slot_program(channel, vectors, uses_ring=len(vectors) == 1)
    return reduce_by_slots(slots, opening, [vector[:2] for vector in vectors])


def reduce_by_slots(
    slots: SlotProgram, opening: tuple[int, int], arrays: Sequence[Arrays]
) -> Iterator[int]:
    """Combine small vectors, flat (SOURCEs, TARGETs), in a call (call, check)."""
    channel = slots.channel
    slots.put(arrays)
    call, check = opening
    yield channel.begin(call, check)
    if channel.disagreeing(check):
        yield Need.DISAGREE
    slots.run(arrays)


def _code_of_small(
    channel: GroupChannel, vector: ReduceBuffers
) -> tuple[CompiledProgram, Arithmetic]:
    accumulate = vector.arithmetic.accumulate
    arithmetic = vector.arithmetic._replace(wire=accumulate)  # halves would save nothing in slots
    rank, size, counts = channel.rank, channel.size, vector.counts
    places = BufferPlacement(makes_first=_makes_first(vector, arithmetic.wire))
    return reduce_code(rank, size, counts, None, places, 1, vector.ends), arithmetic
