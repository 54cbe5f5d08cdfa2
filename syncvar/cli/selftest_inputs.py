"""Inputs and expected results of `syncvar test` and `syncvar bench`, exact, so == compares them.

An input is a short pattern, repeated. Its length is a prime, so a chunk in the wrong position
shows; patterns of two ranks differ. The expected results use NumPy only, in float64 or in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.algorithms.schedule import even_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


PERIOD = 1021

_FOLDS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_LOCATING = {"minloc": np.argmin, "maxloc": np.argmax}
FOLDED_OPS = (*_FOLDS, *_LOCATING)  # ops with an expected result


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a collective; equal on all ranks except for `rank`.

    Args:
        rank: This rank.
        size: Number of ranks.
        shape: Shape of a rank's input.
        dtype: Its name.
        op: Op, if the collective has one.
        root: Root, if it has one.
    """

    rank: int
    size: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0


def part(case: Case, rank: int) -> NDArray[Any]:
    """Return a rank's input as a new array."""
    return np.resize(_pattern(case.dtype, case.op, rank, case.size), case.shape)


def combined(case: Case, ranks: Sequence[int]) -> Any:
    """Return the reduction of some ranks' inputs; (values, ranks) for minloc and maxloc."""
    found = _combined(case.dtype, case.op, tuple(ranks), case.size)
    if isinstance(found, tuple):
        return tuple(np.resize(one, case.shape) for one in found)
    return np.resize(found, case.shape)


def cut(value: Any, size: int) -> list[Any]:
    """Return `size` pieces of axis 0, the first ones longer; of a tuple, tuples of pieces."""
    if isinstance(value, tuple):
        return list(zip(*(cut(one, size) for one in value), strict=True))
    return [value[chunk.start : chunk.stop] for chunk in even_chunks(value.shape[0], size)]


def different_array(wanted: NDArray[Any]) -> NDArray[Any]:
    """Return an array that differs in every element, to detect elements that nobody writes."""
    return np.asarray((wanted == 0).astype(wanted.dtype))


def count_wrong(got: Any, wanted: Any) -> int:
    """Return the number of wrong elements; all, at least one, if shape or dtype is wrong."""
    if wanted is None:
        return 0 if got is None else 1
    if isinstance(wanted, list | tuple):
        if not isinstance(got, list | tuple) or len(got) != len(wanted):
            return max(1, sum(int(one.size) for one in wanted))
        return sum(count_wrong(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    if not isinstance(got, np.ndarray) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return max(1, int(wanted.size))
    return int(np.count_nonzero(got != wanted))


def first_wrong(got: Any, wanted: Any) -> str:
    """Describe the first difference of two results; "" if there is none."""
    if wanted is None:
        return "" if got is None else f"a {type(got).__name__} instead of None"
    if isinstance(wanted, list | tuple):
        if not isinstance(got, list | tuple):
            return f"a {type(got).__name__} instead of {len(wanted)} arrays"
        if len(got) != len(wanted):
            return f"{len(got)} arrays instead of {len(wanted)}"
        for index, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            found = first_wrong(mine, theirs)
            if found:
                return f"array {index}: {found}"
        return ""
    if not isinstance(got, np.ndarray):
        return f"a {type(got).__name__} instead of an array"
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    indexes = np.argwhere(got != wanted)
    if not len(indexes):
        return ""
    where = tuple(int(one) for one in indexes[0])
    shown = where[0] if len(where) == 1 else where
    more = f" ({len(indexes)} of {wanted.size} are wrong)" if len(indexes) > 1 else ""
    return f"index {shown} is {got[where]} instead of {wanted[where]}{more}"


@lru_cache(maxsize=4096)
def _pattern(dtype: str, op: str, rank: int, size: int) -> NDArray[Any]:
    kind = _dtype(dtype)
    index = np.arange(PERIOD)
    mixed = (7 * index + 5 * rank + index // 13 * (rank + 1) + rank * rank) % 11
    if kind.kind == "b":
        return (mixed % 2).astype(kind)
    if op in ("and", "or", "xor"):
        return ((mixed * 37 + 11) % 128).astype(kind)
    if op == "prod":  # one rank has a 2 in each element: products stay small on many ranks
        signs = np.ones(PERIOD) if kind.kind == "u" else 1.0 - 2.0 * (mixed % 2)
        factors = np.where(index % size == rank, 2.0, 1.0) * signs
        if kind.kind == "c":
            factors = factors * np.where(mixed % 3 == 0, 1j, 1)
        return factors.astype(kind)
    values = mixed % 6 if kind.kind == "u" else mixed % 8 - 5
    if op == "mean" and size * 5 <= np.iinfo(np.int8).max:
        values = values * size  # so that the mean is a whole number
    if kind.kind == "c":
        return (values + 1j * values[::-1]).astype(kind)
    return values.astype(kind)


@lru_cache(maxsize=4096)
def _combined(dtype: str, op: str, ranks: tuple[int, ...], size: int) -> Any:
    kind = _dtype(dtype)
    parts = [_pattern(dtype, op, rank, size) for rank in ranks]
    if op in _LOCATING:
        if kind.kind == "V":
            parts = [one.astype(np.float64) for one in parts]
        wide = np.stack(parts)
        at = _LOCATING[op](wide, axis=0)  # the lowest rank of equal values
        return np.take_along_axis(wide, at[None], axis=0)[0].astype(kind), np.asarray(ranks)[at]
    if not parts:
        is_float = op == "mean" and kind.kind in "iu"
        return np.full(PERIOD, _identity(op, kind), np.float64 if is_float else kind)
    if kind.kind in "fV":
        parts = [one.astype(np.float64) for one in parts]
    elif kind.kind == "c":
        parts = [one.astype(np.complex128) for one in parts]
    elif op == "mean":
        parts, kind = [one.astype(np.float64) for one in parts], np.dtype(np.float64)
    with np.errstate(over="ignore"):
        total = reduce(_FOLDS[op], parts)
    if op == "mean" and kind.kind == "c":
        # Complex division rounds more than once: divide in the dtype itself.
        total = total.astype(kind) / kind.type(len(ranks))
    elif op == "mean":
        total = total / len(ranks)
    return np.asarray(total).astype(kind)


def _identity(op: str, kind: np.dtype[Any]) -> Any:
    if op in ("min", "max"):
        if kind.kind == "b":
            return op == "min"
        if kind.kind in "iu":
            limits = np.iinfo(kind)
            return limits.max if op == "min" else limits.min
        return np.inf if op == "min" else -np.inf
    if op == "and":
        return kind.type(True) if kind.kind == "b" else ~kind.type(0)
    return 1 if op == "prod" else 0


def _dtype(name: str) -> np.dtype[Any]:
    from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index

    return dtype_from_index(DTYPE_NAMES.index(name))
