"""Batches, which are arrays or pytrees of arrays with equal first axes: inspect, split, stack."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.algorithms.schedule import even_chunks
from syncvar.core.array_arguments import as_array
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError
from syncvar.core.pytree import (
    TreeDef,
    children_of,
    describe,
    flatten,
    is_structure,
    rebuild,
    structure_from_plain,
    structure_to_plain,
    unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_TEXTS = {"U": "str", "S": "bytes", "O": "object"}
_UNITS = ("D", "h", "m", "s", "ms", "us", "ns")
_TIMES = tuple(f"{kind}[{unit}]" for kind in ("datetime64", "timedelta64") for unit in _UNITS)
_DIGESTED_BYTES = 1 << 20
_REMEDY = "pass the result of state_dict()"


class BatchPolicy(NamedTuple):
    """Form that all batches of a step share: pytree structure, dtypes and shapes of rows."""

    structure: TreeDef  # without the arrays
    leaves: tuple[tuple[str, tuple[int, ...]], ...]  # dtype name, shape after the first axis

    def describe(self) -> str:
        """Return the form as text, such as "{x: array} of float64[rows, 2]"."""
        shapes = [(name, ", ".join(["rows", *map(str, shape)])) for name, shape in self.leaves]
        arrays = ", ".join(f"{name}[{shape}]" for name, shape in shapes)
        is_array = self.structure.kind == "leaf"
        return arrays if is_array else f"{describe(self.structure)} of {arrays}"

    def plain(self) -> list[Any]:
        """Return the form as lists, numbers and texts that can be sent."""
        leaves = [[name, list(shape)] for name, shape in self.leaves]
        return [structure_to_plain(self.structure), leaves]

    @staticmethod
    def from_plain(plain: list[Any]) -> BatchPolicy:
        """Return the form from `plain`."""
        structure, leaves = plain
        shapes = tuple((name, tuple(shape)) for name, shape in leaves)
        return BatchPolicy(structure_from_plain(structure), shapes)

    def no_rows(self) -> Any:
        """Return a batch of this form without rows; named tuples become tuples."""
        empty = [np.empty((0, *shape), _dtype_of(name)) for name, shape in self.leaves]
        return unflatten(self.structure, empty)


def as_leaf(value: Any) -> NDArray[Any]:
    """Return a leaf as an array; NumPy arrays, also of texts, are returned as they are."""
    return value if type(value) is np.ndarray else as_array(value, "a leaf of the batch")


def map_leaves(fn: Callable[[NDArray[Any]], Any], value: Any) -> Any:
    """Return the pytree with `fn` of each array; dict order and named tuple types stay."""
    if is_structure(value):
        return rebuild(value, [map_leaves(fn, item) for item in children_of(value)])
    return fn(as_leaf(value))


def leaves_of(value: Any) -> list[NDArray[Any]]:
    """Return the arrays of a pytree, dicts in the order of sorted keys."""
    return [as_leaf(leaf) for leaf in flatten(value)[1]]


def inspect_batch(value: Any) -> tuple[Any, int, BatchPolicy]:
    """Return a batch whose leaves are arrays, its number of rows, and its form."""
    structure, leaves = flatten(value)
    arrays = [as_leaf(leaf) for leaf in leaves]
    rows = _common_length(arrays)
    shapes = tuple((_dtype_name(array.dtype), array.shape[1:]) for array in arrays)
    is_batch = all(array is leaf for array, leaf in zip(arrays, leaves, strict=True))
    batch = value if is_batch else map_leaves(lambda array: array, value)
    return batch, rows, BatchPolicy(structure, shapes)


def _common_length(leaves: list[NDArray[Any]]) -> int:
    if not leaves:
        raise ConfigError("the batch contains no array; every element must contain at least one")
    for leaf in leaves:
        if leaf.ndim == 0:
            raise ConfigError(
                f"an element of the dataset is {leaf[()]!r}, which has no first axis to split; "
                f"make batches: sv.data.from_arrays(x, batch_size=32), or dataset.batch(32)"[:400]
            )
    rows = len(leaves[0])
    if any(len(leaf) != rows for leaf in leaves):
        shown = ", ".join(map(str, sorted({len(leaf) for leaf in leaves})))
        raise ConfigError(f"the arrays of a batch must have first axes of one length, not {shown}")
    return rows


def even_part(batch: Any, rows: int, parts: int, index: int) -> Any:
    """Return part `index` of `parts` of a batch, split evenly along its first axis, as views.

    Sizes differ by at most one. The first parts are longer, and the last may have no rows.
    """
    chunk = even_chunks(rows, parts)[index]
    return map_leaves(lambda array: array[chunk.start : chunk.stop], batch)


def no_rows(batch: Any) -> Any:
    """Return a batch of the same form without rows."""
    return map_leaves(lambda array: np.empty((0, *array.shape[1:]), array.dtype), batch)


def content_digest(batch: Any) -> int:
    """Return a digest of the first MiB of each array; arrays of objects do not count."""
    digest = hashlib.blake2b(digest_size=8)
    for array in leaves_of(batch):
        if array.dtype.kind != "O" and array.size:
            rows = max(1, _DIGESTED_BYTES // max(1, array.nbytes // len(array)))
            digest.update(np.ascontiguousarray(array[:rows]).tobytes())
    return int.from_bytes(digest.digest(), "little")


def stack_elements(elements: Sequence[Any]) -> Any:
    """Return a batch of elements of one form: each array gets a new first axis."""
    structures = [flatten(element)[0] for element in elements]
    if any(structure != structures[0] for structure in structures):
        shown = " and ".join(sorted({describe(structure) for structure in structures}))
        raise ConfigError(f"elements of different structures cannot be one batch: {shown}")
    return _stacked(elements)


def _stacked(parts: Sequence[Any]) -> Any:
    model = parts[0]
    if isinstance(model, dict):
        return {key: _stacked([part[key] for part in parts]) for key in model}
    if is_structure(model):
        columns = zip(*map(children_of, parts), strict=True)
        return rebuild(model, [_stacked(list(column)) for column in columns])
    arrays = [as_leaf(part) for part in parts]
    try:
        return np.stack(arrays)
    except ValueError:
        shapes = ", ".join(sorted({str(array.shape) for array in arrays}))
        raise ConfigError(
            f"elements of shapes {shapes} cannot be one batch; pad them with dataset.map"
        ) from None


@lru_cache(maxsize=64)
def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.name in DTYPE_NAMES or dtype.name in _TIMES:
        return dtype.name
    name = _TEXTS.get(dtype.kind)
    if name is None:
        known = ", ".join((*DTYPE_NAMES, *_TEXTS.values(), "datetime64[s]"))
        raise ConfigError(f"a batch cannot have an array of dtype {dtype}; use one of {known}")
    return name


def _dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name in the tables; NumPy never parses text of other processes."""
    if name in DTYPE_NAMES:
        return dtype_from_index(DTYPE_NAMES.index(name))
    if name in _TIMES:
        return np.dtype(_TIMES[_TIMES.index(name)])
    letters = {text: letter for letter, text in _TEXTS.items()}
    if name not in letters:
        raise ConfigError(f"there is no dtype {name!r}")
    return np.dtype(letters[name])


def integer_of(name: str, value: Any, at_least: int) -> int:
    """Return an integer argument of at least `at_least`, or raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ConfigError(f"{name} must be an integer of at least {at_least}, not {value!r}")
    return int(value)


def read_state(state: Any, expected: Mapping[str, str]) -> tuple[int, int]:
    """Return (epoch, position) of a saved iterator state, in which `expected` does not differ."""
    if not isinstance(state, Mapping):
        found = type(state).__name__
        raise ConfigError(f"the state of an iterator is a dict, not {found}: {_REMEDY}")
    missing = sorted({"epoch", "position", *expected} - set(state))
    if missing:
        raise ConfigError(f"the state of the iterator has no {', '.join(missing)}: {_REMEDY}")
    for name, current in expected.items():
        if state[name] != current:
            raise ConfigError(
                f"the state was saved with {name} {state[name]!r}, this iterator has {current!r}: "
                f"the order of its elements would differ. Create the dataset as before, or begin a "
                f"new epoch"
            )
    return integer_of("epoch", state["epoch"], 0), integer_of("position", state["position"], 0)
