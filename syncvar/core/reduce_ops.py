"""Reductions: which op takes which dtype, in which dtype it accumulates, how two operands become one, how it ends."""

from __future__ import annotations

import contextvars
import operator
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.dtypes import dtype_index
from syncvar.core.enum_arguments import word_of
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Combiner = Callable[..., Any]  # (left, right, out=array): a ufunc, or a function of ours

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


def quiet_caller() -> Callable[..., Any]:
    """Return a function that calls another one inside `quiet()`, which is entered in 0.1 us instead of 0.8; for one thread at a time.

    Since NumPy 2 what `np.seterr` sets belongs to a context of Python's, and this makes one, once.

    Example:
        >>> quiet_caller()(np.geterr)["over"]
        'ignore'
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            with quiet():
                return function(*arguments)

        return call
    context = (
        contextvars.Context()
    )  # an empty one: a copy would keep alive what the program has set
    context.run(np.seterr, all="ignore")
    return context.run


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
        element_shape: Of the elements of a registered op that are arrays; `accumulate` is a record of one.
    """

    name: str
    source: str
    ufunc: Combiner
    accumulate: np.dtype[Any]
    result: np.dtype[Any]
    is_mean: bool
    is_locating: bool = False
    commutes: bool = True
    element_shape: tuple[int, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether contributions travel as records: pairs of value and rank, or elements that are arrays."""
        return self.is_locating or self.element_shape != ()

    def count(self, array: NDArray[Any]) -> int:
        """Return how many elements of this op an array has."""
        return array.size // prod(self.element_shape) if self.element_shape else array.size


class _RegisteredOp(NamedTuple):
    function: Callable[..., Any]
    commutes: bool
    element_shape: tuple[int, ...]


_registered: dict[str, _RegisteredOp] = {}
_ELEMENT_BYTES_MAX = 64 << 10


def register_op(
    name: str,
    function: Callable[[NDArray[Any], NDArray[Any]], Any],
    *,
    commutative: bool = False,
    element_shape: tuple[int, ...] = (),
    replace: bool = False,
) -> None:
    """Make a function of two arrays an op, under the same name on every rank.

    It must be associative; it need not be commutative: the left operand is what some ranks have together, the right one
    what the ranks after them have.

    **The function is given pieces.** Algorithms cut arrays into pieces, of any length and at any place, so it must work
    element by element: what it makes of a piece is that piece of what it makes of the whole. Where an element of the op is
    itself an array (a matrix to be multiplied, a row to be looked up in), say its shape: `element_shape=(2, 2)` is for
    arrays of shape (..., 2, 2), and the function is given some whole elements, as an array (count, 2, 2).

    Args:
        name: Letters, digits and underscores; none of the built-in ops, nor a word that is accepted for one ("average").
        function: Takes two one-dimensional arrays of equal length and dtype (of elements: of equal shape) and returns one of
            the same shape and a dtype that goes into theirs by NumPy's same_kind; a NumPy ufunc is called with `out=`. Its
            operands are read-only. It must return the same on every rank, and not rely on where a piece lies in the array.
        commutative: The operands may change places, which allows more algorithms; the same on every rank.
        element_shape: Lengths of the last dimensions that belong together; at most 64 KiB, the same on every rank.
        replace: An op of this name may exist already.

    Raises:
        ConfigError: A wrong name, function or element shape. A call raises it, before anything is sent, where the function
            fails for a few elements of the dtype, or makes something else of them together than one by one.

    Cost: the first call with a dtype tries the function out on three elements, on every rank.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.register_op("gcd", np.gcd, replace=True)
        >>> sv.all_reduce(np.array([12, 18]), "gcd")
        array([12, 18])
        >>> sv.register_op("product_of_matrices", np.matmul, element_shape=(2, 2), replace=True)
        >>> sv.all_reduce(np.ones((5, 2, 2)), "product_of_matrices").shape
        (5, 2, 2)
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"the name of an op must be letters, digits and underscores, not {name!r}"
        )
    name = name.lower()
    if name in OPS:
        raise ConfigError(f"{name!r} is a built-in op: register yours under another name")
    from syncvar.core.migration_hints import op_of

    if op_of(name) != name:  # calls with it may have been prepared
        raise ConfigError(
            f"{name!r} is accepted for the built-in op {op_of(name)!r}: register yours under another name"
        )
    if not callable(function):
        raise ConfigError(f"an op must be a function of two arrays, not {type(function).__name__}")
    try:
        shape = tuple(operator.index(length) for length in element_shape)
    except TypeError:
        raise ConfigError(
            f"element_shape must be a tuple of lengths, not {element_shape!r}"
        ) from None
    if any(length < 1 for length in shape):
        raise ConfigError(f"element_shape must have lengths of at least 1, not {element_shape!r}")
    if name in _registered and not replace:
        raise ConfigError(
            f"the op {name!r} is registered already; pass replace=True to put another in its place"
        )
    _registered[name] = _RegisteredOp(function, bool(commutative), shape)
    _reduction.cache_clear()


