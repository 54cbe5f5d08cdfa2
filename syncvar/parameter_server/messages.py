"""What workers and servers say to each other.

A message is a map of plain values; its arrays travel beside it, as buffers of their own that nobody copies into the map. The
kinds, by who sends them:

* worker: `request` (operations, in the order of `number`), `peek`, or `cut` and `take` (a snapshot).
* server to a worker: `answer`, `refused` (the worker's incarnation is fenced), `marks`, `taken`, `uncut`, `lost` (there is no
  copy of what it asks for).
* server to server: `vote` and `decision` (transactions over several servers), `seed`, `copy`, `copied`, `retired` (mirrors).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from syncvar.core.dtypes import dtype_from_index, dtype_index
from syncvar.core.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MESSAGE_NBYTES_MAX = 16 << 20
_ITEMS_MAX = 1 << 20
_PLAIN = "?bBhHiIlLqQefd"  # dtypes whose arrays are buffers that can be cast

Message = dict[str, Any]
Endpoint = tuple[str, int]
"""("worker", its rank) or ("server", its index)."""

Arrays = tuple["NDArray[Any]", ...]

# kind -> field -> type; every field is required
_SCHEMA: dict[str, dict[str, type]] = {
    "request": {
        "server": int,
        "rank": int,
        "incarnation": int,
        "number": int,
        "follows": int,
        "answered": int,
        "transaction": int,
        "parts": list,
        "sent": list,
        "operations": list,
    },
    "answer": {
        "server": int,
        "incarnation": int,
        "number": int,
        "error": str,
        "reason": str,
        "results": list,
    },
    "refused": {"server": int, "incarnation": int},
    "peek": {"server": int, "rank": int, "id": int, "operations": list},
    "cut": {"server": int, "rank": int, "id": int},
    "marks": {"server": int, "id": int, "marks": dict},
    "take": {"server": int, "rank": int, "id": int, "need": dict, "operations": list},
    "taken": {"server": int, "id": int, "marks": dict, "results": list},
    "uncut": {"server": int, "id": int},
    "vote": {
        "home": int,
        "server": int,
        "rank": int,
        "incarnation": int,
        "transaction": int,
        "parts": list,
        "reason": str,
    },
    "decision": {"server": int, "rank": int, "incarnation": int, "transaction": int, "reason": str},
    "copy": {"server": int, "index": int, "entry": dict},
    "seed": {"server": int, "index": int},
    "copied": {"server": int, "index": int},
    "retired": {"server": int},
    "lost": {"server": int},
}


_FIELDS = {kind: tuple(fields.items()) for kind, fields in _SCHEMA.items()}


class OutgoingMessage(NamedTuple):
    """A message to be sent.

    Args:
        target: To whom.
        message: Plain values.
        arrays: Contiguous; they do not change any more.
    """

    target: Endpoint
    message: Message
    arrays: Arrays = ()


def frames_of(message: Message, arrays: Sequence[NDArray[Any]] = ()) -> list[bytes | memoryview]:
    """Return a message as frames: the map, then the bytes of each array, which are not copied.

    Example:
        >>> message, arrays = message_of(frames_of({"kind": "retired", "server": 1}, (np.arange(3),)))
        >>> message["server"], arrays[0].tolist()
        (1, [0, 1, 2])
    """
    told = [[dtype_index(array.dtype), *array.shape] for array in arrays]
    return [msgpack.packb([message, told]), *map(_buffer, arrays)]


def message_of(frames: Sequence[Any]) -> tuple[Message, Arrays]:
    """Read the frames of a message.

    Args:
        frames: Buffers; the arrays are views of them, so they must not change afterwards.

    Raises:
        WireError: They are no message; says why.
    """
    if not frames or len(frames[0]) > MESSAGE_NBYTES_MAX:
        raise WireError("a message between workers and servers begins with a map of at most 16 MiB")
    try:
        message, told = msgpack.unpackb(
            frames[0],
            strict_map_key=False,
            max_array_len=_ITEMS_MAX,
            max_map_len=_ITEMS_MAX,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a message of workers and servers: {error}") from error
    check(message)
    if not isinstance(told, list) or len(told) != len(frames) - 1:
        raise WireError(f"a message {message['kind']!r} tells of other arrays than came with it")
    return message, tuple(map(_array, told, frames[1:]))


def check(message: Any) -> None:
    """Raise WireError unless a message is of a known kind and has its fields."""
    kind = message.get("kind") if isinstance(message, dict) else None
    schema = _FIELDS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        raise WireError(f"unknown kind of message {str(kind)[:40]!r} between workers and servers")
    for name, wanted in schema:
        if type(message.get(name)) is not wanted:
            raise WireError(f"message {kind!r}: field {name!r} is missing or of a wrong type")


def _buffer(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array, in order; not a copy, unless its own order is another one."""
    if array.dtype.char in _PLAIN and array.flags.c_contiguous and array.size:
        return memoryview(array).cast("B")  # type: ignore[arg-type]
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _array(told: Any, frame: Any) -> NDArray[Any]:
    try:
        dtype, shape = dtype_from_index(told[0]), told[1:]
        array: NDArray[Any] = np.ndarray(shape, dtype, frame)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise WireError(
            f"an array between workers and servers is told by its dtype and its shape, and has their bytes: {error}"
        ) from error
    if memoryview(frame).nbytes != array.nbytes:
        raise WireError(f"an array {dtype.name}{shape} came with {memoryview(frame).nbytes} bytes")
    array.flags.writeable = False
    return array
