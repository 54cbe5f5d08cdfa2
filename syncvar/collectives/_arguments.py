"""Checks and conversions shared by all collectives."""

from __future__ import annotations

import reprlib
import sys
from collections import OrderedDict
from copy import copy
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.errors import ConfigError, MismatchError, TransportError, UsageError
from syncvar.wire import DTYPE_NAMES, Untaken, library_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from syncvar.engine.group import Communicator

__all__ = [
    "Structure", "arrays_in", "arrays_of", "as_array", "checked_integer", "checked_output", "checked_root", "deliver", "describe", "flatten", "fresh",
    "holds_dataclass", "is_dataclass", "is_structure", "parts_of", "plain_structure", "rebuilt", "restored_structure", "told", "unflatten",
]  # fmt: skip

_PLAIN_LEAVES = (bool, int, float, complex, np.generic)


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
        if value is None or isinstance(value, str | bytes | dict | set):
            raise ConfigError(f"{what} must be an array or a number, not {value!r}"[:300])
        if type(value) is Untaken:
            raise ConfigError(f"{what} {value.reason}")
        if _is_masked(value):
            raise ConfigError(f"{what} is a masked array, and its mask would be lost on the way: pass x.filled(0), or what else stands for nothing")
        try:
            library = library_of(value)
            value = np.asarray(value) if library is None else library.take(value)
        except (TransportError, MismatchError):  # of a variable that is read: not about what it is
            raise
        except Exception as error:  # whatever the library, or an __array__, raises
            raise ConfigError(f"{what} of type {type(value).__name__} cannot be an array: {told(error)}") from error
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if not _travels(value.dtype):
        raise ConfigError(_untravelled(value, what))
    return np.asarray(value)


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
    return str(error) if isinstance(error, (ValueError, TypeError, BufferError, RuntimeError)) else f"{type(error).__name__}: {error}"


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
        return id(value) not in above and any(_is_masked(item, (*above, id(value))) for item in value)
    return isinstance(value, masked.MaskedArray)


def checked_root(root: Any, communicator: Communicator) -> int:
    """Return `root` as a rank of those who make the call.

    Raises:
        ConfigError: It is no integer or outside the group.
        UsageError: It has left the block of sv.uneven that this rank is in.
    """
    size = len(communicator.whole)
    rank = checked_integer("root", root)
    if not 0 <= rank < size:
        raise ConfigError(f"root {rank} is not in the group: its ranks are 0 to {size - 1}")
    if communicator.uneven is None:
        return rank
    if communicator.whole[rank] not in communicator.members:
        raise UsageError(
            f"rank {rank} is the root of this call and has left its loop in sv.uneven: name one that still works "
            f"({', '.join(map(str, communicator.present))}), for instance block.working[0]"
        )
    return communicator.members.index(communicator.whole[rank])


