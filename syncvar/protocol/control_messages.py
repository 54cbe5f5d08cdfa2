"""Messages between a worker or server and the launcher: small maps, checked field by field."""

from __future__ import annotations

from types import UnionType
from typing import Any, get_args, get_origin

import msgpack

from syncvar.core.errors import WireError
from syncvar.protocol.compatibility import check_about
from syncvar.protocol.message_limits import CONTROL_NBYTES_MAX

_DEPTH_MAX = 8
_ITEMS_MAX = 4096
_TEXT_MAX = 65536

Message = dict[str, Any]

# Message kind -> field -> type. Every field is required. A float may arrive as an integer.
_Ranks = list[int]
_Counts = dict[int, int]
_Texts = dict[int, str]
_SCHEMA: dict[str, dict[str, Any]] = {
    # worker -> launcher
    "join": {
        "rank": int,
        "job": str,
        "generation": int,
        "address": str,
        "pid": int,
        "host": str,
        "about": dict[str, int | str],
    },
    "report": {
        "group": int,
        "members": _Ranks,
        "call": int,
        "ordinal": int,
        "fingerprint": int,
        "what": str,
        "site": str,
        "awaiting": _Ranks,
        "waited_s": float,
        "mismatch": bool,
        "may_move": bool,
        "entered": _Counts,
    },
    "resumed": {"group": int, "call": int},
    "poison": {"group": int, "members": _Ranks, "call": int, "what": str, "reason": str},
    "left_run": {"group": int, "members": _Ranks, "call": int, "epoch_end": int, "reason": str},
    "broke": {"kind_of_break": str, "reason": str, "group": int, "call": int, "missing": _Ranks},
    "failed": {"reason": str},
    "here": {"last": str, "age_s": float, "is_over": bool, "stack": str},
    "leaving": {"entered": _Counts, "skipped": list[int], "sent": list[int], "sites": _Texts},
    # server -> launcher
    "serve": {
        "server": int,
        "job": str,
        "generation": int,
        "address": str,
        "outside": str,
        "host": str,
        "host_index": int,
        "pid": int,
    },
    "holds": {"server": int, "job": str, "generation": int, "of": int},
    # worker or server -> launcher
    "find_servers": {"job": str, "generation": int, "host_index": int},
    # launcher -> worker or server
    "servers": {
        "version": int,
        "addresses": _Texts,
        "hosts": _Texts,
        "ended": _Texts,
        "incarnations": _Counts,
    },
    # launcher -> worker
    "roll": {
        "generation": int,
        "addresses": _Texts,
        "hosts": _Texts,
        "places": _Counts,
        "without_shm": _Texts,
    },
    "refused": {"error": str, "reason": str, "missing": _Ranks},
    "abort": {
        "rank": int,
        "host": str,
        "reason": str,
        "kind_of_break": str,
        "group": int,
        "call": int,
        "missing": _Ranks,
    },
    "are_you_there": {},
    "left": {"rank": int, "entered": _Counts, "skipped": list[int]},
    "verdict": {
        "group": int,
        "call": int,
        "last_call": int,
        "text": str,
        "table": _Texts,
        "waits": bool,
    },
}


def pack_message(kind: str, **fields: Any) -> bytes:
    """Return a message as bytes; characters that UTF-8 cannot encode (file names) are escaped."""
    message = {"kind": kind, **fields}
    return bytes(msgpack.packb(message, use_bin_type=True, unicode_errors="backslashreplace"))


def parse_message(data: bytes) -> Message:
    """Return a message with a known "kind" and all fields of the right type, or raise WireError."""
    if len(data) > CONTROL_NBYTES_MAX:
        raise WireError(f"a control message of {len(data)} bytes exceeds {CONTROL_NBYTES_MAX}")
    try:
        message = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            ext_hook=_refuse_extension,
            max_str_len=_TEXT_MAX,
            max_bin_len=_TEXT_MAX,
            max_array_len=_ITEMS_MAX,
            max_map_len=_ITEMS_MAX,
            max_ext_len=0,
        )
    except WireError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a control message: {error}") from error
    if not isinstance(message, dict):
        raise WireError("a control message must be a map")
    name = message.get("kind")
    schema = _SCHEMA.get(name) if isinstance(name, str) else None
    if schema is None:
        raise WireError(f"unknown kind of control message {str(name)[:40]!r}")
    for field, kind in schema.items():
        if not _is_of(message.get(field), kind):
            raise WireError(
                f"control message {name!r}: field {field!r} is missing or of a wrong type"
            )
    if name == "join":
        check_about(message["about"])
    _check_depth(message, 1)
    return message


def _is_of(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is None:
        if kind is float:
            return type(value) in (int, float) and value == value  # noqa: PLR0124  (no NaN)
        return type(value) is kind
    if origin is UnionType:
        return any(_is_of(value, one) for one in get_args(kind))
    if type(value) is not origin:
        return False
    if origin is list:
        return all(_is_of(item, get_args(kind)[0]) for item in value)
    of_key, of_value = get_args(kind)
    return all(_is_of(key, of_key) and _is_of(item, of_value) for key, item in value.items())


def _check_depth(value: Any, depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise WireError(f"a control message is nested more than {_DEPTH_MAX} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise WireError("keys of a control message are texts or integers")
            _check_depth(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_depth(item, depth + 1)


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise WireError(f"extension type {code} in a control message")
