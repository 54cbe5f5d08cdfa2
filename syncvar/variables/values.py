"""What a program passes to variables, and what acts as an array.

`PerReplica` and `Mirrored` hold this process's part of a value; `ArrayProtocol` makes a variable
behave like the array that reading returns. `operand_array` and `check_rows` convert the operands of
writes.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from syncvar.core.array_arguments import as_array
from syncvar.core.array_types import dtype_index
from syncvar.core.errors import ConfigError, RowOutOfRange, UsageError
from syncvar.core.html_table import array_rows, html_table
from syncvar.core.reduce_ops import reduction
from syncvar.variables.policy import AccessKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

_PYTHON_NUMBERS = (bool, int, float, complex)
_NUMBER_TYPES = frozenset(_PYTHON_NUMBERS)
_ORDER = {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2, "c": 3}
_NAMES = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}
_WIDE = {"b": "bool", "i": "int64", "u": "uint64", "f": "float32", "c": "complex64"}
_ROW_UFUNCS: dict[AccessKind, np.ufunc] = {
    AccessKind.SCATTER_ADD: np.add,
    AccessKind.SCATTER_SUB: np.subtract,
    AccessKind.SCATTER_MUL: np.multiply,
    AccessKind.SCATTER_DIV: np.divide,
    AccessKind.SCATTER_MIN: np.minimum,
    AccessKind.SCATTER_MAX: np.maximum,
}
_OF_BOOLS = (AccessKind.SCATTER_UPDATE, AccessKind.SCATTER_MIN, AccessKind.SCATTER_MAX)


class DistributedValues:
    """Base class of values that have one part on each replica.

    Args:
        value: This process's part.

    Example:
        >>> import syncvar as sv
        >>> x = sv.PerReplica(3.0)
        >>> isinstance(x, sv.DistributedValues), x.values
        (True, (3.0,))
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def values(self) -> tuple[Any, ...]:
        """This process's part, as a tuple of one."""
        return (self._value,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._value!r})"

    def _repr_html_(self) -> str:
        return html_table(
            f"sv.{type(self).__name__}: the part of this rank", array_rows(self._value)
        )


def _refuse_ambiguous(label: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        raise UsageError(
            f"{label} of a PerReplica has no single meaning, since every replica holds another "
            "value. Pass it to strategy.run(fn, args=(x,)), combine it with "
            "strategy.reduce('SUM', x, axis=None), or take this process's part with "
            "strategy.experimental_local_results(x)"
        )

    return refuse


class PerReplica(DistributedValues):
    """This process's part of a value that may differ between replicas.

    Pass it to `run`, `reduce`, `gather` or `experimental_local_results`; used as a
    number it raises UsageError.

    Example:
        >>> import syncvar as sv
        >>> x = sv.PerReplica(3.0)
        >>> sv.get_strategy().experimental_local_results(x)
        (3.0,)
        >>> x + 1
        Traceback (most recent call last):
        ...
        syncvar.core.errors.UsageError: arithmetic of a PerReplica has no single meaning, ...
    """

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _refuse_ambiguous("arithmetic")
    )
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = (
        _refuse_ambiguous("arithmetic")
    )
    __rmatmul__ = __neg__ = __pos__ = __abs__ = __iadd__ = __isub__ = __imul__ = _refuse_ambiguous(
        "arithmetic"
    )
    __itruediv__ = __and__ = __or__ = __xor__ = __invert__ = _refuse_ambiguous("arithmetic")
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse_ambiguous("comparison")
    __getitem__ = __setitem__ = _refuse_ambiguous("indexing")
    __iter__ = __len__ = __contains__ = _refuse_ambiguous("iteration")
    __float__ = __int__ = __bool__ = __complex__ = __index__ = _refuse_ambiguous("conversion")
    __array__ = __array_ufunc__ = __array_function__ = _refuse_ambiguous("a NumPy function")


class Mirrored(DistributedValues, NDArrayOperatorsMixin):
    """A value that is the same on all replicas; acts as its array.

    Example:
        >>> import syncvar as sv
        >>> float(sv.Mirrored(2.0) + 1)
        3.0
    """

    __hash__ = object.__hash__

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        array = np.asarray(self._value, dtype=dtype)
        return array.copy() if copy and array is self._value else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [one.__array__() if isinstance(one, Mirrored) else one for one in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self._value)[key]

    def __len__(self) -> int:
        return len(np.asarray(self._value))

    def __iter__(self) -> Any:
        return iter(np.asarray(self._value))

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self._value), spec) if spec else str(self)

    def __float__(self) -> float:
        return float(np.asarray(self._value))

    def __int__(self) -> int:
        return int(np.asarray(self._value))

    def __bool__(self) -> bool:
        return bool(np.asarray(self._value))


