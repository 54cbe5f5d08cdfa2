"""The all-reduce in shared memory: the plans "direct" (small) and "owners" (long), read and written where the data lie.

Sums follow the tree T(0, n) over ranks, so `reproducible=True` costs nothing here and the bytes are equal on all ranks.

* **small**: each rank publishes its vector in its slot and sums all slots itself; one phase.
* **into all**: every rank's target lies in the arena: each owner sums its part of all sources and writes the sum (or what
  becomes of the target with it) into all targets. Where the sources lie there too, two phases do; where source and
  target are the same array it is reduced in place, with no copy. What becomes of a target is worked out from that target
  itself: copies that have come to differ stay different, as on other ways, so that somebody can still find it.
* **by segments**: the vector is cut into segments that stay in the caches. In one phase each rank sums its part of
  segment k, brings segment k+1, and afterwards takes the others' sums of segment k. Sources that lie in the arena are
  read where they are. Half types travel as they are: each owner widens what it sums, and rounds the sum once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.arena.channels import SEGMENT_BYTES
from syncvar.errors import InternalError
from syncvar.execution.float16 import are_scalable, round_scaled, widen, widen_scaled
from syncvar.execution.gil import PIECE, copy_holding, crowd, ufunc_holding
from syncvar.execution.lower_reduce import EVERYWHERE, Cells, Ends, Places, reduce_code
from syncvar.execution.phases import agreed
from syncvar.execution.pieces import store
from syncvar.execution.program import Kind
from syncvar.execution.running import (
    Arithmetic,
    Lying,
    found_in,
    native_of,
    open_code,
    run_code,
    suits_native,
)
from syncvar.plans import choose, tree_order

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.channel import Channel
    from syncvar.execution.kernels import Combiner
    from syncvar.execution.program import Code

__all__ = [
    "Placed", "Vector", "bring_first", "cells_of", "combine", "copier", "folder", "is_direct", "reduce_owned", "reduce_published", "reduce_shared", "storer", "teach",
]  # fmt: skip

_WIDENED = 32 << 10  # elements that are widened at once
_NOWHERE = 0  # in a published word only: nothing lies at offset 0 but the arena's header
_BLOCK_BYTES = 256 << 10  # what one owner sums before it writes it to all targets
_NATIVE_BLOCK_BYTES = 32 << 10
_CELLS, _LAG = 8, 4  # of a segment, where all ranks run programs in C; and how many may wait to be read
_SUMS_ALL_MAX = 2  # ranks that sum all cells each; of more, each combines its part


def is_direct(nbytes: int, size: int) -> bool:
    """Return whether everybody sums a vector of this size, rather than each rank its part."""
    return choose("all_reduce", nbytes, size, shared=True).algorithm == "direct"


@lru_cache(maxsize=64)
def _order(size: int) -> tuple[tuple[int, int], ...]:
    return tuple(tree_order(0, size))


def combine(terms: Sequence[NDArray[Any]], ufunc: Combiner, out: NDArray[Any], *, hold: bool = False) -> None:
    """Combine arrays by the tree into `out`, which may be the first of them; the others stay as they are.

    Args:
        terms: At least two, in the order of ranks.
        ufunc: Combines two operands.
        out: Of the same shape.
        hold: Flat arrays are combined without letting go of the interpreter's lock.
    """
    values = list(terms)
    for left, right in _order(len(terms)):
        target = out if left == 0 else values[left] if values[left] is not terms[left] else np.empty_like(out)
        if hold:
            ufunc_holding(ufunc, values[left], values[right], target)
        else:
            ufunc(values[left], values[right], out=target)
        values[left] = target


class Vector(NamedTuple):
    """What a rank brings to a reduction, and where the result goes: the concatenation of flat arrays.

    Args:
        sources: Arrays of one dtype; each may be its target itself, but overlap none otherwise.
        targets: Arrays of the same counts, of one dtype.
        ufunc: Combines two operands.
        accumulate: dtype in which they are combined.
        divisor: What the combination is divided by; 0 for nothing.
        apply: A target becomes apply(target, combination); None sets it to the combination.
        ends: Which ranks end with what; where this rank ends with nothing, its targets have no elements.
    """

    sources: Sequence[NDArray[Any]]
    targets: Sequence[NDArray[Any]]
    ufunc: Combiner
    accumulate: np.dtype[Any]
    divisor: int = 0
    apply: np.ufunc | None = None
    ends: Ends = EVERYWHERE

    @property
    def is_split(self) -> bool:
        """Whether it consists of several arrays."""
        return len(self.sources) != 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each array."""
        return tuple([source.size for source in self.sources])

    @property
    def nbytes(self) -> int:
        """Bytes of what is combined."""
        return sum(self.counts) * self.accumulate.itemsize

    def only(self, places: Sequence[int]) -> Vector:
        """Return the same for some of the arrays."""
        return self._replace(sources=[self.sources[place] for place in places], targets=[self.targets[place] for place in places])

    @property
    def is_widened(self) -> bool:
        """Whether halves travel, and the owner widens them."""
        brought = self.sources[0].dtype
        return brought != self.accumulate and self.targets[0].dtype == brought and self.apply is None

    @property
    def wire(self) -> np.dtype[Any]:
        """The dtype of what the others see."""
        return self.sources[0].dtype if self.is_widened else self.accumulate

    @property
    def arithmetic(self) -> Arithmetic:
        """What becomes of the terms."""
        return Arithmetic(self.ufunc, self.wire, self.accumulate, self.divisor, self.apply)

    def suits_native(self, how: Arithmetic) -> bool:
        """Whether the C runner takes it; the same on all ranks that make the same call."""
        return self.sources[0].dtype == how.wire and self.targets[0].dtype == how.wire and suits_native(how)

    def told(self, channel: Channel, side: int) -> tuple[int, int]:
        """Return the words by which this rank tells where its arrays lie; what has to be brought comes on this side.

        `Placed.from_words` reads them; nothing else may take such a word for an offset.
        """
        locate = channel.arena.locate
        source = target = None
        if not self.is_split:
            x, out = self.sources[0], self.targets[0]
            source = locate(x) if x.dtype == self.wire else None
            target = source if out is x else locate(out)
            if out is x and self.ends != EVERYWHERE:  # others read it while it is written over
                source = None
        return (source or _NOWHERE) << 1 | side, target or _NOWHERE


