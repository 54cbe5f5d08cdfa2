"""What of the arena has been given out: every use of it can be compared with that, where `check_arena` is on.

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
        arena: The mapped arena.
    """

    def __init__(self, arena: SharedSegment) -> None:
        self._arena = arena
        self._sizes: dict[int, int] = {}
        _, stop = arena.layout.arrays(arena.local_rank)
        self.start = stop - self.nbytes(arena)
        arena.words[arena.table(arena.local_rank) // 8 + GIVEN] = self.start

    @staticmethod
    def nbytes(arena: SharedSegment) -> int:
        """Return how much of a region is taken for this: whole pages at its end."""
        return -(-arena.layout.region_bytes // LINE_BYTES // PAGE_BYTES) * PAGE_BYTES

    def add(self, offset: int, nbytes: int) -> None:
        """Tell that memory has been given out.

        Raises:
            SharedMemoryFull: There is no room to tell it.
        """
        first, last = self._lines(self._arena.local_rank, offset, nbytes)
        page = (self.start + first) // PAGE_BYTES * PAGE_BYTES
        self._arena.populate(page, -(-(self.start + last - page) // PAGE_BYTES) * PAGE_BYTES)
        self._arena.ground[self.start + first : self.start + last] = 1
        self._sizes[offset] = nbytes

    def remove(self, offset: int) -> None:
        """Tell that it is nobody's any more."""
        first, last = self._lines(self._arena.local_rank, offset, self._sizes.pop(offset))
        self._arena.ground[self.start + first : self.start + last] = 0

    def why_not(self, offset: int, nbytes: int) -> str:
        """Return in words why some bytes may not be used; empty where they may."""
        arena = self._arena
        place = f"bytes [{offset}, {offset + nbytes}) of the arena"
        rank = next(
            (
                one
                for one in range(arena.local_world_size)
                if _is_in(arena.layout.arrays(one), offset, nbytes)
            ),
            None,
        )
        if rank is None:
            return f"{place} are no memory for arrays"
        told = arena.words[arena.table(rank) // 8 + GIVEN]
        first, last = self._lines(rank, offset, nbytes)
        if told and not arena.ground[told + first : told + last].all():
            return f"{place} have not been given out by local rank {rank}"
        return ""

    def _lines(self, rank: int, offset: int, nbytes: int) -> tuple[int, int]:
        start, _ = self._arena.layout.region(rank)
        return (offset - start) // LINE_BYTES, -(-(offset + nbytes - start) // LINE_BYTES)


def _is_in(bounds: tuple[int, int], offset: int, nbytes: int) -> bool:
    return bounds[0] <= offset and offset + nbytes <= bounds[1]
