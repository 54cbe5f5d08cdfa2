"""The allocator of a region, against a model that knows every page: nothing overlaps, leaks, or is touched unpopulated."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncvar.shm.allocator import EXTENT_BYTES, RESERVE_BYTES, SMALL_BYTES, Ranges, RegionAllocator
from syncvar.shm.segment_file import HUGE_BYTES, LINE_BYTES, PAGE_BYTES

MIB = 1 << 20

numbers = st.integers(0, 40)
spans = st.tuples(st.booleans(), numbers, numbers)


@given(st.lists(spans, max_size=30), numbers, numbers)
def test_ranges_are_a_set(changes, start, stop):
    ranges, model = Ranges(), set()
    for is_added, first, last in changes:
        if is_added:
            ranges.add(first, last)
            model |= set(range(first, last))
        else:
            ranges.remove(first, last)
            model -= set(range(first, last))
    assert {number for first, last in ranges for number in range(first, last)} == model
    assert ranges.total == len(model)
    found = list(ranges)
    assert all(first < last for first, last in found)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found)), (
        "what touches is one range"
    )
    asked = set(range(start, stop))
    assert {
        number for first, last in ranges.inside(start, stop) for number in range(first, last)
    } == asked & model
    assert {
        number for first, last in ranges.outside(start, stop) for number in range(first, last)
    } == asked - model


@given(st.lists(spans, max_size=20), st.integers(1, 10), st.sampled_from([1, 2, 4, 8]))
def test_fit_is_the_lowest_aligned_stretch(changes, nbytes, align):
    ranges, model = Ranges(), set()
    for _, first, last in changes:
        ranges.add(first, last)
        model |= set(range(first, last))
    fitting = [at for at in range(0, 48, align) if set(range(at, at + nbytes)) <= model]
    assert ranges.fit(nbytes, align) == min(fitting, default=-1)


class Model:
    """What the owner of an allocator would do, and what must hold."""

    def __init__(self, start, stop, reserve):
        self.extents = RegionAllocator(start, stop, reserve)
        self.start, self.stop, self.reserve = start, stop, reserve
        self.populated = set()  # pages
        self.used = set()  # pages that somebody wrote to since they were populated
        self.live = {}  # offset -> size

    def pages(self, start, stop):
        return set(range(start // PAGE_BYTES, -(-stop // PAGE_BYTES)))

    def allocate(self, nbytes, fails_after=None):
        taken = self.extents.allocate(nbytes)
        if taken is None:
            return
        offset, stop = taken.offset, taken.offset + taken.nbytes
        assert self.start <= offset
        assert stop <= self.stop
        assert taken.nbytes >= max(1, nbytes)
        assert offset % LINE_BYTES == 0
        assert nbytes < PAGE_BYTES or offset % PAGE_BYTES == LINE_BYTES
        assert all(stop <= other or other + size <= offset for other, size in self.live.items())
        missing = set().union(*(self.pages(*one) for one in taken.missing))
        assert not missing & self.populated
        if fails_after is not None and taken.missing:
            for start, end in self.extents.cancel(taken):
                self.give_back(start, end)
            return
        self.populated |= missing
        assert self.pages(offset, stop) <= self.populated
        dirty = set().union(*(self.pages(*one) for one in taken.dirty))
        assert self.used & self.pages(offset, stop) <= dirty
        assert all(
            offset - offset % PAGE_BYTES <= start < end <= stop for start, end in taken.dirty
        )
        self.live[offset] = taken.nbytes
        self.used |= self.pages(offset, stop)

    def free(self, number):
        if self.live:
            offset = sorted(self.live)[number % len(self.live)]
            del self.live[offset]
            for start, stop in self.extents.free(offset):
                self.give_back(start, stop)
            assert self.extents.reserve_used_bytes <= self.reserve

    def give_back(self, start, stop):
        pages = self.pages(start, stop)
        assert start % PAGE_BYTES == stop % PAGE_BYTES == 0
        assert pages <= self.populated
        assert all(not pages & self.pages(other, other + size) for other, size in self.live.items())
        self.populated -= pages
        self.used -= pages

    def end(self):
        while self.live:
            self.free(0)
        for start, stop in self.extents.trim(0):
            self.give_back(start, stop)
        assert not self.populated
        assert self.extents.used_bytes == self.extents.reserve_used_bytes == 0
        whole = self.extents.allocate(self.stop - self.start - LINE_BYTES)
        assert whole is not None, "free neighbours are one again"
        assert whole.missing == ((self.start, self.stop),)


sizes = st.one_of(
    st.integers(0, 3 * PAGE_BYTES),
    st.sampled_from(
        [
            1,
            LINE_BYTES,
            PAGE_BYTES - 1,
            PAGE_BYTES,
            SMALL_BYTES,
            SMALL_BYTES + 1,
            EXTENT_BYTES,
            HUGE_BYTES,
        ]
    ),
    st.integers(SMALL_BYTES, 5 * MIB),
)
moves = st.one_of(
    st.tuples(st.just("allocate"), sizes),
    st.tuples(st.just("free"), st.integers(0, 100)),
    st.tuples(st.just("fail"), sizes),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(moves, max_size=40), st.sampled_from([0, PAGE_BYTES, 2 * MIB, RESERVE_BYTES]))
def test_any_sequence_keeps_the_rules_and_leaks_nothing(sequence, reserve):
    model = Model(256 << 10, 12 * MIB, reserve)
    for move, number in sequence:
        if move == "free":
            model.free(number)
        else:
            model.allocate(number, fails_after=0 if move == "fail" else None)
    model.end()


WHOLE = MIB - LINE_BYTES
"""What takes 1 MiB of pages."""


def test_a_loop_asks_for_pages_once():
    extents = RegionAllocator(0, 64 * MIB)
    first = extents.allocate(7 * MIB + WHOLE)
    assert first.missing == ((0, 8 * MIB),)
    assert first.dirty == ()
    for _ in range(5):
        assert extents.free(first.offset) == []
        again = extents.allocate(7 * MIB + WHOLE)
        assert (again.offset, again.missing, again.dirty) == (LINE_BYTES, (), ((0, 8 * MIB),))


def test_what_is_beyond_the_reserve_is_given_back():
    extents = RegionAllocator(0, 128 * MIB)
    large = extents.allocate(39 * MIB + WHOLE)
    assert extents.free(large.offset) == [(16 * MIB, 40 * MIB)]
    assert extents.reserve_used_bytes == RESERVE_BYTES
    again = extents.allocate(39 * MIB + WHOLE)
    assert (again.missing, again.dirty) == (((16 * MIB, 40 * MIB),), ((0, 16 * MIB),))


def test_small_ones_share_an_extent():
    extents = RegionAllocator(0, 4 * MIB)
    taken = [extents.allocate(1000) for _ in range(1024)]
    assert taken[0].missing == ((0, EXTENT_BYTES),)
    assert all(not one.missing for one in taken[1:])
    assert extents.used_bytes == EXTENT_BYTES
    assert extents.allocate(1000).missing, "the 1025th needs another"


def test_large_ones_lie_on_huge_pages_where_there_is_room():
    extents = RegionAllocator(256 << 10, 9 * MIB)
    assert extents.allocate(MIB + WHOLE).offset == 2 * MIB + LINE_BYTES
    assert extents.allocate(2 * MIB + WHOLE).offset == 4 * MIB + LINE_BYTES
    assert extents.allocate(MIB + WHOLE).offset == 7 * MIB + LINE_BYTES, (
        "rather not aligned than not at all"
    )
    assert extents.allocate(MIB + WHOLE) is None


def test_a_full_region_says_so_and_goes_on():
    extents = RegionAllocator(0, 2 * MIB)
    assert extents.allocate(MIB + WHOLE + 1) is None
    taken = extents.allocate(MIB + WHOLE)
    assert extents.allocate(1) is None
    extents.free(taken.offset)
    assert extents.allocate(1).offset == 0


def test_what_was_not_allocated_cannot_be_freed():
    extents = RegionAllocator(0, 2 * MIB)
    taken = extents.allocate(100)
    extents.free(taken.offset)
    with pytest.raises(KeyError):
        extents.free(taken.offset)
    with pytest.raises(ValueError, match="no range of pages"):
        RegionAllocator(1, MIB)


def test_after_retiring_only_new_memory_is_taken():
    extents = RegionAllocator(0, 32 * MIB)
    kept, small = extents.allocate(WHOLE), extents.allocate(64)
    extents.free(kept.offset)
    extents.retire()
    for nbytes in (64, MIB, 4 * MIB):
        taken = extents.allocate(nbytes)
        assert taken.offset >= 2 * MIB
        assert taken.dirty == ()
        assert taken.missing
    assert small.offset == MIB
