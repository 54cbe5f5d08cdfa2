"""What of shared memory has been given out: every use of it can be compared with that, where `check_shm` is on.

Each rank tells all others, at the end of its region, which lines of the cache there it has given out: one byte for each.
A use of memory that nobody was given is a bug of this library, and is refused before it reads or writes anything: else it
would change an array of somebody, or take its numbers for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.shm.segment_layout import LINE_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from syncvar.shm.segment import SharedSegment

__all__ = ["GIVEN", "AllocationMap"]

GIVEN = 4  # word of a rank's table: where its bytes begin; 0 where it keeps none


class AllocationMap:
    """What this rank has given out of its region, and what the others say of theirs.

    Args:
        shm: The mapped shared memory.
    """

    def __init__(self, shm: SharedSegment) -> None:
        self._shm = shm
        self._sizes: dict[int, int] = {}
        _, stop = shm.layout.arrays(shm.local_rank)
        self.start = stop - self.nbytes(shm)
        shm.words[shm.table(shm.local_rank) // 8 + GIVEN] = self.start

    @staticmethod
    def nbytes(shm: SharedSegment) -> int:
        """Return how much of a region is taken for this: whole pages at its end."""
        return -(-shm.layout.region_bytes // LINE_BYTES // PAGE_BYTES) * PAGE_BYTES

    def add(self, offset: int, nbytes: int) -> None:
        """Tell that memory has been given out.

        Raises:
            SharedMemoryFull: There is no room to tell it.
        """
        first, last = self._lines(self._shm.local_rank, offset, nbytes)
        page = (self.start + first) // PAGE_BYTES * PAGE_BYTES
        self._shm.populate(page, -(-(self.start + last - page) // PAGE_BYTES) * PAGE_BYTES)
        self._shm.ground[self.start + first : self.start + last] = 1
        self._sizes[offset] = nbytes

    def remove(self, offset: int) -> None:
        """Tell that it is nobody's any more."""
        first, last = self._lines(self._shm.local_rank, offset, self._sizes.pop(offset))
        self._shm.ground[self.start + first : self.start + last] = 0

    def why_not(self, offset: int, nbytes: int) -> str:
        """Return in words why some bytes may not be used; empty where they may."""
        shm = self._shm
        place = f"bytes [{offset}, {offset + nbytes}) of shared memory"
        rank = next(
            (
                one
                for one in range(shm.local_world_size)
                if _is_in(shm.layout.arrays(one), offset, nbytes)
            ),
            None,
        )
        if rank is None:
            return f"{place} are no memory for arrays"
        told = shm.words[shm.table(rank) // 8 + GIVEN]
        first, last = self._lines(rank, offset, nbytes)
        if told and not shm.ground[told + first : told + last].all():
            return f"{place} have not been given out by local rank {rank}"
        return ""

    def _lines(self, rank: int, offset: int, nbytes: int) -> tuple[int, int]:
        start, _ = self._shm.layout.region(rank)
        return (offset - start) // LINE_BYTES, -(-(offset + nbytes - start) // LINE_BYTES)


def _is_in(bounds: tuple[int, int], offset: int, nbytes: int) -> bool:
    return bounds[0] <= offset and offset + nbytes <= bounds[1]
