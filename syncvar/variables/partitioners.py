"""Partitioners: into how many parts a large variable is cut, along its first axis.

A partitioner is called with a shape and a dtype and returns the number of parts of each axis. The
parts are contiguous rows, the first (rows mod parts) of them one row longer: `row_ranges` lists
them.

Example:
    >>> import numpy as np, syncvar as sv
    >>> sv.partitioners.MaxSize(16)((7, 2), np.float32)
    [4, 1]
    >>> sv.partitioners.row_ranges(7, 4)
    [[0, 2], [2, 4], [4, 6], [6, 7]]
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.algorithms.schedule import even_chunks
from syncvar.core.errors import ConfigError
from syncvar.data.batches import integer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FixedShards", "MaxSize", "MinSize", "row_ranges"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from syncvar.core.migration_hints import missing_attribute

        raise missing_attribute("sv.partitioners", name, __all__)


@dataclass(frozen=True, slots=True)
class FixedShards:
    """Cut into a given number of parts; into single rows if there are fewer rows.

    Args:
        num_shards: Parts, at least 1.

    Raises:
        ConfigError: `num_shards` is not an integer of at least 1.

    Example:
        >>> import syncvar as sv
        >>> sv.partitioners.FixedShards(2)((10, 3), "float32")
        [2, 1]
    """

    num_shards: int

    def __post_init__(self) -> None:
        integer_of("num_shards", self.num_shards, 1)

    def __call__(self, shape: Sequence[int], dtype: Any) -> list[int]:
        """Return the parts of each axis.

        Args:
            shape: Of the variable.
            dtype: Of the variable.
        """
        rows, _ = _measured(shape, dtype)
        return _parts(shape, min(self.num_shards, rows))


@dataclass(frozen=True, slots=True)
class MinSize:
    """Cut into as many parts as possible, of at least about so many bytes each.

    Args:
        min_shard_bytes: Bytes below which parts are not cut, at least 1.
        max_shards: Parts at most, at least 1.

    Raises:
        ConfigError: An argument is not an integer of at least 1.

    Example:
        >>> import syncvar as sv
        >>> sv.partitioners.MinSize(max_shards=100)((1024, 1024), "float32")
        [16, 1]
    """

    min_shard_bytes: int = 262144
    max_shards: int = 1

    def __post_init__(self) -> None:
        integer_of("min_shard_bytes", self.min_shard_bytes, 1)
        integer_of("max_shards", self.max_shards, 1)

    def __call__(self, shape: Sequence[int], dtype: Any) -> list[int]:
        """Return the parts of each axis.

        Args:
            shape: Of the variable.
            dtype: Of the variable.
        """
        rows, row_nbytes = _measured(shape, dtype)
        return _parts(
            shape, min(self.max_shards, rows, _ceil(rows * row_nbytes, self.min_shard_bytes))
        )


@dataclass(frozen=True, slots=True)
class MaxSize:
    """Cut into the fewest parts of at most so many bytes each; a part has at least one row.

    Args:
        max_shard_bytes: Bytes of a part, at least 1.
        max_shards: Parts at most, at least 1, whatever their bytes; None for no limit.

    Raises:
        ConfigError: An argument is not an integer of at least 1.

    Example:
        >>> import syncvar as sv
        >>> sv.partitioners.MaxSize(64)((100, 3), "float32")
        [20, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        integer_of("max_shard_bytes", self.max_shard_bytes, 1)
        if self.max_shards is not None:
            integer_of("max_shards", self.max_shards, 1)

    def __call__(self, shape: Sequence[int], dtype: Any) -> list[int]:
        """Return the parts of each axis.

        Args:
            shape: Of the variable.
            dtype: Of the variable.
        """
        rows, row_nbytes = _measured(shape, dtype)
        rows_of_part = max(1, self.max_shard_bytes // row_nbytes) if row_nbytes else max(1, rows)
        parts = _ceil(rows, rows_of_part)
        return _parts(shape, parts if self.max_shards is None else min(parts, self.max_shards))


def row_ranges(rows: int, shards: int) -> list[list[int]]:
    """Return the first row and the row after the last one of each part; the first parts are longer.

    Args:
        rows: To be cut, at least 0.
        shards: Parts, at least 1; those after the rows are used up are empty.

    Raises:
        ConfigError: An argument is not an integer, or is too small.

    Example:
        >>> import syncvar as sv
        >>> sv.partitioners.row_ranges(7, 3)
        [[0, 3], [3, 5], [5, 7]]
    """
    chunks = even_chunks(integer_of("rows", rows, 0), integer_of("shards", shards, 1))
    return [[chunk.start, chunk.stop] for chunk in chunks]


def _measured(shape: Sequence[int], dtype: Any) -> tuple[int, int]:
    """Return the rows of a variable and the bytes of a row; a scalar is one row."""
    if not isinstance(shape, tuple | list):
        raise ConfigError(f"shape must be a tuple of integers, not {shape!r}")
    lengths = [integer_of("a length of the shape", length, 0) for length in shape]
    try:
        itemsize = np.dtype(dtype).itemsize
    except TypeError as error:
        raise ConfigError(f"dtype {dtype!r} is none of NumPy's: {error}") from None
    return (lengths[0], prod(lengths[1:]) * itemsize) if lengths else (1, itemsize)


def _parts(shape: Sequence[int], first: int) -> list[int]:
    return [max(1, int(first)), *(1 for _ in shape[1:])] if shape else []


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
