"""Records of fixed length that describe a rank's input to a call, for calls with unequal shapes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.array_types import DTYPE_NAMES, dtype_index
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NDIM_MAX = 13
_RECORD = struct.Struct(f"<BBBxxxxxQ{_NDIM_MAX}Q")
RECORD_BYTES = _RECORD.size
NOTHING, ARRAY, BYTES = 0, 1, 2


class InputRecord(NamedTuple):
    """Description of one rank's input."""

    kind: int = NOTHING  # NOTHING, ARRAY or BYTES
    dtype: int = 0  # index of the array's dtype
    shape: tuple[int, ...] = ()  # shape of the array
    nbytes: int = 0  # length of the bytes; for an array: a digest that must be equal on all ranks

    def describe(self) -> str:
        """Return the input as text, for the table of a mismatch."""
        if self.kind == NOTHING:
            return "passes nothing"
        if self.kind == BYTES:
            return f"passes {self.nbytes} bytes"
        return f"passes {DTYPE_NAMES[self.dtype]}{list(self.shape)}"


def array_record(array: NDArray[Any], digest: int = 0) -> InputRecord:
    """Return the record of an array; raise ConfigError if it has too many dimensions."""
    if array.ndim > _NDIM_MAX:
        raise ConfigError(
            f"an array of {array.ndim} dimensions cannot be communicated; "
            f"reshape it to {_NDIM_MAX} or fewer"
        )
    return InputRecord(ARRAY, dtype_index(array.dtype), array.shape, digest)


def pack_record(record: InputRecord) -> bytes:
    """Return a record as `RECORD_BYTES` bytes."""
    padded = (*record.shape, *(0,) * (_NDIM_MAX - len(record.shape)))
    return _RECORD.pack(record.kind, record.dtype, len(record.shape), record.nbytes, *padded)


def unpack_record(data: bytes) -> InputRecord:
    """Return the record in `RECORD_BYTES` bytes."""
    kind, dtype, ndim, nbytes, *shape = _RECORD.unpack(data)
    return InputRecord(kind, dtype, tuple(shape[:ndim]), nbytes)
