"""Arrays out of what a caller gives, and results in what it gave to be written to: one check each, with what to write instead."""

from __future__ import annotations

import reprlib
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.array_interop import UnsupportedLibrary, library_of
from syncvar.core.dtypes import DTYPE_NAMES
from syncvar.core.errors import ConfigError, MismatchError, TransportError

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUMBERS = (bool, int, float, complex, np.generic)
"""Types of what is a number, and no array."""


def as_array(value: Any, what: str = "the value") -> NDArray[Any]:
    """Return `value` as a native-endian NumPy array, without a copy where that is possible.

    Args:
        value: NumPy array or scalar, Python number, nested list of numbers, or anything with `__array__`, the buffer
            protocol or DLPack. Of a tensor that requires a gradient the value is taken.
        what: How to call it in an error.

    Raises:
        ConfigError: It cannot be an array, its dtype cannot be communicated, or it is a masked array.
    """
    if type(value) is not np.ndarray:
        if value is None:
            raise ConfigError(f"{what} must be an array or a number, not None: {_NOTHING_TO_BRING}")
        if isinstance(value, str | bytes):
            wrong = f"{what} must be an array or a number, not {value!r:.200}"
            raise ConfigError(f"{wrong}: sv.broadcast_object(x), for instance, sends texts")
        if isinstance(value, dict | set):
            raise ConfigError(f"{what} must be an array or a number, not {value!r}"[:300])
        if type(value) is UnsupportedLibrary:
            raise ConfigError(f"{what} {value.reason}")
        if _is_masked(value):
            raise ConfigError(
                f"{what} is a masked array, and its mask would be lost on the way: pass x.filled(0), or what else stands for nothing"
            )
        try:
            library = library_of(value)
            value = np.asarray(value) if library is None else library.take(value)
        except (TransportError, MismatchError):  # of a variable that is read: not about what it is
            raise
        except Exception as error:  # whatever the library, or an __array__, raises
            raise ConfigError(
                f"{what} of type {type(value).__name__} cannot be an array: {told(error)}"
            ) from None
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if not _travels(value.dtype):
        raise ConfigError(_untravelled(value, what))
    return np.asarray(value)


_NOTHING_TO_BRING = (
    "write np.zeros(shape) where a rank has nothing to bring. Where the gradient of a parameter of "
    "PyTorch is None, write p.grad = torch.zeros_like(p), or leave out the parameters whose "
    "p.requires_grad is False, on all ranks"
)
_AS_OBJECTS = "texts travel as objects, sv.broadcast_object(x.tolist()) for instance"
_UNTRAVELLED = {
    "c": "x.astype('complex128'), for instance",
    "U": _AS_OBJECTS,
    "S": _AS_OBJECTS,
    "M": "x.astype('int64') sends moments as integers of their unit",
    "m": "x.astype('int64') sends durations as integers of their unit",
    "T": _AS_OBJECTS,
    "V": "send each field, x['name'], in a dict of arrays",
}
"""By kind of dtype: what to write instead of an array of a dtype that does not travel."""


@lru_cache(maxsize=256)
def _travels(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of a dtype can be communicated; NumPy makes the name anew each time."""
    return dtype.name in DTYPE_NAMES


def told(error: Exception) -> str:
    """Return an error in words; one of a kind whose message alone says little with its kind.

    Example:
        >>> told(ValueError("no memory of the CPU")), told(KeyError("cpu"))
        ('no memory of the CPU', "KeyError: 'cpu'")
    """
    return (
        str(error)
        if isinstance(error, (ValueError, TypeError, BufferError, RuntimeError))
        else f"{type(error).__name__}: {error}"
    )


def _untravelled(array: NDArray[Any], what: str) -> str:
    """Return why an array cannot travel, and what to write."""
    if array.dtype.kind != "O":
        remedy = _UNTRAVELLED.get(array.dtype.kind, "x.astype('float64'), for instance")
        if array.dtype.kind == "V" and array.dtype.names is None:  # a small float of ml_dtypes
            remedy = "x.astype('float16'), for instance"
        return f"{what}: dtype {array.dtype} cannot be communicated; use one of {', '.join(DTYPE_NAMES)}: {remedy}"
    if array.ndim == 0 and hasattr(array.item(), "__iter__"):
        kind = type(array.item()).__name__
        return f"{what} is a {kind}, and no array: pass a list of arrays, list(x)"
    for item in array.flat:
        if isinstance(item, str | bytes):
            return f"{what} holds {reprlib.repr(item)}, which is no number: {_AS_OBJECTS}"
        if not isinstance(item, NUMBERS):
            return f"{what} holds {reprlib.repr(item)} of type {type(item).__name__}, which is no number: pass np.zeros(shape), or other numbers"
        if isinstance(item, int) and not -(1 << 63) <= item < 1 << 64:
            return f"{what} holds {reprlib.repr(item)}, which no integer dtype can: pass float(x), which rounds it, or several smaller integers"
    dtype = np.asarray(array.tolist()).dtype
    name = dtype.name if dtype.name in DTYPE_NAMES else "float64"
    return f"{what} is an array of Python objects (dtype object), here {reprlib.repr(array.tolist())}: pass x.astype('{name}')"


def _is_masked(value: Any, above: tuple[int, ...] = ()) -> bool:
    """Return whether a value, or an item of nested lists, is a masked array, which becomes another array without its mask.

    Args:
        value: As it was passed; a list that holds itself is looked through once, and refused where it becomes an array.
        above: The lists that it stands in.
    """
    masked = sys.modules.get("numpy.ma")  # NumPy imports it with the first use
    if masked is None:
        return False
    if isinstance(value, list | tuple):
        return id(value) not in above and any(
            _is_masked(item, (*above, id(value))) for item in value
        )
    return isinstance(value, masked.MaskedArray)


def checked_output(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `out` if a result of this shape and dtype can be written to it.

    Raises:
        ConfigError: It cannot; the message says why.
    """
    if type(out) is UnsupportedLibrary:
        raise ConfigError(f"out {out.reason}")
    if not isinstance(out, np.ndarray):
        raise ConfigError(
            f"out must be a NumPy array, or a tensor in the memory of the CPU, not {type(out).__name__}"
        )
    if _is_masked(out):
        raise ConfigError(
            "out is a masked array, and its mask would say something else than the result: pass out.data, or leave it out"
        )
    if out.shape != shape or out.dtype != dtype:
        raise ConfigError(
            f"out has shape {out.shape} and dtype {out.dtype}, the result has shape {shape} and dtype {dtype}"
        )
    if not out.flags.writeable:
        raise ConfigError("out is read-only: pass a writable array")
    return out


def deliver(made: NDArray[Any], out: Any) -> NDArray[Any]:
    """Return a result in `out`, if there is one.

    Raises:
        ConfigError: It does not fit.
    """
    if out is None or made is out:
        return made
    target = checked_output(out, made.shape, made.dtype)
    target[...] = made
    return target


def checked_integer(name: str, value: Any) -> int:
    """Return an argument that must be an integer.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        hint = (
            ": the array to write to is named, out=buffer" if isinstance(value, np.ndarray) else ""
        )
        raise ConfigError(f"{name} must be an integer, not {value!r:.100}{hint}")
    return int(value)
