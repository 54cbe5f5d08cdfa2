"""Conversion of values on their way into a variable: accepted types, dtypes, and digests."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.array_arguments import as_array
from syncvar.core.array_types import dtype_index
from syncvar.core.errors import ConfigError, UsageError
from syncvar.variables.block_digests import block_digests
from syncvar.variables.values import Mirrored, PerReplica

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHORT_BYTES = (
    4096  # of longer arrays the digests of blocks are digested, which are made ten times as fast
)
_PYTHON_NUMBERS = (bool, int, float, complex)
_PLAIN_NUMBERS = frozenset(_PYTHON_NUMBERS)
_ORDER = {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2, "c": 3}


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """Return `dtype` as a dtype that can be communicated."""
    try:
        made: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(
            f"dtype must name a NumPy dtype, not {dtype!r} ({error}). Write dtype='float32', for "
            "instance"
        ) from None
    if not made.isnative:
        made = made.newbyteorder("=")
    dtype_index(made)
    return made


def initial_array(value: Any, dtype: np.dtype[Any] | None, what: str) -> NDArray[Any]:
    """Return an initial value as an array of its own.

    Python floats make float32, ints int64, bools bool; arrays keep their dtype.
    """
    array = plain_array(value, f"{what}: the value")
    if dtype is None:
        dtype = (
            np.dtype(np.float32) if _is_weak(value) and array.dtype == np.float64 else array.dtype
        )
    return _cast(array, dtype, what, weak=_is_weak(value))


def operand_array(
    value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], what: str
) -> NDArray[Any]:
    """Return an operand as an array of exactly this shape and dtype.

    NumPy's same_kind rule casts arrays. Python numbers (and lists of them) are weak: they take the
    dtype if it can hold them.

    Raises:
        ConfigError: Wrong shape or dtype, or no value at all.
        UsageError: A PerReplica: reduce it first.
    """
    number = None if shape else number_array(value, dtype)
    if number is not None:
        return number
    array = plain_array(value, f"{what}: the value")
    if array.shape != shape:
        raise ConfigError(
            f"{what}: the value has shape {array.shape}, the variable {shape}; nothing is "
            f"broadcast. Write np.broadcast_to(x, {shape}) if that is meant"
        )
    return _cast(array, dtype, what, weak=_is_weak(value))


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


def digest_of(array: NDArray[Any]) -> int:
    """Return the 64-bit digest of dtype, shape and bytes."""
    made = _begun(array.dtype, array.shape).copy()
    flat = np.ascontiguousarray(array)
    short = flat.nbytes <= _SHORT_BYTES
    data = flat.reshape(-1).view(np.uint8) if short else block_digests(flat)
    made.update(data)  # type: ignore[arg-type]
    return int.from_bytes(made.digest(), "little")


@lru_cache(maxsize=256)
def _begun(dtype: np.dtype[Any], shape: tuple[int, ...]) -> hashlib.blake2b:
    return hashlib.blake2b(f"{dtype.name}{shape}".encode(), digest_size=8)


def plain_array(value: Any, what: str) -> NDArray[Any]:
    """Return any value except a PerReplica as an array.

    Raises:
        ConfigError: Not an array.
        UsageError: A PerReplica.
    """
    if isinstance(value, PerReplica):
        raise UsageError(
            f"{what}: a PerReplica holds one value for each replica; reduce it first: x = "
            "strategy.reduce('SUM', x, axis=None), or pass it through strategy.run(fn, args=(x,))"
        )
    if value is None:
        raise ConfigError(
            f"{what} must be an array or a number, not None. Every replica passes one: write "
            "np.zeros(shape), or 0.0, where a replica has nothing to bring"
        )
    if isinstance(value, str | bytes):
        raise ConfigError(
            f"{what} must be an array or a number, not {value!r:.80}: write 0.0, or np.zeros(shape)"
        )
    return as_array(value.values[0] if isinstance(value, Mirrored) else value, what)


def _is_weak(value: Any) -> bool:
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))  # few, where the parts are many
        return kinds <= _PLAIN_NUMBERS or all(_is_weak(part) for part in value)
    return isinstance(value, _PYTHON_NUMBERS) and not isinstance(value, np.generic)


def _cast(array: NDArray[Any], dtype: np.dtype[Any], what: str, *, weak: bool) -> NDArray[Any]:
    if array.dtype == dtype:
        return array
    if not weak:
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ConfigError(
                f"{what}: {array.dtype.name} does not go into {dtype.name} (NumPy's same_kind "
                f"rule). Write x.astype('{dtype.name}') if that is meant"
            )
        return array.astype(dtype)
    if not array.size:  # NumPy calls an empty list float64, but it holds no float
        return array.astype(dtype)
    if _ORDER[array.dtype.kind] > _ORDER[dtype.kind]:
        raise ConfigError(
            f"{what}: a Python {_NAMES[array.dtype.kind]} does not go into {dtype.name}. Write "
            f"np.asarray(x).astype('{dtype.name}') if that is meant, or make the variable with "
            f"dtype='{_WIDE[array.dtype.kind]}'"
        )
    if dtype.kind in "iu" and array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ConfigError(
                f"{what}: {dtype.name} holds {limits.min} to {limits.max}, not "
                f"{array.tolist()!s:.120}. Make the variable with "
                f"dtype='{'uint64' if int(array.max()) > np.iinfo(np.int64).max else 'int64'}'"
            )
    with np.errstate(over="ignore"):
        made = array.astype(dtype)
    if dtype.kind not in "biu" and bool(
        np.any(np.isinf(made.astype(np.complex128)) & np.isfinite(array))
    ):
        raise ConfigError(
            f"{what}: {dtype.name} cannot hold {array.tolist()!s:.120}. Make the variable with "
            f"dtype='{'complex128' if dtype.kind == 'c' else 'float64'}'"
        )
    return made


_NAMES = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}
_WIDE = {"b": "bool", "i": "int64", "u": "uint64", "f": "float32", "c": "complex64"}
