"""Reductions as NumPy ufuncs: which op takes which dtype, in which dtype it accumulates, how it ends."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.config import nearest
from syncvar.errors import ConfigError
from syncvar.wire import dtype_index

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["OPS", "Reduction", "divided", "finish", "reduction"]

OPS = ("sum", "mean", "prod", "min", "max")
_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class Reduction(NamedTuple):
    """How an op treats a dtype.

    Args:
        name: The op.
        source: Name of the dtype of the contributions.
        ufunc: Combines two operands.
        accumulate: dtype in which contributions are combined.
        result: dtype of the result.
        is_mean: The sum is divided by the number of ranks at the end.
    """

    name: str
    source: str
    ufunc: np.ufunc
    accumulate: np.dtype[Any]
    result: np.dtype[Any]
    is_mean: bool


@lru_cache(maxsize=256)
def reduction(op: str, dtype: np.dtype[Any]) -> Reduction:
    """Return how `op` treats `dtype`.

    Half types accumulate in float32 and are rounded once; the mean of integers is float64.

    Raises:
        ConfigError: Unknown op, or an op that has no meaning for the dtype.

    Example:
        >>> reduction("mean", np.dtype("int32")).result
        dtype('float64')
    """
    if not isinstance(op, str) or op.lower() not in _UFUNCS:
        hint = nearest(op, OPS) if isinstance(op, str) else ""
        raise ConfigError(f"op must be one of {', '.join(OPS)}, not {op!r}{hint}")
    name = op.lower()
    dtype_index(dtype)
    kind = dtype.kind
    if kind == "b" and name in ("sum", "mean", "prod"):
        raise ConfigError(f"{name} of bool has no meaning: write x.astype('int64'), or use min (and) or max (or)")
    if kind == "c" and name in ("min", "max"):
        raise ConfigError(f"{name} of complex numbers has no meaning: they have no order")
    is_mean = name == "mean"
    accumulate: np.dtype[Any]
    result: np.dtype[Any]
    if is_mean and kind in "iu":
        accumulate = result = np.dtype(np.float64)
    elif dtype.itemsize == 2 and kind in "fV":
        accumulate, result = np.dtype(np.float32), dtype
    else:
        accumulate = result = dtype
    return Reduction(name, dtype.name, _UFUNCS[name], accumulate, result, is_mean)


def divided(how: Reduction, total: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the combined contributions, divided by their number where the op is a mean: then it is a new array.

    Not in place: over links the array may still be on its way to others.
    """
    return np.asarray(np.divide(total, np.asarray(count, dtype=total.dtype))) if how.is_mean else total


def finish(how: Reduction, total: NDArray[Any], count: int) -> NDArray[Any]:
    """Turn the combined contributions into the result."""
    total = divided(how, total, count)
    return total if total.dtype == how.result else total.astype(how.result)
