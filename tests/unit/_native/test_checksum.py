"""The checksum of frames is that of zlib, whichever code computes it."""

import random
import zlib

import pytest

from syncvar._native import crc32

LENGTHS = [*range(300), *range(1000, 2100, 37), 4097, 65535, 65536, 65537, (1 << 20) + 5]


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_the_checksum_is_that_of_zlib(offset):
    data = memoryview(random.Random(1).randbytes(max(LENGTHS) + offset))[offset:]
    for nbytes in LENGTHS:
        assert crc32(data[:nbytes]) == zlib.crc32(data[:nbytes]), nbytes


def test_each_flipped_bit_changes_the_checksum():
    data = bytearray(random.Random(2).randbytes(500))
    right = crc32(data)
    for bit in range(0, len(data) * 8, 3):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32(data) != right
        data[bit // 8] ^= 1 << bit % 8


def test_an_object_without_bytes_is_refused():
    with pytest.raises(TypeError):
        crc32("text")


def test_a_checksum_goes_on_behind_the_bytes_before():
    data = memoryview(random.Random(3).randbytes(9000))
    for cut in (0, 1, 127, 128, 1024, 5000, 9000):
        assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data), cut
    for wrong in ((), (data, 1, 2), (data, "1")):
        with pytest.raises(TypeError):
            crc32(*wrong)
