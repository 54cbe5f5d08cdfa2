"""Pytrees: nested dicts, lists, tuples and dataclasses, split into their structure and arrays."""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.array_arguments import NUMBERS, as_array
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from numpy.typing import NDArray

_ENDLESS = "the value contains itself or is nested too deeply: pass finite lists and dicts"


class TreeDef(NamedTuple):
    """Structure of a pytree without its leaves; ranks can compare it.

    Args:
        kind: "dict", "list", "tuple" (named or not), "dataclass" or "leaf".
        keys: Sorted keys of a dict; for a dataclass: its name and the names of its fields.
        children: Structure of each item.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[TreeDef, ...] = ()


LEAF = TreeDef("leaf")


class PyTree(NamedTuple):
    """A flattened pytree of arrays, used as the input of a call in place of an array.

    Args:
        structure: The structure.
        arrays: The leaves, in the order of `flatten`.
        shape: Structure, and dtype and shape of each leaf; equal for pytrees of the same form.
        dtype: None, because each leaf has its own.
    """

    structure: TreeDef
    arrays: list[NDArray[Any]]
    shape: Hashable
    dtype: None = None

    @classmethod
    def of(cls, structure: TreeDef, arrays: list[NDArray[Any]]) -> PyTree:
        """Return the pytree of a structure and its arrays."""
        forms = tuple([(array.dtype, array.shape) for array in arrays])
        return cls(structure, arrays, (structure, forms))

    def without_memory(self) -> PyTree:
        """Return a pytree of the same form whose arrays take no memory, for caches of calls."""
        empty = [np.broadcast_to(np.empty((), one.dtype), one.shape) for one in self.arrays]
        return self._replace(arrays=empty)

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """Return the nested value with the same structure and other arrays."""
        return unflatten(self.structure, arrays)


def is_structure(value: Any) -> bool:
    """Return whether a value is a pytree, not an array: a dict, named tuple, dataclass or list.

    Nested lists and tuples of plain numbers count as arrays. Raises ConfigError for a value that
    contains itself.
    """
    if isinstance(value, dict):
        return True
    if isinstance(value, list | tuple):
        try:
            return hasattr(value, "_fields") or not _are_numbers(value)
        except RecursionError:
            raise ConfigError(_ENDLESS) from None
    return is_dataclass(value)


def is_dataclass(value: Any) -> bool:
    """Return whether a value is a dataclass instance that is no array type."""
    kind = type(value)
    return (
        hasattr(kind, "__dataclass_fields__")
        and not hasattr(kind, "__array__")
        and not hasattr(kind, "__dlpack__")
    )


def _are_numbers(items: Iterable[Any]) -> bool:
    kinds = set(map(type, items))  # a long list has only a few types
    if not any(issubclass(kind, list | tuple) for kind in kinds):
        return all(issubclass(kind, NUMBERS) for kind in kinds)
    return all(
        _are_numbers(item) and not hasattr(item, "_fields")
        if isinstance(item, list | tuple)
        else isinstance(item, NUMBERS)
        for item in items
    )


def children_of(value: Any) -> list[Any]:
    """Return the direct children of a pytree, in its own order; ConfigError for an unset field."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    try:
        return [getattr(value, name) for name in _field_names(value)]
    except AttributeError as error:
        name = type(value).__name__
        raise ConfigError(f"a field of the dataclass {name} is not set: {error}") from None


def rebuild(value: Any, parts: list[Any]) -> Any:
    """Return a pytree of the type of `value` with other children, in the order of `children_of`.

    A dataclass is copied and its fields are set. Neither `__init__` nor `__post_init__` runs,
    because the copy already has what they computed.
    """
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind(zip(value, parts, strict=True))
    if isinstance(value, list):
        return parts
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    result = copy(value)
    for name, part in zip(_field_names(value), parts, strict=True):
        object.__setattr__(result, name, part)  # works on frozen dataclasses too
    return result


def _field_names(value: Any) -> list[str]:
    return [field.name for field in fields(value)]


