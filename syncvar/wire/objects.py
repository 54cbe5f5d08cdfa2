"""Plain Python objects as bytes and back: data only, nothing that could run.

Travels: None, bool, int, float, complex, str, bytes, list, tuple, dict, NumPy arrays and scalars of the dtypes in
`syncvar.wire.dtypes`. Everything else is refused when it is packed.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from syncvar.errors import ConfigError, WireError
from syncvar.wire.dtypes import dtype_from_index, dtype_index

__all__ = ["pack_object", "unpack_object"]

_TUPLE, _ARRAY, _SCALAR, _BIG_INTEGER, _COMPLEX = 1, 2, 3, 4, 5
_DEPTH_MAX = 64
_ARRAY_HEAD = struct.Struct("<BB")


def pack_object(value: Any, limit_nbytes: int = 1 << 31) -> bytes:
    """Return `value` as bytes.

    Raises:
        ConfigError: A part of the value cannot travel (its place and type are named), or the result is too long.

    Example:
        >>> unpack_object(pack_object({"a": (1, [2.5, None])}))
        {'a': (1, [2.5, None])}
    """
    data = msgpack.packb(_plain(value, "value", 0), use_bin_type=True, strict_types=True)
    if len(data) > limit_nbytes:
        raise ConfigError(f"the object takes {len(data)} bytes, more than the limit of {limit_nbytes}")
    return bytes(data)


def unpack_object(data: bytes) -> Any:
    """Return the object that `pack_object` made into `data`.

    Raises:
        WireError: The bytes are no such object.
    """
    return _unpack(data, 0)


def _unpack(data: bytes, depth: int) -> Any:
    if depth > _DEPTH_MAX:  # each level holds a copy of what is inside it
        raise WireError(f"the packed object has tuples nested more than {_DEPTH_MAX} deep")
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=False, use_list=True, ext_hook=lambda code, inner: _restore(code, inner, depth)
        )
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError, struct.error, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"the bytes are no packed object: {error}") from error


def _plain(value: Any, place: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{place} is a text that cannot be encoded: {error}") from None
        return value
    if kind is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return msgpack.ExtType(_BIG_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if depth >= _DEPTH_MAX:
        raise ConfigError(f"{place} is nested more than {_DEPTH_MAX} deep")
    if kind is list:
        return [_plain(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if kind is tuple:
        items = [_plain(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
        return msgpack.ExtType(_TUPLE, msgpack.packb(items, use_bin_type=True, strict_types=True))
    if kind is dict:
        return {
            _plain(key, f"a key of {place}", depth + 1): _plain(item, f"{place}[{key!r}]", depth + 1)
            for key, item in value.items()
        }
    if kind in (bytearray, memoryview):
        return bytes(value)
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, struct.pack("<dd", value.real, value.imag))
    return _plain_array(value, place)


def _plain_array(value: Any, place: str) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        code = _SCALAR
    elif type(value) is np.ndarray:
        code = _ARRAY
    else:
        raise ConfigError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot travel; objects may be "
            f"None, bool, int, float, complex, str, bytes, list, tuple, dict and NumPy arrays (nothing is pickled)"
        )
    array = np.asarray(value)
    try:
        index = dtype_index(array.dtype)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
    head = _ARRAY_HEAD.pack(index, array.ndim) + struct.pack(f"<{array.ndim}Q", *array.shape)
    return msgpack.ExtType(code, head + array.tobytes())


def _restore(code: int, data: bytes, depth: int) -> Any:
    if code == _TUPLE:
        items = _unpack(data, depth + 1)
        if not isinstance(items, list):
            raise WireError("a tuple must hold a list")
        return tuple(items)
    if code == _BIG_INTEGER:
        return int.from_bytes(data, "little", signed=True)
    if code == _COMPLEX:
        return complex(*struct.unpack("<dd", data))
    if code not in (_ARRAY, _SCALAR):
        raise WireError(f"unknown type code {code}")
    import numpy as np

    index, ndim = _ARRAY_HEAD.unpack_from(data)
    dtype = dtype_from_index(index)
    shape = struct.unpack_from(f"<{ndim}Q", data, _ARRAY_HEAD.size)
    start = _ARRAY_HEAD.size + 8 * ndim
    count = 1
    for length in shape:
        count *= length
    if len(data) - start != count * dtype.itemsize:
        raise WireError(f"an array of shape {shape} and dtype {dtype} does not have {len(data) - start} bytes")
    array = np.frombuffer(data, dtype=np.uint8, offset=start).view(dtype).reshape(shape).copy()
    return array[()] if code == _SCALAR else array
