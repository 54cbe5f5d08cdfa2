"""The bytes of a message between workers and servers.

* A head: the length, a checksum for unprotected links, the number of parts, and the sender's
  shared-memory segment.
* For each part its length and location.
* The parts that are *inline*, each at a multiple of eight bytes. Others are *separate*, after this
  message, or *lent*, in the segment.

ZeroMQ sockets carry the message and each separate part in frames of `FRAME_NBYTES`. The last frame
of a part is shorter, and may be empty (`syncvar.protocol.message_limits`).
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import InternalError
from syncvar.protocol.message_limits import FRAME_NBYTES
from syncvar.shm.segment_file import SegmentId, SharedMemoryReference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Borrow = Callable[[SharedMemoryReference], Any]

NBYTES_MAX = 1 << 34  # of one message

_HEAD = struct.Struct("<QII16s")
_NO_SEGMENT = bytes(16)
_INLINE, _SEPARATE, _LENT = 0, 1, 2  # a lent part has the location _LENT + offset
_PADS = [bytes(count) for count in range(8)]


class Packed(NamedTuple):
    """A message to send: total length of its pieces, the pieces, and separate parts."""

    nbytes: int
    pieces: list[Any]
    separate: list[Any]


def packed(
    frames: Sequence[Any],
    lent: Sequence[tuple[int, SharedMemoryReference]] = (),
    *,
    segment: SegmentId | None = None,
    has_checksum: bool = False,
    separate_nbytes: int = NBYTES_MAX,
) -> Packed:
    """Pack a message without copying its parts.

    Args:
        frames: Parts of the message: contiguous buffers of bytes.
        lent: Index and location of the parts that are lent in `segment`.
        segment: The sender's shared memory; None for none.
        has_checksum: Whether to add a checksum of the parts that are not lent.
        separate_nbytes: Length from which parts are separate.
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


def cut(part: Any) -> list[Any]:
    """Return the frames of a part, without a copy."""
    view = memoryview(part)
    if view.nbytes < FRAME_NBYTES:
        return [part]
    return [view[start : start + FRAME_NBYTES] for start in range(0, view.nbytes + 1, FRAME_NBYTES)]


def joined(frames: Iterable[Any]) -> list[Any]:
    """Return the parts in some frames, without a copy of parts of one frame.

    Raises:
        ValueError: The last frames of a part are missing.
    """
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
    """Return the length of the message that begins with at least eight bytes.

    Raises:
        ValueError: These are no first bytes of a message, or it is longer than `nbytes_max`.
    """
    nbytes = int.from_bytes(start[:8], "little")
    if not _HEAD.size <= nbytes <= nbytes_max or nbytes % 8:
        raise ValueError(f"no message is {nbytes} bytes long")
    return nbytes


def unpacked(
    message: Any, separate: Sequence[Any] = (), borrow: Borrow | None = None
) -> tuple[list[Any], SegmentId | None]:
    """Return the parts of a message, views of it, and the sender's segment (None for none).

    Args:
        message: Bytes, or a view of them.
        separate: The separate parts.
        borrow: Function that returns the bytes of a reference; None if there is no shared memory.

    Raises:
        ValueError: The message is malformed.
        InternalError: It refers to shared memory that this process has not mapped.
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
