"""The reproducible tree, summed in the memory at hand: single items, or nodes that somebody has summed already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.execution.float16 import widen
from syncvar.execution.kernels import quiet
from syncvar.plans import split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Node = tuple[int, int]

__all__ = ["summed"]

_BLOCK = 1 << 14  # elements that are summed at a time, so that what is between stays in cache


def summed(held: Mapping[Node, NDArray[Any]], lo: int, hi: int, out: NDArray[Any], start: int) -> None:
    """Sum the tree T(lo, hi) into an array.

    Args:
        held: Nodes (lo, hi) whose values are known, flat arrays; each item of the tree belongs to one of them.
        lo: First item.
        hi: One past the last item.
        out: Flat, of the dtype in which they are summed.
        start: The element of the nodes that belongs to the first one of `out`.
    """
    rooms: list[NDArray[Any]] = []
    with quiet():
        for first in range(0, out.size, _BLOCK):
            block = out[first : first + _BLOCK]
            _sum(held, lo, hi, block, start + first, rooms, 0)


def _sum(
    held: Mapping[Node, NDArray[Any]], lo: int, hi: int, out: NDArray[Any], start: int, rooms: list[NDArray[Any]], depth: int
) -> None:
    node = held.get((lo, hi))
    if node is not None:
        part = node[start : start + out.size]
        if part.dtype == np.float16 and out.dtype == np.float32:
            widen(part, out)
        else:
            out[...] = part
        return
    mid = split(lo, hi)
    left, right = held.get((lo, mid)), held.get((mid, hi))
    if left is None or left.dtype != out.dtype:
        _sum(held, lo, mid, out, start, rooms, depth)
        first = out
    else:
        first = left[start : start + out.size]
    if right is None or right.dtype != out.dtype:
        if len(rooms) == depth:
            rooms.append(np.empty(_BLOCK, out.dtype))
        second = rooms[depth][: out.size]
        _sum(held, mid, hi, second, start, rooms, depth + 1)
    else:
        second = right[start : start + out.size]
    np.add(first, second, out=out)
