"""Values of a few standard types as bytes and back: range, Path, Decimal and NumPy's dtypes."""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

from syncvar.core.dtypes import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError, WireError

_RANGE, _PATH, _DECIMAL, _DTYPE = STANDARD_CODES = range(11, 15)  # of msgpack's extension types
_BOUNDS = struct.Struct("<qqq")  # start, stop, step
_DTYPE_TEXT = re.compile(r"[<>|][?biufcSUmM]\d{0,9}(\[\d{0,9}[A-Za-z]{1,2}\])?")


def is_standard(value: Any) -> bool:
    """Return whether a value is a range, a Path, a Decimal or a NumPy dtype."""
    return _code_of(value) != 0


def _code_of(value: Any) -> int:
    kind = type(value)
    if kind is range:
        return _RANGE
    if kind is type(Path()):
        return _PATH
    if kind.__module__ == "decimal" and kind.__name__ == "Decimal":
        return _DECIMAL
    numpy = sys.modules.get("numpy")
    return _DTYPE if numpy is not None and isinstance(value, numpy.dtype) else 0


def pack_standard(value: Any, place: str) -> tuple[int, bytes] | None:
    """Return the code and bytes of a value, or None for other types; `place` names it in errors.

    Raises:
        ConfigError: A dtype of Python objects or with fields, or a range beyond 64-bit integers.
    """
    code = _code_of(value)
    if not code:
        return None
    if code == _RANGE:
        try:
            return code, _BOUNDS.pack(value.start, value.stop, value.step)
        except struct.error:
            raise ConfigError(
                f"{place} is {value!r}, beyond 64-bit integers: write (x.start, x.stop)"
            ) from None
    if code == _PATH:
        return code, os.fsencode(value)
    if code == _DECIMAL:
        return code, str(value).encode()
    text = value.name if value.name in DTYPE_NAMES else value.str
    if text not in DTYPE_NAMES and not _DTYPE_TEXT.fullmatch(text):
        raise ConfigError(
            f"{place} is the dtype {value}, which cannot travel: write x.descr, or str(x)"
        )
    if not value.isnative:
        text = value.str
    return code, text.encode()


def unpack_standard(code: int, data: bytes) -> Any:
    """Return the value of a code and bytes, or raise WireError."""
    try:
        return _unpacked(code, data)
    except (ValueError, TypeError, ArithmeticError, struct.error) as error:
        raise WireError(f"the bytes are no value of type code {code}: {error}") from error


def _unpacked(code: int, data: bytes) -> Any:
    if code == _RANGE:
        return range(*_BOUNDS.unpack(data))
    if code == _PATH:
        return Path(os.fsdecode(data))
    if code == _DECIMAL:
        from decimal import Decimal

        return Decimal(data.decode())
    import numpy as np

    text = data.decode()
    if text in DTYPE_NAMES:
        return dtype_from_index(DTYPE_NAMES.index(text))
    if not _DTYPE_TEXT.fullmatch(text):
        raise ValueError(f"{text!r:.100} is no dtype")
    return np.dtype(text)
