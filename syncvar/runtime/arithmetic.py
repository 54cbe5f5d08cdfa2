"""Arithmetic of reductions in NumPy: combine inputs by a tree, divide, and store the result.

The tree T(0, n) over ranks fixes the order, so sums have equal bits on all ranks, in Python and in
C. Half types in shared memory are widened, combined in float32 and rounded once.

NumPy converts halves (float16) one by one, and subnormal ones very slowly. This module uses integer
operations instead. The bits of a half, moved to the exponent and fraction of float32, are the half
times 2**-112: exactly, also for subnormal ones. Sums, minima and maxima of such *scaled* values are
the scaled results of float32, to the bit, because all halves are multiples of 2**-24. Rounding a
scaled value to nearest even at one fixed bit, whatever its exponent, gives the bits of the half.

NumPy releases the GIL for operations on more than 500 elements. If another thread computes in
Python, getting it back takes about 5 ms each time. `gil_monitor` detects that. Then calls work for
a while in pieces of 500 elements, which keep the GIL.
"""

from __future__ import annotations

import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native import program as native_program
from syncvar._native.constants import HalfType
from syncvar.algorithms.reproducible_tree import tree_order
from syncvar.core.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncvar.core.reduce_ops import Combiner

    Copier = Callable[[NDArray[Any], NDArray[Any]], Any]  # of (target, value)


# NumPy keeps the GIL for up to 500 elements. A multiple of all vector lengths: else NumPy adds the
# last elements of a piece one by one, and a sum of two NaNs may get the payload of the other one.
PIECE = 496
_SLOW_S = 0.002
_SLOW_S_PER_BYTE = 2e-9
_HOLD_S = 2.0


class GilMonitor:
    """Whether other threads of this process compete for the GIL."""

    def __init__(self) -> None:
        self.usual_threads = 1  # the caller
        self.is_alert = False  # calls may have to keep the GIL
        self._until = 0.0

    def is_there(self) -> bool:
        """Return whether there are threads, perhaps idle, besides the caller and syncvar's own."""
        threads = sum(not thread.name.startswith("syncvar-") for thread in threading.enumerate())
        return threads > self.usual_threads

    def holds(self) -> bool:
        """Return whether calls should keep the GIL now."""
        if self.is_alert and time.perf_counter() >= self._until:
            self.is_alert = False
        return self.is_alert and self.is_there()

    def note(self, seconds: float, nbytes: int) -> None:
        """Record the duration of a call. A late peer looks like contention, which does no harm."""
        if seconds > _SLOW_S + _SLOW_S_PER_BYTE * nbytes and self.is_there():
            self._until = time.perf_counter() + _HOLD_S
            self.is_alert = True


gil_monitor = GilMonitor()


def ufunc_holding(
    ufunc: Combiner, one: NDArray[Any], other: NDArray[Any], out: NDArray[Any]
) -> None:
    """Execute `ufunc(one, other, out)` on flat arrays without releasing the GIL."""
    for start in range(0, out.size, PIECE):
        stop = start + PIECE
        ufunc(one[start:stop], other[start:stop], out=out[start:stop])


