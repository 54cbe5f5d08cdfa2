"""Messages between workers and servers as bytes: they come out as they went in, or are refused."""

import itertools

import pytest

from syncvar.core.errors import InternalError
from syncvar.parameter_server.messages import (
    NBYTES_MAX,
    join_frames,
    length_of,
    pack_frames,
    split_part,
    unpack_frames,
)
from syncvar.protocol.frame import FRAME_NBYTES
from syncvar.shm.segment_file import SegmentId, SharedMemoryReference

HERE = SegmentId(2, 3, 4)
PARTS = [b"head", b"", b"x" * 8, b"y" * 100, b"z"]


def whole_of(message):
    whole = b"".join(message.pieces)
    assert len(whole) == message.nbytes == length_of(whole)
    return whole


@pytest.mark.parametrize("separate_nbytes", [1, 8, 100, NBYTES_MAX])
@pytest.mark.parametrize("has_checksum", [False, True])
def test_parts_come_out_as_they_went_in(separate_nbytes, has_checksum):
    message = pack_frames(
        PARTS, segment=HERE, has_checksum=has_checksum, separate_nbytes=separate_nbytes
    )
    assert [len(one) for one in message.separate] == [
        len(one) for one in PARTS if len(one) >= separate_nbytes
    ]
    frames, segment = unpack_frames(whole_of(message), message.separate)
    assert ([bytes(one) for one in frames], segment) == (PARTS, HERE)


def test_parts_begin_at_multiples_of_eight_bytes():
    whole = whole_of(pack_frames(PARTS))
    starts = [whole.index(one) for one in PARTS if one]
    assert [start % 8 for start in starts] == [0] * len(starts)


def test_what_is_lent_is_borrowed_and_nothing_of_it_is_sent():
    lent = [SharedMemoryReference(HERE, 64, 8), SharedMemoryReference(HERE, 0, 100)]
    message = pack_frames(PARTS, [(2, lent[0]), (3, lent[1])], segment=HERE)
    asked = []
    frames, segment = unpack_frames(
        whole_of(message), (), lambda reference: asked.append(reference) or b"lent"
    )
    assert (asked, segment, frames[2:4]) == (lent, HERE, [b"lent"] * 2)
    assert b"xxxxxxxx" not in whole_of(message)
    with pytest.raises(
        InternalError,
        match=r"8 bytes .*in segment .* \(host 2, generation 3\), and this process has mapped no shared memory",
    ):
        unpack_frames(whole_of(message))
    with pytest.raises(ValueError, match="names no shared memory"):
        unpack_frames(whole_of(pack_frames(PARTS, [(2, lent[0])])))


def test_what_is_cut_off_or_changed_is_refused():
    whole = whole_of(pack_frames(PARTS, has_checksum=True))
    for end in range(0, len(whole), 8):
        with pytest.raises(ValueError, match=r"message|cut"):
            unpack_frames(whole[:end] if end < 8 else end.to_bytes(8, "little") + whole[8:end])
    for at, bit in itertools.product(
        (whole.index(b"head"), whole.index(b"y" * 100) + 99), range(8)
    ):
        changed = bytearray(whole)
        changed[at] ^= 1 << bit
        with pytest.raises(ValueError, match="not as it was sent"):
            unpack_frames(changed)


def test_parts_travel_in_frames_of_which_none_is_long():
    parts = [
        bytes(size) + b"."
        for size in (
            0,
            FRAME_NBYTES - 2,
            FRAME_NBYTES - 1,
            FRAME_NBYTES,
            2 * FRAME_NBYTES - 1,
            9,
            3 * FRAME_NBYTES,
        )
    ]
    frames = [frame for part in parts for frame in split_part(part)]
    assert max(map(len, frames)) == FRAME_NBYTES
    assert [bytes(one) for one in join_frames(iter(frames))] == parts
    assert join_frames(iter(frames))[0] is parts[0], "what is short is not copied"
    with pytest.raises(ValueError, match="the last frames of a message are missing"):
        join_frames(frames[:-1])


@pytest.mark.parametrize("apart", [[], [b"x" * 7], [b"x" * 8, b"more"]])
def test_parts_that_are_apart_have_to_be_there(apart):
    message = pack_frames([b"head", b"x" * 8], separate_nbytes=8)
    with pytest.raises(ValueError, match="message"):
        unpack_frames(whole_of(message), apart)


@pytest.mark.parametrize("nbytes", [0, 8, 25, NBYTES_MAX + 8])
def test_no_message_has_such_a_length(nbytes):
    with pytest.raises(ValueError, match="long"):
        length_of(nbytes.to_bytes(8, "little"))


def test_who_has_not_introduced_himself_may_say_less():
    assert length_of((4096).to_bytes(8, "little"), 4096) == 4096
    with pytest.raises(ValueError, match="4104 bytes long"):
        length_of((4104).to_bytes(8, "little"), 4096)
