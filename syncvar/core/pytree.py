"""Nested values: the structure of dicts, lists, tuples and dataclasses apart from the arrays in them."""

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


class TreeDef(NamedTuple):
    """The shape of a nested value without its leaves; it can be compared with that of another rank.

    Args:
        kind: "dict", "list", "tuple" (named or not), "dataclass" or "leaf".
        keys: Keys of a dict, sorted; name of a dataclass, and of its fields.
        children: One structure for each item.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[TreeDef, ...] = ()


LEAF = TreeDef("leaf")
"""The structure of an array alone."""


class PyTree(NamedTuple):
    """Plain dicts, lists and tuples of arrays, in the place of an array.

    Args:
        structure: How they hold the arrays.
        arrays: The leaves, in the order of `flatten`.
        shape: The structure, and dtype and shape of each leaf: what makes two of them alike.
        dtype: None: there is one of each leaf.
    """

    structure: TreeDef
    arrays: list[NDArray[Any]]
    shape: Hashable
    dtype: None = None

    @classmethod
    def of(cls, structure: TreeDef, arrays: list[NDArray[Any]]) -> PyTree:
        """Return the leaves of such a structure."""
        return cls(
            structure, arrays, (structure, tuple([(array.dtype, array.shape) for array in arrays]))
        )

    def without_memory(self) -> PyTree:
        """Return the leaves of a structure that is alike, whose arrays take no memory: what is kept of a call that may be made again.

        Example:
            >>> leaves = PyTree.of(flatten([np.ones((2, 3))])[0], [np.ones((2, 3))]).without_memory()
            >>> leaves.arrays[0].shape, leaves.arrays[0].strides
            ((2, 3), (0, 0))
        """
        return self._replace(
            arrays=[
                np.broadcast_to(np.empty((), array.dtype), array.shape) for array in self.arrays
            ]
        )

    def with_arrays(self, made: Iterable[Any]) -> Any:
        """Return the same structure of other arrays."""
        return unflatten(self.structure, made)


def is_structure(value: Any) -> bool:
    """Return whether `value` is a dict, a named tuple, a dataclass, or a list or tuple that is more than nested numbers.

    Raises:
        ConfigError: It holds itself.
    """
    if isinstance(value, dict):
        return True
    if isinstance(value, list | tuple):
        try:
            return hasattr(value, "_fields") or not _are_numbers(value)
        except RecursionError:
            raise ConfigError(_ENDLESS) from None
    return is_dataclass(value)


_ENDLESS = "the value holds itself, or is nested too deep: pass lists and dicts that have an end"


def is_dataclass(value: Any) -> bool:
    """Return whether a value is an object of a dataclass, and no array by itself."""
    kind = type(value)
    return (
        hasattr(kind, "__dataclass_fields__")
        and not hasattr(kind, "__array__")
        and not hasattr(kind, "__dlpack__")
    )


def _are_numbers(items: Iterable[Any]) -> bool:
    """Return whether the parts of a list are numbers, or lists of numbers."""
    kinds = set(map(type, items))  # few, where the parts are many
    if not any(issubclass(kind, list | tuple) for kind in kinds):
        return all(issubclass(kind, NUMBERS) for kind in kinds)
    return all(
        _are_numbers(item) and not hasattr(item, "_fields")
        if isinstance(item, list | tuple)
        else isinstance(item, NUMBERS)
        for item in items
    )


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
        raise ConfigError(
            f"a field of the dataclass {type(value).__name__} is not set: {error}"
        ) from None


def rebuilt(value: Any, parts: list[Any]) -> Any:
    """Return a structure of the kind of `value` with other parts, in the order of `parts_of`.

    A dataclass is copied and given its parts; neither `__init__` nor `__post_init__` runs, for what they made is there.

    Example:
        >>> rebuilt({"b": 1.0, "a": [2.0]}, [3.0, 4.0])
        {'b': 3.0, 'a': 4.0}
    """
    if isinstance(value, dict):
        return (OrderedDict if isinstance(value, OrderedDict) else dict)(
            zip(value, parts, strict=True)
        )
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


def flatten(value: Any) -> tuple[TreeDef, list[Any]]:
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


def _flatten(value: Any, leaves: list[Any]) -> TreeDef:
    if isinstance(value, dict):
        try:
            keys = tuple(sorted(value))
        except TypeError as error:
            raise ConfigError(f"the keys of a structure must have an order: {error}") from None
        return TreeDef("dict", keys, tuple(_flatten(value[key], leaves) for key in keys))
    if is_structure(value):
        kind, keys = "list" if isinstance(value, list) else "tuple", ()
        if not isinstance(value, list | tuple):
            kind, keys = "dataclass", (type(value).__qualname__, *_field_names(value))
        return TreeDef(kind, keys, tuple(_flatten(item, leaves) for item in parts_of(value)))
    leaves.append(value)
    return LEAF


def arrays_of(value: Any, leaves: list[Any], what: str = "x") -> list[NDArray[Any]]:
    """Return the leaves that `flatten` found in a value as arrays.

    Raises:
        ConfigError: One cannot be an array; its place is named.

    Example:
        >>> value = {"a": [1.0, {1}]}
        >>> arrays_of(value, flatten(value)[1])
        Traceback (most recent call last):
        ...
        syncvar.core.errors.ConfigError: x['a'][1] must be an array or a number, not {1}
    """
    try:
        return [as_array(leaf) for leaf in leaves]
    except ConfigError:
        return [
            as_array(leaf, place) for leaf, place in zip(leaves, _places(value, what), strict=True)
        ]


def arrays_in(value: Any, out: Any = None) -> tuple[TreeDef | None, list[NDArray[Any]]]:
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
        names = getattr(value, "_fields", None) or (
            _field_names(value) if is_dataclass(value) else None
        )
        for number, part in enumerate(parts_of(value)):
            yield from _places(
                part, f"{place}[{number}]" if names is None else f"{place}.{names[number]}"
            )


def describe(structure: TreeDef, length_max: int = 120) -> str:
    """Return a structure in words.

    Example:
        >>> describe(flatten({"b": 1.0, "a": [{"c": 2.0}]})[0])
        '{a: [{c: array}], b: array}'
        >>> describe(flatten({"layers": [np.ones(2)] * 8})[0])
        '{layers: [8 arrays]}'
    """
    text = _describe(structure)
    return text if len(text) <= length_max else text[: length_max - 2] + " …"


def _describe(structure: TreeDef) -> str:
    kind, keys, children = structure
    items = [_describe(child) for child in children]
    if kind == "leaf":
        return "array"
    if kind == "dict":
        return (
            "{" + ", ".join(f"{key}: {item}" for key, item in zip(keys, items, strict=True)) + "}"
        )
    if kind == "dataclass":
        return f"{keys[0]}({', '.join(f'{key}={item}' for key, item in zip(keys[1:], items, strict=True))})"
    are_arrays = len(items) > 2 and set(items) == {"array"}
    inside = f"{len(items)} arrays" if are_arrays else ", ".join(items)
    return f"[{inside}]" if kind == "list" else f"({inside})"


def holds_dataclass(structure: TreeDef) -> bool:
    """Return whether there is a dataclass in a structure: a rank that brings none of it cannot make one.

    Example:
        >>> holds_dataclass(flatten({"a": [1.0]})[0])
        False
    """
    return structure.kind == "dataclass" or any(map(holds_dataclass, structure.children))


def unflatten(structure: TreeDef, leaves: Iterable[Any], like: Any = None) -> Any:
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
        return rebuilt(
            like,
            [
                _unflatten(child, leaves, part)
                for child, part in zip(children, parts_of(like), strict=True)
            ],
        )
    if kind == "dataclass":
        raise ConfigError(
            f"there is a {keys[0]} in the value, and its class does not travel: pass one with arrays of the same shapes here too"
        )
    items = [_unflatten(child, leaves, None) for child in children]
    return items if kind == "list" else tuple(items)


def fresh(structure: TreeDef | None, value: Any) -> Any:
    """Return what a call that has been started keeps of a structure: nothing of it is changed by the caller meanwhile."""
    return value if structure is None else unflatten(structure, flatten(value)[1], value)


def plain_structure(structure: TreeDef) -> list[Any]:
    """Return a structure as lists and texts, which can travel."""
    return [
        structure.kind,
        list(structure.keys),
        [plain_structure(child) for child in structure.children],
    ]


def restored_structure(plain: list[Any]) -> TreeDef:
    """Return the structure that `plain` came from."""
    kind, keys, children = plain
    return TreeDef(kind, tuple(keys), tuple(restored_structure(child) for child in children))
