"""Which arrays of a call lie where a result of it goes: what is still to be read must not be written."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.arena.mapping import Block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["apart", "are_same", "owns_itself"]


def apart(arrays: list[NDArray[Any]], targets: Sequence[NDArray[Any] | None]) -> list[NDArray[Any]]:
    """Return the arrays, with a copy of each that lies where the result of another one goes, or its own at another place."""
    if _are_strangers(arrays, targets):
        return arrays
    written = sorted(
        (*np.lib.array_utils.byte_bounds(target), index) for index, target in enumerate(targets) if target is not None
    )
    if not written:
        return arrays
    starts = [low for low, _, _ in written]
    reach = list(accumulate((high for _, high, _ in written), max))
    made = []
    for index, array in enumerate(arrays):
        low, high = np.lib.array_utils.byte_bounds(array)
        last = bisect_left(starts, high)
        first = bisect_right(reach, low, 0, last)
        reached = {written[place][2] for place in range(first, last) if written[place][1] > low and array.size}
        target = targets[index]
        if target is not None and array.strides == target.strides and are_same(array, target):
            reached.discard(index)
        made.append(array.copy() if reached else array)
    return made


def _are_strangers(arrays: list[NDArray[Any]], targets: Sequence[NDArray[Any] | None]) -> bool:
    """Return whether it is plain from who owns the memory that no array lies where a result goes, but its own in place."""
    owners: dict[int, int] = {}
    for index, target in enumerate(targets):
        if target is not None:
            owner = target if target.base is None else _owner(target)
            if not isinstance(owner, Block | mmap.mmap) and not owns_itself(owner):
                return False
            owners[id(owner)] = index if owners.get(id(owner), index) == index else -1
    for index, array in enumerate(arrays):
        owner = array if array.base is None else _owner(array)
        if not (type(owner) is Block or owns_itself(owner)):
            return False
        if id(owner) in owners and (owners[id(owner)] != index or array is not targets[index]):
            return False
    return True


def owns_itself(value: Any) -> bool:
    """Return whether a value is an array that is no view of anything."""
    return type(value) is np.ndarray and value.base is None and value.flags.owndata


def _owner(array: NDArray[Any]) -> Any:
    """Return the object that an array's memory belongs to, as far as it is known."""
    found: Any = array
    while True:
        base = found.obj if type(found) is memoryview else getattr(found, "base", None)
        if base is None:
            return found
        found = base


def are_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two flat arrays are the same elements: then each is read before it is written."""
    place, theirs = one.__array_interface__["data"][0], other.__array_interface__["data"][0]
    return bool(place == theirs and one.dtype == other.dtype and one.size == other.size)
