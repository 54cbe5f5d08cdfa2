"""Where things are in shared memory: nothing overlaps, tables and regions are aligned, too little is refused in words."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.core.errors import ConfigError
from syncvar.shm import segment_file
from syncvar.shm.segment_file import (
    HEADER_BYTES,
    HUGE_BYTES,
    LINE_BYTES,
    PAGE_BYTES,
    TABLE_BYTES,
    SegmentLayout,
    format_bytes,
)


@given(st.integers(1, 300), st.integers(0, 1 << 42))
def test_regions_are_equal_apart_and_inside(ranks, more):
    plan = SegmentLayout(HUGE_BYTES * (ranks + 1) + more, ranks)
    regions = [plan.region(rank) for rank in range(ranks)]
    assert regions[0][0] >= HEADER_BYTES
    assert regions[-1][1] <= plan.shm_bytes
    assert all(one[1] == other[0] for one, other in itertools.pairwise(regions))
    assert {stop - start for start, stop in regions} == {plan.region_bytes}
    assert plan.region_bytes % HUGE_BYTES == 0
    for rank, (start, stop) in enumerate(regions):
        assert start % HUGE_BYTES == 0
        assert plan.table(rank) == start
        assert plan.arrays(rank) == (start + TABLE_BYTES, stop)
        assert stop - start - TABLE_BYTES >= 1 << 20, "room for an extent"


def test_the_abort_word_has_a_line_of_its_own():
    words = {
        segment_file.MAGIC,
        segment_file.VERSION,
        segment_file.SHM_BYTES,
        segment_file.LOCAL_WORLD_SIZE,
        segment_file.USABLE_CORES,
        segment_file.GENERATION,
    }
    assert segment_file.ABORT * 8 == LINE_BYTES
    assert all(word * 8 // LINE_BYTES == 0 for word in words)
    assert len(words) == 6
    assert HEADER_BYTES % PAGE_BYTES == TABLE_BYTES % PAGE_BYTES == 0


@pytest.mark.parametrize(("shm_bytes", "ranks"), [(16 << 20, 8), (1 << 20, 1), (1 << 40, 0)])
def test_too_little_is_refused(shm_bytes, ranks):
    with pytest.raises(
        ConfigError,
        match=rf"shm_bytes \({shm_bytes}\) is too small for {ranks} ranks on a host",
    ):
        SegmentLayout(shm_bytes, ranks)


def test_the_smallest_setting_serves_seven_ranks():
    assert SegmentLayout(16 << 20, 7).region_bytes == HUGE_BYTES


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (1 << 40, "1 TiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_sizes_in_words(count, words):
    assert format_bytes(count) == words
