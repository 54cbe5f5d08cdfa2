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
from syncvar.plans import choose, even_chunks, tree_order
from syncvar.runtime.crowd import PIECE, copy_holding, crowd, ufunc_holding
from syncvar.runtime.halves import are_scalable, round_scaled, widen, widen_scaled
from syncvar.runtime.phases import agreed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.runtime.kernels import Combiner

__all__ = [
    "OneSegment", "Placed", "Vector", "bounds", "bring_first", "combine", "is_direct", "reduce_one_segment", "reduce_owned",
    "reduce_shared",
]  # fmt: skip

_WIDENED = 32 << 10  # elements that are widened at once
_COPIES_MAX = 16
_NOWHERE = 0  # in a published word only: nothing lies at offset 0 but the arena's header
_BLOCK_BYTES = 256 << 10  # what one owner sums before it writes it to all targets


def is_direct(nbytes: int, size: int) -> bool:
    """Return whether everybody sums a vector of this size, rather than each rank its part."""
    return choose("all_reduce", nbytes, size, shared=True).algorithm == "direct"


@lru_cache(maxsize=64)
def _order(size: int) -> tuple[tuple[int, int], ...]:
    return tuple(tree_order(0, size))


@lru_cache(maxsize=1024)
def bounds(count: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each rank's part of a segment."""
    return tuple((chunk.start, chunk.stop) for chunk in even_chunks(count, size))


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
    """What a rank brings to a reduction, and where the result goes.

    Args:
        x: Flat array; it may be `out` itself, but not overlap it otherwise.
        out: Flat array of the same count.
        ufunc: Combines two operands.
        accumulate: dtype in which they are combined.
        divisor: What the combination is divided by; 0 for nothing.
        apply: `out` becomes apply(out, combination); None sets it to the combination.
    """

    x: NDArray[Any]
    out: NDArray[Any]
    ufunc: Combiner
    accumulate: np.dtype[Any]
    divisor: int = 0
    apply: np.ufunc | None = None

    @property
    def is_widened(self) -> bool:
        """Whether halves travel, and the owner widens them."""
        return self.x.dtype != self.accumulate and self.out.dtype == self.x.dtype and self.apply is None

    @property
    def wire(self) -> np.dtype[Any]:
        """The dtype of what the others see."""
        return self.x.dtype if self.is_widened else self.accumulate

    def told(self, channel: Channel, side: int) -> tuple[int, int]:
        """Return the words by which this rank tells where `x` and `out` lie; what has to be brought comes on this side.

        `Placed.from_words` reads them; nothing else may take such a word for an offset.
        """
        locate = channel.arena.locate
        source = locate(self.x) if self.x.dtype == self.wire else None
        target = source if self.out is self.x else locate(self.out)
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


def reduce_shared(channel: Channel, opening: tuple[int, int] | None, vector: Vector) -> Iterator[int]:
    """Combine a vector of all ranks.

    Args:
        channel: This rank's.
        opening: (call, check) where this is the first stage of a call; None for a later one.
        vector: What is combined.

    Yields:
        What the others have to reach.
    """
    size = channel.size
    if opening is None:
        channel.reserve_segments()
        side = channel.next_parity()
        bring_first(channel, vector, side)
        yield channel.publish()
        yield from reduce_owned(channel, vector, Placed.nowhere(size, side))
        return
    call, check = opening
    if is_direct(vector.x.size * vector.accumulate.itemsize, size):
        yield from _small(channel, opening, vector)
        return
    channel.reserve_segments()
    side = channel.tail ^ 1
    source, target = vector.told(channel, side)
    if source >> 1 == _NOWHERE:
        bring_first(channel, vector, side)
    yield from agreed(channel, check, channel.begin(call, check, source, target))
    yield from reduce_owned(channel, vector, Placed.from_words(*channel.arrays()))


class OneSegment:
    """Views for vectors that are one segment long and travel as they are, made once.

    Args:
        channel: This rank's; all ranks have their segments.
        count: Elements.
        dtype: Theirs, also of the combination.
    """

    __slots__ = ("_copies", "brings", "made", "own", "takes", "terms")

    def __init__(self, channel: Channel, count: int, dtype: np.dtype[Any]) -> None:
        rank, segment = channel.rank, channel.segment
        parts = bounds(count, channel.size)
        low, high = parts[rank]
        others = [(other, part) for other, part in enumerate(parts) if other != rank]
        self.own = slice(low, high)
        self.made = segment(rank, 2, high - low, dtype)
        stretches = [one for one in ((0, low), (high, count)) if one[1] > one[0]]
        self.brings = [
            [(segment(rank, side, stop - start, dtype, start), slice(start, stop)) for start, stop in stretches]
            for side in (0, 1)
        ]
        self.terms = [(other, [segment(other, side, high - low, dtype, low) for side in (0, 1)]) for other, _ in others]
        self.takes = [(segment(other, 2, stop - start, dtype), slice(start, stop)) for other, (start, stop) in others]
        self._copies: dict[tuple[int, ...], list[list[NDArray[Any]]]] = {}

    def copies(self, channel: Channel, vector: Vector, places: Sequence[int]) -> list[list[NDArray[Any]]]:
        """Return, block by block, this rank's part of the vectors that lie at some places of the arena."""
        key = tuple(places)
        found = self._copies.get(key)
        if found is None:
            if len(self._copies) >= _COPIES_MAX:
                self._copies.clear()
            wholes = [channel.resident(place, vector.x.size, vector.accumulate)[self.own] for place in places]
            per_block = _BLOCK_BYTES // vector.accumulate.itemsize
            found = [
                [whole[start : start + per_block] for whole in wholes] for start in range(0, wholes[0].size, per_block)
            ]
            if not channel.arena.is_checked:
                self._copies[key] = found
        return found


def reduce_one_segment(
    channel: Channel, opening: tuple[int, int], vector: Vector, views: OneSegment
) -> Iterator[int]:
    """Do what `reduce_shared` does, for vectors for which the views were made."""
    x, out, apply = vector.x, vector.out, vector.apply
    side = channel.tail ^ 1
    source, target = vector.told(channel, side)
    if source >> 1 == _NOWHERE:
        for view, cut in views.brings[side]:
            np.copyto(view, x[cut])
    call, check = opening
    yield from agreed(channel, check, channel.begin(call, check, source, target))
    sources, targets = channel.arrays()
    if max(sources) > 1 or all(targets):  # else all is brought, as everything is made ready for
        placed = Placed.from_words(sources, targets)
        places = placed.targets_in_arena
        if places is None or placed.sources != placed.targets or apply is not None:
            yield from reduce_owned(channel, vector, placed)
            return
        for parts in views.copies(channel, vector, places):
            _combined(vector, parts, parts[0], hold=False)
            for part in parts[1:]:
                np.copyto(part, parts[0])
        yield channel.publish()
        return
    own, made = views.own, views.made
    terms = [sides[sources[other]] for other, sides in views.terms]
    terms.insert(channel.rank, x[own])
    _combined(vector, terms, made, hold=False)
    _store(out[own], made, apply, np.copyto)
    yield channel.publish()
    for view, cut in views.takes:
        _store(out[cut], view, apply, np.copyto)


def bring_first(channel: Channel, vector: Vector, side: int) -> None:
    """Put the first segment of a vector where the others see it."""
    wire = vector.wire
    copy = copy_holding if crowd.holds() else np.copyto
    _bring(channel, vector.x, 0, min(vector.x.size, SEGMENT_BYTES // wire.itemsize), side, wire, copy)


def reduce_owned(channel: Channel, vector: Vector, placed: Placed) -> Iterator[int]:
    """Combine a vector, each rank its part of it, when all ranks know where the arrays of all lie.

    Args:
        channel: This rank's.
        vector: What is combined.
        placed: Where they lie; the first segment of what has to be brought has been published.

    Yields:
        What the others have to reach.
    """
    places, goals = placed.sources_in_arena, placed.targets_in_arena
    if places is None or goals is None:
        yield from _by_segments(channel, vector, placed)
        return
    sources = [channel.resident(place, vector.x.size, vector.wire) for place in places]
    low, high = bounds(vector.x.size, channel.size)[channel.rank]
    _into_all(channel, vector, goals, [source[low:high] for source in sources], low)
    yield channel.publish()


def _by_segments(channel: Channel, vector: Vector, placed: Placed) -> Iterator[int]:
    x, out = vector.x, vector.out
    rank, size = channel.rank, channel.size
    count, wire = x.size, vector.wire
    hold = crowd.holds()
    copy = copy_holding if hold else np.copyto
    goals = placed.targets_in_arena
    per_segment = SEGMENT_BYTES // wire.itemsize
    segment = 0
    start = 0
    while True:
        stop = min(count, start + per_segment)
        parts = bounds(stop - start, size)
        low, high = parts[rank]
        terms = []
        for other, place in enumerate(placed.sources):
            if other == rank and x.dtype == wire:
                terms.append(x[start + low : start + high])
            elif place is not None:
                terms.append(channel.resident(place, count, wire)[start + low : start + high])
            else:
                terms.append(channel.segment(other, (placed.sides[other] + segment) & 1, high - low, wire, low))
        if goals is not None:
            _into_all(channel, vector, goals, terms, start + low)
        else:
            made = channel.segment(rank, 2 + (segment & 1), high - low, wire)
            _combined(vector, terms, made, hold=hold)
            _store(out[start + low : start + high], made, vector.apply, copy)
        if stop < count and placed.sources[rank] is None:
            _bring(channel, x, stop, min(count, stop + per_segment), (placed.sides[rank] + segment + 1) & 1, wire, copy)
        yield channel.publish()
        if goals is None:
            for distance in range(1, size):
                other = (rank + distance) % size
                low, high = parts[other]
                taken = channel.segment(other, 2 + (segment & 1), high - low, wire)
                _store(out[start + low : start + high], taken, vector.apply, copy)
        if stop >= count:
            return
        start = stop
        segment += 1


def _into_all(channel: Channel, vector: Vector, places: Sequence[int], terms: list[NDArray[Any]], low: int) -> None:
    """Combine terms, and store the result from element `low` on into all ranks' targets, by blocks that stay in the caches."""
    hold, rank, count = crowd.holds(), channel.rank, vector.x.size
    copy = copy_holding if hold else np.copyto
    high = low + terms[0].size
    targets = [channel.resident(place, count, vector.out.dtype)[low:high] for place in places]
    per_block = _BLOCK_BYTES // vector.accumulate.itemsize
    is_straight = vector.apply is None and vector.out.dtype == vector.wire
    room = np.empty(0 if is_straight else min(per_block, high - low), vector.accumulate)
    for start in range(0, high - low, per_block):
        stop = min(high - low, start + per_block)
        goals = [target[start:stop] for target in targets]
        made = goals[0] if is_straight else room[: stop - start]  # no term but the first lies where this one goes
        _combined(vector, [term[start:stop] for term in terms], made, hold=hold)
        if vector.apply is None and not is_straight:
            _store(goals[rank], made, None, copy)
            made = goals[rank]
        for goal in goals:
            if goal is not made:
                _store(goal, made, vector.apply, copy)


def _combined(vector: Vector, terms: list[NDArray[Any]], made: NDArray[Any], *, hold: bool) -> None:
    """Combine terms into an array, and divide."""
    if vector.is_widened:
        _combine_widened(terms, vector.ufunc, made, vector.accumulate, vector.divisor, hold=hold)
        return
    combine(terms, vector.ufunc, made, hold=hold)
    if vector.divisor:
        np.divide(made, vector.divisor, out=made)


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
    count, dtype = vector.x.size, vector.accumulate
    channel.small(channel.rank, channel.side ^ 1, count, dtype)[...] = vector.x
    yield from agreed(channel, check, channel.begin(call, check))
    made = np.empty(count, dtype)
    combine(channel.smalls_now(count, dtype), vector.ufunc, made)
    if vector.divisor:
        np.divide(made, vector.divisor, out=made)
    _store(vector.out, made, vector.apply, np.copyto)


def _bring(
    channel: Channel, x: NDArray[Any], start: int, stop: int, side: int, dtype: np.dtype[Any], copy: Any
) -> None:
    """Copy a segment of `x` to where the others see it; the own part only where it has to change its dtype."""
    low, high = bounds(stop - start, channel.size)[channel.rank]
    if x.dtype != dtype:
        low = high = 0
    if low:
        copy(channel.segment(channel.rank, side, low, dtype), x[start : start + low])
    if high < stop - start:
        copy(channel.segment(channel.rank, side, stop - start - high, dtype, high), x[start + high : stop])


def _store(target: NDArray[Any], value: NDArray[Any], apply: np.ufunc | None, copy: Any) -> None:
    if apply is not None:
        apply(target, value, out=target, casting="same_kind")
    elif target.dtype == value.dtype:
        copy(target, value)
    else:
        target[...] = value