def _refuse_in_place(symbol: str, instead: str) -> Callable[[Any, Any], NoReturn]:
    def refuse(self: Any, other: Any) -> NoReturn:
        del other
        raise TypeError(
            f"`v {symbol} x` is not supported: it would make the name v an array. Write "
            f"`{instead}` to write to the variable {self.name!r}"
        )

    return refuse


class ArrayProtocol(NDArrayOperatorsMixin):
    """Operators, conversions and NumPy functions on the result of `read_value`."""

    @property
    def name(self) -> str:
        """Return the name."""
        raise NotImplementedError

    def read_value(self, *, copy: bool = True) -> NDArray[Any]:
        """Return the value; see `Variable.read_value`."""
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        value = self.read_value()
        if dtype is not None and value.dtype != dtype:
            if copy is False:
                raise ValueError(f"{value.dtype} cannot become {np.dtype(dtype)} without a copy")
            return value.astype(dtype)
        return value.copy() if copy else value

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Any = None,
        dl_device: Any = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a copy of the value for another library: `torch.from_dlpack(v)`.

        It is a copy, because the value is read-only and arrays of other libraries may not be.
        """
        if copy is False:
            raise BufferError(
                f"the value of variable {self.name!r} is given away as a copy only: leave out "
                "copy=False"
            )
        value = self.read_value(copy=False)
        if value.dtype.kind == "V":
            raise BufferError(
                f"NumPy's DLPack does not know {value.dtype}: write np.asarray(v), or "
                "torch.from_numpy(v.numpy().view('int16').copy()).view(torch.bfloat16)"
            )
        options = {"stream": stream}
        if max_version is not None:
            options = {"max_version": max_version, "dl_device": dl_device}
        return value.copy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number for CPU memory."""
        return 1, 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, ArrayProtocol) for one in kwargs.get("out") or ()) or method == "at":
            raise TypeError(
                f"np.{ufunc.__name__} cannot write into a variable; write v.assign(x), "
                "v.assign_add(x) or v.assign_sub(x)"
            )
        plain = [one.read_value() if isinstance(one, ArrayProtocol) else one for one in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    __iadd__ = _refuse_in_place("+=", "v.assign_add(x)")
    __isub__ = _refuse_in_place("-=", "v.assign_sub(x)")
    __imul__ = _refuse_in_place("*=", "v.assign(v * x)")
    __itruediv__ = _refuse_in_place("/=", "v.assign(v / x)")
    __ifloordiv__ = _refuse_in_place("//=", "v.assign(v // x)")
    __imod__ = _refuse_in_place("%=", "v.assign(v % x)")
    __ipow__ = _refuse_in_place("**=", "v.assign(v ** x)")
    __imatmul__ = _refuse_in_place("@=", "v.assign(v @ x)")
    __iand__ = _refuse_in_place("&=", "v.assign(v & x)")
    __ior__ = _refuse_in_place("|=", "v.assign(v | x)")
    __ixor__ = _refuse_in_place("^=", "v.assign(v ^ x)")
    __ilshift__ = _refuse_in_place("<<=", "v.assign(v << x)")
    __irshift__ = _refuse_in_place(">>=", "v.assign(v >> x)")

    __hash__ = object.__hash__

    def __getitem__(self, key: Any) -> Any:
        return self.read_value()[key]

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"a part of the variable {self.name!r} cannot be assigned by indexing; write "
            "v.scatter_update(rows, values), or v.assign(x)"
        )

    def __len__(self) -> int:
        return len(self.read_value(copy=False))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())

    def __format__(self, spec: str) -> str:
        # Without a spec like repr, which never communicates.
        return format(self.read_value(copy=False), spec) if spec else str(self)

    def __float__(self) -> float:
        return float(self.read_value(copy=False))

    def __int__(self) -> int:
        return int(self.read_value(copy=False))

    def __complex__(self) -> complex:
        return complex(self.read_value(copy=False))

    def __bool__(self) -> bool:
        return bool(self.read_value(copy=False))

    def __index__(self) -> int:
        return operator.index(self.read_value(copy=False))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"the variable {self.name!r} cannot be pickled: its copies live in several processes. "
            "Save it with sv.Checkpoint(v=v).save(path), or pickle v.numpy()"
        )


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """Return `dtype` as a dtype that can be communicated."""
    try:
        result: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(
            f"dtype must name a NumPy dtype, not {dtype!r} ({error}). Write dtype='float32', for "
            "instance"
        ) from None
    if not result.isnative:
        result = result.newbyteorder("=")
    dtype_index(result)
    return result


