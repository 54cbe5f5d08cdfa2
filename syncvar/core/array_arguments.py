"""Checks of arguments: arrays as input, outputs that fit the result, integers, and words."""

from __future__ import annotations

import reprlib
import sys
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from syncvar.core.array_types import DTYPE_NAMES, UnsupportedLibrary, library_of
from syncvar.core.errors import ConfigError, MismatchError, TransportError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

NUMBERS = (bool, int, float, complex, np.generic)

_NO_INPUT = (
    "write np.zeros(shape) on a rank that has no input. If the gradient of a PyTorch parameter is "
    "None, write p.grad = torch.zeros_like(p), or leave out parameters whose p.requires_grad is "
    "False, on all ranks"
)
_AS_OBJECTS = "texts travel as objects, sv.broadcast_object(x.tolist()) for instance"
# By dtype.kind: replacement for an array whose dtype cannot be communicated.
_REMEDIES = {
    "c": "x.astype('complex128'), for instance",
    "U": _AS_OBJECTS,
    "S": _AS_OBJECTS,
    "M": "x.astype('int64') sends dates as integers of their unit",
    "m": "x.astype('int64') sends durations as integers of their unit",
    "T": _AS_OBJECTS,
    "V": "send each field, x['name'], in a dict of arrays",
}


def as_array(value: Any, argument: str = "the value") -> NDArray[Any]:
    """Return `value` as a NumPy array in native byte order, without a copy if possible.

    It may be a NumPy array or scalar, a Python number, a nested list of numbers, or anything with
    `__array__`, the buffer protocol or DLPack. Raises ConfigError for a masked array, or a dtype
    that cannot be communicated; `argument` is its name in errors.
    """
    if type(value) is not np.ndarray:
        _refuse_other_types(value, argument)
        try:
            library = library_of(value)
            value = np.asarray(value) if library is None else library.take(value)
        except (TransportError, MismatchError):  # from the read of a variable
            raise
        except Exception as error:  # a library, or an __array__, may raise anything
            raise ConfigError(
                f"{argument} of type {type(value).__name__} cannot be an array: {error_text(error)}"
            ) from None
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if not _travels(value.dtype):
        raise ConfigError(_dtype_error(value, argument))
    return np.asarray(value)


def _refuse_other_types(value: Any, argument: str) -> None:
    if value is None:
        raise ConfigError(f"{argument} must be an array or a number, not None: {_NO_INPUT}")
    if isinstance(value, str | bytes):
        wrong = f"{argument} must be an array or a number, not {value!r:.200}"
        raise ConfigError(f"{wrong}: sv.broadcast_object(x), for instance, sends texts")
    if isinstance(value, dict | set):
        raise ConfigError(f"{argument} must be an array or a number, not {value!r}"[:300])
    if type(value) is UnsupportedLibrary:
        raise ConfigError(f"{argument} {value.reason}")
    if _is_masked(value):
        raise ConfigError(
            f"{argument} is a masked array, and syncvar would lose its mask: pass x.filled(0), or "
            f"another neutral value"
        )


@lru_cache(maxsize=256)
def _travels(dtype: np.dtype[Any]) -> bool:
    return dtype.name in DTYPE_NAMES  # cached, because NumPy builds the name on each access