def checked_output(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `out` if a result of this shape and dtype can be written to it.

    Raises:
        ConfigError: It cannot; the message says why.
    """
    if type(out) is Untaken:
        raise ConfigError(f"out {out.reason}")
    if not isinstance(out, np.ndarray):
        raise ConfigError(f"out must be a NumPy array, or a tensor in the memory of the CPU, not {type(out).__name__}")
    if _is_masked(out):
        raise ConfigError("out is a masked array, and its mask would say something else than the result: pass out.data, or leave it out")
    if out.shape != shape or out.dtype != dtype:
        raise ConfigError(f"out has shape {out.shape} and dtype {out.dtype}, the result has shape {shape} and dtype {dtype}")
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
        raise ConfigError(f"{name} must be an integer, not {value!r}")
    return int(value)


class Structure(NamedTuple):
    """The shape of a nested value without its leaves; it can be compared with that of another rank.

    Args:
        kind: "dict", "list", "tuple" (named or not), "dataclass" or "leaf".
        keys: Keys of a dict, sorted; name of a dataclass, and of its fields.
        children: One structure for each item.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()


_LEAF = Structure("leaf")


def is_structure(value: Any) -> bool:
    """Return whether `value` is a dict, a named tuple, a dataclass, or a list or tuple that is more than nested numbers.

    Raises:
        ConfigError: It holds itself.
    """
    if isinstance(value, dict):
        return True
    if isinstance(value, list | tuple):
        try:
            return hasattr(value, "_fields") or any(is_structure(item) or not _is_numbers(item) for item in value)
        except RecursionError:
            raise ConfigError(_ENDLESS) from None
    return is_dataclass(value)


_ENDLESS = "the value holds itself, or is nested too deep: pass lists and dicts that have an end"


def is_dataclass(value: Any) -> bool:
    """Return whether a value is an object of a dataclass, and no array by itself."""
    kind = type(value)
    return hasattr(kind, "__dataclass_fields__") and not hasattr(kind, "__array__") and not hasattr(kind, "__dlpack__")


def _is_numbers(item: Any) -> bool:
    if isinstance(item, list | tuple):
        return not hasattr(item, "_fields") and all(_is_numbers(part) for part in item)
    return isinstance(item, _PLAIN_LEAVES)


def parts_of(value: Any) -> list[Any]:
    """Return the parts of a structure, in its own order.

    Raises:
        ConfigError: A field of a dataclass has not been set.

    Example:
        >>> parts_of({"b": 1.0, "a": [2.0]})
        [1.0, [2.0]]
    """
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    try:
        return [getattr(value, name) for name in _field_names(value)]
    except AttributeError as error:
        raise ConfigError(f"a field of the dataclass {type(value).__name__} is not set: {error}") from error


def rebuilt(value: Any, parts: list[Any]) -> Any:
    """Return a structure of the kind of `value` with other parts, in the order of `parts_of`.

    A dataclass is copied and given its parts; neither `__init__` nor `__post_init__` runs, for what they made is there.

    Example:
        >>> rebuilt({"b": 1.0, "a": [2.0]}, [3.0, 4.0])
        {'b': 3.0, 'a': 4.0}
    """
    if isinstance(value, dict):
        return (OrderedDict if isinstance(value, OrderedDict) else dict)(zip(value, parts, strict=True))
    if isinstance(value, list):
        return parts
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    made = copy(value)
    for name, part in zip(_field_names(value), parts, strict=True):
        object.__setattr__(made, name, part)  # also where it is frozen
    return made


def _field_names(value: Any) -> list[str]:
    return [field.name for field in fields(value)]


def flatten(value: Any) -> tuple[Structure, list[Any]]:
    """Split a nested value into its structure and its leaves; dicts in the order of their sorted keys.

    Raises:
        ConfigError: The keys of a dict have no order, a field of a dataclass is not set, or the value holds itself.

    Example:
        >>> structure, leaves = flatten({"b": 1.0, "a": {"c": 2.0}})
        >>> leaves
        [2.0, 1.0]
        >>> unflatten(structure, leaves)
        {'a': {'c': 2.0}, 'b': 1.0}
    """
    leaves: list[Any] = []
    try:
        return _flatten(value, leaves), leaves
    except RecursionError:
        raise ConfigError(_ENDLESS) from None


def _flatten(value: Any, leaves: list[Any]) -> Structure:
    if isinstance(value, dict):
        try:
            keys = tuple(sorted(value))
        except TypeError as error:
            raise ConfigError(f"the keys of a structure must have an order: {error}") from error
        return Structure("dict", keys, tuple(_flatten(value[key], leaves) for key in keys))
    if is_structure(value):
        kind, keys = "list" if isinstance(value, list) else "tuple", ()
        if not isinstance(value, list | tuple):
            kind, keys = "dataclass", (type(value).__qualname__, *_field_names(value))
        return Structure(kind, keys, tuple(_flatten(item, leaves) for item in parts_of(value)))
    leaves.append(value)
    return _LEAF


def arrays_of(value: Any, leaves: list[Any], what: str = "x") -> list[NDArray[Any]]:
    """Return the leaves that `flatten` found in a value as arrays.

    Raises:
        ConfigError: One cannot be an array; its place is named.

    Example:
        >>> value = {"a": [1.0, "text"]}
        >>> arrays_of(value, flatten(value)[1])
        Traceback (most recent call last):
        ...
        syncvar.errors.ConfigError: x['a'][1] must be an array or a number, not 'text'
    """
    try:
        return [as_array(leaf) for leaf in leaves]
    except ConfigError:
        return [as_array(leaf, place) for leaf, place in zip(leaves, _places(value, what), strict=True)]


def arrays_in(value: Any, out: Any = None) -> tuple[Structure | None, list[NDArray[Any]]]:
    """Return the structure of a value, None of a single array, and its arrays.

    Raises:
        ConfigError: One cannot be an array, or there is an `out` beside a structure.
    """
    if not is_structure(value):
        return None, [as_array(value)]
    if out is not None:
        raise ConfigError("out cannot be given with a structure")
    structure, leaves = flatten(value)
    return structure, arrays_of(value, leaves)


def _places(value: Any, place: str) -> Iterator[str]:
    """Yield how each leaf of a value is written."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _places(value[key], f"{place}[{key!r}]")
    elif not is_structure(value):
        yield place
    else:
        names = getattr(value, "_fields", None) or (_field_names(value) if is_dataclass(value) else None)
        for number, part in enumerate(parts_of(value)):
            yield from _places(part, f"{place}[{number}]" if names is None else f"{place}.{names[number]}")


def describe(structure: Structure, length_max: int = 120) -> str:
    """Return a structure in words, with a star for each leaf.

    Example:
        >>> describe(flatten({"b": 1.0, "a": [{"c": 2.0}]})[0])
        '{a: [{c: *}], b: *}'
    """
    text = _describe(structure)
    return text if len(text) <= length_max else text[: length_max - 2] + " …"


def _describe(structure: Structure) -> str:
    kind, keys, children = structure
    items = [_describe(child) for child in children]
    if kind == "leaf":
        return "*"
    if kind == "dict":
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(keys, items, strict=True)) + "}"
    if kind == "dataclass":
        return f"{keys[0]}({', '.join(f'{key}={item}' for key, item in zip(keys[1:], items, strict=True))})"
    return f"[{', '.join(items)}]" if kind == "list" else f"({', '.join(items)})"


def holds_dataclass(structure: Structure) -> bool:
    """Return whether there is a dataclass in a structure: a rank that brings none of it cannot make one.

    Example:
        >>> holds_dataclass(flatten({"a": [1.0]})[0])
        False
    """
    return structure.kind == "dataclass" or any(map(holds_dataclass, structure.children))


def unflatten(structure: Structure, leaves: list[Any], like: Any = None) -> Any:
    """Put leaves back into a structure; the keys of dicts are sorted, and so in one order on all ranks.

    Args:
        structure: As `flatten` made it.
        leaves: In its order.
        like: A value of this structure, whose classes are taken; without one, which a structure that holds a dataclass must
            have, a named tuple becomes a tuple.

    Raises:
        ConfigError: There is a dataclass in the structure, and no value to tell which.
    """
    return _unflatten(structure, iter(leaves), like)


def _unflatten(structure: Structure, leaves: Iterator[Any], like: Any) -> Any:
    kind, keys, children = structure
    if kind == "leaf":
        return next(leaves)
    if kind == "dict":
        return {
            key: _unflatten(child, leaves, None if like is None else like[key]) for key, child in zip(keys, children, strict=True)
        }
    if like is not None:
        return rebuilt(like, [_unflatten(child, leaves, part) for child, part in zip(children, parts_of(like), strict=True)])
    if kind == "dataclass":
        raise ConfigError(f"there is a {keys[0]} in the value, and its class does not travel: pass one with arrays of the same shapes here too")
    items = [_unflatten(child, leaves, None) for child in children]
    return items if kind == "list" else tuple(items)


def fresh(structure: Structure | None, value: Any) -> Any:
    """Return what a call that has been started keeps of a structure: nothing of it is changed by the caller meanwhile."""
    return value if structure is None else unflatten(structure, flatten(value)[1], value)


def plain_structure(structure: Structure) -> list[Any]:
    """Return a structure as lists and texts, which can travel."""
    return [structure.kind, list(structure.keys), [plain_structure(child) for child in structure.children]]


def restored_structure(plain: list[Any]) -> Structure:
    """Return the structure that `plain` came from."""
    kind, keys, children = plain
    return Structure(kind, tuple(keys), tuple(restored_structure(child) for child in children))
