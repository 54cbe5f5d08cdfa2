"""Allocation maps: with `check_shm` on, each use of shared memory is checked against them.

Each rank keeps a map at the end of its region: one byte for each cache line, 1 if the line is
allocated. A use of memory that nobody allocated is a bug of this library. The check raises before
the use could damage an array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.shm.segment_layout import LINE_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from syncvar.shm.segment_layout import SegmentLayout

MAP_OFFSET = 4  # word of a rank's table: offset of its map; 0 without checks


class AllocationMap:
    """The allocated lines of this rank's region, and a reader of the other ranks' maps.

    Args:
        layout: Layout of the segment.
        local_rank: Rank of this process on the host.
        words: The segment as 64-bit words.
        ground: The segment as bytes.
        populate: Function that reserves the pages of a range.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        local_rank: int,
        words: memoryview,
        ground: NDArray[np.uint8],
        populate: Callable[[int, int], None],
    ) -> None:
        self._layout, self._rank = layout, local_rank
        self._words, self._ground, self._populate = words, ground, populate
        self._sizes: dict[int, int] = {}
        _, stop = layout.arrays(local_rank)
        # The map has whole pages at the end of the region.
        self.start = stop - -(-layout.region_bytes // LINE_BYTES // PAGE_BYTES) * PAGE_BYTES
        words[layout.table(local_rank) // 8 + MAP_OFFSET] = self.start

    def add(self, offset: int, nbytes: int) -> None:
        """Mark memory as allocated.

        Raises:
            SharedMemoryFull: There is no room for the map's pages.
        """
        first, last = self._lines(self._rank, offset, nbytes)
        page = (self.start + first) // PAGE_BYTES * PAGE_BYTES
        self._populate(page, -(-(self.start + last - page) // PAGE_BYTES) * PAGE_BYTES)
        self._ground[self.start + first : self.start + last] = 1
        self._sizes[offset] = nbytes

    def remove(self, offset: int) -> None:
        """Mark memory as free."""
        first, last = self._lines(self._rank, offset, self._sizes.pop(offset))
        self._ground[self.start + first : self.start + last] = 0

    def why_not(self, offset: int, nbytes: int) -> str:
        """Return why nobody may use these bytes, or an empty text."""
        layout = self._layout
        span = f"bytes [{offset}, {offset + nbytes}) of shared memory"
        ranks = range(layout.local_world_size)
        owners = [rank for rank in ranks if _is_in(layout.arrays(rank), offset, nbytes)]
        if not owners:
            return f"{span} are outside the memory for arrays"
        rank = owners[0]
        start = self._words[layout.table(rank) // 8 + MAP_OFFSET]
        first, last = self._lines(rank, offset, nbytes)
        if start and not self._ground[start + first : start + last].all():
            return f"local rank {rank} has not allocated {span}"
        return ""

    def _lines(self, rank: int, offset: int, nbytes: int) -> tuple[int, int]:
        start, _ = self._layout.region(rank)
        return (offset - start) // LINE_BYTES, -(-(offset + nbytes - start) // LINE_BYTES)


def _is_in(bounds: tuple[int, int], offset: int, nbytes: int) -> bool:
    return bounds[0] <= offset and offset + nbytes <= bounds[1]
