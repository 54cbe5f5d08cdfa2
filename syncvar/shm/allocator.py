"""The allocator of a region: which bytes are in use, and which free pages are populated.

Large allocations take their own pages; small ones share extents of 1 MiB. An allocation of a page
or more begins one cache line into a page. NumPy's large arrays begin 16 bytes into a page. If a
target begins less than 32 bytes behind its source modulo a page, AMD processors copy ten times
slower.

Freed pages stay populated up to a reserve, so loops that create and drop arrays need no system
calls. `RegionAllocator` only computes: its caller populates, clears and gives back the pages.

With `check_shm` on, each use of shared memory is checked against the ranks' allocation maps. Each
rank keeps one at the end of its region (`AllocationMap`): one byte for each cache line, 1 if the
line is allocated. A use of memory that nobody allocated is a bug of this library. The check raises
before the use could damage an array.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from syncvar.shm.segment_file import HUGE_BYTES, LINE_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from syncvar.shm.segment_file import SegmentLayout

EXTENT_BYTES = 1 << 20
SMALL_BYTES = 256 << 10
RESERVE_BYTES = 16 << 20
MAP_OFFSET = 4  # word of a rank's table: offset of its map; 0 without checks

Range = tuple[int, int]


class AllocatedRange(NamedTuple):
    """An allocation.

    Args:
        offset: Its start.
        nbytes: Its size, rounded up.
        missing: Page ranges that the caller must populate before use; they will read as zeros.
        dirty: Ranges of the allocation that hold old bytes.
    """

    offset: int
    nbytes: int
    missing: tuple[Range, ...]
    dirty: tuple[Range, ...]


class Ranges:
    """A set of whole numbers as disjoint ranges [start, stop) that never touch each other.

    Example:
        >>> some = Ranges()
        >>> some.add(0, 10); some.add(10, 20); some.remove(4, 6)
        >>> list(some), some.total
        ([(0, 4), (6, 20)], 18)
    """

    __slots__ = ("_starts", "_stops", "total")

    def __init__(self, *ranges: Range) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.total = 0
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._stops, strict=True)

    def add(self, start: int, stop: int) -> None:
        """Add a range; it may overlap others."""
        if start >= stop:
            return
        # All ranges that overlap or touch the new one become part of it.
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._replace(first, last, [(start, stop)])

    def remove(self, start: int, stop: int) -> None:
        """Remove a range, as far as it is in the set."""
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        if first >= last or start >= stop:
            return
        rest = [(self._starts[first], start), (stop, self._stops[last - 1])]
        self._replace(first, last, [piece for piece in rest if piece[0] < piece[1]])

    def inside(self, start: int, stop: int) -> tuple[Range, ...]:
        """Return the parts of [start, stop) that are in the set."""
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return tuple(
            (max(start, self._starts[at]), min(stop, self._stops[at])) for at in range(first, last)
        )

    def outside(self, start: int, stop: int) -> tuple[Range, ...]:
        """Return the parts of [start, stop) that are not in the set."""
        gaps, at = [], start
        for begin, end in self.inside(start, stop):
            if at < begin:
                gaps.append((at, begin))
            at = end
        if at < stop:
            gaps.append((at, stop))
        return tuple(gaps)

    def fit(self, nbytes: int, align: int) -> int:
        """Return the lowest aligned start of a free range of this size, or -1."""
        for start, stop in zip(self._starts, self._stops, strict=True):
            at = -(-start // align) * align
            if at + nbytes <= stop:
                return at
        return -1

    def last(self) -> Range:
        """Return the highest range."""
        return self._starts[-1], self._stops[-1]

    def _replace(self, first: int, last: int, pieces: list[Range]) -> None:
        self.total += sum(stop - start for start, stop in pieces)
        self.total -= sum(self._stops[first:last]) - sum(self._starts[first:last])
        self._starts[first:last] = [start for start, _ in pieces]
        self._stops[first:last] = [stop for _, stop in pieces]


class RegionAllocator:
    """The allocator of one region.

    Args:
        start: Start of the region, a multiple of a page.
        stop: End of the region, a multiple of a page.
        reserve_bytes: Limit of free pages that stay populated.

    Example:
        >>> extents = RegionAllocator(0, 8 << 20)
        >>> first = extents.allocate((3 << 20) - 64)
        >>> first.offset, first.missing == ((0, 3 << 20),), extents.used_bytes == 3 << 20
        (64, True, True)
        >>> extents.free(first.offset)
        []
        >>> extents.allocate(1 << 20).missing
        ()
    """

    def __init__(self, start: int, stop: int, reserve_bytes: int = RESERVE_BYTES) -> None:
        if start % PAGE_BYTES or stop % PAGE_BYTES or start > stop:
            raise ValueError(f"[{start}, {stop}) is no range of pages")
        self.start, self.stop = start, stop
        self.reserve_bytes = reserve_bytes
        self._free = Ranges((start, stop))
        self._populated = Ranges()  # free, and populated
        self._large: dict[int, Range] = {}  # offset -> its pages
        self._small: dict[int, tuple[Range, int]] = {}  # offset -> (its range, start of its extent)
        self._shared: dict[int, Ranges] = {}  # start of a shared extent -> what is free in it

    @property
    def used_bytes(self) -> int:
        """Bytes of pages in use; shared extents count whole."""
        return self.stop - self.start - self._free.total

    @property
    def reserve_used_bytes(self) -> int:
        """Bytes of free pages that are populated."""
        return self._populated.total

    def allocate(self, nbytes: int) -> AllocatedRange | None:
        """Allocate at least one byte; return None if no free range is large enough."""
        if nbytes < PAGE_BYTES:
            return self._take_small(-(-max(1, nbytes) // LINE_BYTES) * LINE_BYTES, LINE_BYTES)
        size = -(-(LINE_BYTES + nbytes) // PAGE_BYTES) * PAGE_BYTES
        if size <= SMALL_BYTES:
            return self._take_small(size, PAGE_BYTES, LINE_BYTES)
        return self._take_pages(size)

    def free(self, offset: int) -> list[Range]:
        """Free an allocation; return the page ranges to give back to the system."""
        self._release(offset)
        return self.trim(self.reserve_bytes)

    def cancel(self, allocation: AllocatedRange) -> list[Range]:
        """Undo an allocation whose missing pages the caller could not populate."""
        self._release(allocation.offset)
        for start, stop in allocation.missing:
            self._populated.remove(start, stop)
        return self.trim(self.reserve_bytes)

    def trim(self, reserve_bytes: int) -> list[Range]:
        """Return the ranges to give back so that at most `reserve_bytes` of free pages stay."""
        ranges = []
        while self._populated.total > reserve_bytes:
            start, stop = self._populated.last()
            excess = self._populated.total - reserve_bytes
            start = max(start, (stop - excess) // PAGE_BYTES * PAGE_BYTES)
            self._populated.remove(start, stop)
            ranges.append((start, stop))
        return ranges

    def retire(self) -> None:
        """Never allocate freed memory again; callers must not call `free` any more."""
        for start, stop in list(self._populated):
            self._free.remove(start, stop)
        self._populated = Ranges()
        self._shared.clear()

    def _take_small(self, size: int, align: int, begin: int = 0) -> AllocatedRange | None:
        """Allocate in a shared extent, `begin` bytes into the range."""
        for extent, room in self._shared.items():
            start = room.fit(size, align) if room.total >= size else -1
            if start >= 0:
                room.remove(start, start + size)
                self._small[start + begin] = (start, start + size), extent
                return AllocatedRange(start + begin, size - begin, (), ((start, start + size),))
        pages = self._find(EXTENT_BYTES, PAGE_BYTES)
        if pages is None:
            return None
        start, stop = pages.offset, pages.offset + size
        self._shared[start] = Ranges((stop, start + EXTENT_BYTES))
        self._small[start + begin] = (start, stop), start
        return AllocatedRange(
            start + begin, size - begin, pages.missing, Ranges(*pages.dirty).inside(start, stop)
        )

    def _take_pages(self, size: int) -> AllocatedRange | None:
        allocation = self._find(size, HUGE_BYTES) if size >= HUGE_BYTES else None
        allocation = allocation or self._find(size, PAGE_BYTES)
        if allocation is None:
            return None
        offset = allocation.offset + LINE_BYTES
        self._large[offset] = allocation.offset, allocation.offset + size
        return allocation._replace(offset=offset, nbytes=size - LINE_BYTES)

    def _find(self, size: int, align: int) -> AllocatedRange | None:
        """Take free pages, populated ones first."""
        offset = self._populated.fit(size, align)
        if offset < 0:
            offset = self._free.fit(size, align)
        if offset < 0:
            return None
        stop = offset + size
        missing, dirty = self._populated.outside(offset, stop), self._populated.inside(offset, stop)
        self._free.remove(offset, stop)
        self._populated.remove(offset, stop)
        return AllocatedRange(offset, size, missing, dirty)

    def _release(self, offset: int) -> None:
        if offset in self._large:
            self._give(*self._large.pop(offset))
            return
        block, extent = self._small.pop(offset)
        room = self._shared[extent]
        room.add(*block)
        if room.total == EXTENT_BYTES:
            del self._shared[extent]
            self._give(extent, extent + EXTENT_BYTES)

    def _give(self, start: int, stop: int) -> None:
        self._free.add(start, stop)
        self._populated.add(start, stop)


class AllocationMap:
    """The allocated lines of this rank's region, and a reader of the other ranks' maps.

    `words` and `ground` are the segment as 64-bit words and as bytes; `populate` reserves the pages
    of a range.
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
        """Mark memory as allocated; raise SharedMemoryFull without room for the map's pages."""
        first, last = self._lines(self._rank, offset, nbytes)
        page = (self.start + first) // PAGE_BYTES * PAGE_BYTES
        self._populate(page, -(-(self.start + last - page) // PAGE_BYTES) * PAGE_BYTES)
        self._ground[self.start + first : self.start + last] = 1
        self._sizes[offset] = nbytes

    def remove(self, offset: int) -> None:
        """Mark memory as free."""
        first, last = self._lines(self._rank, offset, self._sizes.pop(offset))
        self._ground[self.start + first : self.start + last] = 0

    def misuse(self, offset: int, nbytes: int) -> str:
        """Return why nobody may use these bytes, or an empty text."""
        layout = self._layout
        span = f"bytes [{offset}, {offset + nbytes}) of shared memory"
        ranks = range(layout.local_world_size)
        for rank in ranks:
            start, stop = layout.arrays(rank)
            if start <= offset and offset + nbytes <= stop:
                break
        else:
            return f"{span} are outside the memory for arrays"
        start = self._words[layout.table(rank) // 8 + MAP_OFFSET]
        first, last = self._lines(rank, offset, nbytes)
        if start and not self._ground[start + first : start + last].all():
            return f"local rank {rank} has not allocated {span}"
        return ""

    def _lines(self, rank: int, offset: int, nbytes: int) -> tuple[int, int]:
        start, _ = self._layout.region(rank)
        return (offset - start) // LINE_BYTES, -(-(offset + nbytes - start) // LINE_BYTES)
