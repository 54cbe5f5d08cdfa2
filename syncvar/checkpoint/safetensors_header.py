"""Reader and writer of safetensors headers. Pure: bytes in, data out, and back.

A file is 8 bytes (length of the header, little endian), the header (JSON), and the tensors side by
side. Not every reader knows complex numbers: they are stored as real ones with a last axis of 2.

Source: the format's description, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from syncvar.core.errors import CheckpointError

HEADER_BYTES_MAX = 16 << 20
_NDIM_MAX = 65
_PREFIX = 8
CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "complex64": "F32",
    "complex128": "F64",
}
_CODE_BYTES = {
    "BOOL": 1,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "U8": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "BF16": 2,
}


class Tensor(NamedTuple):
    """One tensor of a file.

    Args:
        name: Its key.
        dtype: Code of the format.
        shape: Shape of the stored numbers.
        start: First byte, counted from the end of the header.
        stop: Byte after the last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element of a NumPy dtype."""
    return _CODE_BYTES[CODES[dtype]] * (2 if dtype.startswith("complex") else 1)


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape under which an array is stored."""
    return (*shape, 2) if dtype.startswith("complex") else shape


def header_bytes(
    arrays: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, list[Tensor]]:
    """Return the header of a file and its tensors, in the order of `arrays`."""
    tensors, end = [], 0
    for name, dtype, shape in arrays:
        start, end = end, end + math.prod(shape) * itemsize_of(dtype)
        tensors.append(Tensor(name, CODES[dtype], stored_shape(dtype, shape), start, end))
    head: dict[str, Any] = {"__metadata__": metadata}
    head |= {
        t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.stop]}
        for t in tensors
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"a shard's header takes {len(text)} bytes, more than {HEADER_BYTES_MAX}: save fewer "
            f"variables"
        )
    return len(text).to_bytes(_PREFIX, "little") + text, tensors


def header_length(prefix: bytes, file_nbytes: int) -> int:
    """Return the length of prefix and header."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) != _PREFIX or length > min(HEADER_BYTES_MAX, file_nbytes - _PREFIX):
        raise CheckpointError(f"its header claims {length} bytes of a file of {file_nbytes}")
    return _PREFIX + length


def parse_header(data: bytes, file_nbytes: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file."""
    head = strict_json(data[_PREFIX:], "the header")
    metadata = head.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(text) is not str for text in metadata.values()):
        raise CheckpointError("the header's metadata are not texts")
    tensors = {name: _tensor(name, fields) for name, fields in head.items()}
    end = 0
    for tensor in sorted(tensors.values(), key=lambda one: (one.start, one.stop)):
        if tensor.start != end:
            raise CheckpointError(
                f"tensor {tensor.name!r} begins at {tensor.start}, not at {end}: a hole or an "
                "overlap"
            )
        end = tensor.stop
    end += len(data)
    if end != file_nbytes:
        raise CheckpointError(f"the tensors end at byte {end} of a file of {file_nbytes}")
    return tensors, metadata


def _tensor(name: str, fields: Any) -> Tensor:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {name!r:.80} has not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    sizes_are_right = (
        isinstance(shape, list)
        and len(shape) <= _NDIM_MAX
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(number) is int and 0 <= number < 1 << 62 for number in shape + offsets)
    )
    if not isinstance(dtype, str) or dtype not in _CODE_BYTES or not sizes_are_right:
        raise CheckpointError(f"tensor {name!r:.80} has a wrong dtype, shape or offsets")
    start, stop = offsets
    if stop - start != math.prod(shape) * _CODE_BYTES[dtype]:
        raise CheckpointError(
            f"tensor {name!r:.80} of shape {shape} and dtype {dtype} does not take {stop - start} "
            f"bytes"
        )
    return Tensor(name, dtype, tuple(shape), start, stop)


def strict_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object; reject duplicate keys, NaN and infinities."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CheckpointError(f"{what} has a key twice")
        return found

    def refuse(name: str) -> Any:
        raise CheckpointError(f"{what} has the number {name}")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return value
