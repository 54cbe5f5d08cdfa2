"""The frames between a joining host and the launcher: one type byte, then the payload.

Messages of the agent travel inside INPUT and OUTPUT frames. Bytes in, values out. Type bytes and
greeting are the same in all versions, so a host of another version gets an explanation.
"""

from __future__ import annotations

import ipaddress
from typing import Any, NamedTuple

import msgpack

from syncvar.core.errors import WireError

CHUNK = 1 << 18
"""The most bytes behind a letter."""

# the host says
HELLO, OUTPUT, WORDS, ENDED = b"h", b"o", b"e", b"x"
# the launcher says
START, INPUT, END_INPUT, REFUSED, DONE, PING = b"s", b"i", b"c", b"r", b"d", b"p"

QUEUED = 16
"""The most messages that wait for each host and direction."""

_FORM = 1
_TEXT_MAX = 4096
_NAME_MAX = 253
_SLOTS_MAX = 1 << 16
_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "at": (str,),
    "slots": (int, type(None)),
    "cwd": (str, type(None)),
    "syncvar": (str,),
    "protocol": (int,),
    "python": (str,),
    "byte_order": (str,),
}


class Hello(NamedTuple):
    """The greeting of a host that joins.

    Args:
        name: The name for messages.
        at: Its own address towards the launcher.
        slots: Its slots for workers; None for one per usable core.
        cwd: The folder in which they start; None for the launcher's own.
        syncvar: The version of syncvar there.
        protocol: The version of the protocol there.
        python: The version of Python there.
        byte_order: "little" or "big".
    """

    name: str
    at: str
    slots: int | None
    cwd: str | None
    syncvar: str
    protocol: int
    python: str
    byte_order: str

    def pack(self) -> bytes:
        """Return the greeting as bytes."""
        packed: bytes = msgpack.packb({"form": _FORM, **self._asdict()})
        return packed

    @classmethod
    def read(cls, data: bytes) -> Hello:
        """Return the greeting in these bytes."""
        try:
            found: Any = msgpack.unpackb(data, max_map_len=64, max_array_len=0, max_ext_len=0)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise WireError("what it says of itself is no greeting") from None
        if (
            not isinstance(found, dict)
            or found.pop("form", None) != _FORM
            or found.keys() != _TYPES.keys()
        ):
            raise WireError(
                "what it says of itself has another form than here: it has another version of "
                "syncvar; install the same on all"
            )
        for name, value in found.items():
            if type(value) not in _TYPES[name] or (
                isinstance(value, str) and len(value) > _TEXT_MAX
            ):
                raise WireError(f"the {name} that it says of itself cannot be")
        if not found["name"] or not found["name"].isprintable() or len(found["name"]) > _NAME_MAX:
            raise WireError("the name that it says of itself cannot be")
        if found["at"]:
            try:
                ipaddress.ip_address(found["at"].partition("%")[0])
            except ValueError:
                raise WireError("the address that it says of itself is none") from None
        if found["slots"] is not None and not 1 <= found["slots"] <= _SLOTS_MAX:
            raise WireError(
                f"it offers {found['slots']} slots, and at least 1 and at most {_SLOTS_MAX} can be"
            )
        return cls(**found)
