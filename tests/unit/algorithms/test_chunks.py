"""Chunks cover the buffer, in order, without gap or overlap."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.algorithms.schedule import Buffer, Chunk, consecutive_chunks, even_chunks


@given(count=st.integers(0, 10_000), parts=st.integers(1, 300))
def test_even_chunks_cover_the_buffer_in_order_and_differ_by_one_at_most(count, parts):
    chunks = even_chunks(count, parts)
    assert len(chunks) == parts
    assert chunks[0].start == 0
    assert chunks[-1].stop == count
    assert all(one.stop == other.start for one, other in pairwise(chunks))
    sizes = [chunk.count for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(counts=st.lists(st.integers(0, 50), max_size=40))
def test_consecutive_chunks_have_the_given_counts_and_touch_each_other(counts):
    chunks = consecutive_chunks(counts)
    assert [chunk.count for chunk in chunks] == counts
    assert [chunk.start for chunk in chunks] == [
        sum(counts[:index]) for index in range(len(counts))
    ]


@pytest.mark.parametrize(
    "make",
    [lambda buffer: even_chunks(5, 2, buffer), lambda buffer: consecutive_chunks([3, 2], buffer)],
)
def test_chunks_lie_in_the_buffer_that_was_asked_for(make):
    assert make(Buffer.SCRATCH) == [Chunk(0, 3, Buffer.SCRATCH), Chunk(3, 5, Buffer.SCRATCH)]
    assert make(Buffer.WORK) == [Chunk(0, 3), Chunk(3, 5)]


def test_fewer_elements_than_parts_leave_empty_chunks_at_the_end():
    assert [chunk.count for chunk in even_chunks(2, 4)] == [1, 1, 0, 0]
