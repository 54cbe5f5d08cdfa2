"""Partitioners: the rules of each, for all shapes; parts cover the rows."""

from math import ceil, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.core.errors import ConfigError
from syncvar.variables.partitioners import FixedShards, MaxSize, MinSize, row_ranges

SHAPES = st.lists(st.integers(0, 300), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "float64", "int8", np.dtype("complex128")])


@given(rows=st.integers(0, 5000), shards=st.integers(1, 200))
def test_row_ranges_cover_the_rows_and_the_first_are_longer(rows, shards):
    ranges = row_ranges(rows, shards)
    assert len(ranges) == shards
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes.count(rows // shards + 1) == rows % shards


@given(shape=SHAPES, dtype=DTYPES, shards=st.integers(1, 400))
def test_fixed_shards(shape, dtype, shards):
    made = FixedShards(shards)(shape, dtype)
    assert made == ([max(1, min(shards, shape[0]))] + [1] * (len(shape) - 1) if shape else [])


@given(shape=SHAPES, dtype=DTYPES, nbytes=st.integers(1, 5000), shards=st.integers(1, 400))
def test_min_size(shape, dtype, nbytes, shards):
    made = MinSize(nbytes, shards)(shape, dtype)
    assert len(made) == len(shape)
    assert all(parts == 1 for parts in made[1:])
    if shape:
        total = prod(shape) * np.dtype(dtype).itemsize
        assert made[0] == max(1, min(shards, shape[0], ceil(total / nbytes)))


@given(
    shape=SHAPES, dtype=DTYPES, nbytes=st.integers(1, 5000), shards=st.none() | st.integers(1, 400)
)
def test_max_size_keeps_parts_below_the_limit_where_a_row_is(shape, dtype, nbytes, shards):
    made = MaxSize(nbytes, shards)(shape, dtype)
    assert len(made) == len(shape)
    assert all(parts == 1 for parts in made[1:])
    if not shape:
        return
    row = prod(shape[1:]) * np.dtype(dtype).itemsize
    if shards is not None:
        assert made[0] <= shards
        free = MaxSize(nbytes)(shape, dtype)[0]
        assert made[0] == min(free, shards)
    elif row <= nbytes:
        longest = row_ranges(shape[0], made[0])[0]
        assert (longest[1] - longest[0]) * row <= nbytes
    else:
        assert made[0] == max(1, shape[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedShards(0), "num_shards must be an integer of at least 1, not 0"),
        (lambda: FixedShards(True), "not True"),
        (lambda: MinSize(0), "min_shard_bytes"),
        (lambda: MinSize(4, 0), "max_shards"),
        (lambda: MaxSize(0), "max_shard_bytes"),
        (lambda: MaxSize(2.5), "max_shard_bytes"),
        (lambda: MaxSize(4, 0), "max_shards"),
        (lambda: row_ranges(-1, 2), "rows"),
        (lambda: row_ranges(3, 0), "shards"),
        (lambda: FixedShards(2)((3, -1), "float32"), "length of the shape"),
        (lambda: FixedShards(2)(3, "float32"), "shape must be a tuple"),
        (lambda: FixedShards(2)((3,), "floot"), "dtype 'floot'"),
    ],
)
def test_wrong_arguments(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_partitioners_compare_and_show_their_arguments():
    assert MinSize() == MinSize(262144, 1)
    assert repr(MaxSize(64)) == "MaxSize(max_shard_bytes=64, max_shards=None)"
