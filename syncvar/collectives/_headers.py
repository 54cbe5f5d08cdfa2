"""The header round: every rank tells every other, in one small fixed record, what it brings to a call.

Collectives whose plan depends on all ranks (uneven lengths, receivers that pass nothing) begin with it. Since all
ranks see the same records, all come to the same conclusion and raise the same error.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.engine.operation import Stage
from syncvar.errors import ConfigError, MismatchError
from syncvar.wire import DTYPE_NAMES, dtype_index

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.engine.group import Communicator

__all__ = [
    "ARRAY", "BYTES", "RECORD_BYTES", "Record", "array_record", "exchange", "exchange_bytes", "pack_record", "require_same", "unpack_record",
]  # fmt: skip

_NDIM_MAX = 13
_RECORD = struct.Struct(f"<BBBxxxxxQ{_NDIM_MAX}Q")
RECORD_BYTES = _RECORD.size
NOTHING, ARRAY, BYTES = 0, 1, 2


class Record(NamedTuple):
    """What a rank brings.

    Args:
        kind: NOTHING, ARRAY or BYTES.
        dtype: Index of the dtype of an array.
        shape: Shape of an array.
        nbytes: Length of bytes, or a digest that must be the same on all ranks.
    """

    kind: int = NOTHING
    dtype: int = 0
    shape: tuple[int, ...] = ()
    nbytes: int = 0

    def describe(self) -> str:
        """Return the record in words."""
        if self.kind == NOTHING:
            return "brings nothing"
        if self.kind == BYTES:
            return f"brings {self.nbytes} bytes"
        return f"brings {DTYPE_NAMES[self.dtype]}{list(self.shape)}"


def array_record(array: NDArray[Any], digest: int = 0) -> Record:
    """Return the record of an array.

    Raises:
        ConfigError: It has too many dimensions.
    """
    if array.ndim > _NDIM_MAX:
        raise ConfigError(f"an array of {array.ndim} dimensions cannot be communicated; reshape it to {_NDIM_MAX} or fewer")
    return Record(ARRAY, dtype_index(array.dtype), array.shape, digest)


def pack_record(record: Record) -> bytes:
    """Return the bytes of a record, always as many."""
    padded = (*record.shape, *(0,) * (_NDIM_MAX - len(record.shape)))
    return _RECORD.pack(record.kind, record.dtype, len(record.shape), record.nbytes, *padded)


def unpack_record(data: bytes) -> Record:
    """Return the record in some bytes.

    Example:
        >>> unpack_record(pack_record(Record(ARRAY, 3, (2, 5)))).shape
        (2, 5)
    """
    kind, dtype, ndim, nbytes, *shape = _RECORD.unpack(data)
    return Record(kind, dtype, tuple(shape[:ndim]), nbytes)


def exchange(communicator: Communicator, mine: Record) -> Generator[Stage, None, list[Record]]:
    """Exchange records; returns those of all ranks of the group, in rank order."""
    told = yield from exchange_bytes(communicator, pack_record(mine))
    return [unpack_record(data) for data in told]


def exchange_bytes(communicator: Communicator, mine: bytes) -> Generator[Stage, None, list[bytes]]:
    """Exchange bytes, as many from each rank; returns those of all ranks of the group, in rank order."""
    size = len(mine)
    work = np.zeros(communicator.size * size, np.uint8)
    rank = communicator.member_rank
    work[rank * size : (rank + 1) * size] = np.frombuffer(mine, np.uint8)
    yield Stage(communicator.plan("header_exchange", size), work)
    everything = work.tobytes()
    return [everything[start : start + size] for start in range(0, len(everything), size)]


def require_same(communicator: Communicator, what: str, values: list[Any], records: list[Record]) -> None:
    """Raise MismatchError on every rank unless all `values` are equal.

    Raises:
        MismatchError: They differ; the table tells what each rank brings.
    """
    if any(value != values[0] for value in values):
        table = {communicator.members[rank]: record.describe() for rank, record in enumerate(records)}
        raise MismatchError(f"{what}: the ranks bring values that do not fit together", table)