def initial_array(value: Any, dtype: np.dtype[Any] | None, label: str) -> NDArray[Any]:
    """Return an initial value as an array of its own; Python floats make float32."""
    array = plain_array(value, f"{label}: the value")
    is_weak = _is_weak(value)
    if dtype is None:
        is_float = is_weak and array.dtype == np.float64
        dtype = np.dtype(np.float32) if is_float else array.dtype
    return _cast(array, dtype, label, weak=is_weak)


def operand_array(
    value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], label: str
) -> NDArray[Any]:
    """Return an operand as an array of exactly this shape and dtype.

    NumPy's same_kind rule casts arrays. Python numbers (and lists of them) are weak: they take the
    dtype if it can hold them.
    """
    number = None if shape else number_array(value, dtype)
    if number is not None:
        return number
    array = plain_array(value, f"{label}: the value")
    if array.shape != shape:
        raise ConfigError(
            f"{label}: the value has shape {array.shape}, the variable {shape}; nothing is "
            f"broadcast. Write np.broadcast_to(x, {shape}) if that is meant"
        )
    return _cast(array, dtype, label, weak=_is_weak(value))


def number_array(value: Any, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return a Python int or float as an array; None if the dtype might not hold it.

    Example:
        >>> number_array(2, np.dtype("float32")), number_array(1e300, np.dtype("float32"))
        (array(2., dtype=float32), None)
    """
    limits = _limits(dtype).get(type(value))
    if limits is None or not limits[0] <= value <= limits[1]:
        return None
    try:
        return np.asarray(value).astype(dtype, copy=False)
    # The program has set NumPy to raise on underflow.
    except (FloatingPointError, Warning):
        return None


@lru_cache(maxsize=64)
def _limits(dtype: np.dtype[Any]) -> dict[type, tuple[Any, Any]]:
    """Return the smallest and the largest int and float that fit into a dtype."""
    if dtype.kind in "iu":
        whole = np.iinfo(dtype)
        return {int: (int(whole.min), int(whole.max))}
    if dtype.kind not in "fc":
        return {}
    largest = float(np.finfo(dtype).max)
    most = min(int(largest), np.iinfo(np.int64).max)
    return {float: (-largest, largest), int: (-most, most)}


def plain_array(value: Any, label: str) -> NDArray[Any]:
    """Return any value except a PerReplica as an array."""
    if isinstance(value, PerReplica):
        raise UsageError(
            f"{label}: a PerReplica holds one value for each replica; reduce it first: x = "
            "strategy.reduce('SUM', x, axis=None), or pass it through strategy.run(fn, args=(x,))"
        )
    if value is None:
        raise ConfigError(
            f"{label} must be an array or a number, not None. Every replica passes one: write "
            "np.zeros(shape), or 0.0, where a replica has nothing to bring"
        )
    if isinstance(value, str | bytes):
        raise ConfigError(
            f"{label} must be an array or a number, not {value!r:.80}: write 0.0, or "
            "np.zeros(shape)"
        )
    return as_array(value.values[0] if isinstance(value, Mirrored) else value, label)


def _is_weak(value: Any) -> bool:
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))  # looking at each item would be slower
        return kinds <= _NUMBER_TYPES or all(_is_weak(part) for part in value)
    return isinstance(value, _PYTHON_NUMBERS) and not isinstance(value, np.generic)


def _cast(array: NDArray[Any], dtype: np.dtype[Any], label: str, *, weak: bool) -> NDArray[Any]:
    if array.dtype == dtype:
        return array
    if not weak:
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ConfigError(
                f"{label}: {array.dtype.name} does not go into {dtype.name} (NumPy's same_kind "
                f"rule). Write x.astype('{dtype.name}') if that is meant"
            )
        return array.astype(dtype)
    if not array.size:  # NumPy calls an empty list float64, but it holds no float
        return array.astype(dtype)
    if _ORDER[array.dtype.kind] > _ORDER[dtype.kind]:
        raise ConfigError(
            f"{label}: a Python {_NAMES[array.dtype.kind]} does not go into {dtype.name}. Write "
            f"np.asarray(x).astype('{dtype.name}') if that is meant, or make the variable with "
            f"dtype='{_WIDE[array.dtype.kind]}'"
        )
    if dtype.kind in "iu" and array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ConfigError(
                f"{label}: {dtype.name} holds {limits.min} to {limits.max}, not "
                f"{array.tolist()!s:.120}. Make the variable with "
                f"dtype='{'uint64' if int(array.max()) > np.iinfo(np.int64).max else 'int64'}'"
            )
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind in "biu":
        return cast
    if bool(np.any(np.isinf(cast.astype(np.complex128)) & np.isfinite(array))):
        raise ConfigError(
            f"{label}: {dtype.name} cannot hold {array.tolist()!s:.120}. Make the variable with "
            f"dtype='{'complex128' if dtype.kind == 'c' else 'float64'}'"
        )
    return cast


class RowSelection(NamedTuple):
    """Rows of a variable."""

    indices: NDArray[Any]  # int64[k], each in [0, rows)
    values: NDArray[Any]  # the variable's dtype, shape (k, *row)


def check_rows(
    operation: AccessKind,
    indices: Any,
    values: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    label: str,
) -> RowSelection:
    """Return the checked operand of a scatter operation."""
    if not shape:
        raise ConfigError(
            f"{label}: a scalar has no rows; write v.assign(x), v.assign_add(x) or v.assign_sub(x)"
        )
    if dtype.kind == "b" and operation not in _OF_BOOLS:
        raise ConfigError(
            f"{label}: bool has no sum or product; use scatter_update, scatter_min or scatter_max"
        )
    if dtype.kind == "c" and operation in (AccessKind.SCATTER_MIN, AccessKind.SCATTER_MAX):
        raise ConfigError(f"{label}: complex numbers have no order")
    try:
        rows = plain_array(indices, f"{label}: indices")
    except ConfigError:
        if (row := _beyond(indices)) is None:
            raise
        raise RowOutOfRange(
            f"{label}: row {row} is outside the variable's {_inside(shape[0])}"
        ) from None
    if rows.dtype.kind not in "iu" and rows.size:
        raise ConfigError(f"{label}: indices must be integers, not {rows.dtype.name}")
    parts = operand_array(values, (*rows.shape, *shape[1:]), dtype, f"{label}: values")
    value = rows.reshape(-1)
    outside = value[(value < 0) | (value >= shape[0])]
    flat = value.astype(np.int64)
    if outside.size:
        row, count = int(outside[0]), shape[0]
        fix = (
            f"Leave such rows out: keep = rows < {count}; v.{operation.value}(rows[keep], "
            "values[keep])"
        )
        if row < 0 < count:
            fix = f"Negative rows do not count from the end: write rows % {count}"
        raise RowOutOfRange(f"{label}: row {row} is outside the variable's {_inside(count)}. {fix}")
    return RowSelection(flat, np.ascontiguousarray(parts).reshape((flat.size, *shape[1:])))


def _inside(count: int) -> str:
    return f"rows 0 to {count - 1}" if count else "rows: it has none"


def _beyond(indices: Any) -> int | None:
    """Return the first index that no integer dtype holds; NumPy would make an array of objects."""
    if isinstance(indices, list | tuple):
        return next((found for item in indices if (found := _beyond(item)) is not None), None)
    return indices if isinstance(indices, int) and not -(1 << 63) <= indices < 1 << 64 else None


def apply_rows(
    operation: AccessKind, copy: NDArray[Any], rows: RowSelection, divisor: int = 1
) -> NDArray[Any]:
    """Return a copy with the rows applied one by one; half types are rounded once."""
    half = copy.dtype.itemsize == 2 and copy.dtype.kind in "fV"
    dtype = reduction("sum", copy.dtype).accumulate if half else copy.dtype
    result = np.array(copy, dtype=dtype, copy=True)
    values = rows.values.astype(dtype)
    if divisor > 1:
        values = values / np.asarray(divisor, dtype)
    if operation is AccessKind.SCATTER_UPDATE:
        result[rows.indices] = values  # the last value of a row that is named twice
    elif operation is AccessKind.SCATTER_DIV and dtype.kind in "iu":
        for row, value in zip(rows.indices, values, strict=True):
            result[row] = _truncated(result[row], value)
    else:
        _ROW_UFUNCS[operation].at(result, rows.indices, values)
    return result if result.dtype == copy.dtype else result.astype(copy.dtype)


def _truncated(dividend: NDArray[Any], divisor: NDArray[Any]) -> NDArray[Any]:
    quotient = dividend // divisor
    inexact = (dividend % divisor != 0) & ((dividend < 0) != (divisor < 0))
    return np.asarray(quotient + inexact.astype(quotient.dtype))
