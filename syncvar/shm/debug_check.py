"""Allocation maps: with `check_shm` on, each use of shared memory is checked against them.

Each rank keeps a map at the end of its region: one byte for each cache line, 1 if the line is
allocated. A use of memory that nobody allocated is a bug of this library. The check raises before
the use could damage an array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.shm.segment_layout import LINE_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from syncvar.shm.segment import SharedSegment

GIVEN = 4  # word of a rank's table: offset of its map; 0 without checks


class AllocationMap:
    """The allocated lines of this rank's region, and a reader of the other ranks' maps.

    Args:
        shm: The mapped segment.
    """

    def __init__(self, shm: SharedSegment) -> None:
        self._shm = shm
        self._sizes: dict[int, int] = {}
        _, stop = shm.layout.arrays(shm.local_rank)
        self.start = stop - self.nbytes(shm)
        shm.words[shm.table(shm.local_rank) // 8 + GIVEN] = self.start

    @staticmethod
    def nbytes(shm: SharedSegment) -> int:
        """Return the size of the map: whole pages at the end of a region."""
        return -(-shm.layout.region_bytes // LINE_BYTES // PAGE_BYTES) * PAGE_BYTES

    def add(self, offset: int, nbytes: int) -> None:
        """Mark memory as allocated."""
        first, last = self._lines(self._shm.local_rank, offset, nbytes)
        page = (self.start + first) // PAGE_BYTES * PAGE_BYTES
        self._shm.populate(page, -(-(self.start + last - page) // PAGE_BYTES) * PAGE_BYTES)
        self._shm.ground[self.start + first : self.start + last] = 1
        self._sizes[offset] = nbytes

    def remove(self, offset: int) -> None:
        """Mark memory as free."""
        first, last = self._lines(self._shm.local_rank, offset, self._sizes.pop(offset))
        self._shm.ground[self.start + first : self.start + last] = 0

    def why_not(self, offset: int, nbytes: int) -> str:
        """Return why nobody may use these bytes, or an empty text."""
        shm = self._shm
        place = f"bytes [{offset}, {offset + nbytes}) of shared memory"
        ranks = range(shm.local_world_size)
        owners = [rank for rank in ranks if _is_in(shm.layout.arrays(rank), offset, nbytes)]
        rank = owners[0] if owners else None
        if rank is None:
            return f"{place} are outside the memory for arrays"
        told = shm.words[shm.table(rank) // 8 + GIVEN]
        first, last = self._lines(rank, offset, nbytes)
        if told and not shm.ground[told + first : told + last].all():
            return f"local rank {rank} has not allocated {place}"
        return ""

    def _lines(self, rank: int, offset: int, nbytes: int) -> tuple[int, int]:
        start, _ = self._shm.layout.region(rank)
        return (offset - start) // LINE_BYTES, -(-(offset + nbytes - start) // LINE_BYTES)


def _is_in(bounds: tuple[int, int], offset: int, nbytes: int) -> bool:
    return bounds[0] <= offset and offset + nbytes <= bounds[1]