class Placed(NamedTuple):
    """What all ranks have told of a vector, in their order.

    Args:
        sources: Where `x` lies in the arena; None where it is brought.
        targets: Where `out` lies there; None for nowhere.
        sides: Of the first segments of what is brought.
    """

    sources: list[int | None]
    targets: list[int | None]
    sides: list[int]

    @classmethod
    def from_words(cls, sources: Sequence[int], targets: Sequence[int]) -> Placed:
        """Read what `Vector.told` of all ranks has returned."""
        return cls([word >> 1 or None for word in sources], [word or None for word in targets], [word & 1 for word in sources])

    @classmethod
    def nowhere(cls, size: int, side: int) -> Placed:
        """Return this for vectors of so many ranks that all have to be brought, on the same side."""
        return cls([None] * size, [None] * size, [side] * size)

    @property
    def sources_in_arena(self) -> list[int] | None:
        """Where `x` of all ranks lies in the arena; None where that of any rank lies elsewhere."""
        return _all_known(self.sources)

    @property
    def targets_in_arena(self) -> list[int] | None:
        """Where `out` of all ranks lies in the arena; None where that of any rank lies elsewhere."""
        return _all_known(self.targets)

    @property
    def go_by_segments(self) -> bool:
        """Whether results, or what is brought, go by way of segments."""
        return self.sources_in_arena is None or self.targets_in_arena is None


def _all_known(places: Sequence[int | None]) -> list[int] | None:
    known = [place for place in places if place is not None]
    return known if len(known) == len(places) else None


def reduce_shared(channel: Channel, opening: tuple[int, int] | None, vector: Vector) -> Generator[int, None, bool]:
    """Combine a vector of all ranks.

    Args:
        channel: This rank's.
        opening: (call, check) where this is the first stage of a call; None for a later one.
        vector: What is combined.

    Yields:
        What the others have to reach.

    Returns:
        Whether everybody has read what this rank has put; the same on all ranks.
    """
    size = channel.size
    if opening is None:
        channel.reserve_segments()
        side = channel.next_parity()
        bring_first(channel, vector, side)
        yield channel.publish()
        return (yield from reduce_owned(channel, vector, Placed.nowhere(size, side)))
    call, check = opening
    if is_direct(vector.nbytes, size):
        yield from _small(channel, opening, vector)
        return True
    channel.reserve_segments()
    side = channel.tail ^ 1
    source, target = vector.told(channel, side)
    if source >> 1 == _NOWHERE:
        bring_first(channel, vector, side)
    yield from agreed(channel, check, channel.begin(call, check, source, target))
    return (yield from reduce_owned(channel, vector, Placed.from_words(*channel.arrays())))


