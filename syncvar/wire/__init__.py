"""Bytes in, events out: every message that crosses a process boundary, and every decision taken about it.

* `frame`: the header of a data frame.
* `control`: messages between a worker and the launcher, checked against a schema.
* `membership`, `arbiter`, `health`, `coordinator`: the launcher's decisions as pure machines (time is an argument).
* `servers`: where the servers of a job are, as the launcher tells it to whoever asks.
* `keys`: the secret of a job, and what is derived from it.
* `libraries`: tensors of other libraries as NumPy arrays on the same memory.
* `objects`, `moments`, `dtypes`: plain Python objects, dates and arrays as data; nothing is ever pickled.

Nothing here opens a socket, starts a thread or reads a clock. NumPy is imported only when an array is met, so that
the launcher can use this room without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.loading import attributes_of
from syncvar.wire.control import CONTROL_NBYTES_MAX, Message, pack_message, parse_message
from syncvar.wire.dtypes import DTYPE_NAMES, dtype_from_index, dtype_index
from syncvar.wire.frame import (
    CARRIERS,
    HEADER_NBYTES,
    PROTOCOL_VERSION,
    Header,
    Kind,
    pack_header,
    parse_header,
)
from syncvar.wire.libraries import Library, Untaken, library_of
from syncvar.wire.objects import DEPTH_MAX, is_plain, pack_object, unpack_object

if TYPE_CHECKING:
    from syncvar.wire.arbiter import Report, Verdict
    from syncvar.wire.coordinator import Action, Coordinator, Fail, Mute, Say, Tell
    from syncvar.wire.health import Health, Opinion
    from syncvar.wire.keys import KEY_BYTES, derive, parse_key
    from syncvar.wire.membership import Member, RollCall
    from syncvar.wire.servers import ServerTable

_DECISIONS = {  # the launcher's; workers do without, and are there sooner
    "arbiter": ("Report", "Verdict"),
    "coordinator": ("Action", "Coordinator", "Fail", "Mute", "Say", "Tell"),
    "health": ("Health", "Opinion"),
    "keys": ("KEY_BYTES", "derive", "parse_key"),
    "membership": ("Member", "RollCall"),
    "servers": ("ServerTable",),
}
_HOME = {name: f"{__name__}.{home}" for home, names in _DECISIONS.items() for name in names}

__all__ = [
    "CARRIERS",
    "CONTROL_NBYTES_MAX",
    "DEPTH_MAX",
    "DTYPE_NAMES",
    "HEADER_NBYTES",
    "KEY_BYTES",
    "PROTOCOL_VERSION",
    "Action",
    "Coordinator",
    "Fail",
    "Header",
    "Health",
    "Kind",
    "Library",
    "Member",
    "Message",
    "Mute",
    "Opinion",
    "Report",
    "RollCall",
    "Say",
    "ServerTable",
    "Tell",
    "Untaken",
    "Verdict",
    "derive",
    "dtype_from_index",
    "dtype_index",
    "is_plain",
    "library_of",
    "pack_header",
    "pack_message",
    "pack_object",
    "parse_header",
    "parse_key",
    "parse_message",
    "unpack_object",
]

__getattr__ = attributes_of(__name__, _HOME)
