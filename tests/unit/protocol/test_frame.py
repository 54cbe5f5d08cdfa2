"""The header of a frame: one layout, one form, and nothing but WireError for everything else."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncvar.core.errors import WireError
from syncvar.protocol.frame import HEADER_NBYTES, FrameType, Header, parse_header

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
headers = st.builds(
    Header,
    st.sampled_from([int(kind) for kind in FrameType]),
    U32,
    U32,
    U64,
    U64,
    U32,
    U32,
    U64,
    st.integers(0, 1 << 40),
)
many = settings(max_examples=400, deadline=None)
SAMPLE = Header(FrameType.DATA, 3, 1, 99, 12345, 6, 7, 0xDEADBEEF, 4096).pack()


@many
@given(headers)
def test_a_header_is_read_as_it_was_written(header):
    data = Header(*header).pack()
    assert len(data) == HEADER_NBYTES
    assert parse_header(data) == header


@many
@given(headers)
def test_a_header_has_one_form(header):
    assert Header(*parse_header(Header(*header).pack())).pack() == Header(*header).pack()


def test_every_single_bit_that_changes_is_noticed():
    for bit in range(len(SAMPLE) * 8):
        flipped = bytearray(SAMPLE)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            parse_header(bytes(flipped))


def test_every_byte_that_changes_is_noticed():
    for place in range(len(SAMPLE)):
        for value in range(256):
            if value != SAMPLE[place]:
                with pytest.raises(WireError):
                    parse_header(SAMPLE[:place] + bytes([value]) + SAMPLE[place + 1 :])


@pytest.mark.parametrize(
    "length", [length for length in range(2 * HEADER_NBYTES) if length != HEADER_NBYTES]
)
def test_a_header_that_is_too_short_or_too_long_is_refused(length):
    with pytest.raises(WireError, match=f"not {length}"):
        parse_header((SAMPLE + SAMPLE)[:length])


@settings(max_examples=2000, deadline=None)
@given(st.binary(max_size=2 * HEADER_NBYTES))
def test_random_bytes_are_refused_with_wire_error_only(data):
    with pytest.raises(WireError):
        parse_header(data)


def test_random_bytes_of_the_right_length_and_beginning_are_refused():
    draw = random.Random(0)
    for _ in range(20_000):
        with pytest.raises(WireError):
            parse_header(SAMPLE[:4] + draw.randbytes(HEADER_NBYTES - 4))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"XX" + SAMPLE[2:], "not a frame of syncvar"),
        (SAMPLE[:2] + b"\x63" + SAMPLE[3:], "protocol 99"),
        (SAMPLE[:-1] + bytes([SAMPLE[-1] ^ 1]), "checksum"),
        (Header(0, 0, 0, 0).pack(), "unknown kind of frame 0"),
        (Header(200, 0, 0, 0).pack(), "unknown kind of frame 200"),
    ],
)
def test_the_refusal_says_what_is_wrong(data, reason):
    with pytest.raises(WireError, match=reason):
        parse_header(data)


def test_a_payload_beyond_the_limit_is_refused_and_one_at_the_limit_is_not():
    assert parse_header(Header(FrameType.DATA, 0, 0, 0, nbytes=1000).pack(), 1000).nbytes == 1000
    with pytest.raises(WireError, match="1001 bytes exceeds the limit of 1000"):
        parse_header(Header(FrameType.DATA, 0, 0, 0, nbytes=1001).pack(), 1000)
