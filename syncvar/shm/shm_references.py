"""References to shared memory that one process sends to another, and the check that a reader makes of them.

An offset means the same bytes only to processes that map the same segment. A process that refers
to shared memory in a message therefore sends a `SharedMemoryReference`, which names the segment.
`Arena.resolve` compares that name with the segment that the reader has mapped. An offset that
stands *in* a segment needs no name: its reader has that segment mapped.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["REFERENCE_NBYTES", "SegmentId", "SharedMemoryReference"]

_ID = struct.Struct("<IIQ")
_REFERENCE = struct.Struct("<16sqq")

REFERENCE_NBYTES = _REFERENCE.size
"""Length of a packed reference."""


class SegmentId(NamedTuple):
    """Which segment of shared memory it is; no two segments have the same.

    Args:
        host: Index of the host in the job.
        generation: Version of the membership.
        token: A random number, of 64 bits and never 0, that the maker of the segment draws.

    Example:
        >>> one = SegmentId(1, 0, 255)
        >>> str(one), SegmentId.unpack(one.pack()) == one
        ('segment 00000000000000ff (host 1, generation 0)', True)
    """

    host: int
    generation: int
    token: int

    def pack(self) -> bytes:
        """Return it as 16 bytes."""
        return _ID.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> SegmentId:
        """Return what 16 bytes hold."""
        return cls(*_ID.unpack(data))

    def __str__(self) -> str:
        """Return its name for messages."""
        return f"segment {self.token:016x} (host {self.host}, generation {self.generation})"


class SharedMemoryReference(NamedTuple):
    """Where some bytes lie in a segment, as one process sends it to another.

    Args:
        segment: The segment that the sender has mapped.
        offset: Where they begin, in bytes.
        nbytes: How many they are.
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
        """Return what `REFERENCE_NBYTES` bytes hold."""
        segment, offset, nbytes = _REFERENCE.unpack(data)
        return cls(SegmentId.unpack(segment), offset, nbytes)

    def refusal(self, mapped: SegmentId | None, segment_nbytes: int) -> str:
        """Return why a reader must not follow it, or an empty text.

        Args:
            mapped: The segment that the reader has mapped; None for none.
            segment_nbytes: Size of that segment.

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
            return f"it is in {self.segment}, and this process has mapped {mapped or 'no shared memory'}"
        if self.offset < 0 or self.nbytes < 0:
            return "it begins before the segment, or has a negative length"
        if self.offset + self.nbytes > segment_nbytes:
            return f"it ends beyond the {segment_nbytes} bytes of the segment"
        return ""
