"""Range, Path, Decimal, NumPy dtypes, dates and times as bytes and back."""

from __future__ import annotations

import datetime as dt
import os
import re
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

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


# -- dates and times -------------------------------------------------------------------------------

DATETIME_TYPES = (dt.date, dt.time, dt.datetime, dt.timedelta)
_DATE = struct.Struct("<HBB")
_TIME = struct.Struct("<BBBIB")  # hour, minute, second, microsecond, fold
_DURATION = struct.Struct("<iiI")  # days, seconds, microseconds
_OFFSET = struct.Struct("<q")  # microseconds
_MICROSECOND = dt.timedelta(microseconds=1)
_NO_ZONE, _FIXED, _NAMED = b"\x00", b"\x01", b"\x02"


def pack_datetime(value: Any) -> bytes:
    """Return a date, time, datetime or timedelta (no subclass) as bytes.

    Raises:
        ConfigError: Its time zone has a type that cannot be packed.
    """
    kind = type(value)
    if kind is dt.date:
        return _DATE.pack(value.year, value.month, value.day)
    if kind is dt.timedelta:
        return _DURATION.pack(value.days, value.seconds, value.microseconds)
    day = _DATE.pack(value.year, value.month, value.day) if kind is dt.datetime else b""
    clock = _TIME.pack(value.hour, value.minute, value.second, value.microsecond, value.fold)
    return day + clock + _packed_zone(value.tzinfo)


def unpack_datetime(index: int, data: bytes) -> Any:
    """Return the value of type `MOMENTS[index]`, or raise ValueError or struct.error."""
    kind = DATETIME_TYPES[index]
    if kind is dt.date:
        return dt.date(*_DATE.unpack(data))
    if kind is dt.timedelta:
        return dt.timedelta(*_DURATION.unpack(data))
    size = _DATE.size if kind is dt.datetime else 0
    day = _DATE.unpack(data[:size]) if size else ()
    *clock, fold = _TIME.unpack(data[size : size + _TIME.size])
    make: Callable[..., Any] = kind
    return make(*day, *clock, tzinfo=_zone(data[size + _TIME.size :]), fold=fold)


def _packed_zone(zone: dt.tzinfo | None) -> bytes:
    if zone is None:
        return _NO_ZONE
    if type(zone) is dt.timezone:
        offset = zone.utcoffset(None)
        name = zone.tzname(None)
        own_name = name if name != dt.timezone(offset).tzname(None) else ""
        return _FIXED + _OFFSET.pack(offset // _MICROSECOND) + own_name.encode()
    key = getattr(zone, "key", None)
    if type(zone).__module__ == "zoneinfo" and isinstance(key, str):
        return _NAMED + key.encode()
    kind = f"{type(zone).__module__}.{type(zone).__qualname__}"
    raise ConfigError(
        f"its time zone is a {kind}, which cannot travel: use datetime.timezone, "
        f"zoneinfo.ZoneInfo(name), or x.astimezone(datetime.timezone.utc)"
    )


def _zone(data: bytes) -> dt.tzinfo | None:
    code, rest = data[:1], data[1:]
    if code == _NO_ZONE and not rest:
        return None
    if code == _FIXED:
        (offset,) = _OFFSET.unpack(rest[: _OFFSET.size])
        name = rest[_OFFSET.size :].decode()
        delta = dt.timedelta(microseconds=offset)
        return dt.timezone(delta, name) if name else dt.UTC if not offset else dt.timezone(delta)
    if code == _NAMED:
        import zoneinfo

        key = rest.decode()
        try:
            return zoneinfo.ZoneInfo(key)  # raises for names that lead out of its folders
        except (KeyError, OSError) as error:
            raise ValueError(f"there is no time zone {key!r:.80} here: {error}") from None
    raise ValueError("the bytes are no time zone")
