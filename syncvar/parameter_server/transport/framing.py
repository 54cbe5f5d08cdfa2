"""One message between workers and servers as bytes: what it consists of, then the parts themselves.

A message consists of three things:

* a head: the length of the whole, a checksum where nothing else protects it, the number of parts, and the segment of
  shared memory that the sender has mapped;
* for each part its length and where it is;
* the parts that are *here*, each at a multiple of eight bytes. Others are *apart*, after this message, or *lent*, in the
  segment that the head names.

Sockets of ZeroMQ carry the message and each part that is apart in frames (`syncvar.protocol.message_limits`). Each frame is
`FRAME_NBYTES` long, except the last one, which is shorter and may be empty.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import InternalError
from syncvar.protocol.message_limits import FRAME_NBYTES
from syncvar.shm.shm_references import SegmentId, SharedMemoryReference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NBYTES_MAX = 1 << 34
"""No message is longer."""

_HEAD = struct.Struct("<QII16s")
_NO_SEGMENT = bytes(16)
_HERE, _APART, _LENT = 0, 1, 2  # and beyond: where it is lent
_PADS = [bytes(count) for count in range(8)]


class Packed(NamedTuple):
    """A message to be sent.

    Args:
        nbytes: Length of the pieces together.
        pieces: Bytes and buffers that follow each other.
        apart: Long parts that are to be sent after them.
    """

    nbytes: int
    pieces: list[Any]
    apart: list[Any]


def packed(
    frames: Sequence[Any],
    lent: Sequence[tuple[int, SharedMemoryReference]] = (),
    *,
    segment: SegmentId | None = None,
    has_checksum: bool = False,
    apart_nbytes: int = NBYTES_MAX,
) -> Packed:
    """Put a message together; nothing is copied.

    Args:
        frames: Its parts: contiguous buffers of bytes.
        lent: Of some of them the index, and where in `segment` they are lent.
        segment: The shared memory that the sender has mapped; None for none.
        has_checksum: Whoever receives it is to compare its parts with a checksum; those that are lent have none.
        apart_nbytes: Parts of this length and longer are apart.

    Example:
        >>> nbytes, pieces, apart = packed([b"head", b"array"])
        >>> [bytes(one) for one in unpacked(b"".join(pieces))[0]], nbytes, apart
        ([b'head', b'array'], 80, [])
    """
    table: list[int] = []
    pieces: list[Any] = [b""]
    apart: list[Any] = []
    places = {index: _LENT + reference.offset for index, reference in lent} if lent else {}
    nbytes, checksum = _HEAD.size + 16 * len(frames), 0
    for index, frame in enumerate(frames):
        size = len(frame)
        if index in places:
            table += (size, places[index])
            continue
        if has_checksum:
            checksum = zlib.crc32(frame, checksum)
        if size >= apart_nbytes:
            table += (size, _APART)
            apart.append(frame)
            continue
        table += (size, _HERE)
        pieces.append(frame)
        nbytes += size
        if size % 8:
            pieces.append(_PADS[-size % 8])
            nbytes += -size % 8
    named = _NO_SEGMENT if segment is None else segment.pack()
    pieces[0] = _HEAD.pack(
        nbytes, (checksum or 1) if has_checksum else 0, len(frames), named
    ) + struct.pack(f"<{len(table)}Q", *table)
    return Packed(nbytes, pieces, apart)


def cut(part: Any) -> list[Any]:
    """Return the frames in which a part travels; nothing is copied.

    Example:
        >>> [len(one) for one in cut(bytes(FRAME_NBYTES + 3))], [len(one) for one in cut(b"head")]
        ([1052672, 3], [4])
    """
    view = memoryview(part)
    if view.nbytes < FRAME_NBYTES:
        return [part]
    return [view[start : start + FRAME_NBYTES] for start in range(0, view.nbytes + 1, FRAME_NBYTES)]


def joined(frames: Iterable[Any]) -> list[Any]:
    """Return the parts that have travelled in these frames; a part of one frame is not copied.

    Raises:
        ValueError: The last frames of a part are missing.
    """
    parts: list[Any] = []
    begun: deque[Any] = deque()
    for frame in frames:
        begun.append(frame)
        if len(frame) < FRAME_NBYTES:
            parts.append(_concatenated(begun) if len(begun) > 1 else frame)
            begun.clear()
    if begun:
        raise ValueError("the last frames of a message are missing")
    return parts


def _concatenated(frames: deque[Any]) -> memoryview:
    """Return what frames hold together, and let go of each as soon as it is copied."""
    whole = np.empty(sum(map(len, frames)), np.uint8)
    at = 0
    while frames:
        frame = frames.popleft()
        whole[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
        at += len(frame)
    return memoryview(whole).toreadonly()  # type: ignore[arg-type]


def length_of(start: Any, nbytes_max: int = NBYTES_MAX) -> int:
    """Return how long the message is that begins with at least eight bytes.

    Raises:
        ValueError: No message begins so, or it is longer than `nbytes_max`.
    """
    nbytes = int.from_bytes(start[:8], "little")
    if not _HEAD.size <= nbytes <= nbytes_max or nbytes % 8:
        raise ValueError(f"no message is {nbytes} bytes long")
    return nbytes


def unpacked(
    message: Any,
    apart: Sequence[Any] = (),
    borrow: Callable[[SharedMemoryReference], Any] | None = None,
) -> tuple[list[Any], SegmentId | None]:
    """Take a message apart; the parts are views of it.

    Args:
        message: Bytes, or a view of them.
        apart: The parts that came apart.
        borrow: Returns the bytes that a reference names; None where nothing can be borrowed.

    Returns:
        Its parts, and the shared memory that its sender has mapped; None for none.

    Raises:
        ValueError: It is no message, or not as it was sent.
        InternalError: It refers to shared memory that this process has not mapped.
    """
    view = memoryview(message)
    if view.nbytes < _HEAD.size:
        raise ValueError("a message is cut off")
    nbytes, checksum, count, named = _HEAD.unpack_from(view)
    segment = None if named == _NO_SEGMENT else SegmentId.unpack(named)
    at = _HEAD.size + 16 * count
    if nbytes != view.nbytes or at > nbytes:
        raise ValueError("a message is not as long as it says")
    table = struct.unpack_from(f"<{2 * count}Q", view, _HEAD.size)
    frames: list[Any] = []
    others = iter(apart)
    crc = 0
    for size, place in zip(table[::2], table[1::2], strict=True):
        if place >= _LENT:
            if segment is None:
                raise ValueError(
                    "an array is lent, and the message does not say in which shared memory"
                )
            reference = SharedMemoryReference(segment, place - _LENT, size)
            if borrow is None:
                raise InternalError(
                    f"a message refers to an array of {size} bytes in shared memory: {reference.refusal(None, 0)}"
                )
            frames.append(borrow(reference))
            continue
        if place == _APART:
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
