"""Messages between a worker or server and the launcher: small maps, checked field by field.

"join" and "refused" are the same in every version of the protocol, so a rank of another version
gets an error that names both versions. Other messages change with `PROTOCOL_VERSION`.
"""

from __future__ import annotations

from types import UnionType
from typing import Any, get_args, get_origin

import msgpack

from syncvar.core.errors import WireError
from syncvar.protocol.frame import CONTROL_NBYTES_MAX
from syncvar.protocol.membership import check_about

_DEPTH_MAX = 8
_ITEMS_MAX = 4096
_TEXT_MAX = 65536

Message = dict[str, Any]

# Message kind -> field -> type. Every field is required. A float may arrive as an integer.
_Ranks = list[int]
_Counts = dict[int, int]
_Texts = dict[int, str]


def _of(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_SCHEMA: dict[str, dict[str, Any]] = {
    # worker -> launcher
    "join": {
        **_of(int, "rank generation pid"),
        **_of(str, "job address host"),
        "about": dict[str, int | str],
    },
    "wait_report": {
        **_of(int, "group call ordinal fingerprint"),
        **_of(str, "description site"),
        **_of(bool, "mismatch is_awaited has_active_threads"),
        **_of(_Ranks, "members awaiting"),
        # (rank, group, call), flattened: one of these calls ends the wait; empty if all ranks must
        "alternatives": list[int],
        "waited_s": float,
        "entered": _Counts,
    },
    "wait_end": _of(int, "group call"),
    "reject_call": {**_of(int, "group call"), **_of(str, "description reason"), "members": _Ranks},
    "abort_step": {**_of(int, "group call last_call"), "members": _Ranks, "reason": str},
    "group_failure": {
        **_of(str, "failure_kind reason"),
        **_of(int, "group call"),
        "missing": _Ranks,
    },
    "process_failure": _of(str, "reason failure_kind"),
    # head of a host, after its probe: (host, host, nanoseconds, bytes per ms) of pairs, flattened
    "host_rates": {"rates": list[int], "path": str},
    "status": {**_of(str, "last_call stack"), "age_s": float, "is_finished": bool},
    # answer to "observe"; see `protocol.observer`
    "observation": {
        **_of(int, "number received_ns answered_ns window_ns counted made steps"),
        **_of(str, "boot last_call"),
        "is_in_call": bool,
        "age_s": float,
        # (group, call, began, ended, waited) by this rank's clock, flattened; see `CallTimes`
        "calls": list[int],
        "groups": dict[int, list[int]],  # members of these groups
        "kind_texts": list[str],  # (call, variable, path), flattened
        "kind_numbers": list[int],  # (calls, bytes, nanoseconds) of each kind, flattened
        "sent": _Counts,  # bytes sent over links, by peer
    },
    "leave": {"entered": _Counts, **_of(list[int], "skipped sent"), "sites": _Texts},
    # worker of an elastic job -> launcher; see `protocol.elastic_membership`
    "enroll": {**_of(int, "heard holds incarnation"), "job": str},
    "leaving": {},
    # launcher -> worker of an elastic job
    "assignment": _of(
        int, "generation rank world_size local_rank local_world_size host_index host_count"
    ),
    "membership_change": {},
    "dismissal": {},
    # server -> launcher
    "serve": {
        **_of(int, "server generation host_index pid"),
        **_of(str, "job address outside host"),
    },
    "holds": {**_of(int, "server generation of"), "job": str},
    # worker or server -> launcher
    "find_servers": {"job": str, **_of(int, "generation host_index")},
    # launcher -> worker or server
    "servers": {"version": int, **_of(_Texts, "addresses hosts ended"), "incarnations": _Counts},
    # launcher -> worker
    "members": {
        "generation": int,
        **_of(_Texts, "addresses hosts without_shm"),
        "host_indices": _Counts,
        "probes": bool,  # whether the heads of the hosts measure, and all wait for "host_network"
        "rates": list[int],  # as in "host_rates", if they are known
    },
    "host_network": {"rates": list[int]},
    "refused": {**_of(str, "error reason"), "missing": _Ranks},
    "abort": {
        **_of(int, "rank group call"),
        **_of(str, "host reason failure_kind"),
        "missing": _Ranks,
        "status": list[int],  # exit code, or minus the signal; empty if unknown
    },
    "ping": {},
    # The offset of the rank's clock from the launcher's, and its error (-1: unknown)
    "observe": _of(int, "number offset_ns error_ns"),
    "leave_notice": {"rank": int, "entered": _Counts, "skipped": list[int]},
    "decision": {
        **_of(int, "group call last_call"),
        "text": str,
        "table": _Texts,
        **_of(bool, "has_waiting_ranks is_deadlock"),
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
