"""What each rank brings to a collective, and what it must have afterwards.

The values are whole numbers that differ between elements and ranks, small enough that the dtype
holds every sum of them exactly. They are made as float32, which holds all of them.

The size of a call is that of its larger buffer, as in nccl-tests:

| collective | size | a rank brings | a rank gets |
|---|---|---|---|
| all_reduce | the vector | all of it | all of it |
| broadcast | the vector | the root: all of it | all of it |
| all_gather | the gathered vector | its piece | all of it |
| reduce_scatter | the vector that is reduced | all of it | its piece |
| all_to_all | the vector that is cut | all of it | a piece of each rank's |
| barrier | a vector that stays as it is | all of it | what it brought |

Where a vector is cut, its count is rounded up to equal pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["HALF_TYPES", "Values", "itemsize", "numpy_dtype"]

HALF_TYPES = ("float16", "bfloat16")
CUT = ("all_gather", "reduce_scatter", "all_to_all")
LARGEST = {
    "int8": 1 << 7,
    "uint8": 1 << 8,
    "int16": 1 << 15,
    "uint16": 1 << 16,
    "float16": 1 << 11,
    "bfloat16": 1 << 8,
}
FLOAT32_LARGEST = 1 << 24
LONGEST_PERIOD = 1021
Floats = np.ndarray[Any, np.dtype[np.float32]]


def itemsize(dtype: str) -> int:
    """Return the bytes of an element.

    Example:
        >>> itemsize("bfloat16"), itemsize("float64")
        (2, 8)
    """
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of a name; bfloat16 needs ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


@dataclass(frozen=True, slots=True)
class Values:
    """One call as one rank sees it.

    Args:
        collective: Its name.
        dtype: Of the elements.
        count: Elements of the larger buffer.
        rank: This rank.
        world: How many there are.
        op: "sum" or "mean".
    """

    collective: str
    dtype: str
    count: int
    rank: int
    world: int
    op: str = "sum"

    @classmethod
    def sized(cls, collective: str, dtype: str, size: int, rank: int, world: int) -> Values:
        """Return the call whose larger buffer has `size` bytes, or a little more where it must be cut evenly.

        Example:
            >>> Values.sized("all_gather", "float32", 8, 0, 4).count
            4
        """
        count = max(1, size // itemsize(dtype))
        pieces = world if collective in CUT else 1
        return cls(collective, dtype, -(-count // pieces) * pieces, rank, world)

    @property
    def piece(self) -> int:
        """Return the elements of one of the equal pieces."""
        return self.count // self.world

    @property
    def brought_count(self) -> int:
        """Return how many elements this rank brings."""
        return self.piece if self.collective == "all_gather" else self.count

    @property
    def result_count(self) -> int:
        """Return how many elements this rank gets."""
        return self.piece if self.collective == "reduce_scatter" else self.count

    def brought(self) -> Floats:
        """Return what this rank brings; to a broadcast all but the root bring zeros, which must not be seen again."""
        if self.collective == "broadcast" and self.rank:
            return np.zeros(self.count, np.float32)
        return self._pattern(self.brought_count) * np.float32(self.rank + 1)

    def expected(self) -> Floats:
        """Return what this rank must have afterwards."""
        whole = self._pattern(self.brought_count)
        mine = slice(self.rank * self.piece, (self.rank + 1) * self.piece)
        factors = np.arange(1, self.world + 1, dtype=np.float32)
        total = factors.sum(dtype=np.float32)
        match self.collective:
            case "broadcast":
                return whole
            case "barrier":
                return self.brought()
            case "all_gather":
                return np.concatenate([whole * factor for factor in factors])
            case "reduce_scatter":
                return whole[mine] * total
            case "all_to_all":
                return np.concatenate([whole[mine] * factor for factor in factors])
            case _:
                return whole * (total / np.float32(self.world) if self.op == "mean" else total)

    def _pattern(self, count: int) -> Floats:
        """Return 1, 2, 3 … up to an odd period, again and again: pieces that are mixed up do not fit."""
        largest = min(FLOAT32_LARGEST, LARGEST.get(self.dtype, FLOAT32_LARGEST))
        period = max(1, min(LONGEST_PERIOD, (largest - 1) // (self.world * (self.world + 1) // 2)))
        period -= 1 - period % 2
        return np.resize(np.arange(1, period + 1, dtype=np.float32), count)
