"""Checks and conversions shared by all collectives."""

from __future__ import annotations

import reprlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.errors import ConfigError
from syncvar.wire import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["Structure", "as_array", "checked_output", "checked_root", "describe", "flatten", "is_structure", "unflatten"]

_PLAIN_LEAVES = (bool, int, float, complex, np.generic)


def as_array(value: Any, what: str = "the value") -> NDArray[Any]:
    """Return `value` as a native-endian NumPy array, without a copy where that is possible.

    Args:
        value: NumPy array or scalar, Python number, nested list of numbers, or anything with `__array__`, the buffer
            protocol or DLPack.
        what: How to call it in an error.

    Raises:
        ConfigError: It cannot be an array, its dtype cannot be communicated, or it is a masked array.
    """
    if type(value) is not np.ndarray:
        if value is None or isinstance(value, str | bytes | dict | set):
            raise ConfigError(f"{what} must be an array or a number, not {value!r}"[:300])
        if _is_masked(value):
            raise ConfigError(f"{what} is a masked array, and its mask would be lost on the way: pass x.filled(0), or what else stands for nothing")
        try:
            value = _converted(value)
        except (ValueError, TypeError, BufferError, RuntimeError) as error:
            raise ConfigError(f"{what} of type {type(value).__name__} cannot be an array: {error}") from error
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if value.dtype.name not in DTYPE_NAMES:
        raise ConfigError(_untravelled(value, what))
    return np.asarray(value)


def _untravelled(array: NDArray[Any], what: str) -> str:
    """Return why an array cannot travel, and what to write."""
    if array.dtype.kind != "O":
        return f"{what}: dtype {array.dtype} cannot be communicated; use one of {', '.join(DTYPE_NAMES)}: x.astype('float64'), for instance"
    for item in array.flat:
        if not isinstance(item, _PLAIN_LEAVES):
            return f"{what} holds {reprlib.repr(item)} of type {type(item).__name__}, which is no number: pass np.zeros(shape), or other numbers"
        if isinstance(item, int) and not -(1 << 63) <= item < 1 << 64:
            return f"{what} holds {reprlib.repr(item)}, which no integer dtype can: pass float(x), which rounds it, or several smaller integers"
    dtype = np.asarray(array.tolist()).dtype
    name = dtype.name if dtype.name in DTYPE_NAMES else "float64"
    return f"{what} is an array of Python objects (dtype object), here {reprlib.repr(array.tolist())}: pass x.astype('{name}')"


def _is_masked(value: Any) -> bool:
    """Return whether a value, or an item of nested lists, is a masked array, which becomes another array without its mask."""
    masked = sys.modules.get("numpy.ma")  # NumPy imports it with the first use
    if masked is None:
        return False
    if isinstance(value, list | tuple):
        return any(_is_masked(item) for item in value)
    return isinstance(value, masked.MaskedArray)


def _converted(value: Any) -> NDArray[Any]:
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic):
        try:
            return np.from_dlpack(value)
        except (RuntimeError, BufferError):  # DLPack of NumPy knows no bfloat16, and other libraries refuse memory of devices
            if not hasattr(value, "__array__"):
                raise
    return np.asarray(value)


def checked_root(root: Any, size: int) -> int:
    """Return `root` as a rank of the group.

    Raises:
        ConfigError: It is no integer or outside the group.
    """
    if isinstance(root, bool) or not isinstance(root, int | np.integer):
        raise ConfigError(f"root must be an integer, not {root!r}")
    if not 0 <= root < size:
        raise ConfigError(f"root {root} is not in the group: its ranks are 0 to {size - 1}")
    return int(root)


def checked_output(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `out` if a result of this shape and dtype can be written to it.

    Raises:
        ConfigError: It cannot; the message says why.
    """
    if not isinstance(out, np.ndarray):
        raise ConfigError(f"out must be a NumPy array, not {type(out).__name__}")
    if _is_masked(out):
        raise ConfigError("out is a masked array, and its mask would say something else than the result: pass out.data, or leave it out")
    if out.shape != shape or out.dtype != dtype:
        raise ConfigError(f"out has shape {out.shape} and dtype {out.dtype}, the result has shape {shape} and dtype {dtype}")
    if not out.flags.writeable:
        raise ConfigError("out is read-only: pass a writable array")
    return out


class Structure(NamedTuple):
    """The shape of a nested value without its leaves.

    Args:
        kind: "dict", "list", "tuple" or "leaf".
        keys: Keys of a dict, sorted.
        children: One structure for each item.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()


_LEAF = Structure("leaf")


def is_structure(value: Any) -> bool:
    """Return whether `value` is a dict, or a list or tuple that is more than nested numbers."""
    if isinstance(value, dict):
        return True
    if isinstance(value, list | tuple):
        return any(is_structure(item) or not _is_numbers(item) for item in value)
    return False


def _is_numbers(item: Any) -> bool:
    if isinstance(item, list | tuple):
        return all(_is_numbers(part) for part in item)
    return isinstance(item, _PLAIN_LEAVES)


def flatten(value: Any) -> tuple[Structure, list[Any]]:
    """Split a nested value into its structure and its leaves; dicts in the order of their sorted keys.

    Example:
        >>> structure, leaves = flatten({"b": 1.0, "a": {"c": 2.0}})
        >>> leaves
        [2.0, 1.0]
        >>> unflatten(structure, leaves)
        {'a': {'c': 2.0}, 'b': 1.0}
    """
    leaves: list[Any] = []
    return _flatten(value, leaves), leaves


def _flatten(value: Any, leaves: list[Any]) -> Structure:
    if isinstance(value, dict):
        try:
            keys = tuple(sorted(value))
        except TypeError as error:
            raise ConfigError(f"the keys of a structure must have an order: {error}") from error
        return Structure("dict", keys, tuple(_flatten(value[key], leaves) for key in keys))
    if is_structure(value):
        kind = "list" if isinstance(value, list) else "tuple"
        return Structure(kind, (), tuple(_flatten(item, leaves) for item in value))
    leaves.append(value)
    return _LEAF


def describe(structure: Structure, length_max: int = 120) -> str:
    """Return a structure in words, with a star for each leaf.

    Example:
        >>> describe(flatten({"b": 1.0, "a": [{"c": 2.0}]})[0])
        '{a: [{c: *}], b: *}'
    """
    text = _describe(structure)
    return text if len(text) <= length_max else text[: length_max - 2] + " …"


def _describe(structure: Structure) -> str:
    items = [_describe(child) for child in structure.children]
    if structure.kind == "dict":
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(structure.keys, items, strict=True)) + "}"
    if structure.kind == "leaf":
        return "*"
    return f"[{', '.join(items)}]" if structure.kind == "list" else f"({', '.join(items)})"


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """Put leaves back into a structure."""
    return _unflatten(structure, iter(leaves))


def _unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure.kind == "leaf":
        return next(leaves)
    items = [_unflatten(child, leaves) for child in structure.children]
    if structure.kind == "dict":
        return dict(zip(structure.keys, items, strict=True))
    return items if structure.kind == "list" else tuple(items)
