"""Reductions: which op takes which dtype, in which dtype it accumulates, how two operands become one, how it ends."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.errors import ConfigError
from syncvar.wire import dtype_index

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Combiner = Callable[..., Any]  # (left, right, out=array): a ufunc, or a function of ours

__all__ = ["OPS", "Combiner", "Reduction", "divided", "finish", "identity", "quiet", "reduction", "register_op"]

OPS = ("sum", "mean", "prod", "min", "max", "and", "or", "xor", "minloc", "maxloc")
_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_LOCATING = ("minloc", "maxloc")


def quiet() -> np.errstate:
    """Return the context in which values are combined, cast and divided: what overflows is infinite, on all ranks.

    What the caller has told NumPy (`np.seterr`, warnings as errors) is a matter of one rank, and the result is not.
    """
    return np.errstate(all="ignore")


class Reduction(NamedTuple):
    """How an op treats a dtype.

    Args:
        name: The op.
        source: Name of the dtype of the contributions.
        ufunc: Combines two operands.
        accumulate: dtype in which contributions are combined.
        result: dtype of the result.
        is_mean: The sum is divided by the number of ranks at the end.
        is_locating: Elements are pairs of a value and the rank that brings it.
        commutes: The order of the contributions does not matter; else only trees over the ranks in order are right.
    """

    name: str
    source: str
    ufunc: Combiner
    accumulate: np.dtype[Any]
    result: np.dtype[Any]
    is_mean: bool
    is_locating: bool = False
    commutes: bool = True


_registered: dict[str, tuple[Combiner, bool]] = {}


def register_op(
    name: str,
    function: Callable[[NDArray[Any], NDArray[Any]], Any],
    *,
    commutative: bool = False,
    replace: bool = False,
) -> None:
    """Make a function of two arrays an op, under the same name on every rank.

    It must be associative; it need not be commutative: the left operand is what some ranks have together, the right one
    what the ranks after them have.

    Args:
        name: Letters, digits and underscores; none of the built-in ops.
        function: Takes two arrays of equal shape and dtype and returns one of the same shape; a NumPy ufunc is called
            with `out=`. It must not change its operands, and return the same on every rank.
        commutative: The operands may change places, which allows more algorithms; the same on every rank.
        replace: An op of this name may exist already.

    Raises:
        ConfigError: A wrong name or function.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.register_op("gcd", np.gcd, replace=True)
        >>> sv.all_reduce(np.array([12, 18]), "gcd")
        array([12, 18])
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"the name of an op must be letters, digits and underscores, not {name!r}")
    name = name.lower()
    if name in OPS:
        raise ConfigError(f"{name!r} is a built-in op: register yours under another name")
    if not callable(function):
        raise ConfigError(f"an op must be a function of two arrays, not {type(function).__name__}")
    if name in _registered and not replace:
        raise ConfigError(f"the op {name!r} is registered already; pass replace=True to put another in its place")
    _registered[name] = (function if isinstance(function, np.ufunc) else _wrapped(name, function)), bool(commutative)
    _reduction.cache_clear()


def _wrapped(name: str, function: Callable[[NDArray[Any], NDArray[Any]], Any]) -> Combiner:
    def combine(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        made = np.asarray(function(left, right))
        if made.shape != out.shape:
            raise ConfigError(f"the op {name!r} made an array of shape {made.shape} of two of shape {out.shape}")
        out[...] = made
        return out

    return combine


def _take_smaller(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    return _take(left, right, out, np.less)


def _take_larger(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    return _take(left, right, out, np.greater)


def _take(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any], is_better: np.ufunc) -> NDArray[Any]:
    """Take the better pair, or the one that is no number; of equal ones that of the lower rank."""
    ours, theirs = left["value"], right["value"]
    is_lower = right["rank"] < left["rank"]
    better = is_better(theirs, ours) | ((theirs == ours) & is_lower)
    if ours.dtype.kind in "fV":
        odd, other = np.isnan(ours), np.isnan(theirs)
        better = np.where(odd | other, other & (~odd | is_lower), better)
    made = np.where(better, right, left)
    out[...] = made
    return out


def reduction(op: str, dtype: np.dtype[Any]) -> Reduction:
    """Return how `op` treats `dtype`.

    Half types accumulate in float32 and are rounded once; the mean of integers is float64; `and`, `or` and `xor` are
    logical on bools and bitwise on integers; `minloc` and `maxloc` make pairs of a value and its rank.

    Raises:
        ConfigError: Unknown op, or an op that has no meaning for the dtype.

    Example:
        >>> reduction("mean", np.dtype("int32")).result
        dtype('float64')
    """
    if not isinstance(op, str):
        raise ConfigError(f"op must be one of {', '.join((*OPS, *_registered))}, not {op!r}"[:500])
    return _reduction(op.lower(), dtype)


@lru_cache(maxsize=256)
def _reduction(name: str, dtype: np.dtype[Any]) -> Reduction:
    if name not in OPS and name not in _registered:
        known = (*OPS, *_registered)
        from syncvar.config import nearest

        raise ConfigError(f"op must be one of {', '.join(known)}, not {name!r}{nearest(name, known)}")
    dtype_index(dtype)
    kind = dtype.kind
    if name in _registered:
        function, commutes = _registered[name]
        return Reduction(name, dtype.name, function, dtype, dtype, is_mean=False, commutes=commutes)
    if kind == "b" and name in ("sum", "mean", "prod"):
        raise ConfigError(f"{name} of bool has no meaning: write x.astype('int64'), or use and (min) or or (max)")
    if kind == "c" and name in ("min", "max", *_LOCATING):
        raise ConfigError(f"{name} of complex numbers has no meaning: they have no order")
    if name in ("and", "or", "xor") and kind not in "biu":
        raise ConfigError(f"{name} of {dtype.name} has no meaning: it takes bools and integers")
    if name in _LOCATING:
        pair = np.dtype([("value", dtype), ("rank", np.int64)])
        take = _take_smaller if name == "minloc" else _take_larger
        return Reduction(name, dtype.name, take, pair, pair, is_mean=False, is_locating=True)
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


def identity(how: Reduction) -> Any:
    """Return the value that changes nothing when it is combined with another.

    Raises:
        ConfigError: The op has none that is known.

    Example:
        >>> identity(reduction("min", np.dtype("int8"))), identity(reduction("prod", np.dtype("float32")))
        (127, 1)
    """
    dtype = how.result
    simple = {"sum": 0, "mean": 0, "prod": 1, "or": 0, "xor": 0}
    if how.name in simple:
        return simple[how.name]
    if how.name == "and":
        return True if dtype.kind == "b" else np.array(-1, np.int64).astype(dtype)[()]
    if how.name in ("min", "max"):
        if dtype.kind == "b":
            return how.name == "min"
        if dtype.kind in "iu":
            return np.iinfo(dtype).max if how.name == "min" else np.iinfo(dtype).min
        return np.inf if how.name == "min" else -np.inf
    raise ConfigError(f"the op {how.name!r} has no identity, which rank 0 would get; use scan")


def divided(how: Reduction, total: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the combined contributions, divided by their number where the op is a mean: then it is a new array.

    Not in place: over links the array may still be on its way to others.
    """
    return np.asarray(np.divide(total, np.asarray(count, dtype=total.dtype))) if how.is_mean else total


def finish(how: Reduction, total: NDArray[Any], count: int) -> NDArray[Any]:
    """Turn the combined contributions into the result."""
    total = divided(how, total, count)
    return total if total.dtype == how.result else total.astype(how.result)
