"""Messages between a worker and the launcher: small maps, checked field by field before anyone looks at them."""

from __future__ import annotations

from typing import Any

import msgpack

from syncvar.errors import WireError

__all__ = ["CONTROL_NBYTES_MAX", "Message", "pack_message", "parse_message"]

CONTROL_NBYTES_MAX = 1 << 20
_DEPTH_MAX = 8
_ITEMS_MAX = 4096
_TEXT_MAX = 65536

Message = dict[str, Any]

# kind -> field -> type. Every field is required.
_NUMBER = (int, float)
_SCHEMA: dict[str, dict[str, type | tuple[type, ...]]] = {
    # worker -> launcher
    "join": {"rank": int, "job": str, "generation": int, "address": str, "pid": int, "host": str, "about": dict},
    "report": {
        "group": int, "members": list, "call": int, "fingerprint": int, "what": str, "site": str,
        "awaiting": list, "waited_s": _NUMBER, "mismatch": bool, "may_move": bool, "entered": dict,
    },
    "resumed": {"group": int, "call": int},
    "poison": {"group": int, "members": list, "call": int, "what": str, "reason": str},
    "left_run": {"group": int, "members": list, "call": int, "epoch_end": int, "reason": str},
    "broke": {"kind_of_break": str, "reason": str, "group": int, "call": int, "missing": list},
    "leaving": {"entered": dict},
    # launcher -> worker
    "roll": {"generation": int, "addresses": dict, "hosts": dict},
    "refused": {"error": str, "reason": str, "missing": list},
    "abort": {"rank": int, "host": str, "reason": str, "kind_of_break": str, "group": int, "call": int, "missing": list},
    "left": {"rank": int, "entered": dict},
    "verdict": {"group": int, "call": int, "last_call": int, "text": str, "table": dict},
}  # fmt: skip


def pack_message(kind: str, **fields: Any) -> bytes:
    """Return a message as bytes.

    Example:
        >>> parse_message(pack_message("resumed", group=0, call=4))["call"]
        4
    """
    return bytes(msgpack.packb({"kind": kind, **fields}, use_bin_type=True))


def parse_message(data: bytes) -> Message:
    """Read a message.

    Returns:
        A map whose "kind" is known and whose fields are present and of the right type.

    Raises:
        WireError: Anything else.
    """
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
    schema = _SCHEMA.get(message.get("kind", "")) if isinstance(message.get("kind"), str) else None
    if schema is None:
        raise WireError(f"unknown kind of control message {str(message.get('kind'))[:40]!r}")
    for name, kinds in schema.items():
        value = message.get(name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise WireError(f"control message {message['kind']!r}: field {name!r} is missing or of a wrong type")
    _check_depth(message, 1)
    return message


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
