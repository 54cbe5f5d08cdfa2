"""Grids of the mpi4py layer."""

from math import prod

import pytest

from syncvar.compat.mpi4py.mpi_errors import MpiException
from syncvar.compat.mpi4py.mpi_topology import Compute_dims


@pytest.mark.parametrize(
    ("ranks", "dims", "lengths"),
    [
        (12, 2, [4, 3]),
        (6, 3, [3, 2, 1]),
        (64, 3, [4, 4, 4]),
        (7, 2, [7, 1]),
        (12, [0, 3, 0], [2, 3, 2]),
        (6, [2, 3], [2, 3]),
    ],
)
def test_compute_dims_chooses_equal_lengths(ranks, dims, lengths):
    found = Compute_dims(ranks, dims)
    assert found == lengths
    assert prod(found) == ranks


@pytest.mark.parametrize(("ranks", "dims"), [(7, [2, 0]), (6, [2, 2]), (6, [-1, 0])])
def test_lengths_that_do_not_fit(ranks, dims):
    with pytest.raises(MpiException, match="do not fit"):
        Compute_dims(ranks, dims)
