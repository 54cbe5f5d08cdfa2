"""Plain Python objects as bytes and back, without pickle: data only, nothing that could run.

`_KINDS` lists the types; dtypes are those of `syncvar.core.array_types`. Members of an IntEnum or
StrEnum come back as their int or str, because classes are not sent. Packing raises for the rest.
"""

from __future__ import annotations

import datetime as dt
import enum
import math
import os
import re
import struct
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from syncvar.core.array_types import DTYPE_NAMES, NAMED, dtype_from_index, dtype_index, library_of
from syncvar.core.errors import ConfigError, WireError
from syncvar.core.html_table import RankResults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

# -- ranges, paths, decimals and dtypes ------------------------------------------------------------

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
    """Return the code and bytes of a value, or None for other types; `place` names it in errors."""
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
    """Return a date, time, datetime or timedelta (no subclass) as bytes."""
    kind = type(value)
    if kind is dt.date:
        return _DATE.pack(value.year, value.month, value.day)
    if kind is dt.timedelta:
        return _DURATION.pack(value.days, value.seconds, value.microseconds)
    day = _DATE.pack(value.year, value.month, value.day) if kind is dt.datetime else b""
    clock = _TIME.pack(value.hour, value.minute, value.second, value.microsecond, value.fold)
    return day + clock + _packed_zone(value.tzinfo)


def unpack_datetime(index: int, data: bytes) -> Any:
    """Return the value of type `DATETIME_TYPES[index]`, or raise ValueError or struct.error."""
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


# -- classes of the program ------------------------------------------------------------------------


class _RegisteredClass(NamedTuple):
    """A class of the program whose objects can travel."""

    kind: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    def encoded(self, value: Any, place: str) -> Any:
        """Return the plain data of an object; raise ConfigError."""
        try:
            return self.encode(value)
        except Exception as error:  # the program's function may raise anything
            raise ConfigError(
                f"{place} cannot travel: the encode function of {self.name!r} raised "
                f"{type(error).__name__}: {error}"
            ) from error


_classes: dict[type, _RegisteredClass] = {}
_names: dict[str, _RegisteredClass] = {}


def register_object(
    cls: type,
    encode: Callable[[Any], Any],
    decode: Callable[[Any], Any],
    *,
    name: str | None = None,
) -> None:
    """Let objects of a class travel in `send_object`, `broadcast_object` and the like.

    The bytes contain the name and the plain data, and no code. Every process that sends or receives
    such objects registers the class under the same name. The class must be exactly `cls`: register
    subclasses one by one.

    Args:
        cls: The class.
        encode: Returns plain data for an object. They may contain objects of registered classes.
        decode: Returns an object for what `encode` has returned.
        name: Name of the class in messages; None means its module and qualified name.

    Raises:
        ConfigError: An argument is wrong, another class has the name, or syncvar already sends
            objects of this class.

    Cost: no message. Each object travels with the name.

    Example:
        >>> import dataclasses, syncvar as sv
        >>> @dataclasses.dataclass
        ... class Task:
        ...     number: int
        >>> sv.register_object(Task, dataclasses.astuple, lambda data: Task(*data), name="task")
        >>> sv.broadcast_object([Task(3)])
        [Task(number=3)]
    """
    if not isinstance(cls, type):
        raise ConfigError(f"register_object takes a class, not {cls!r:.100}")
    for label, function in (("encode", encode), ("decode", decode)):
        if not callable(function):
            raise ConfigError(f"{label} must be a function, not {function!r:.100}")
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"name must be a text, not {name!r:.100}")
    if cls in PLAIN or cls.__module__.partition(".")[0] in _LIBRARIES:
        raise ConfigError(f"syncvar sends objects of {cls.__qualname__} without register_object")
    key = name or f"{cls.__module__}.{cls.__qualname__}"
    other = _names.get(key)
    if other is not None and not _is_same_class(other.kind, cls):
        raise ConfigError(
            f"the name {key!r} belongs to {other.kind.__module__}.{other.kind.__qualname__}: "
            "pass another name"
        )
    earlier = _classes.get(cls)
    if earlier is not None and earlier.name != key:
        raise ConfigError(f"the class is registered as {earlier.name!r} already")
    _classes[cls] = _names[key] = _RegisteredClass(cls, key, encode, decode)


