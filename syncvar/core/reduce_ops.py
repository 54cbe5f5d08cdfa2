"""Reduction ops: allowed dtypes, accumulation dtype, combination of two operands, final step."""

from __future__ import annotations

import contextvars
import operator
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.array_arguments import matching_word
from syncvar.core.array_types import dtype_index
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Combiner = Callable[..., Any]  # (left, right, out=array): a ufunc, or a function here

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
_ELEMENT_BYTES_MAX = 64 << 10
_ELEMENT = "element"  # field of a record that holds one element of a registered op


def quiet() -> np.errstate:
    """Return the context in which syncvar combines, casts and divides: overflow gives infinity.

    `np.seterr` and warnings as errors are settings of one rank, and results must not differ.
    """
    return np.errstate(all="ignore")


def quiet_caller() -> Callable[..., Any]:
    """Return `call(function, *arguments)` that calls a function inside `quiet()`.

    It costs 0.1 us instead of 0.8 us, and only one thread at a time may use it.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            with quiet():
                return function(*arguments)

        return call
    # NumPy 2 keeps these settings in a context of contextvars. This one starts empty, because a
    # copy of the caller's would keep the caller's objects alive.
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


class Reduction(NamedTuple):
    """An op for one dtype.

    Args:
        name: Name of the op.
        source: Name of the input dtype.
        ufunc: Function that combines two operands.
        accumulate: dtype in which inputs are combined.
        result: dtype of the result.
        is_mean: Whether the last step divides by the number of ranks.
        is_locating: Whether elements are pairs of a value and its rank (`minloc`, `maxloc`).
        commutes: Whether operands may change places; if not, only trees over ranks in order work.
        element_shape: Shape of one element of a registered op; `accumulate` is a record of one.
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
        """Whether inputs travel as records: value and rank, or elements that are arrays."""
        return self.is_locating or self.element_shape != ()

    def count(self, array: NDArray[Any]) -> int:
        """Return the number of elements of this op in an array."""
        return array.size // prod(self.element_shape) if self.element_shape else array.size


class _RegisteredOp(NamedTuple):
    function: Callable[..., Any]
    commutes: bool
    element_shape: tuple[int, ...]


_registered: dict[str, _RegisteredOp] = {}


