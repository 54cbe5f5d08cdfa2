"""The exact split: shares of a value whose sum, in any order, is the value to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Binary digits of the significand, and the exponent of the smallest place, by dtype.
_PLACES = {
    "float16": (11, -24),
    "bfloat16": (8, -133),
    "float32": (24, -149),
    "float64": (53, -1074),
}


def share_of(value: NDArray[Any], count: int, index: int) -> NDArray[Any]:
    """Return the share of copy `index` of a value that is split over `count` copies.

    Every copy takes value / count truncated: integers toward zero, floats to a multiple of the
    value's last place. Copy 0 takes the rest. Then every partial sum is a multiple of that place
    and no larger than the value, so it is exact in any order. Infinities, NaN and zeros (with their
    sign) go to every copy. For a bool, copy 0 has the value and the others False.

    Example:
        >>> import numpy as np
        >>> [int(share_of(np.asarray(-7), 2, copy)) for copy in (0, 1)]
        [-4, -3]
        >>> parts = [share_of(np.asarray(0.1), 3, copy) for copy in range(3)]
        >>> float(sum(parts)) == 0.1
        True
    """
    kind = value.dtype.kind
    if count == 1:
        return value
    if kind == "b":
        return value if index == 0 else np.zeros_like(value)
    if kind in "iu":
        return np.asarray(_integer_share(value, count, index), value.dtype)
    if kind == "c":
        made = np.empty_like(value)
        made.real = _float_share(value.real, count, index)
        made.imag = _float_share(value.imag, count, index)
        return made
    return _float_share(value, count, index)


def _integer_share(value: NDArray[Any], count: int, index: int) -> NDArray[Any]:
    divisor = value.dtype.type(count) if np.iinfo(value.dtype).max >= count else None
    if divisor is None:  # fewer values than copies: every quotient is 0
        return value if index == 0 else np.zeros_like(value)
    quotient = value // divisor
    quotient = quotient + ((value < 0) & (value % divisor != 0)).astype(value.dtype)
    rest: NDArray[Any] = value - quotient * value.dtype.type(count - 1)
    return rest if index == 0 else quotient


def _float_share(value: NDArray[Any], count: int, index: int) -> NDArray[Any]:
    digits, lowest = _PLACES[value.dtype.name]
    ordinary = np.isfinite(value) & (value != 0)
    wide = np.where(ordinary, value, np.ones_like(value)).astype(np.float64)
    exponent = np.frexp(wide)[1]
    # np.spacing overflows at the largest value.
    place = np.ldexp(1.0, np.maximum(exponent - digits, lowest))
    units = np.asarray(wide / place).astype(np.int64)
    share = _integer_share(units, count, index).astype(np.float64) * place
    return np.asarray(np.where(ordinary, share.astype(value.dtype), value), value.dtype)
