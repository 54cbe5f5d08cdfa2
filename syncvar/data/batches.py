"""Batches: arrays, or structures of arrays, with the same first axis. What they are, cutting and stacking them.

A structure is a nested dict, list or (named) tuple; a list or tuple of numbers is an array.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.algorithms.chunks import even_chunks
from syncvar.core.array_arguments import as_array
from syncvar.core.dtypes import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError
from syncvar.core.pytree import (
    TreeDef,
    describe,
    flatten,
    is_structure,
    parts_of,
    plain_structure,
    rebuilt,
    restored_structure,
    unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_TEXTS = {"U": "str", "S": "bytes", "O": "object"}
_TIMES = tuple(
    f"{kind}[{unit}]"
    for kind in ("datetime64", "timedelta64")
    for unit in ("D", "h", "m", "s", "ms", "us", "ns")
)
_DIGESTED_BYTES = 1 << 20


class BatchPolicy(NamedTuple):
    """What all batches of a step have in common: the structure, and of each array the dtype and the shape of a row.

    Args:
        structure: Without the arrays.
        leaves: (name of the dtype, shape after the first axis) of each array.
    """

    structure: TreeDef
    leaves: tuple[tuple[str, tuple[int, ...]], ...]

    def describe(self) -> str:
        """Return it in words.

        Example:
            >>> inspected({"x": np.zeros((4, 2)), "y": np.zeros(4, int)})[2].describe()
            '{x: array, y: array} of float64[rows, 2], int64[rows]'
        """
        arrays = ", ".join(
            f"{name}[{', '.join(['rows', *map(str, shape)])}]" for name, shape in self.leaves
        )
        return (
            arrays if self.structure.kind == "leaf" else f"{describe(self.structure)} of {arrays}"
        )

    def plain(self) -> list[Any]:
        """Return it as lists, numbers and texts, which can travel."""
        return [
            plain_structure(self.structure),
            [[name, list(shape)] for name, shape in self.leaves],
        ]

    @staticmethod
    def from_plain(plain: list[Any]) -> BatchPolicy:
        """Return the kind that `plain` came from."""
        structure, leaves = plain
        return BatchPolicy(
            restored_structure(structure), tuple((name, tuple(shape)) for name, shape in leaves)
        )

    def no_rows(self) -> Any:
        """Return a batch of this kind without rows; a named tuple becomes a tuple.

        Example:
            >>> inspected((np.zeros((4, 2)), np.zeros(4, bool)))[2].no_rows()
            (array([], shape=(0, 2), dtype=float64), array([], dtype=bool))
        """
        return unflatten(
            self.structure, [np.empty((0, *shape), _dtype_of(name)) for name, shape in self.leaves]
        )


def as_leaf(value: Any) -> NDArray[Any]:
    """Return a leaf of a structure as an array; NumPy arrays as they are, also those of texts.

    Raises:
        ConfigError: It cannot be an array.
    """
    return value if type(value) is np.ndarray else as_array(value, "a leaf of the batch")


def map_leaves(fn: Callable[[NDArray[Any]], Any], value: Any) -> Any:
    """Return the structure with `fn` of each array; dicts keep their order and named tuples their type.

    Example:
        >>> map_leaves(len, {"x": np.zeros(3), "y": [np.zeros(2), [1, 2, 3, 4]]})
        {'x': 3, 'y': [2, 4]}
    """
    if is_structure(value):
        return rebuilt(value, [map_leaves(fn, item) for item in parts_of(value)])
    return fn(as_leaf(value))


def leaves_of(value: Any) -> list[NDArray[Any]]:
    """Return the arrays of a structure, dicts in the order of their sorted keys."""
    return [as_leaf(leaf) for leaf in flatten(value)[1]]


def as_batch(value: Any) -> Any:
    """Return a batch whose leaves are arrays; the value itself if they are.

    Raises:
        ConfigError: It is no batch.
    """
    return inspected(value)[0]


def inspected(value: Any) -> tuple[Any, int, BatchPolicy]:
    """Return a batch whose leaves are arrays, its number of rows, and its kind.

    Raises:
        ConfigError: It is no batch, or an array has a dtype that no batch can have.
    """
    structure, leaves = flatten(value)
    arrays = [as_leaf(leaf) for leaf in leaves]
    rows = _common_length(arrays)
    kind = BatchPolicy(
        structure, tuple((_dtype_name(array.dtype), array.shape[1:]) for array in arrays)
    )
    is_batch = all(array is leaf for array, leaf in zip(arrays, leaves, strict=True))
    return value if is_batch else map_leaves(lambda array: array, value), rows, kind


def rows_of(batch: Any) -> int:
    """Return the length of the first axis.

    Raises:
        ConfigError: There is no array, or one without a first axis, or their lengths differ.

    Example:
        >>> rows_of((np.zeros((3, 2)), np.zeros(3)))
        3
    """
    return _common_length(leaves_of(batch))


def _common_length(leaves: list[NDArray[Any]]) -> int:
    if not leaves:
        raise ConfigError(
            "the batch is a structure without any array; every element must hold at least one"
        )
    for leaf in leaves:
        if leaf.ndim == 0:
            raise ConfigError(
                f"an element of the dataset is {leaf[()]!r}, which has no first axis to count and cut rows along; make batches: "
                f"sv.data.from_arrays(x, batch_size=32), or dataset.batch(32)"[:400]
            )
    rows = len(leaves[0])
    if any(len(leaf) != rows for leaf in leaves):
        lengths = ", ".join(map(str, sorted({len(leaf) for leaf in leaves})))
        raise ConfigError(
            f"the arrays of a batch must have first axes of one length, not {lengths}"
        )
    return rows


def even_part(batch: Any, rows: int, parts: int, index: int) -> Any:
    """Return one of the parts of a batch that is cut evenly along its first axis.

    Sizes differ by one at most, the first parts are longer, and trailing ones may have no row. Nothing is copied.

    Args:
        batch: Whole.
        rows: That it has.
        parts: At least 1.
        index: 0 to `parts` - 1.

    Example:
        >>> [even_part(np.arange(4), 4, 3, index).tolist() for index in range(3)]
        [[0, 1], [2], [3]]
    """
    chunk = even_chunks(rows, parts)[index]
    return map_leaves(lambda array: array[chunk.start : chunk.stop], batch)


def no_rows(batch: Any) -> Any:
    """Return a batch like this one without rows."""
    return map_leaves(lambda array: np.empty((0, *array.shape[1:]), array.dtype), batch)


def content_digest(batch: Any) -> int:
    """Return a number that batches with different bytes are unlikely to share; arrays of objects do not count.

    Cost: reads at most the first MiB of each array.
    """
    made = hashlib.blake2b(digest_size=8)
    for array in leaves_of(batch):
        if array.dtype.kind != "O" and array.size:
            rows = max(1, _DIGESTED_BYTES // max(1, array.nbytes // len(array)))
            made.update(np.ascontiguousarray(array[:rows]).tobytes())
    return int.from_bytes(made.digest(), "little")


def stacked(elements: Sequence[Any]) -> Any:
    """Return a batch of elements of one kind: each array gets a new first axis.

    Raises:
        ConfigError: Their structures or shapes differ.

    Example:
        >>> stacked([{"x": 1}, {"x": 2}])
        {'x': array([1, 2])}
    """
    structures = [flatten(element)[0] for element in elements]
    if any(structure != structures[0] for structure in structures):
        shown = " and ".join(sorted({describe(structure) for structure in structures}))
        raise ConfigError(f"elements of different structures cannot be one batch: {shown}")
    return _stacked(elements)


def _stacked(parts: Sequence[Any]) -> Any:
    model = parts[0]
    if isinstance(model, dict):
        return {key: _stacked([part[key] for part in parts]) for key in model}
    if isinstance(model, dict):
        return rebuilt(model, [_stacked([part[key] for part in parts]) for key in model])
    if is_structure(model):
        return rebuilt(
            model, [_stacked(list(same)) for same in zip(*map(parts_of, parts), strict=True)]
        )
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
    """Return the dtype of a name, out of the closed list: a text of another process is not given to NumPy."""
    if name in DTYPE_NAMES:
        return dtype_from_index(DTYPE_NAMES.index(name))
    if name in _TIMES:
        return np.dtype(_TIMES[_TIMES.index(name)])
    letters = {text: letter for letter, text in _TEXTS.items()}
    if name not in letters:
        raise ConfigError(f"there is no dtype {name!r}")
    return np.dtype(letters[name])