def register_op(
    name: str,
    function: Callable[[NDArray[Any], NDArray[Any]], Any],
    *,
    commutative: bool = False,
    element_shape: tuple[int, ...] = (),
    replace: bool = False,
) -> None:
    """Register a function of two arrays as an op, under the same name on every rank.

    The function must be associative. It need not be commutative: its left operand combines lower
    ranks than its right operand.

    Algorithms cut arrays into pieces of any length, so the function must work on each element by
    itself: `f(a, b)[i:j]` must equal `f(a[i:j], b[i:j])`. If one element of the op is an array,
    such as a matrix for matrix multiplication, pass its shape. With `element_shape=(2, 2)` inputs
    have the shape (..., 2, 2), and the function gets arrays of shape (count, 2, 2).

    Args:
        name: Letters, digits and underscores. Neither the name of a built-in op nor an alias of
            one ("average").
        function: Function of two arrays of equal shape and dtype, which are read-only. It returns
            an array of the same shape, with a dtype that casts to theirs ("same_kind"). It must
            return the same on every rank. A NumPy ufunc is called with `out=`.
        commutative: Whether the operands may change places, which allows more algorithms. Must be
            the same on every rank.
        element_shape: Shape of one element, at most 64 KiB. Must be the same on every rank.
        replace: Whether an op of this name may exist already.

    Raises:
        ConfigError: The name, function or element shape is wrong. A later call raises it too,
            before it sends anything, if the function fails for the dtype or is not elementwise.

    Cost: the first call with a dtype tests the function with three elements, on every rank.

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

    alias = op_of(name)
    if alias != name:  # earlier calls with it may be cached
        raise ConfigError(
            f"{name!r} is an alias of the built-in op {alias!r}: register yours under another name"
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
        raise ConfigError(f"the op {name!r} is registered already; pass replace=True to replace it")
    _registered[name] = _RegisteredOp(function, bool(commutative), shape)
    _reduction.cache_clear()


def _registered_reduction(name: str, dtype: np.dtype[Any]) -> Reduction:
    """Return a registered op for a dtype, after a test of its function; may raise ConfigError."""
    function, commutes, shape = _registered[name]
    if not shape:
        combine = function if isinstance(function, np.ufunc) else _wrapped(name, function)
        hint = (
            "for one alone. If an element of the op is an array, register it with element_shape=, "
            "for instance (2, 2)"
        )
        _test_function(name, combine, np.dtype(dtype), hint)
        return Reduction(name, dtype.name, combine, dtype, dtype, is_mean=False, commutes=commutes)
    element = np.dtype([(_ELEMENT, dtype, shape)])
    if element.itemsize > _ELEMENT_BYTES_MAX:
        raise ConfigError(
            f"an element of the op {name!r} has {element.itemsize} bytes; the limit is "
            f"{_ELEMENT_BYTES_MAX}"
        )
    combine = _wrapped(name, function)
    _test_function(name, combine, element, "for one alone")
    result = Reduction(name, dtype.name, combine, element, dtype, is_mean=False)
    return result._replace(commutes=commutes, element_shape=shape)


def _wrapped(name: str, function: Callable[[NDArray[Any], NDArray[Any]], Any]) -> Combiner:
    def combine(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        if not out.size:
            return out
        target: NDArray[Any] = out if out.dtype.names is None else out[_ELEMENT]
        operands = []
        for operand in (left, right):
            seen = operand.view() if operand.dtype.names is None else operand[_ELEMENT]
            seen.flags.writeable = False  # it may be the input of another rank
            operands.append(seen)
        operand_text = f"two arrays of {target.dtype.name}{list(target.shape)}"
        try:
            result = np.asarray(function(*operands))
        except Exception as error:
            raise ConfigError(
                f"the op {name!r} raised {type(error).__name__} for {operand_text}: {error}"
            ) from error
        if result.shape != target.shape or not _goes_into(result.dtype, target.dtype):
            raise ConfigError(
                f"the op {name!r} returned {result.dtype.name}{list(result.shape)} for "
                f"{operand_text}"
            )
        target[...] = result
        return out

    return combine


def _goes_into(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    return (
        one == other
        or np.can_cast(one, other, "same_kind")
        or (one.kind in "fV" and other.kind in "fV")
    )


def _test_function(name: str, combine: Combiner, dtype: np.dtype[Any], hint: str) -> None:
    """Raise ConfigError if op(a, b) of three elements differs from op on each of them."""
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
    whole, single = np.empty(3, dtype), np.empty(3, dtype)
    must = f"It must give the same for several elements as {hint}"
    try:
        with quiet():
            combine(left, right, out=whole)
            for i in range(3):
                combine(left[i : i + 1], right[i : i + 1], out=single[i : i + 1])
    except ConfigError as error:
        raise ConfigError(f"{error}. {must}") from error.__cause__
    except Exception as error:
        raise ConfigError(
            f"the op {name!r} raised {type(error).__name__} for arrays of {plain.name}: {error}. "
            f"{must}"
        ) from error
    wide = np.complex128 if plain.kind in "fVc" else plain
    one, other = (array.view(plain).astype(wide) for array in (whole, single))
    if not np.allclose(one, other, rtol=1e-2, equal_nan=True):
        raise ConfigError(
            f"the op {name!r} is not elementwise: op(a, b) of 3-element {plain.name} arrays "
            f"differs from op on each element. {must}"
        )


def _take_smaller(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    return _take(left, right, out, np.less)


def _take_larger(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    return _take(left, right, out, np.greater)


def _take(
    left: NDArray[Any], right: NDArray[Any], out: NDArray[Any], is_better: np.ufunc
) -> NDArray[Any]:
    """Write the better pair. NaN wins over numbers; of equal values the lower rank wins."""
    ours, theirs = left["value"], right["value"]
    is_lower = right["rank"] < left["rank"]
    better = is_better(theirs, ours) | ((theirs == ours) & is_lower)
    if ours.dtype.kind in "fV":
        odd, other = np.isnan(ours), np.isnan(theirs)
        better = np.where(odd | other, other & (~odd | is_lower), better)
    out[...] = np.where(better, right, left)
    return out


def op_name(op: Any) -> Any:
    """Return the name of an op that is an enum member; any other value is returned as it is."""
    return op if type(op) is str else matching_word(op, (*OPS, *_registered)) or op


def reduction(op: str, dtype: np.dtype[Any]) -> Reduction:
    """Return `op` for `dtype`, or raise ConfigError.

    Half types accumulate in float32 and are rounded once. The mean of integers is float64. `and`,
    `or` and `xor` are logical on bools and bitwise on integers. `minloc` and `maxloc` produce pairs
    of a value and its rank.
    """
    if not isinstance(op, str):
        raise ConfigError(_no_op(op))
    return _reduction(op.lower(), dtype)


def _no_op(op: Any) -> str:
    """Return the error text for an unknown op."""
    from syncvar.core.migration_hints import op_hint

    known = (*OPS, *_registered)
    if isinstance(op, np.ndarray):
        return (
            f"op must be a name such as 'sum', not {op!r:.100}: pass the array for the result "
            f"by name, out=buffer"
        )
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


def identity(op: Reduction) -> Any:
    """Return the neutral element of an op, or raise ConfigError if none is known."""
    dtype = op.result
    simple = {"sum": 0, "mean": 0, "prod": 1, "or": 0, "xor": 0}
    if op.name in simple:
        return simple[op.name]
    if op.name == "and":
        return True if dtype.kind == "b" else np.array(-1, np.int64).astype(dtype)[()]
    if op.name in ("min", "max"):
        if dtype.kind == "b":
            return op.name == "min"
        if dtype.kind in "iu":
            return np.iinfo(dtype).max if op.name == "min" else np.iinfo(dtype).min
        return np.inf if op.name == "min" else -np.inf
    raise ConfigError(f"the op {op.name!r} has no identity, which rank 0 would get; use scan")


def divide_mean(op: Reduction, total: NDArray[Any], count: int) -> NDArray[Any]:
    """Return `total`, or for a mean of several inputs a new array divided by `count`.

    It never divides in place: over links the array may still be on its way to other ranks.
    """
    if not op.is_mean or count <= 1:
        return total
    return np.asarray(np.divide(total, np.asarray(count, dtype=total.dtype)))


def finish(op: Reduction, total: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the result of a reduction from its combined inputs."""
    total = divide_mean(op, total, count)
    return total if total.dtype == op.result else total.astype(op.result)
