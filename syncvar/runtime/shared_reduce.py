"""The all-reduce in shared memory: the plans "direct" (small) and "owners" (long), read and written where the data lie.

Sums follow the tree T(0, n) over ranks, so `reproducible=True` costs nothing here and the bytes are equal on all ranks.

* **small**: each rank publishes its vector in its slot and sums all slots itself; one phase.
* **in place**: every rank's source is its target and lies in the arena: each owner sums its part of all copies and writes
  the sum into all of them; two phases, no copy.
* **by segments**: the vector is cut into segments that stay in the caches. In one phase each rank sums its part of
  segment k, brings segment k+1, and afterwards takes the others' sums of segment k. Sources that lie in the arena are
  read where they are. Half types travel as they are: each owner widens what it sums, and rounds the sum once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.arena.channels import SEGMENT_BYTES
from syncvar.plans import choose, even_chunks, tree_order
from syncvar.runtime.crowd import copy_holding, crowd, ufunc_holding
from syncvar.runtime.phases import agreed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.runtime.kernels import Combiner

__all__ = ["bounds", "combine", "is_direct", "reduce_shared"]

_WIDENED = 16 << 10  # elements that are widened at once
_BLOCK_BYTES = 128 << 10  # of the in-place path: what one owner sums before it writes it to all copies


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


def reduce_shared(
    channel: Channel,
    opening: tuple[int, int] | None,
    x: NDArray[Any],
    out: NDArray[Any],
    ufunc: Combiner,
    *,
    accumulate: np.dtype[Any] | None = None,
    divisor: int = 0,
    apply: np.ufunc | None = None,
) -> Iterator[int]:
    """Combine `x` of all ranks into `out`.

    Args:
        channel: This rank's.
        opening: (call, check) where this is the first stage of a call; None for a later one.
        x: Flat array; it may be `out` itself, but not overlap it otherwise.
        out: Flat array of the same count.
        ufunc: Combines two operands.
        accumulate: dtype in which they are combined; that of `x` by default.
        divisor: What the combination is divided by; 0 for nothing.
        apply: `out` becomes apply(out, combination); None sets it to the combination.

    Yields:
        Words to wait for.
    """
    dtype = accumulate or x.dtype
    rank, size = channel.rank, channel.size
    count = x.size
    nbytes = count * dtype.itemsize
    if opening is not None and is_direct(nbytes, size):
        yield from _small(channel, opening, x, out, ufunc, dtype, divisor, apply)
        return
    channel.reserve_segments()
    hold = crowd.holds()
    copy = copy_holding if hold else np.copyto
    is_widened = x.dtype != dtype and out.dtype == x.dtype and apply is None
    wire = x.dtype if is_widened else dtype  # of what the others see
    per_segment = SEGMENT_BYTES // wire.itemsize
    source = target = 0
    if opening is not None:
        locate = channel.arena.locate
        if x.dtype == wire:
            source = max(0, locate(x))
            if source and out is x and apply is None and not is_widened:
                target = source
        side = channel.tail ^ 1
    else:
        side = channel.next_parity()
    if not source:
        _bring(channel, x, 0, min(count, per_segment), side, wire, copy)
        source = side
    if opening is not None:
        call, check = opening
        yield from agreed(channel, check, channel.begin(call, check, source, target))
        sources, targets = channel.arrays()
        if all(targets) and sources == targets:
            _in_place(channel, sources, count, dtype, ufunc, divisor, hold=hold)
            yield channel.publish()
            return
    else:
        yield channel.publish()
        sources = [side] * size
    segment = 0
    start = 0
    while True:
        stop = min(count, start + per_segment)
        parts = bounds(stop - start, size)
        low, high = parts[rank]
        terms = []
        for other, place in enumerate(sources):
            if place > 1:
                terms.append(channel.resident(place, count, wire)[start + low : start + high])
            elif other == rank and x.dtype == wire:
                terms.append(x[start + low : start + high])
            else:
                terms.append(channel.segment(other, (place + segment) & 1, high - low, wire, low))
        made = channel.segment(rank, 2 + (segment & 1), high - low, wire)
        if is_widened:
            _combine_widened(terms, ufunc, made, dtype, divisor, hold=hold)
        else:
            combine(terms, ufunc, made, hold=hold)
            if divisor:
                np.divide(made, divisor, out=made)
        _store(out[start + low : start + high], made, apply, copy)
        if stop < count and sources[rank] < 2:
            _bring(channel, x, stop, min(count, stop + per_segment), (sources[rank] + segment + 1) & 1, wire, copy)
        yield channel.publish()
        for distance in range(1, size):
            other = (rank + distance) % size
            low, high = parts[other]
            taken = channel.segment(other, 2 + (segment & 1), high - low, wire)
            _store(out[start + low : start + high], taken, apply, copy)
        if stop >= count:
            return
        start = stop
        segment += 1


def _combine_widened(
    terms: Sequence[NDArray[Any]], ufunc: Combiner, out: NDArray[Any], dtype: np.dtype[Any], divisor: int, *, hold: bool
) -> None:
    """Combine terms in `dtype`, by stretches that stay in the caches, and round the combination once."""
    for start in range(0, out.size, _WIDENED):
        stop = min(out.size, start + _WIDENED)
        wide = [term[start:stop].astype(dtype) for term in terms]
        combine(wide, ufunc, wide[0], hold=hold)
        if divisor:
            np.divide(wide[0], divisor, out=wide[0])
        out[start:stop] = wide[0]


def _small(
    channel: Channel,
    opening: tuple[int, int],
    x: NDArray[Any],
    out: NDArray[Any],
    ufunc: Combiner,
    dtype: np.dtype[Any],
    divisor: int,
    apply: np.ufunc | None,
) -> Iterator[int]:
    call, check = opening
    count = x.size
    channel.small(channel.rank, channel.side ^ 1, count, dtype)[...] = x
    yield from agreed(channel, check, channel.begin(call, check))
    made = np.empty(count, dtype)
    combine(channel.smalls_now(count, dtype), ufunc, made)
    if divisor:
        np.divide(made, divisor, out=made)
    _store(out, made, apply, np.copyto)


def _in_place(
    channel: Channel,
    places: Sequence[int],
    count: int,
    dtype: np.dtype[Any],
    ufunc: Combiner,
    divisor: int,
    *,
    hold: bool,
) -> None:
    """Combine this rank's part of all ranks' arrays, into all of them."""
    copy = copy_holding if hold else np.copyto
    copies = [channel.resident(place, count, dtype) for place in places]
    low, high = bounds(count, channel.size)[channel.rank]
    per_block = _BLOCK_BYTES // dtype.itemsize
    for start in range(low, high, per_block):
        stop = min(high, start + per_block)
        parts = [copy[start:stop] for copy in copies]
        first = parts[0]
        combine(parts, ufunc, first, hold=hold)
        if divisor:
            np.divide(first, divisor, out=first)
        for part in parts[1:]:
            copy(part, first)


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
