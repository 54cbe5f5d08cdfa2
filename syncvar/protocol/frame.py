"""The header of a data frame: fixed layout, checksum, limits.

A frame is a header of `HEADER_NBYTES` bytes and a payload of `Header.nbytes` bytes, which travels as a second message
part (or not at all when it is empty). The header names the message completely, so that a frame can never be taken for
another call's.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from syncvar.core.errors import WireError

PROTOCOL_VERSION = 1
_MAGIC = b"sv"
_BODY = struct.Struct("<2sBBIIQQIIQQ")
_CHECKSUM = struct.Struct("<I")
HEADER_NBYTES = _BODY.size + _CHECKSUM.size


class FrameType(IntEnum):
    """What a frame is for."""

    DATA = 1
    CREDIT = 2
    BYE = 3
    ASK = 4  # outside the calls: a question to the receiver's engine
    ANSWER = 5
    KNOCK = 6  # the sender waits in this call, whose bytes go through shared memory


CARRIERS = frozenset({FrameType.DATA, FrameType.ANSWER})
"""The kinds of frames that have a payload."""


class Header(NamedTuple):
    """A parsed header.

    Args:
        kind: What the frame is for.
        source: Rank of the sender in the world.
        generation: Version of the membership.
        group: Identity of the group, the same on all its ranks.
        call: Number of the call within the group; of ASK and ANSWER, the asker's number of the question.
        round: Round of the plan, counted through all stages of the call; of ANSWER, how many frames the answer has.
        segment: Which part of the chunk this is.
        fingerprint: 64-bit digest of (collective, op, dtype, shape, root, name); of ASK and ANSWER, of what is asked.
        nbytes: Bytes of the payload; of a CREDIT frame, the bytes given back.
    """

    kind: int
    source: int
    generation: int
    group: int
    call: int
    round: int
    segment: int
    fingerprint: int
    nbytes: int


def pack_header(
    kind: int,
    source: int,
    generation: int,
    group: int,
    call: int = 0,
    round_index: int = 0,
    segment: int = 0,
    fingerprint: int = 0,
    nbytes: int = 0,
) -> bytes:
    """Return the bytes of a header.

    Example:
        >>> parse_header(pack_header(FrameType.DATA, 3, 0, 1, 7, nbytes=40)).call
        7
    """
    body = _BODY.pack(
        _MAGIC,
        PROTOCOL_VERSION,
        kind,
        source,
        generation,
        group,
        call,
        round_index,
        segment,
        fingerprint,
        nbytes,
    )
    return body + _CHECKSUM.pack(zlib.crc32(body))


def parse_header(data: bytes, nbytes_max: int = 1 << 40) -> Header:
    """Read a header.

    Args:
        data: Exactly `HEADER_NBYTES` bytes.
        nbytes_max: Largest payload accepted, in bytes.

    Raises:
        WireError: Wrong length, magic, version, checksum, kind or size; the message says which.
    """
    if len(data) != HEADER_NBYTES:
        raise WireError(f"a header has {HEADER_NBYTES} bytes, not {len(data)}")
    magic, version, kind, *rest = _BODY.unpack_from(data)
    if magic != _MAGIC:
        raise WireError(f"not a frame of syncvar: it begins with {magic!r}")
    if version != PROTOCOL_VERSION:
        raise WireError(f"frame of protocol {version}, this process speaks {PROTOCOL_VERSION}")
    if _CHECKSUM.unpack_from(data, _BODY.size)[0] != zlib.crc32(data[: _BODY.size]):
        raise WireError("the checksum of a header is wrong")
    if not FrameType.DATA <= kind <= FrameType.KNOCK:
        raise WireError(f"unknown kind of frame {kind}")
    if kind in CARRIERS and rest[7] > nbytes_max:
        raise WireError(f"a payload of {rest[7]} bytes exceeds the limit of {nbytes_max}")
    return Header(kind, *rest)
