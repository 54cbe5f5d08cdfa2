"""Datatypes of the mpi4py layer, compared with what NumPy selects."""

import numpy as np
import pytest

from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py.mpi_datatypes import (
    PREDEFINED,
    Datatype,
    datatype_of_spec,
    from_numpy_dtype,
    to_numpy_dtype,
)
from syncvar.compat.mpi4py.mpi_errors import MpiException
from syncvar.compat.mpi4py.mpi_operations import Status

DOUBLE, INT, BYTE = (PREDEFINED[name] for name in ("DOUBLE", "INT", "BYTE"))
GRID = np.arange(60.0).reshape(6, 10)


def packed(datatype, array, count=1):
    data = datatype.layout.pack(array.reshape(-1).view(np.uint8), 0, count)
    return data.view(array.dtype).tolist()


@pytest.mark.parametrize(
    ("datatype", "selected"),
    [
        (DOUBLE.Create_contiguous(4), GRID[0, :4]),
        (DOUBLE.Create_vector(6, 2, 10), GRID[:, :2]),
        (DOUBLE.Create_hvector(3, 1, 160), GRID[::2, 0]),
        (DOUBLE.Create_indexed([2, 1], [5, 0]), GRID.flat[[5, 6, 0]]),
        (DOUBLE.Create_hindexed([1, 3], [80, 0]), GRID.flat[[10, 0, 1, 2]]),
        (DOUBLE.Create_indexed_block(2, [1, 11]), GRID.flat[[1, 2, 11, 12]]),
        (DOUBLE.Create_hindexed_block(1, [8, 16]), GRID.flat[[1, 2]]),
        (DOUBLE.Create_subarray([6, 10], [2, 3], [1, 4]), GRID[1:3, 4:7]),
        (
            DOUBLE.Create_subarray([10, 6], [3, 2], [4, 1], const.ORDER_F),
            GRID[1:3, 4:7],
        ),
        (
            DOUBLE.Create_vector(2, 1, 10).Create_contiguous(1).Create_vector(2, 1, 1),
            GRID.flat[[0, 10, 11, 21]],
        ),
    ],
)
def test_a_derived_datatype_packs_what_numpy_selects_and_puts_it_back(datatype, selected):
    wanted = np.asarray(selected).ravel()
    data = datatype.layout.pack(GRID.reshape(-1).view(np.uint8), 0, 1)
    assert data.view(float).tolist() == wanted.tolist()
    assert datatype.Get_size() == wanted.nbytes
    target = np.full(60, -1.0)
    datatype.layout.unpack(data, target.view(np.uint8), 0)
    changed = np.flatnonzero(target != -1)
    assert sorted(target[changed].tolist()) == sorted(wanted.tolist())
    assert all(target[i] == GRID.flat[i] for i in changed)


@pytest.mark.parametrize(
    ("datatype", "extent"),
    [
        (Datatype.Create_struct([1, 1], [0, 8], [DOUBLE, INT]), 16),
        (Datatype.Create_struct([1, 1], [0, 4], [INT, BYTE]), 8),
        (Datatype.Create_struct([3, 1], [0, 3], [BYTE, BYTE]), 4),
        (Datatype.Create_struct([1, 1], [0, 4], [INT, BYTE]).Create_resized(0, 5), 5),
        (Datatype.Create_struct([1, 1], [0, 8], [DOUBLE, INT.Create_resized(0, 4)]), 12),
    ],
)
def test_a_struct_ends_where_a_struct_of_c_ends(datatype, extent):
    assert datatype.Get_extent() == (0, extent)


def test_resized_elements_follow_each_other_at_their_extent():
    column = DOUBLE.Create_vector(6, 1, 10).Create_resized(0, 8)
    assert column.Get_extent() == (0, 8)
    assert packed(column, GRID, 3) == GRID[:, :3].T.ravel().tolist()


def test_a_struct_has_the_places_of_a_record():
    record = np.dtype([("a", "i4"), ("b", "f8"), ("c", "i2", (3,))], align=True)
    datatype = Datatype.Create_struct(
        [1, 1, 3], [record.fields[name][1] for name in "abc"], [INT, DOUBLE, PREDEFINED["SHORT"]]
    ).Create_resized(0, record.itemsize)
    rows = np.zeros(2, record)
    rows["a"], rows["b"], rows["c"] = 7, 2.5, [1, 2, 3]
    data = datatype.layout.pack(rows.view(np.uint8), 0, 2)
    assert data.size == 2 * (4 + 8 + 6)
    again = np.zeros(2, record)
    datatype.layout.unpack(data, again.view(np.uint8), 0)
    assert all((again[name] == rows[name]).all() for name in "abc")
    assert from_numpy_dtype(record).Get_size() == datatype.Get_size()
    assert to_numpy_dtype(from_numpy_dtype(record)).itemsize == record.itemsize


def test_an_incomplete_last_element_is_written_as_far_as_it_goes():
    every_second = DOUBLE.Create_vector(3, 1, 2)
    target = np.zeros(6)
    every_second.layout.unpack(np.array([1.0, 2.0]).view(np.uint8), target.view(np.uint8), 0)
    assert target.tolist() == [1, 0, 2, 0, 0, 0]


def test_pack_and_unpack_move_a_position():
    buffer = bytearray(32)
    place = INT.Pack(np.array([1, 2], "i"), buffer, 0, None)
    place = DOUBLE.Pack(np.array([0.5]), buffer, place, None)
    assert place == 16
    ints, doubles = np.zeros(2, "i"), np.zeros(1)
    assert DOUBLE.Unpack(buffer, INT.Unpack(buffer, 0, ints, None), doubles, None) == 16
    assert (ints.tolist(), doubles.tolist()) == ([1, 2], [0.5])
    with pytest.raises(MpiException, match="no room"):
        DOUBLE.Pack(np.zeros(5), buffer, 0, None)
    swapped = bytearray(8)
    INT.Pack_external("external32", np.array([1, 258], "i"), swapped, 0)
    assert swapped == b"\x00\x00\x00\x01\x00\x00\x01\x02"


def test_a_status_counts_elements():
    pair = Datatype.Create_struct([1, 1], [0, 4], [INT, DOUBLE])
    status = Status.of(0, 0, 16)
    assert status.Get_count(INT) == 4
    assert status.Get_count(pair) == const.UNDEFINED
    assert status.Get_elements(pair) == 3  # int, double, int
    status.Set_elements(pair, 2)
    assert status.Get_count(pair) == 1


def test_codes_and_dtypes_name_datatypes():
    assert datatype_of_spec("d") == datatype_of_spec(np.float64) == datatype_of_spec("f8") == DOUBLE
    with pytest.raises(KeyError):
        datatype_of_spec("nothing")
    assert not PREDEFINED["DATATYPE_NULL"]
    with pytest.raises(MpiException, match="DATATYPE_NULL"):
        PREDEFINED["DATATYPE_NULL"].Get_size()
