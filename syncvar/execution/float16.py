"""Arithmetic on halves (float16) by integer operations: NumPy converts them one by one, subnormal ones very slowly.

The bits of a half, moved to where float32 has its exponent and fraction, are the half times 2**-112: exactly, subnormal
ones too, which become subnormal float32. Sums, minima and maxima of such *scaled* values are the scaled sums, minima and
maxima of float32, to the bit: all halves are multiples of 2**-24, so nothing is lost below. The bits of a scaled value,
rounded to nearest even at one place whatever its exponent, are the bits of the half.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.execution.kernels import Combiner

__all__ = ["are_scalable", "round_scaled", "widen", "widen_scaled"]

_EXACT = (np.add, np.minimum, np.maximum)  # products of scaled values are scaled twice
_DIVISOR_MAX = 4096  # up to here a quotient of subnormal values rounds as that of float32: none is that near to a tie
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
    """Return all halves, in the order of their bits."""
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
    """Return whether terms may be combined as scaled values: none is infinite or NaN, and no sum can become infinite.

    Args:
        terms: Contiguous, at least one element each.
        ufunc: Combines two operands.
        divisor: What the combination is divided by; 0 for nothing.
    """
    if ufunc not in _EXACT or divisor > _DIVISOR_MAX or _SUBNORMAL + _SUBNORMAL == 0:  # a thread may flush them to zero
        return False
    values = _values()
    total = 0.0
    for term in terms:
        high = int(np.maximum.reduce(term.view(np.int16)))
        low = int(np.maximum.reduce(term.view(np.uint16))) - 0x8000  # of the negative ones
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
    np.copyto(bits, halves.view(np.int16))  # the sign is copied to the upper half
    np.left_shift(bits, _FRACTION_SHIFT, out=bits)
    np.bitwise_and(bits, _SIGN_AND_HALF, out=bits)


def round_scaled(scaled: NDArray[np.float32], out: NDArray[np.float16], room: NDArray[np.float32]) -> None:
    """Write values that are scaled by 2**-112 as halves, rounded to nearest, ties to even.

    Args:
        scaled: None of them NaN, or larger than the largest half.
        out: Of the same count.
        room: Of the same count; overwritten.

    Example:
        >>> out, room = np.empty(2, np.float16), np.empty(2, np.float32)
        >>> round_scaled(np.array([2049.0, -2051.0], np.float32) * np.float32(2.0**-112), out, room)
        >>> out.tolist()
        [2048.0, -2052.0]
    """
    bits, sums = scaled.view(np.int32), room.view(np.int32)
    np.right_shift(bits, _FRACTION_SHIFT, out=sums)
    np.bitwise_and(sums, _SIGN_AND_ODD, out=sums)  # the sign goes where it will be next to the exponent
    np.add(sums, bits, out=sums)
    np.add(sums, _BELOW_TIE, out=sums)
    np.right_shift(sums, _FRACTION_SHIFT, out=sums)
    np.copyto(out.view(np.int16), sums, casting="unsafe")  # the lower 16 bits