def _copy_holding(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Execute `target[...] = source` on flat arrays without releasing the GIL."""
    if (
        target.dtype == source.dtype
        and target.size
        and target.flags.c_contiguous
        and source.flags.c_contiguous
    ):
        target.view(np.uint8).data[:] = source.view(np.uint8).data
        return
    for start in range(0, target.size, PIECE):
        target[start : start + PIECE] = source[start : start + PIECE]


def copier(*, hold: bool) -> Copier:
    """Return a function that copies flat arrays; `hold` keeps the GIL."""
    return _copy_holding if hold else np.copyto


HALVES = {"float16": int(HalfType.FLOAT16), "bfloat16": int(HalfType.BFLOAT16)}
_WIDENED = 32 << 10  # elements widened at once


class Arithmetic(NamedTuple):
    """How inputs of ranks become a result."""

    ufunc: Combiner | None  # combines two operands; None where nothing is combined
    wire: np.dtype[Any]  # dtype of the inputs in shared memory
    accumulate: np.dtype[Any]  # dtype in which they are combined
    divisor: int = 0  # divisor of the combination; 0 for none
    # A target becomes apply(target, combination); None sets it to the combination
    apply: np.ufunc | None = None

    @property
    def native(self) -> tuple[Any, ...]:
        """The same as a tuple for the C extension."""
        half = 0 if self.wire == self.accumulate else HALVES.get(self.wire.name, -1)
        divide = np.divide if self.divisor else None
        divisor = np.asarray(self.divisor, self.accumulate).tobytes() if self.divisor else b""
        return self.wire.itemsize, self.accumulate, half, self.ufunc, divide, divisor, self.apply

    @property
    def suits_native(self) -> bool:
        """Whether the C extension can do it."""
        return _suits_native(self)


@lru_cache(maxsize=256)
def _suits_native(arithmetic: Arithmetic) -> bool:
    if not isinstance(arithmetic.ufunc, np.ufunc):
        return False
    return native_program(b"", 0, (), (), arithmetic.native) is not None


def folder(
    arithmetic: Arithmetic, *, hold: bool
) -> Callable[[list[NDArray[Any]], NDArray[Any]], None]:
    """Return a function that combines terms into an array, and divides; `hold` keeps the GIL."""
    ufunc, divisor = arithmetic.ufunc, arithmetic.divisor
    if ufunc is None:
        return _fold_nothing
    if arithmetic.wire != arithmetic.accumulate:
        return lambda terms, output: combine_widened(
            terms, ufunc, output, arithmetic.accumulate, divisor, hold=hold
        )

    def fold(terms: list[NDArray[Any]], output: NDArray[Any]) -> None:
        combine(terms, ufunc, output, hold=hold)
        if divisor:
            np.divide(output, divisor, out=output)

    return fold


def _fold_nothing(*_: Any) -> None:
    raise InternalError("a program without an op has to combine blocks")


@lru_cache(maxsize=64)
def _order(size: int) -> tuple[tuple[int, int], ...]:
    return tuple(tree_order(0, size))


def combine(
    terms: Sequence[NDArray[Any]], ufunc: Combiner, out: NDArray[Any], *, hold: bool = False
) -> None:
    """Combine arrays by the tree into `out`, which may be the first; with `hold` keep the GIL."""
    if len(terms) == 2 and not hold:
        combine_two(ufunc, terms[0], terms[1], out)
        return
    values = list(terms)
    for left, right in _order(len(terms)):
        if left == 0:
            target = out
        else:
            target = values[left] if values[left] is not terms[left] else np.empty_like(out)
        if hold and target.size > 1:
            ufunc_holding(ufunc, values[left], values[right], target)
        else:
            combine_two(ufunc, values[left], values[right], target)
        values[left] = target


def combine_two(
    ufunc: Combiner, left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]
) -> None:
    """Combine two arrays into `out`, which may be one of them.

    NumPy rounds an in-place product of one complex number differently; this function does not.

    Example:
        >>> x, y = np.array([1.1 + 1.3j]), np.array([1.7 + 1.9j])
        >>> product = x * y
        >>> combine_two(np.multiply, x, y, x)
        >>> bool(x == product)
        True
    """
    if out.size == 1 and out.dtype.kind == "c" and ufunc is np.multiply:
        out[...] = ufunc(left, right)
    else:
        ufunc(left, right, out=out)


def combine_widened(
    terms: Sequence[NDArray[Any]],
    ufunc: Combiner,
    out: NDArray[Any],
    dtype: np.dtype[Any],
    divisor: int,
    *,
    hold: bool,
) -> None:
    """Combine terms in `dtype`, in pieces that fit the caches, and round the result once."""
    per_piece = PIECE if hold else _WIDENED
    room = np.empty((len(terms), min(per_piece, out.size)), dtype)
    is_half = out.dtype == np.float16
    for start in range(0, out.size, per_piece):
        stop = min(out.size, start + per_piece)
        parts, output = [term[start:stop] for term in terms], out[start:stop]
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
            round_scaled(wide[0], output, wide[1])
        else:
            output[...] = wide[0]


def store(target: NDArray[Any], value: NDArray[Any], apply: np.ufunc | None) -> None:
    """Store a value in an array, or replace the array by apply(array, value)."""
    if apply is None:
        target[...] = value
    else:
        apply(target, value, out=target, casting="same_kind")


def store_parts(
    arrays: Sequence[NDArray[Any]], value: NDArray[Any], apply: np.ufunc | None
) -> None:
    """Store a vector as the concatenation of flat arrays; see `store`."""
    start = 0
    for array in arrays:
        store(array, value[start : start + array.size], apply)
        start += array.size


def storer(arithmetic: Arithmetic, copy: Copier) -> Copier:
    """Return a function that stores combinations in targets; `copy` serves equal dtypes."""
    apply = arithmetic.apply

    def store_combination(target: NDArray[Any], value: NDArray[Any]) -> None:
        if apply is None and target.dtype == value.dtype:
            copy(target, value)
        else:
            store(target, value, apply)

    return store_combination


_EXACT = (np.add, np.minimum, np.maximum)  # products of scaled values are scaled twice
# Up to here quotients of subnormal values round as in float32: none is so near to a tie.
_DIVISOR_MAX = 4096
_LARGEST = 65504.0
_INFINITE = 0x7C00
_SUBNORMAL = np.float32(2**-149)

# Operands as arrays of no dimension: Python numbers would be converted in every call.
_FRACTION_SHIFT = np.array(13, np.int32)
_SIGN_AND_HALF = np.array(-0x70000001, np.int32)  # all bits but three copies of the sign
_SIGN_AND_ODD = np.array(1 << 28 | 1, np.int32)
_BELOW_TIE = np.array(0xFFF, np.int32)


@lru_cache(maxsize=1)
def _values() -> NDArray[np.float32]:
    """Return all halves as float32, in the order of their bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def widen(halves: NDArray[np.float16], out: NDArray[np.float32]) -> None:
    """Write halves as float32: `out[...] = halves`, as fast for subnormal ones.

    Example:
        >>> out = np.empty(2, np.float32)
        >>> widen(np.array([1.5, -np.inf], np.float16), out)
        >>> out
        array([ 1.5, -inf], dtype=float32)
    """
    _values().take(halves.view(np.uint16), None, out, "clip")


def are_scalable(terms: Sequence[NDArray[np.float16]], ufunc: Combiner, divisor: int) -> bool:
    """Return whether terms may be combined as scaled values: all are finite, and so is any sum.

    Terms are contiguous and not empty.
    """
    flushes = _SUBNORMAL + _SUBNORMAL == 0  # a thread may flush subnormal values to zero
    if ufunc not in _EXACT or divisor > _DIVISOR_MAX or flushes:
        return False
    values = _values()
    total = 0.0
    for term in terms:
        high = int(np.maximum.reduce(term.view(np.int16)))
        low = int(np.maximum.reduce(term.view(np.uint16))) - 0x8000  # of the negative halves
        largest = max(high, low)
        if largest >= _INFINITE:
            return False
        total += float(values[largest])
    return total <= _LARGEST


def widen_scaled(halves: NDArray[np.float16], out: NDArray[np.float32]) -> None:
    """Write halves times 2**-112; none of them infinite or NaN.

    Example:
        >>> out = np.empty(2, np.float32)
        >>> widen_scaled(np.array([1.5, -(2.0**-24)], np.float16), out)
        >>> out.astype(np.float64) * 2.0**112
        array([ 1.50000000e+00, -5.96046448e-08])
    """
    bits = out.view(np.int32)
    np.copyto(bits, halves.view(np.int16))  # the sign extends to the upper half
    np.left_shift(bits, _FRACTION_SHIFT, out=bits)
    np.bitwise_and(bits, _SIGN_AND_HALF, out=bits)


def round_scaled(
    scaled: NDArray[np.float32], out: NDArray[np.float16], room: NDArray[np.float32]
) -> None:
    """Write values that are scaled by 2**-112 as halves, rounded to nearest, ties to even.

    `scaled` has no NaN and nothing above the largest half; `room` is scratch memory of its size.

    Example:
        >>> out, room = np.empty(2, np.float16), np.empty(2, np.float32)
        >>> round_scaled(np.array([2049.0, -2051.0], np.float32) * np.float32(2.0**-112), out, room)
        >>> out.tolist()
        [2048.0, -2052.0]
    """
    bits, sums = scaled.view(np.int32), room.view(np.int32)
    np.right_shift(bits, _FRACTION_SHIFT, out=sums)
    # The sign moves next to the new place of the exponent.
    np.bitwise_and(sums, _SIGN_AND_ODD, out=sums)
    np.add(sums, bits, out=sums)
    np.add(sums, _BELOW_TIE, out=sums)
    np.right_shift(sums, _FRACTION_SHIFT, out=sums)
    np.copyto(out.view(np.int16), sums, casting="unsafe")  # the lower 16 bits
