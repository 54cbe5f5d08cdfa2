"""Several arrays as one vector: which parts of which arrays are the elements of a stretch of their concatenation."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Piece", "pieces", "store", "store_pieces"]


class Piece(NamedTuple):
    """A part of one array: elements [start, stop) of array number `array`, at `place` of the stretch asked for."""

    array: int
    start: int
    stop: int
    place: int


@lru_cache(maxsize=256)
def pieces(counts: tuple[int, ...], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the pieces of the elements [start, stop) of the concatenation of arrays with these counts.

    Example:
        >>> [tuple(piece) for piece in pieces((2, 0, 3), 1, 4)]
        [(0, 1, 2, 0), (2, 0, 2, 1)]
    """
    found = []
    begin = 0
    for index, count in enumerate(counts):
        low, high = max(start, begin), min(stop, begin + count)
        if high > low:
            found.append(Piece(index, low - begin, high - begin, low - start))
        begin += count
        if begin >= stop:
            break
    return tuple(found)


def store_pieces(arrays: Sequence[NDArray[Any]], value: NDArray[Any], apply: np.ufunc | None) -> None:
    """Store a vector as the elements of the concatenation of flat arrays; an array becomes apply(array, its part)."""
    counts = tuple([array.size for array in arrays])
    for index, first, last, place in pieces(counts, 0, value.size):
        store(arrays[index][first:last], value[place : place + last - first], apply)


def store(target: NDArray[Any], value: NDArray[Any], apply: np.ufunc | None) -> None:
    """Store a value in an array, or let it become apply(array, value)."""
    if apply is None:
        target[...] = value
    else:
        apply(target, value, out=target, casting="same_kind")