def flatten(value: Any) -> tuple[TreeDef, list[Any]]:
    """Return the structure and the leaves of a nested value; dicts in the order of sorted keys.

    Raises ConfigError for keys without order, an unset field, or a value that contains itself.

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


def _flatten(value: Any, leaves: list[Any]) -> TreeDef:
    if isinstance(value, dict):
        try:
            keys = tuple(sorted(value))
        except TypeError as error:
            raise ConfigError(f"the keys of a dict must have an order: {error}") from None
        return TreeDef("dict", keys, tuple(_flatten(value[key], leaves) for key in keys))
    if is_structure(value):
        kind, keys = "list" if isinstance(value, list) else "tuple", ()
        if not isinstance(value, list | tuple):
            kind, keys = "dataclass", (type(value).__qualname__, *_field_names(value))
        return TreeDef(kind, keys, tuple(_flatten(item, leaves) for item in children_of(value)))
    leaves.append(value)
    return LEAF


def arrays_of(value: Any, leaves: list[Any], argument: str = "x") -> list[NDArray[Any]]:
    """Return leaves from `flatten` as arrays; a ConfigError names the path of a wrong leaf."""
    try:
        return [as_array(leaf) for leaf in leaves]
    except ConfigError:
        paths = _paths(value, argument)
        return [as_array(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]


def arrays_in(value: Any, out: Any = None) -> tuple[TreeDef | None, list[NDArray[Any]]]:
    """Return the structure of a value, None for one array, and its arrays; or raise ConfigError."""
    if not is_structure(value):
        return None, [as_array(value)]
    if out is not None:
        raise ConfigError("out cannot be passed with a list, dict or dataclass of arrays")
    structure, leaves = flatten(value)
    return structure, arrays_of(value, leaves)


def _paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _paths(value[key], f"{path}[{key!r}]")
    elif not is_structure(value):
        yield path
    else:
        names = getattr(value, "_fields", None)
        if names is None and is_dataclass(value):
            names = _field_names(value)
        for i, part in enumerate(children_of(value)):
            yield from _paths(part, f"{path}[{i}]" if names is None else f"{path}.{names[i]}")


def describe(structure: TreeDef, length_max: int = 120) -> str:
    """Return a structure as text, such as "{a: [{c: array}], b: array}" or "[8 arrays]"."""
    text = _describe(structure)
    return text if len(text) <= length_max else text[: length_max - 2] + " …"


def _describe(structure: TreeDef) -> str:
    kind, keys, children = structure
    items = [_describe(child) for child in children]
    if kind == "leaf":
        return "array"
    if kind == "dict":
        pairs = [f"{key}: {item}" for key, item in zip(keys, items, strict=True)]
        return "{" + ", ".join(pairs) + "}"
    if kind == "dataclass":
        pairs = [f"{key}={item}" for key, item in zip(keys[1:], items, strict=True)]
        return f"{keys[0]}({', '.join(pairs)})"
    are_arrays = len(items) > 2 and set(items) == {"array"}
    inside = f"{len(items)} arrays" if are_arrays else ", ".join(items)
    return f"[{inside}]" if kind == "list" else f"({inside})"


def holds_dataclass(structure: TreeDef) -> bool:
    """Return whether a structure contains a dataclass, which a rank without input cannot create."""
    return structure.kind == "dataclass" or any(map(holds_dataclass, structure.children))


def unflatten(structure: TreeDef, leaves: Iterable[Any], like: Any = None) -> Any:
    """Return the nested value of a structure and its leaves; dicts have sorted keys on all ranks.

    `like` is a value of this structure that provides the classes. Without it named tuples become
    tuples, and a dataclass raises ConfigError.
    """
    return _unflatten(structure, iter(leaves), like)


def _unflatten(structure: TreeDef, leaves: Iterator[Any], like: Any) -> Any:
    kind, keys, children = structure
    if kind == "leaf":
        return next(leaves)
    if kind == "dict":
        return {
            key: _unflatten(child, leaves, None if like is None else like[key])
            for key, child in zip(keys, children, strict=True)
        }
    if like is not None:
        parts = zip(children, children_of(like), strict=True)
        return rebuild(like, [_unflatten(child, leaves, part) for child, part in parts])
    if kind == "dataclass":
        raise ConfigError(
            f"the value contains a {keys[0]}, and classes are not sent: pass one with arrays of "
            f"the same shapes here too"
        )
    items = [_unflatten(child, leaves, None) for child in children]
    return items if kind == "list" else tuple(items)


def private_copy(structure: TreeDef | None, value: Any) -> Any:
    """Return a copy of a nested value, so that the caller may change it while the call runs."""
    return value if structure is None else unflatten(structure, flatten(value)[1], value)


def structure_to_plain(structure: TreeDef) -> list[Any]:
    """Return a structure as lists and texts that can be sent."""
    children = [structure_to_plain(child) for child in structure.children]
    return [structure.kind, list(structure.keys), children]


def structure_from_plain(plain: list[Any]) -> TreeDef:
    """Return the structure from `structure_to_plain`."""
    kind, keys, children = plain
    return TreeDef(kind, tuple(keys), tuple(structure_from_plain(child) for child in children))
