"""What the mpi4py layer takes as a buffer."""

import array

import numpy as np
import pytest

from syncvar.compat.mpi4py.mpi_buffers import (
    buffer,
    memory_of,
    simple_region,
    typed_regions,
    vector_regions,
)
from syncvar.compat.mpi4py.mpi_datatypes import PREDEFINED

INT, DOUBLE = PREDEFINED["INT"], PREDEFINED["DOUBLE"]


class FakeTensor:
    def __init__(self, values, name="__array_interface__"):
        self.values = values
        setattr(self, name, values.__array_interface__)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(4, dtype="i"),
        np.asfortranarray(np.arange(4, dtype="i").reshape(2, 2).T),
        array.array("i", range(4)),
        memoryview(array.array("i", range(4))),
        FakeTensor(np.arange(4, dtype="i")),
        FakeTensor(np.arange(4, dtype="i"), "__cuda_array_interface__"),
        [np.arange(4, dtype="i"), INT],
        [np.arange(9, dtype="i"), 4],
        [np.arange(-2, 9, dtype="i"), (4, 2), "i"],
        (bytearray(np.arange(4, dtype="i").tobytes()), "i"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_buffers_with_four_integers(value):
    region = simple_region(value)
    assert region.count == 4
    assert region.packed().view("i").tolist() == [0, 1, 2, 3]


def test_memory_is_that_of_the_object():
    values = np.zeros((2, 3))
    memory_of(values).bytes[:] = 255
    assert np.isnan(values).all()
    with pytest.raises(BufferError, match="contiguous"):
        memory_of(np.zeros((4, 4))[:, 1])
    with pytest.raises(TypeError):
        memory_of(3)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ([np.zeros(3), 4], "too few"),
        ([np.zeros(3), -1], "negative count"),
        ([np.zeros(3, "i"), DOUBLE], "multiple"),
        ([], "1 to 4"),
    ],
)
def test_messages_that_are_wrong(message, error):
    with pytest.raises(ValueError, match=error):
        simple_region(message)


@pytest.mark.parametrize(
    ("message", "places"),
    [
        (np.zeros(5), [(2, 0), (2, 2), (1, 4)]),
        ([np.zeros(6), 2], [(2, 0), (2, 2), (2, 4)]),
        ([np.zeros(9), (2, 3)], [(2, 0), (2, 3), (2, 6)]),
        ([np.zeros(9), [1, 0, 3], [8, 0, 2], DOUBLE], [(1, 8), (0, 0), (3, 2)]),
        ([np.zeros(9), ([1, 0, 3], [8, 0, 2]), "d"], [(1, 8), (0, 0), (3, 2)]),
        ([np.zeros(6), [1, 2, 3]], [(1, 0), (2, 1), (3, 3)]),
    ],
)
def test_counts_and_displacements(message, places):
    found = [(one.count, one.origin // 8) for one in vector_regions(message, 3)]
    assert found == places


def test_datatypes_of_each_rank():
    one, other = typed_regions([np.zeros(4), ([1, 2], [8, 16]), [DOUBLE, INT]], 2)
    assert (one.count, one.origin, one.nbytes) == (1, 8, 8)
    assert (other.count, other.origin, other.nbytes) == (2, 16, 8)


def test_a_buffer_object_is_memory_for_numpy():
    memory = buffer.allocate(16, clear=True)
    values = np.frombuffer(memory, np.int64)
    values[1] = 7
    assert len(memory) == memory.nbytes == 16
    assert memory[8] == 7
    memory[:2] = b"\x01\x02"
    assert bytes(memory[:3]) == b"\x01\x02\x00"
    assert buffer.fromaddress(memory.address, 16) == memory
    assert memory.toreadonly().readonly
    assert not memory.readonly
