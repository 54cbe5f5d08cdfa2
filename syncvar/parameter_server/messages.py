"""Messages between workers and servers, their operations, and their bytes.

A message is a map of plain values; its arrays follow as frames of their own, without a copy. Kinds:

* worker to server: `request` (operations), and for snapshots `peek`, `cut` and `take`.
* server to worker: `answer`, `incarnation_ended`, `marks`, `state`, `no_cut`, and `state_lost` (no
  server has a copy of the shards).
* server to server: `vote` and `decision` (transactions over several servers), `seed`, `copy`,
  `backup_ack` and `retire` (backups).

An operation is a map with its name under "op"; it names arrays by number.

The bytes of a message (`pack_frames`) are:

* A head: the length, a checksum for unprotected links, the number of parts, and the sender's
  shared-memory segment.
* For each part its length and location.
* The parts that are *inline*, each at a multiple of eight bytes. Others are *separate*, after this
  message, or *lent*, in the segment.

ZeroMQ sockets carry the message and each separate part in frames of `FRAME_NBYTES`. The last frame
of a part is shorter, and may be empty (`syncvar.protocol.frame`).
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from syncvar.core.array_types import dtype_from_index, dtype_index
from syncvar.core.errors import InternalError, WireError
from syncvar.parameter_server.shard import Push, ShardSlots, Spec
from syncvar.protocol.frame import FRAME_NBYTES
from syncvar.shm.segment_file import SegmentId, SharedMemoryReference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.shard import RuleKey

    Borrow = Callable[[SharedMemoryReference], Any]

MESSAGE_NBYTES_MAX = 16 << 20
_ITEMS_MAX = 1 << 20
_PLAIN = "?bBhHiIlLqQefd"  # dtypes whose arrays are buffers that can be cast
NBYTES_MAX = 1 << 34  # of one message

_HEAD = struct.Struct("<QII16s")
_NO_SEGMENT = bytes(16)
_INLINE, _SEPARATE, _LENT = 0, 1, 2  # a lent part has the location _LENT + offset
_PADS = [bytes(count) for count in range(8)]

Message = dict[str, Any]
Endpoint = tuple[str, int]  # ("worker", its rank) or ("server", its index)
Arrays = tuple["NDArray[Any]", ...]

# Operations that all servers of a request execute, or none.
SHARED = ("push", "restore", "set_pushes")
# Operations that change nothing.
READS = frozenset(
    {
        *("pull", "slots", "version", "expect", "describe", "task"),
        *("outcome", "wait_all", "progress", "position", "stats", "rule"),
    }
)


def _fields(integers: str, **others: type) -> dict[str, type]:
    return {**dict.fromkeys(integers.split(), int), **others}


# kind -> field -> type; every field is required
_SCHEMA = {
    "request": _fields(
        "server rank incarnation number previous_change ack transaction",
        participants=list,
        last_changes=list,
        operations=list,
    ),
    "answer": _fields("server incarnation number", error=str, reason=str, results=list),
    "incarnation_ended": _fields("server incarnation"),
    "peek": _fields("server rank id", operations=list),
    "cut": _fields("server rank id"),
    "marks": _fields("server id", marks=dict),
    "take": _fields("server rank id", need=dict, operations=list),
    "state": _fields("server id", marks=dict, results=list),
    "no_cut": _fields("server id"),
    "vote": _fields("home server rank incarnation transaction", participants=list, reason=str),
    "decision": _fields("server rank incarnation transaction", reason=str),
    "copy": _fields("server index", entry=dict),
    "seed": _fields("server index"),
    "backup_ack": _fields("server index"),
    "retire": _fields("server"),
    "state_lost": _fields("server"),
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
    return not READS.isdisjoint([operation.get("op") for operation in message["operations"]])


def changes(message: Message) -> bool:
    """Return whether a request changes state of a server."""
    return not READS.issuperset([operation.get("op") for operation in message["operations"]])


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
        operation["method"],
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


# -- the bytes of a message -----------------------------------------------------------------------


class Packed(NamedTuple):
    """A message to send: total length of its pieces, the pieces, and separate parts."""

    nbytes: int
    pieces: list[Any]
    separate: list[Any]


def pack_frames(
    frames: Sequence[Any],
    lent: Sequence[tuple[int, SharedMemoryReference]] = (),
    *,
    segment: SegmentId | None = None,
    has_checksum: bool = False,
    separate_nbytes: int = NBYTES_MAX,
) -> Packed:
    """Pack a message without copying its parts.

    `lent` has index and location of the parts in the sender's `segment`. Parts of at least
    `separate_nbytes` are separate. A checksum leaves out lent parts.
    """
    table: list[int] = []
    pieces: list[Any] = [b""]
    separate: list[Any] = []
    locations = {index: _LENT + reference.offset for index, reference in lent} if lent else {}
    nbytes, checksum = _HEAD.size + 16 * len(frames), 0
    for index, frame in enumerate(frames):
        size = len(frame)
        if index in locations:
            table += (size, locations[index])
            continue
        if has_checksum:
            checksum = zlib.crc32(frame, checksum)
        if size >= separate_nbytes:
            table += (size, _SEPARATE)
            separate.append(frame)
            continue
        table += (size, _INLINE)
        pieces.append(frame)
        nbytes += size
        if size % 8:
            pieces.append(_PADS[-size % 8])
            nbytes += -size % 8
    checksum = (checksum or 1) if has_checksum else 0
    segment_bytes = _NO_SEGMENT if segment is None else segment.pack()
    head = _HEAD.pack(nbytes, checksum, len(frames), segment_bytes)
    pieces[0] = head + struct.pack(f"<{len(table)}Q", *table)
    return Packed(nbytes, pieces, separate)


def split_part(part: Any) -> list[Any]:
    """Return the frames of a part, without a copy."""
    view = memoryview(part)
    if view.nbytes < FRAME_NBYTES:
        return [part]
    return [view[start : start + FRAME_NBYTES] for start in range(0, view.nbytes + 1, FRAME_NBYTES)]


def join_frames(frames: Iterable[Any]) -> list[Any]:
    """Return the parts in some frames; ValueError if the last frames of a part are missing."""
    parts: list[Any] = []
    waiting: deque[Any] = deque()
    for frame in frames:
        waiting.append(frame)
        if len(frame) < FRAME_NBYTES:
            parts.append(_concatenated(waiting) if len(waiting) > 1 else frame)
            waiting.clear()
    if waiting:
        raise ValueError("the last frames of a message are missing")
    return parts


def _concatenated(frames: deque[Any]) -> memoryview:
    """Return the bytes of all frames, and free each frame once it is copied."""
    whole = np.empty(sum(map(len, frames)), np.uint8)
    at = 0
    while frames:
        frame = frames.popleft()
        whole[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
        at += len(frame)
    return memoryview(whole).toreadonly()  # type: ignore[arg-type]


def length_of(start: Any, nbytes_max: int = NBYTES_MAX) -> int:
    """Return the length of the message that begins with at least eight bytes, or ValueError."""
    nbytes = int.from_bytes(start[:8], "little")
    if not _HEAD.size <= nbytes <= nbytes_max or nbytes % 8:
        raise ValueError(f"no message is {nbytes} bytes long")
    return nbytes


def unpack_frames(
    message: Any, separate: Sequence[Any] = (), borrow: Borrow | None = None
) -> tuple[list[Any], SegmentId | None]:
    """Return the parts of a message, views of it, and the sender's segment (None for none).

    `borrow` returns the bytes of a reference. Raises ValueError for a malformed message, and
    InternalError if it refers to shared memory that this process has not mapped.
    """
    view = memoryview(message)
    if view.nbytes < _HEAD.size:
        raise ValueError("a message is cut off")
    nbytes, checksum, count, segment_bytes = _HEAD.unpack_from(view)
    segment = None if segment_bytes == _NO_SEGMENT else SegmentId.unpack(segment_bytes)
    at = _HEAD.size + 16 * count
    if nbytes != view.nbytes or at > nbytes:
        raise ValueError("a message is not as long as it says")
    table = struct.unpack_from(f"<{2 * count}Q", view, _HEAD.size)
    frames: list[Any] = []
    others = iter(separate)
    crc = 0
    for size, location in zip(table[::2], table[1::2], strict=True):
        if location >= _LENT:
            frames.append(_borrowed(segment, location - _LENT, size, borrow))
            continue
        if location == _SEPARATE:
            frame = next(others, None)
            if frame is None or memoryview(frame).nbytes != size:
                raise ValueError("a part of a message is missing")
        else:
            frame = view[at : at + size]
            at += size + -size % 8
            if at > nbytes:
                raise ValueError("a message is cut off")
        if checksum:
            crc = zlib.crc32(frame, crc)
        frames.append(frame)
    if at != nbytes or next(others, None) is not None or (checksum and checksum != (crc or 1)):
        raise ValueError("a message is not as it was sent")
    return frames, segment


def _borrowed(segment: SegmentId | None, offset: int, size: int, borrow: Borrow | None) -> Any:
    if segment is None:
        raise ValueError("a message lends an array and names no shared memory")
    reference = SharedMemoryReference(segment, offset, size)
    if borrow is None:
        raise InternalError(
            f"a message refers to an array of {size} bytes in shared memory: "
            f"{reference.refusal(None, 0)}"
        )
    return borrow(reference)