def error_text(error: Exception) -> str:
    """Return an error as text, with its type if the message alone says little."""
    if isinstance(error, (ValueError, TypeError, BufferError, RuntimeError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _dtype_error(array: NDArray[Any], argument: str) -> str:
    """Return why an array cannot be communicated, and what to write."""
    if array.dtype.kind != "O":
        remedy = _REMEDIES.get(array.dtype.kind, "x.astype('float64'), for instance")
        if array.dtype.kind == "V" and array.dtype.names is None:  # a small float of ml_dtypes
            remedy = "x.astype('float16'), for instance"
        names = ", ".join(DTYPE_NAMES)
        return (
            f"{argument}: dtype {array.dtype} cannot be communicated; use one of {names}: {remedy}"
        )
    if array.ndim == 0 and hasattr(array.item(), "__iter__"):
        kind = type(array.item()).__name__
        return f"{argument} is a {kind}, and no array: pass a list of arrays, list(x)"
    for item in array.flat:
        shown = reprlib.repr(item)
        if isinstance(item, str | bytes):
            return f"{argument} holds {shown}, which is no number: {_AS_OBJECTS}"
        if not isinstance(item, NUMBERS):
            return (
                f"{argument} holds {shown} of type {type(item).__name__}, which is no number: "
                f"pass np.zeros(shape), or other numbers"
            )
        if isinstance(item, int) and not -(1 << 63) <= item < 1 << 64:
            return (
                f"{argument} holds {shown}, which fits no integer dtype: pass float(x), which "
                f"rounds it, or several smaller integers"
            )
    dtype = np.asarray(array.tolist()).dtype
    name = dtype.name if dtype.name in DTYPE_NAMES else "float64"
    return (
        f"{argument} is an array of Python objects (dtype object), here "
        f"{reprlib.repr(array.tolist())}: pass x.astype('{name}')"
    )


def _is_masked(value: Any, above: tuple[int, ...] = ()) -> bool:
    """Return whether a value, or an item of nested lists, is a masked array.

    `above` holds the ids of the lists around it. A list that contains itself is searched once and
    fails later, in the conversion to an array.
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
    """Return `out` if the result fits into it, else raise ConfigError with the reason."""
    if type(out) is UnsupportedLibrary:
        raise ConfigError(f"out {out.reason}")
    if not isinstance(out, np.ndarray):
        raise ConfigError(
            f"out must be a NumPy array or a tensor in the memory of the CPU, not "
            f"{type(out).__name__}"
        )
    if _is_masked(out):
        raise ConfigError(
            "out is a masked array, and its mask would not fit the result: pass out.data, or "
            "leave it out"
        )
    if out.shape != shape or out.dtype != dtype:
        raise ConfigError(
            f"out has shape {out.shape} and dtype {out.dtype}, the result has shape {shape} and "
            f"dtype {dtype}"
        )
    if not out.flags.writeable:
        raise ConfigError("out is read-only: pass a writable array")
    return out


def deliver(result: NDArray[Any], out: Any) -> NDArray[Any]:
    """Return a result in `out`, if there is one; raise ConfigError if it does not fit."""
    if out is None or result is out:
        return result
    target = checked_output(out, result.shape, result.dtype)
    target[...] = result
    return target


def result_buffer(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *sources: NDArray[Any]
) -> NDArray[Any]:
    """Return `out` if it can be written while `sources` are read, else a new array."""
    is_fit = (
        type(out) is np.ndarray and out.shape == shape and out.dtype == dtype and out.flags.carray
    )
    if is_fit and not any(np.may_share_memory(out, source) for source in sources):
        return cast("NDArray[Any]", out)
    return np.empty(shape, dtype)


def checked_integer(name: str, value: Any) -> int:
    """Return an integer argument, or raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        hint = ": pass the array for the result by name, out=buffer"
        hint = hint if isinstance(value, np.ndarray) else ""
        raise ConfigError(f"{name} must be an integer, not {value!r:.100}{hint}")
    return int(value)


def matching_word(argument: Any, known: Iterable[str]) -> str | None:
    """Return the word in `known` that an argument means, or None.

    The argument is text in any case or a member of any enum, also of another library. Of a member
    the name counts, and the value if it is text.

    Example:
        >>> from enum import Enum
        >>> words = ["sum", "mean"]
        >>> matching_word("Mean", words), matching_word(Enum("Op", "SUM MEAN").SUM, words)
        ('mean', 'sum')
    """
    texts = [argument] if isinstance(argument, str) else []
    if isinstance(argument, Enum):
        texts += [argument.value, argument.name]
    lower = [text.lower() for text in texts if isinstance(text, str)]
    return next((word for text in lower for word in known if word.lower() == text), None)
