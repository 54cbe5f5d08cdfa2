"""The header of a data frame, and the limits of message lengths.

A frame is a header of `HEADER_NBYTES` bytes and a payload of `Header.nbytes` bytes. The payload
travels as a second message part, or not at all if it is empty. The header identifies the message
completely, so a frame is never taken for one of another call.

The limits keep an unauthenticated peer from making a process use much memory. ZeroMQ compares the
announced length of a frame with the socket's limit before it allocates memory, and the limit cannot
change once a peer has authenticated. So all frames of syncvar are short: a longer message travels
in several frames. Unauthenticated peers have two more limits. `UnauthenticatedPeers`
(`transports/curve.py`) closes a connection after `UNPROVED_NBYTES_MAX` bytes without
authentication. On a stream with our own framing the first message has at most `HELLO_NBYTES_MAX`
bytes.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from syncvar.core.errors import WireError

PROTOCOL_VERSION = 6  # of frames and of control messages
_MAGIC = b"sv"
_BODY = struct.Struct("<2sBBIIQQIIQQ")
_CHECKSUM = struct.Struct("<I")
_WHOLE = struct.Struct(f"{_BODY.format}I")
HEADER_NBYTES = _WHOLE.size

# Longest frame between workers and servers; between ranks the setting `segment_bytes` holds.
# An array of 1 MiB fits into one frame, so that the receiver need not copy it.
FRAME_NBYTES = (1 << 20) + 4096

# Allowance for the header of a frame and the overhead of encryption.
FRAMING_NBYTES = 4096

# Longest message between a worker and the launcher.
CONTROL_NBYTES_MAX = 1 << 20

# Most bytes of a connection before its peer has authenticated; a handshake takes less than 1 KiB.
UNPROVED_NBYTES_MAX = 64 << 10

# Longest first message on a stream.
HELLO_NBYTES_MAX = 4096


class FrameType(IntEnum):
    """Purpose of a frame."""

    DATA = 1
    CREDIT = 2
    BYE = 3
    ASK = 4  # a one-sided read: a question to the receiver's engine, outside the calls
    ANSWER = 5
    WAKE = 6  # wake-up: the sender waits in this call, whose data are in shared memory
    LANE = 7  # offer of a lane: `call` is its port, or 1 of the rank that connects; 0 refuses it
    PROBE = 8  # of the probe between hosts: `round` says whether it asks, answers or ends it


_KIND_FIRST, _KIND_LAST = int(min(FrameType)), int(max(FrameType))
CARRIERS = frozenset({FrameType.DATA, FrameType.ANSWER, FrameType.LANE, FrameType.PROBE})
"""Types of frames that have a payload."""


class Header(NamedTuple):
    """The header of a frame."""

    kind: int  # purpose of the frame, a FrameType
    source: int  # world rank of the sender
    generation: int  # version of the membership
    group: int  # identity of the group, the same on all its ranks
    # Call number within the group; in ASK and ANSWER: the asker's number of the question.
    call: int = 0
    # Round of the schedule, counted over all stages; in ANSWER: frames of the answer.
    round: int = 0
    segment: int = 0  # index of this part of the chunk
    # 64-bit hash of (collective, op, dtype, shape, root, name); in ASK and ANSWER: hash of
    # the question.
    fingerprint: int = 0
    nbytes: int = 0  # bytes of the payload; in CREDIT: bytes given back

    def pack(self) -> bytes:
        """Return the header as bytes."""
        body = _BODY.pack(_MAGIC, PROTOCOL_VERSION, *self)
        return body + _CHECKSUM.pack(zlib.crc32(body))


def parse_header(data: bytes, nbytes_max: int = 1 << 40) -> Header:
    """Return the fields of a header; WireError if it is wrong or its payload too long."""
    if len(data) != HEADER_NBYTES:
        raise WireError(f"a header has {HEADER_NBYTES} bytes, not {len(data)}")
    magic, version, *fields, checksum = _WHOLE.unpack(data)
    if magic != _MAGIC:
        raise WireError(f"not a frame of syncvar: it begins with {magic!r}")
    if version != PROTOCOL_VERSION:
        raise WireError(f"frame of protocol {version}, this process speaks {PROTOCOL_VERSION}")
    if checksum != zlib.crc32(data[: _BODY.size]):
        raise WireError("the checksum of a header is wrong")
    header = Header._make(fields)
    if not _KIND_FIRST <= header.kind <= _KIND_LAST:
        raise WireError(f"unknown kind of frame {header.kind}")
    if header.kind in CARRIERS and header.nbytes > nbytes_max:
        raise WireError(f"a payload of {header.nbytes} bytes exceeds the limit of {nbytes_max}")
    return header
