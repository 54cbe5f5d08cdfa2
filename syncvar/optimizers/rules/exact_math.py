"""Arithmetic with the same bits on every machine: powers and norms.

Copies must stay equal to the bit, also between hosts with other processors and C libraries. IEEE
addition, multiplication, division and square root are exact everywhere; `pow` of the C library and
the dot product of a BLAS are not.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 16384  # elements that are worked on at a time: the arrays of a step then stay in the cache


def power(base: float, exponent: int) -> float:
    """Return base ** exponent by repeated squaring.

    Example:
        >>> power(0.5, 3), power(0.9, 0)
        (0.125, 1.0)
    """
    made = 1.0
    while exponent:
        if exponent & 1:
            made *= base
        base *= base
        exponent >>= 1
    return made


def sum_of_squares(flat: NDArray[Any], room: NDArray[Any]) -> float:
    """Return the sum of the squares of a flat array, in float64.

    Order: blocks of BLOCK elements from the left, NumPy's pairwise sum in each.
    """
    total = 0.0
    for start in range(0, flat.size, BLOCK):
        part = flat[start : start + BLOCK]
        squares = room[: part.size]
        np.copyto(squares, part)
        np.multiply(squares, squares, out=squares)
        total += float(np.add.reduce(squares))
    return total


def norm(flats: list[NDArray[Any]], room: NDArray[Any]) -> float:
    """Return the 2-norm of several flat arrays as of one."""
    return sqrt(sum([sum_of_squares(flat, room) for flat in flats]))