def reduce_published(channel: Channel, check: int, vector: Vector, native: Any) -> Iterator[int]:
    """Go on with a call that the C runner has published; teach it what is done with vectors that lie as these do."""
    yield from agreed(channel, check, channel.last)
    placed = Placed.from_words(*channel.arrays())
    teach(channel, vector, _places(placed), native)
    yield from reduce_owned(channel, vector, placed)


def teach(channel: Channel, vector: Vector, places: Places, native: Any) -> None:
    """Tell the C runner of a call what is done with vectors that lie in some way."""
    code = _code(channel, vector, places)
    sources = sum(1 << rank for rank in places.sources)
    native.learn(sources, places.into_all, places.by_owners, -1 if code.last_side is None else code.last_side, native_of(code, vector.arithmetic))


def bring_first(channel: Channel, vector: Vector, side: int) -> None:
    """Put the first cells of a vector where the others see them."""
    code = _code(channel, vector, _NOWHERE_ELSE)
    _open(channel, vector, code, vector.arithmetic, side)
    if code.opening:
        channel.tail = side


def reduce_owned(channel: Channel, vector: Vector, placed: Placed, *, goes_on: bool = False) -> Generator[int, None, bool]:
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
    code = _code(channel, vector, _places(placed)._replace(goes_on=goes_on))
    if code.last_side is not None:
        channel.tail = placed.sides[channel.rank] ^ code.last_side
    how = vector.arithmetic
    yield from _run(channel, vector, code, how, _found(channel, vector, code, how.wire, tuple(placed.sides), placed))
    return code.is_read


def _open(channel: Channel, vector: Vector, code: Code, how: Arithmetic, side: int) -> None:
    """Make the copies that come before phase 0, into cells or the slot of this side."""
    found = _found(channel, vector, code, how.wire, channel.own_side(side))
    open_code(channel, code, found, _native(channel, vector, code, how), copier())


def _run(channel: Channel, vector: Vector, code: Code, how: Arithmetic, found: Sequence[Any]) -> Iterator[int]:
    copy = copier()
    yield from run_code(channel, code, found, _native(channel, vector, code, how), copy, storer(how, copy), folder(how))


def _native(channel: Channel, vector: Vector, code: Code, how: Arithmetic) -> Any:
    """Return the program for the C runner, or None where not all arrays are such as it takes."""
    if not channel.is_native or not vector.suits_native(how):
        return None
    are_aligned = all(array.flags.aligned for array in (*vector.sources, *vector.targets))
    return native_of(code, how) if are_aligned else None


def folder(how: Arithmetic) -> Callable[[list[NDArray[Any]], NDArray[Any]], None]:
    """Return what combines terms into an array, and divides."""
    ufunc, divisor, hold = how.ufunc, how.divisor, crowd.holds()
    if ufunc is None:
        return _nothing
    if how.wire != how.accumulate:
        return lambda terms, made: _combine_widened(terms, ufunc, made, how.accumulate, divisor, hold=hold)

    def fold(terms: list[NDArray[Any]], made: NDArray[Any]) -> None:
        combine(terms, ufunc, made, hold=hold)
        if divisor:
            np.divide(made, divisor, out=made)

    return fold


def _nothing(*_: Any) -> None:
    raise InternalError("what is only moved was to be combined: no op was given")


def storer(how: Arithmetic, copy: Any) -> Callable[[NDArray[Any], NDArray[Any]], None]:
    """Return what stores a combination in a target."""
    apply = how.apply

    def store_combination(target: NDArray[Any], value: NDArray[Any]) -> None:
        if apply is None and target.dtype == value.dtype:
            copy(target, value)
        else:
            store(target, value, apply)

    return store_combination


_NOWHERE_ELSE = Places()


def _places(placed: Placed) -> Places:
    sources = frozenset(rank for rank, place in enumerate(placed.sources) if place is not None)
    in_place = any(source is not None and source == target for source, target in zip(placed.sources, placed.targets, strict=True))
    return Places(sources, into_all=placed.targets_in_arena is not None, by_owners=in_place)