def _registered_reduction(name: str, dtype: np.dtype[Any]) -> Reduction:
    """Return how a registered op treats a dtype.

    Raises:
        ConfigError: The function cannot be one, as a few elements show.
    """
    function, commutes, shape = _registered[name]
    if not shape:
        combine = function if isinstance(function, np.ufunc) else _wrapped(name, function)
        _try_out(
            name,
            combine,
            np.dtype(dtype),
            "one by one; an op is given any piece of an array: where its elements are arrays, "
            "register it with element_shape=, for instance (2, 2)",
        )
        return Reduction(name, dtype.name, combine, dtype, dtype, is_mean=False, commutes=commutes)
    element = np.dtype([(_ELEMENT, dtype, shape)])
    if element.itemsize > _ELEMENT_BYTES_MAX:
        raise ConfigError(
            f"an element of the op {name!r} has {element.itemsize} bytes, which is more than {_ELEMENT_BYTES_MAX}"
        )
    combine = _wrapped(name, function)
    _try_out(name, combine, element, "one by one")
    return Reduction(
        name,
        dtype.name,
        combine,
        element,
        dtype,
        is_mean=False,
        commutes=commutes,
        element_shape=shape,
    )


_ELEMENT = "element"


def _wrapped(name: str, function: Callable[[NDArray[Any], NDArray[Any]], Any]) -> Combiner:
    def combine(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        if not out.size:
            return out
        target: NDArray[Any] = out if out.dtype.names is None else out[_ELEMENT]
        operands = []
        for operand in (left, right):
            seen = operand.view() if operand.dtype.names is None else operand[_ELEMENT]
            seen.flags.writeable = False  # it may be an array of another rank
            operands.append(seen)
        try:
            made = np.asarray(function(*operands))
        except Exception as error:
            raise ConfigError(
                f"the op {name!r} raised {type(error).__name__} for two arrays of {target.dtype.name}{list(target.shape)}: {error}"
            ) from error
        if made.shape != target.shape or not _goes_into(made.dtype, target.dtype):
            raise ConfigError(
                f"the op {name!r} made {made.dtype.name}{list(made.shape)} of two arrays of {target.dtype.name}{list(target.shape)}"
            )
        target[...] = made
        return out

    return combine


def _goes_into(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    return (
        one == other
        or np.can_cast(one, other, "same_kind")
        or (one.kind in "fV" and other.kind in "fV")
    )


def _try_out(name: str, combine: Combiner, dtype: np.dtype[Any], alone: str) -> None:
    """Refuse an op that makes something else of three elements than of each of them."""
    plain = dtype
    if dtype.subdtype is not None or dtype.names is not None:
        plain = dtype.fields[_ELEMENT][0].base  # type: ignore[index]
    count = 3 * dtype.itemsize // plain.itemsize
    draw = np.random.default_rng(0)
    values = [
        draw.integers(1, 4, count) % (2 if plain.kind == "b" else 4)
        + draw.random(count) * (plain.kind in "fVc")
        for _ in (0, 1)
    ]
    left, right = (value.astype(plain).view(dtype) for value in values)
    together, apart = np.empty(3, dtype), np.empty(3, dtype)
    try:
        with quiet():
            combine(left, right, out=together)
            for place in range(3):
                combine(
                    left[place : place + 1], right[place : place + 1], out=apart[place : place + 1]
                )
    except ConfigError as error:
        raise ConfigError(
            f"{error}. It must work for elements together and {alone}"
        ) from error.__cause__
    except Exception as error:
        raise ConfigError(
            f"the op {name!r} raised {type(error).__name__} for arrays of {plain.name}: {error}. It must work for elements together and {alone}"
        ) from error
    wide = np.complex128 if plain.kind in "fVc" else plain
    if not np.allclose(
        together.view(plain).astype(wide), apart.view(plain).astype(wide), rtol=1e-2, equal_nan=True
    ):
        raise ConfigError(
            f"the op {name!r} makes something else of three elements of {plain.name} together than of each of them: it must work {alone}"
        )


def _take_smaller(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    return _take(left, right, out, np.less)


def _take_larger(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    return _take(left, right, out, np.greater)


def _take(
    left: NDArray[Any], right: NDArray[Any], out: NDArray[Any], is_better: np.ufunc
) -> NDArray[Any]:
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


def op_name(op: Any) -> Any:
    """Return the name of an op that is given as a member of an enumeration, else what is given."""
    return op if type(op) is str else word_of(op, (*OPS, *_registered)) or op


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
        raise ConfigError(_no_op(op))
    return _reduction(op.lower(), dtype)


def _no_op(op: Any) -> str:
    """Return why something is no op."""
    from syncvar.core.migration_hints import op_hint

    known = (*OPS, *_registered)
    if isinstance(op, np.ndarray):
        return f"op must be a name such as 'sum', not {op!r:.100}: the array to write to is named, out=buffer"
    return f"op must be one of {', '.join(known)}, not {op!r:.100}{op_hint(op, known)}"


@lru_cache(maxsize=256)
def _reduction(name: str, dtype: np.dtype[Any]) -> Reduction:
    if name not in OPS and name not in _registered:
        from syncvar.core.migration_hints import op_of

        name = op_of(name)
        if name not in OPS:
            raise ConfigError(_no_op(name))
    dtype_index(dtype)
    kind = dtype.kind
    if name in _registered:
        return _registered_reduction(name, dtype)
    if kind == "b" and name in ("sum", "mean", "prod"):
        raise ConfigError(
            f"{name} of bool has no meaning: write x.astype('int64'), or use and (min) or or (max)"
        )
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
    return (
        np.asarray(np.divide(total, np.asarray(count, dtype=total.dtype))) if how.is_mean else total
    )


def finish(how: Reduction, total: NDArray[Any], count: int) -> NDArray[Any]:
    """Turn the combined contributions into the result."""
    total = divided(how, total, count)
    return total if total.dtype == how.result else total.astype(how.result)
