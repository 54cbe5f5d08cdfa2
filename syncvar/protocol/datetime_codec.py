"""Dates, times, durations and time zones as bytes and back."""

from __future__ import annotations

import datetime as dt
import struct
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

MOMENTS = (dt.date, dt.time, dt.datetime, dt.timedelta)
_DATE = struct.Struct("<HBB")
_TIME = struct.Struct("<BBBIB")  # hour, minute, second, microsecond, fold
_DURATION = struct.Struct("<iiI")  # days, seconds, microseconds
_OFFSET = struct.Struct("<q")  # microseconds
_MICROSECOND = dt.timedelta(microseconds=1)
_NO_ZONE, _FIXED, _NAMED = b"\x00", b"\x01", b"\x02"


def pack_moment(value: Any) -> bytes:
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


def unpack_moment(index: int, data: bytes) -> Any:
    """Return the value of type `MOMENTS[index]`, or raise ValueError or struct.error."""
    kind = MOMENTS[index]
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