def _code(channel: Channel, vector: Vector, places: Places) -> Code:
    wire = vector.wire
    places = places._replace(converts=vector.sources[0].dtype != wire, makes_first=_makes_first(vector, wire))
    if vector.ends != EVERYWHERE:
        places = places._replace(into_all=False, by_owners=False)
    are_native = channel.are_native and vector.suits_native(vector.arithmetic)
    cells, block = cells_of(channel.size, wire.itemsize, are_native=are_native)
    return reduce_code(channel.rank, channel.size, vector.counts, cells, places, block, vector.ends)


def cells_of(size: int, itemsize: int, *, are_native: bool) -> tuple[Cells, int]:
    """Return how a group cuts long vectors, and elements of the blocks that owners combine at once.

    Args:
        size: Of the group.
        itemsize: Of an element, in bytes.
        are_native: Programs run in C on all its ranks.
    """
    if are_native:
        return Cells(SEGMENT_BYTES // _CELLS // itemsize, _LAG, size <= _SUMS_ALL_MAX), _NATIVE_BLOCK_BYTES // itemsize
    return Cells(SEGMENT_BYTES // itemsize), _BLOCK_BYTES // itemsize


def _makes_first(vector: Vector, wire: np.dtype[Any]) -> bool:
    """Return whether what is combined cannot be made in a target: as it is of a scan where that is one of several terms."""
    is_term = vector.ends.is_prefix and vector.targets[0] is vector.sources[0]
    return vector.apply is not None or vector.targets[0].dtype != wire or is_term


def _found(
    channel: Channel, vector: Vector, code: Code, wire: np.dtype[Any], sides: tuple[int, ...], placed: Placed | None = None,
    slots: tuple[int, ...] | None = None,
) -> list[Any]:
    """Return the memories of a program; None for those that are not known yet. `sides` and `slots` are as for `found_in`."""
    sources, targets = vector.sources, vector.targets
    found = found_in(channel, code, sides, wire, slots)
    for number, kind, rank, place, count in code.own:
        if kind == _SOURCE:
            found[number] = sources[place]
        elif kind == _TARGET:
            found[number] = targets[place]
        elif kind == _SCRATCH:
            found[number] = np.empty(count, wire)
        elif placed is not None:
            places, dtype = (placed.sources, wire) if kind == _LYING else (placed.targets, targets[0].dtype)
            found[number] = Lying(places[rank] or _NOWHERE, dtype)
    return found


_SOURCE, _TARGET, _SCRATCH, _LYING = map(int, (Kind.SOURCE, Kind.TARGET, Kind.SCRATCH, Kind.LYING))


def copier() -> Any:
    """Return what copies, of (target, value), without letting go of the lock where that is better."""
    return copy_holding if crowd.holds() else np.copyto


def _combine_widened(
    terms: Sequence[NDArray[Any]], ufunc: Combiner, out: NDArray[Any], dtype: np.dtype[Any], divisor: int, *, hold: bool
) -> None:
    """Combine terms in `dtype`, by stretches that stay in the caches, and round the combination once."""
    per_stretch = PIECE if hold else _WIDENED
    room = np.empty((len(terms), min(per_stretch, out.size)), dtype)
    is_half = out.dtype == np.float16
    for start in range(0, out.size, per_stretch):
        stop = min(out.size, start + per_stretch)
        parts, made = [term[start:stop] for term in terms], out[start:stop]
        wide = list(room[:, : stop - start])
        is_scaled = is_half and are_scalable(parts, ufunc, divisor)
        for part, row in zip(parts, wide, strict=True):
            if is_scaled:
                widen_scaled(part, row)
            elif is_half:
                widen(part, row)
            else:
                np.copyto(row, part)
        combine(wide, ufunc, wide[0])
        if divisor:
            np.divide(wide[0], divisor, out=wide[0])
        if is_scaled:
            round_scaled(wide[0], made, wide[1])
        else:
            made[...] = wide[0]


def _small(channel: Channel, opening: tuple[int, int], vector: Vector) -> Iterator[int]:
    call, check = opening
    wire = vector.accumulate
    how = vector.arithmetic._replace(wire=wire)  # nothing is saved by halves
    code = reduce_code(channel.rank, channel.size, vector.counts, None, Places(makes_first=_makes_first(vector, wire)), 1, vector.ends)
    _open(channel, vector, code, how, channel.side ^ 1)
    yield from agreed(channel, check, channel.begin(call, check))
    found = _found(channel, vector, code, wire, channel.sides(), slots=channel.slots_now(vector.nbytes))
    yield from _run(channel, vector, code, how, found)
