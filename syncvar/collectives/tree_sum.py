"""Local sums in the order of the reproducible tree, of single items or of nodes summed before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.algorithms.shard_tree import split
from syncvar.collectives.tensors import convert_back
from syncvar.core.array_arguments import as_array
from syncvar.core.errors import ConfigError
from syncvar.core.pytree import flatten, unflatten
from syncvar.core.reduce_ops import finish, quiet, reduction
from syncvar.runtime.arithmetic import widen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Node = tuple[int, int]

_BLOCK = 1 << 14  # elements summed at a time, so that intermediate sums stay in the cache


def tree_sum(parts: Sequence[Any]) -> Any:
    """Sum parts in the order of the reproducible tree, on this rank alone.

    The bits are those of `all_reduce_shards` of the same parts, wherever they are.

    Args:
        parts: At least one array or pytree of arrays; all of one shape and dtype.

    Returns:
        T(0, len(parts)), a new array or pytree.

    Raises:
        ConfigError: There are no parts, or they do not fit together.

    Order: T(lo, hi) = T(lo, mid) + T(mid, hi), mid = lo + the largest power of two below hi - lo.

    Example:
        >>> import syncvar as sv
        >>> sv.tree_sum([1.0, 2.0, 4.0])
        array(7.)
    """
    parts = list(parts)
    if not parts:
        raise ConfigError("tree_sum needs at least one part")
    flat = [flatten(part) for part in parts]
    if any(structure != flat[0][0] for structure, _ in flat):
        raise ConfigError("the parts of tree_sum must have the same structure")
    sums = []
    for leaves in zip(*(leaves for _, leaves in flat), strict=True):
        arrays = [as_array(leaf, "a part") for leaf in leaves]
        first = arrays[0]
        if any(array.shape != first.shape or array.dtype != first.dtype for array in arrays):
            raise ConfigError("the parts of tree_sum must have the same shape and dtype")
        sums.append(tree_combined(arrays, "sum"))
    return convert_back(parts[0], unflatten(flat[0][0], sums, parts[0]))


def tree_combined(arrays: Sequence[NDArray[Any]], op: str) -> NDArray[Any]:
    """Return the "sum" or "mean" of arrays of one shape and dtype, by the reproducible tree."""
    first = arrays[0]
    how = reduction(op, first.dtype)
    total = np.empty(first.size, how.accumulate)
    items = {
        (number, number + 1): np.ascontiguousarray(array).reshape(-1)
        for number, array in enumerate(arrays)
    }
    summed(items, 0, len(arrays), total, 0)
    with quiet():
        return finish(how, total, len(arrays)).reshape(first.shape)


def summed(
    held: Mapping[Node, NDArray[Any]], lo: int, hi: int, out: NDArray[Any], start: int
) -> None:
    """Sum the tree T(lo, hi) into `out`, in the dtype of `out`.

    `held` has the flat arrays of known nodes (lo, hi), which cover the tree. `start` is the element
    of the nodes that belongs to the first one of `out`.
    """
    rooms: list[NDArray[Any]] = []
    with quiet():
        for first in range(0, out.size, _BLOCK):
            block = out[first : first + _BLOCK]
            _sum(held, lo, hi, block, start + first, rooms, 0)


def _sum(
    held: Mapping[Node, NDArray[Any]],
    lo: int,
    hi: int,
    out: NDArray[Any],
    start: int,
    rooms: list[NDArray[Any]],
    depth: int,
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