def _is_same_class(one: type, other: type) -> bool:
    """Return whether two classes are one, perhaps defined again, as in a notebook's cell."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


class _CannotDecodeError(Exception):
    """An object of a class of the program cannot be built on this rank."""


def _registered_object(name: Any, data: Any) -> Any:
    if not isinstance(name, str):
        raise WireError("the name of a class must be a text")
    known = _names.get(name)
    if known is None:
        raise _CannotDecodeError(
            f"the object is a {name!r:.100}, and this process has not registered such a class: "
            f"call sv.register_object(cls, encode, decode, name={name!r:.100}) on every rank first"
        )
    try:
        return known.decode(data)
    except Exception as error:  # the program's function may raise anything
        raise _CannotDecodeError(
            f"the decode function of {known.name!r} raised {type(error).__name__}: {error}"
        ) from error


# -- objects ---------------------------------------------------------------------------------------

_TUPLE, _ARRAY, _SCALAR, _BIG_INTEGER, _COMPLEX = 1, 2, 3, 4, 5
_ORDERED, _COUNTER, _SET, _FROZEN_SET, _TENSOR = 6, 7, 8, 9, 10
# 11 to 14 are STANDARD_CODES.
_REGISTERED = 15  # name of the class, and plain data
_DATETIME = 16  # first of one code for each type in DATETIME_TYPES
DEPTH_MAX = 64
_ARRAY_HEAD = struct.Struct("<BB")
_VERSIONS = "_metadata"  # attribute of PyTorch's state dicts, with the versions of modules

_KINDS = (
    "objects may be None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, "
    "Counter, set, frozenset, date, time, datetime, timedelta, NumPy arrays and dtypes, tensors of "
    "PyTorch and JAX, range, Path and Decimal, and objects of classes that you pass to "
    "sv.register_object (nothing is pickled)"
)
_LIBRARIES = {"numpy", "ml_dtypes", "torch", "jax", "jaxlib"}
_LIBRARIES |= {"typing", "collections", "pathlib", "os", "decimal", "_decimal"}
_DATAFRAME_REMEDIES = {
    "pandas.DataFrame": "df.to_dict('list')",
    "polars.DataFrame": "df.to_dict(as_series=False)",
    "pandas.Series": "x.to_numpy()",
    "polars.Series": "x.to_numpy()",
    "pandas.Timestamp": "x.to_pydatetime()",
    "pandas.Timedelta": "x.to_pytimedelta()",
}

_UNPACK_ERRORS = (ValueError, TypeError, OverflowError, struct.error, msgpack.UnpackException)
_FLAT = frozenset((type(None), bool, int, float, str, bytes))
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_LISTS = frozenset({list, RankResults})
PLAIN = (*_SCALARS, list, tuple, dict, set, frozenset, *DATETIME_TYPES)


def is_plain(value: Any) -> bool:
    """Return whether a value has a type that can be packed; its parts are not checked."""
    import numpy as np

    if isinstance(value, (*PLAIN, np.ndarray, np.generic)) or is_standard(value):
        return True
    if type(value) in _classes:
        return True
    library = library_of(value)
    return library is not None and library.name != ""


def may_travel(kind: type) -> bool:
    """Return whether an instance of a class, or of a subclass, may be plain data."""
    home = kind.__module__.partition(".")[0]
    if home in _LIBRARIES or getattr(kind, "_is_protocol", False):
        return True
    if any(issubclass(one, kind) for one in _classes):
        return True
    try:
        is_of_plain = issubclass(kind, PLAIN) or any(issubclass(one, kind) for one in PLAIN)
    except TypeError:  # the class has its own __subclasscheck__
        return True
    return is_of_plain or kind in (range, object)


def pack_object(
    value: Any, limit_nbytes: int = 1 << 31, *, place: str = "value", advice: str = ""
) -> bytes:
    """Return `value` as bytes.

    Args:
        value: The object.
        limit_nbytes: Largest result, in bytes.
        place: Name of the object in errors.
        advice: Code that errors recommend; "" makes them list the types that can travel.

    Raises:
        ConfigError: A part of the value cannot be packed (the error names its path and type), or
            the result is too long.

    Example:
        >>> unpack_object(pack_object({"a": (1, [2.5, None])}))
        {'a': (1, [2.5, None])}
    """
    data = _packed_flat(value) if _is_flat(value) else None
    if data is None:
        try:
            data = _packed(_plain(value, place, 0))
        except _CannotTravelError as refusal:
            raise ConfigError(refusal.sentence(advice)) from None
        except ConfigError as error:
            raise ConfigError(f"{error}; or write {advice}") if advice else error from None
    if len(data) > limit_nbytes:
        raise ConfigError(
            f"the object takes {len(data)} bytes, more than the limit of {limit_nbytes}"
        )
    return data


class _CannotTravelError(Exception):
    """A part of an object is not plain data; `place` is its path, such as "args[0]"."""

    def __init__(self, place: str, value: Any) -> None:
        self._place = place
        self._value = value

    def sentence(self, advice: str) -> str:
        """Return the text of the error."""
        kind = type(self._value)
        name, remedy = f"{kind.__module__}.{kind.__qualname__}", _remedy(self._value)
        text = f"{self._place} is a {name}, which cannot travel"
        if advice:
            return f"{text} as plain data: write {f'{remedy}, or ' if remedy else ''}{advice}"
        return f"{text}{f': write {remedy}' if remedy else ''}; {_KINDS}"


def _packed_flat(value: Any) -> bytes | None:
    """Return a flat value as bytes; None for a long integer or a text with lone surrogates."""
    try:
        return _packed(value)
    except (OverflowError, ValueError):
        return None


def _is_flat(value: Any) -> bool:
    """Return whether msgpack can pack a value directly: a scalar, or a dict or list of scalars."""
    kind = type(value)
    if kind is dict:
        return _FLAT.issuperset(map(type, value)) and _FLAT.issuperset(map(type, value.values()))
    return _FLAT.issuperset(map(type, value)) if kind is list else kind in _FLAT


def unpack_object(data: bytes) -> Any:
    """Return the object in `data`, from `pack_object`.

    Raises:
        WireError: The bytes are no packed object.
        ConfigError: This process has not registered a class, or its decode function has failed.
    """
    try:
        return _unpack(data, 0)
    except _CannotDecodeError as error:
        raise ConfigError(str(error)) from error.__cause__


def _unpack(data: bytes, depth: int) -> Any:
    if depth > DEPTH_MAX:  # each level holds a copy of its content
        raise WireError(f"the packed object has tuples nested more than {DEPTH_MAX} deep")
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            use_list=True,
            ext_hook=lambda code, inner: _restore(code, inner, depth),
        )
    except WireError:
        raise
    except (*_UNPACK_ERRORS, RecursionError) as error:
        raise WireError(f"the bytes are no packed object: {error}") from error


def _plain(value: Any, place: str, depth: int) -> Any:  # noqa: C901, PLR0911, PLR0912  (a case for each type)
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
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return msgpack.ExtType(_BIG_INTEGER, data)
    if depth >= DEPTH_MAX:
        raise ConfigError(f"{place} is nested more than {DEPTH_MAX} deep")
    if kind in _LISTS:
        return [_plain(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if kind is tuple:
        items = [_plain(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
        return _extension(_TUPLE, items)
    if kind is dict:
        return dict(_plain_pairs(value, place, depth))
    if kind in (bytearray, memoryview):
        return bytes(value)
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, struct.pack("<dd", value.real, value.imag))
    if kind in (OrderedDict, Counter):
        items = [list(pair) for pair in _plain_pairs(value, place, depth)]
        if kind is Counter:
            return _extension(_COUNTER, [items])
        versions = _plain(getattr(value, _VERSIONS, None), f"{place}.{_VERSIONS}", depth + 1)
        return _extension(_ORDERED, [items, versions])
    if kind in (set, frozenset):
        # Sorted by their bytes, so that equal sets have equal bytes in every process.
        parts = sorted(_packed(_plain(item, f"an item of {place}", depth + 1)) for item in value)
        return _extension(_SET if kind is set else _FROZEN_SET, parts)
    if kind in DATETIME_TYPES:
        try:
            return msgpack.ExtType(_DATETIME + DATETIME_TYPES.index(kind), pack_datetime(value))
        except ValueError as error:  # for instance a time zone whose name is no valid text
            raise ConfigError(f"{place}: {error}") from None
    registered = _classes.get(kind)
    if registered is not None:
        data = _plain(registered.encoded(value, place), place, depth + 1)
        return _extension(_REGISTERED, [registered.name, data])
    if isinstance(value, enum.Enum) and isinstance(value, int | str):
        return _plain(value.value, place, depth)
    standard = pack_standard(value, place)
    return _plain_array(value, place) if standard is None else msgpack.ExtType(*standard)


def _plain_pairs(value: dict[Any, Any], place: str, depth: int) -> Iterator[tuple[Any, Any]]:
    for key, item in value.items():
        path = f"{place}[{key!r}]"
        yield _plain(key, f"a key of {place}", depth + 1), _plain(item, path, depth + 1)


def _packed(plain: Any) -> bytes:
    return bytes(msgpack.packb(plain, use_bin_type=True, strict_types=True))


def _extension(code: int, plain: Any) -> Any:
    return msgpack.ExtType(code, _packed(plain))


def _plain_array(value: Any, place: str) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR, _array_bytes(np.asarray(value), place))
    if type(value) is np.ndarray:
        return msgpack.ExtType(_ARRAY, _array_bytes(value, place))
    library = library_of(value)
    if library is None or not library.name:
        raise _CannotTravelError(place, value)
    try:
        array = library.take(value)
    except Exception as error:  # the library may raise anything
        raise ConfigError(
            f"{place} of type {type(value).__name__} cannot travel: {type(error).__name__}: {error}"
        ) from None
    return msgpack.ExtType(_TENSOR, bytes([NAMED.index(library)]) + _array_bytes(array, place))


def _remedy(value: Any) -> str:
    """Return code that makes plain data of a value, if it is known."""
    kind = type(value)
    if library_of(value) is not None:
        return "np.from_dlpack(x)"
    if isinstance(value, tuple):
        return "tuple(x)"
    if hasattr(kind, "__dataclass_fields__"):
        return "dataclasses.asdict(x)"
    return _DATAFRAME_REMEDIES.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}", "")


def _array_bytes(value: NDArray[Any], place: str) -> bytes:
    import numpy as np

    try:
        index = dtype_index(value.dtype)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    array = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("=")).reshape(value.shape)
    head = _ARRAY_HEAD.pack(index, array.ndim) + struct.pack(f"<{array.ndim}Q", *array.shape)
    return head + array.tobytes()


def _restore(code: int, data: bytes, depth: int) -> Any:  # noqa: C901, PLR0911, PLR0912  (a case for each code)
    if code == _TUPLE:
        return tuple(_list(data, depth))
    if code == _BIG_INTEGER:
        return int.from_bytes(data, "little", signed=True)
    if code == _COMPLEX:
        return complex(*struct.unpack("<dd", data))
    if code == _ORDERED:
        items, versions = _list(data, depth)
        restored = OrderedDict((key, item) for key, item in items)
        if versions is not None:
            setattr(restored, _VERSIONS, versions)
        return restored
    if code == _COUNTER:
        (items,) = _list(data, depth)
        return Counter(dict(items))
    if code in (_SET, _FROZEN_SET):
        parts = (_unpack(part, depth + 1) for part in _list(data, depth))
        return set(parts) if code == _SET else frozenset(parts)
    if _DATETIME <= code < _DATETIME + len(DATETIME_TYPES):
        return unpack_datetime(code - _DATETIME, data)
    if code in STANDARD_CODES:
        return unpack_standard(code, data)
    if code == _REGISTERED:
        name, plain = _list(data, depth)
        return _registered_object(name, plain)
    if code == _TENSOR:
        if not data or data[0] >= len(NAMED):
            raise WireError("a tensor of an unknown library")
        library = NAMED[data[0]]
        assert library.give is not None
        return library.give(_restored_array(data[1:]), None)
    if code not in (_ARRAY, _SCALAR):
        raise WireError(f"unknown type code {code}")
    array = _restored_array(data)
    return array[()] if code == _SCALAR else array


def _list(data: bytes, depth: int) -> list[Any]:
    items = _unpack(data, depth + 1)
    if not isinstance(items, list):
        raise WireError("a tuple, set or ordered dict must hold a list")
    return items


def _restored_array(data: bytes) -> NDArray[Any]:
    import numpy as np

    index, ndim = _ARRAY_HEAD.unpack_from(data)
    dtype = dtype_from_index(index)
    shape = struct.unpack_from(f"<{ndim}Q", data, _ARRAY_HEAD.size)
    start = _ARRAY_HEAD.size + 8 * ndim
    count = math.prod(shape)
    if len(data) - start != count * dtype.itemsize:
        raise WireError(
            f"an array of shape {shape} and dtype {dtype} does not have {len(data) - start} bytes"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).view(dtype).reshape(shape).copy()
