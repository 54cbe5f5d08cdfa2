"""Which bytes of a region are taken, which are free, and which of the free ones still have pages behind them.

Large allocations take page ranges of their own; small ones share extents of 1 MiB. What is as long as a page begins a cache line into
one: NumPy's arrays from 128 KiB on begin 16 bytes into a page, and where a target lies less than 32 bytes after its source by their
places in a page, AMD's processors copy a tenth as fast by the string instruction that the C library takes.

Freed pages stay populated up to a reserve, so that a loop which makes and drops arrays asks the system for nothing; what is beyond it
is given back.
Everything here is arithmetic: who owns an `Extents` populates, clears and gives back what it is told.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from syncvar.shm.segment_layout import HUGE_BYTES, LINE_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EXTENT_BYTES", "RESERVE_BYTES", "SMALL_BYTES", "Extents", "Ranges", "Taken"]

EXTENT_BYTES = 1 << 20
SMALL_BYTES = 256 << 10
RESERVE_BYTES = 16 << 20

Range = tuple[int, int]


class Taken(NamedTuple):
    """An allocation.

    Args:
        offset: Where it begins.
        nbytes: Its size, rounded up.
        missing: Page ranges that must be populated before anything there is touched; they will read as zeros.
        dirty: Ranges of the allocation that were used before and hold old bytes.
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
        """Add a range; what is there already stays."""
        if start >= stop:
            return
        # All ranges that overlap or touch the new one become part of it.
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._replace(first, last, [(start, stop)])

    def remove(self, start: int, stop: int) -> None:
        """Remove a range; what is not there stays away."""
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
        """Return the lowest aligned start of a free stretch of this size, or -1."""
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


class Extents:
    """The allocator of one region.

    Args:
        start: Where the region begins, a multiple of a page.
        stop: Where it ends, a multiple of a page.
        reserve_bytes: Free pages that stay populated.

    Example:
        >>> extents = Extents(0, 8 << 20)
        >>> first = extents.allocate((3 << 20) - 64)
        >>> first.offset, first.missing == ((0, 3 << 20),), extents.taken_bytes == 3 << 20
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
        self._kept = Ranges()  # free, and populated
        self._large: dict[int, Range] = {}  # offset -> its pages
        self._small: dict[
            int, tuple[Range, int]
        ] = {}  # offset -> (its stretch, start of its shared extent)
        self._shared: dict[int, Ranges] = {}  # start of a shared extent -> what is free in it

    @property
    def taken_bytes(self) -> int:
        """Pages that are in use, shared extents whole."""
        return self.stop - self.start - self._free.total

    @property
    def kept_bytes(self) -> int:
        """Free pages that are still populated."""
        return self._kept.total

    def allocate(self, nbytes: int) -> Taken | None:
        """Take memory.

        Args:
            nbytes: How much; nothing counts as one byte.

        Returns:
            None when no stretch of the region is large enough.
        """
        if nbytes < PAGE_BYTES:
            return self._take_small(-(-max(1, nbytes) // LINE_BYTES) * LINE_BYTES, LINE_BYTES)
        size = -(-(LINE_BYTES + nbytes) // PAGE_BYTES) * PAGE_BYTES
        return (
            self._take_small(size, PAGE_BYTES, LINE_BYTES)
            if size <= SMALL_BYTES
            else self._take_pages(size)
        )

    def free(self, offset: int) -> list[Range]:
        """Free an allocation.

        Returns:
            The page ranges to give back to the system. They count as given back from now on.

        Raises:
            KeyError: Nothing was allocated there.
        """
        self._release(offset)
        return self.trim(self.reserve_bytes)

    def cancel(self, taken: Taken) -> list[Range]:
        """Undo an allocation whose missing pages could not be populated.

        Returns:
            The page ranges to give back beside the missing ones, of which some may have been populated.
        """
        self._release(taken.offset)
        for start, stop in taken.missing:
            self._kept.remove(start, stop)
        return self.trim(self.reserve_bytes)

    def trim(self, reserve_bytes: int) -> list[Range]:
        """Return what to give back so that at most `reserve_bytes` of free pages stay populated."""
        ranges = []
        while self._kept.total > reserve_bytes:
            start, stop = self._kept.last()
            excess = self._kept.total - reserve_bytes
            start = max(start, (stop - excess) // PAGE_BYTES * PAGE_BYTES)
            self._kept.remove(start, stop)
            ranges.append((start, stop))
        return ranges

    def retire(self) -> None:
        """Never again take memory that was used before; what is allocated may not be freed any more."""
        for start, stop in list(self._kept):
            self._free.remove(start, stop)
        self._kept = Ranges()
        self._shared.clear()

    def _take_small(self, size: int, align: int, begin: int = 0) -> Taken | None:
        """Take a stretch of a shared extent; what is allocated begins so many bytes after it."""
        for extent, room in self._shared.items():
            start = room.fit(size, align) if room.total >= size else -1
            if start >= 0:
                room.remove(start, start + size)
                self._small[start + begin] = (start, start + size), extent
                return Taken(start + begin, size - begin, (), ((start, start + size),))
        pages = self._find(EXTENT_BYTES, PAGE_BYTES)
        if pages is None:
            return None
        start, stop = pages.offset, pages.offset + size
        self._shared[start] = Ranges((stop, start + EXTENT_BYTES))
        self._small[start + begin] = (start, stop), start
        return Taken(
            start + begin, size - begin, pages.missing, Ranges(*pages.dirty).inside(start, stop)
        )

    def _take_pages(self, size: int) -> Taken | None:
        taken = self._find(size, HUGE_BYTES) if size >= HUGE_BYTES else None
        taken = taken or self._find(size, PAGE_BYTES)
        if taken is None:
            return None
        offset = taken.offset + LINE_BYTES
        self._large[offset] = taken.offset, taken.offset + size
        return taken._replace(offset=offset, nbytes=size - LINE_BYTES)

    def _find(self, size: int, align: int) -> Taken | None:
        """Take free pages, populated ones first."""
        offset = self._kept.fit(size, align)
        if offset < 0:
            offset = self._free.fit(size, align)
        if offset < 0:
            return None
        stop = offset + size
        missing, dirty = self._kept.outside(offset, stop), self._kept.inside(offset, stop)
        self._free.remove(offset, stop)
        self._kept.remove(offset, stop)
        return Taken(offset, size, missing, dirty)

    def _release(self, offset: int) -> None:
        if offset in self._large:
            self._give(*self._large.pop(offset))
            return
        stretch, extent = self._small.pop(offset)
        room = self._shared[extent]
        room.add(*stretch)
        if room.total == EXTENT_BYTES:
            del self._shared[extent]
            self._give(extent, extent + EXTENT_BYTES)

    def _give(self, start: int, stop: int) -> None:
        self._free.add(start, stop)
        self._kept.add(start, stop)
