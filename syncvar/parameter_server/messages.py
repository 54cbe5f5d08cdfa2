"""Messages between workers and servers, and the operations of a worker's request.

A message is a map of plain values; its arrays follow as frames of their own, without a copy. Kinds:

* worker to server: `request` (operations), and for snapshots `peek`, `cut` and `take`.
* server to worker: `answer`, `refused` (the worker's incarnation has ended), `marks`, `taken`,
  `uncut`, and `lost` (no server has a copy of the shards).
* server to server: `vote` and `decision` (transactions over several servers), `seed`, `copy`,
  `copied` and `retired` (backups).

An operation is a map with its name under "do"; it names arrays by number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from syncvar.core.array_types import dtype_from_index, dtype_index
from syncvar.core.errors import WireError
from syncvar.parameter_server.server.shard import Push, ShardSlots, Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.server.shard import RuleKey

MESSAGE_NBYTES_MAX = 16 << 20
_ITEMS_MAX = 1 << 20
_PLAIN = "?bBhHiIlLqQefd"  # dtypes whose arrays are buffers that can be cast

Message = dict[str, Any]
Endpoint = tuple[str, int]  # ("worker", its rank) or ("server", its index)
Arrays = tuple["NDArray[Any]", ...]

# Operations that all servers of a request execute, or none.
SHARED = ("push", "restore", "count")
# Operations that change nothing.
READS = frozenset(
    {
        *("pull", "slots", "version", "expect", "describe", "task"),
        *("outcome", "drained", "progress", "where", "stats", "rule"),
    }
)


def _fields(integers: str, **others: type) -> dict[str, type]:
    return {**dict.fromkeys(integers.split(), int), **others}


# kind -> field -> type; every field is required
_SCHEMA = {
    "request": _fields(
        "server rank incarnation number follows answered transaction",
        parts=list,
        sent=list,
        operations=list,
    ),
    "answer": _fields("server incarnation number", error=str, reason=str, results=list),
    "refused": _fields("server incarnation"),
    "peek": _fields("server rank id", operations=list),
    "cut": _fields("server rank id"),
    "marks": _fields("server id", marks=dict),
    "take": _fields("server rank id", need=dict, operations=list),
    "taken": _fields("server id", marks=dict, results=list),
    "uncut": _fields("server id"),
    "vote": _fields("home server rank incarnation transaction", parts=list, reason=str),
    "decision": _fields("server rank incarnation transaction", reason=str),
    "copy": _fields("server index", entry=dict),
    "seed": _fields("server index"),
    "copied": _fields("server index"),
    "retired": _fields("server"),
    "lost": _fields("server"),
}
_FIELDS = {kind: tuple(fields.items()) for kind, fields in _SCHEMA.items()}


class OutgoingMessage(NamedTuple):
    """A message to send; its arrays are contiguous and do not change any more."""

    target: Endpoint
    message: Message
    arrays: Arrays = ()


def frames_of(message: Message, arrays: Sequence[NDArray[Any]] = ()) -> list[bytes | memoryview]:
    """Return a message as frames: the map, then the bytes of each array, without a copy."""
    headers = [[dtype_index(array.dtype), *array.shape] for array in arrays]
    return [msgpack.packb([message, headers]), *map(_buffer, arrays)]


def message_of(frames: Sequence[Any]) -> tuple[Message, Arrays]:
    """Return the message in some frames, and its arrays: read-only views of the frames."""
    if not frames or len(frames[0]) > MESSAGE_NBYTES_MAX:
        raise WireError("a message between workers and servers begins with a map of at most 16 MiB")
    try:
        message, headers = msgpack.unpackb(
            frames[0],
            strict_map_key=False,
            max_array_len=_ITEMS_MAX,
            max_map_len=_ITEMS_MAX,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a message of workers and servers: {error}") from error
    check(message)
    if not isinstance(headers, list) or len(headers) != len(frames) - 1:
        raise WireError(
            f"message {message['kind']!r}: {len(frames) - 1} arrays arrived, and its header "
            f"describes others"
        )
    return message, tuple(map(_array, headers, frames[1:]))


def check(message: Any) -> None:
    """Raise WireError unless a message is of a known kind and has its fields."""
    kind = message.get("kind") if isinstance(message, dict) else None
    schema = _FIELDS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        raise WireError(f"unknown kind of message {str(kind)[:40]!r} between workers and servers")
    for name, expected in schema:
        if type(message.get(name)) is not expected:
            raise WireError(f"message {kind!r}: field {name!r} is missing or of a wrong type")


def _buffer(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array in C order, without a copy where possible."""
    if array.dtype.char in _PLAIN and array.flags.c_contiguous and array.size:
        return memoryview(array).cast("B")  # type: ignore[arg-type]
    flat = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat.view(np.uint8))  # type: ignore[arg-type]


def _array(header: Any, frame: Any) -> NDArray[Any]:
    nbytes = memoryview(frame).nbytes
    try:
        dtype, shape = dtype_from_index(header[0]), header[1:]
        array: NDArray[Any] = np.ndarray(shape, dtype, frame)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise WireError(
            f"malformed array in a message between workers and servers: its header is "
            f"{header!r:.80}, and {nbytes} bytes arrived: {error}"
        ) from error
    if nbytes != array.nbytes:
        raise WireError(f"an array {dtype.name}{shape} came with {nbytes} bytes")
    array.flags.writeable = False
    return array


# -- operations of requests ------------------------------------------------------------------------


def reads(message: Message) -> bool:
    """Return whether a request reads, so that its answer has results."""
    return not READS.isdisjoint([operation.get("do") for operation in message["operations"]])


def changes(message: Message) -> bool:
    """Return whether a request changes state of a server."""
    return not READS.issuperset([operation.get("do") for operation in message["operations"]])


def rule_key_of(rule: list[Any]) -> RuleKey:
    """Return the key of an optimizer in an operation."""
    return rule[0], tuple(sorted(rule[1].items()))


def slots_of(operation: dict[str, Any], arrays: Arrays) -> dict[RuleKey, ShardSlots]:
    """Return the optimizers' slots in a `restore`."""
    found = {}
    for rule, steps, slots in operation["rules"]:
        named = {name: arrays[number] for name, number in slots.items()}
        found[rule_key_of(rule)] = ShardSlots(steps, named)
    return found


def push_of(operation: dict[str, Any], arrays: Arrays) -> Push:
    """Return the change of a `push`."""
    rows, rule = operation["rows"], operation.get("rule")
    return Push(
        operation["how"],
        arrays[operation["value"]],
        None if rows is None else arrays[rows],
        ("", ()) if rule is None else rule_key_of(rule),
        operation.get("rate", 0.0),
        operation.get("combine", "mean"),
    )


def spec_of(operation: dict[str, Any]) -> Spec:
    """Return the spec in a `create`, `expect` or `restore`."""
    spec = Spec(**{name: operation[name] for name in Spec._fields if name in operation})
    return spec._replace(shape=tuple(spec.shape), whole=tuple(spec.whole))
