"""References to shared memory in messages, and the check of their readers.

An offset means the same bytes only to processes that map the same segment. So a message carries a
`SharedMemoryReference`, which names the segment, and `SharedSegment.resolve` compares the name. An
offset inside a segment needs no name: its reader has that segment mapped.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_ID = struct.Struct("<IIQ")
_REFERENCE = struct.Struct("<16sqq")

REFERENCE_NBYTES = _REFERENCE.size
"""Length of a packed reference."""


class SegmentId(NamedTuple):
    """The identity of a segment, unique in the job.

    Args:
        host: Index of the host in the job.
        generation: Version of the membership.
        token: Random 64-bit number, never 0.

    Example:
        >>> one = SegmentId(1, 0, 255)
        >>> str(one), SegmentId.unpack(one.pack()) == one
        ('segment 00000000000000ff (host 1, generation 0)', True)
    """

    host: int
    generation: int
    token: int

    def pack(self) -> bytes:
        """Return the identity as 16 bytes."""
        return _ID.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> SegmentId:
        """Return the identity in 16 bytes."""
        return cls(*_ID.unpack(data))

    def __str__(self) -> str:
        """Return its name for messages."""
        return f"segment {self.token:016x} (host {self.host}, generation {self.generation})"


class SharedMemoryReference(NamedTuple):
    """The location of some bytes, as one process sends it to another.

    Args:
        segment: Segment of the sender.
        offset: Offset of the bytes.
        nbytes: Number of bytes.
    """

    segment: SegmentId
    offset: int
    nbytes: int

    def pack(self) -> bytes:
        """Return it as `REFERENCE_NBYTES` bytes.

        Example:
            >>> one = SharedMemoryReference(SegmentId(1, 0, 255), 64, 8)
            >>> SharedMemoryReference.unpack(one.pack()) == one
            True
        """
        return _REFERENCE.pack(self.segment.pack(), self.offset, self.nbytes)

    @classmethod
    def unpack(cls, data: bytes) -> SharedMemoryReference:
        """Return the reference in `REFERENCE_NBYTES` bytes."""
        segment, offset, nbytes = _REFERENCE.unpack(data)
        return cls(SegmentId.unpack(segment), offset, nbytes)

    def refusal(self, mapped: SegmentId | None, segment_nbytes: int) -> str:
        """Return why the reader of segment `mapped` cannot follow the reference, or an empty text.

        Example:
            >>> here, there = SegmentId(0, 0, 1), SegmentId(1, 0, 2)
            >>> SharedMemoryReference(here, 64, 8).refusal(here, 4096)
            ''
            >>> text = SharedMemoryReference(there, 64, 8).refusal(here, 4096)
            >>> text.startswith("it is in segment 0000000000000002 (host 1, generation 0), and")
            True
            >>> SharedMemoryReference(here, 4095, 8).refusal(here, 4096)
            'it ends beyond the 4096 bytes of the segment'
        """
        if self.segment != mapped:
            own = mapped or "no shared memory"
            return f"it is in {self.segment}, and this process has mapped {own}"
        if self.offset < 0 or self.nbytes < 0:
            return "it begins before the segment, or has a negative length"
        if self.offset + self.nbytes > segment_nbytes:
            return f"it ends beyond the {segment_nbytes} bytes of the segment"
        return ""
