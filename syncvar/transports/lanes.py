"""A lane: a tcp connection to a rank of another host, which the thread that calls drives itself.

A frame on the stream is its header, the CRC-32 of its payload, and the payload. `Lane` sends from
the memory of the caller. A long payload arrives where `placer` says, or in memory of the lane.
Nothing here waits.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import socket
import struct
import termios
from typing import TYPE_CHECKING, Protocol

import numpy as np

from syncvar._native import crc32
from syncvar.core.errors import WireError
from syncvar.protocol.frame import CARRIERS, HEADER_NBYTES, parse_header
from syncvar.transports.base import Frame
from syncvar.transports.zeromq_sockets import CLOSED, ConnectionCopy

if TYPE_CHECKING:
    from syncvar.core.settings import RuntimeConfig
    from syncvar.protocol.frame import Header
    from syncvar.transports.base import BorrowedFrame, Place, Placer

_CHECKSUM = struct.Struct("<I")
_PREFIX_NBYTES = HEADER_NBYTES + _CHECKSUM.size
_NO_PAYLOAD = _CHECKSUM.pack(crc32(b""))
_JOINED_NBYTES_MAX = 4096  # a payload up to this size is copied behind its header
_STAGING_NBYTES = 16 << 10  # shorter frames are received here, several at a time
_PIECE_NBYTES = 256 << 10  # what is received at a time stays in the cache until it is used
_OUTQ = struct.Struct("=i")


class LaneConnection(Protocol):
    """A connected, non-blocking socket, or one with TLS."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def send(self, data: bytes, /) -> int:
        """Send bytes; return how many have gone, or raise BlockingIOError."""

    def recv(self, nbytes: int, /) -> bytes:
        """Receive up to so many bytes, none at the end; BlockingIOError if there are none now."""

    def close(self) -> None:
        """Close the socket."""


class LaneLoan:
    """A payload that a lane, or later a link, still reads."""

    __slots__ = ("is_over", "of_link")

    def __init__(self) -> None:
        self.is_over = False
        self.of_link: BorrowedFrame | None = None

    def is_done(self) -> bool:
        """Return whether the caller may write the memory again."""
        return self.is_over or (self.of_link is not None and self.of_link.is_done())


class QueuedFrame:
    """A frame that could not go at once; it owns its payload, or has lent it."""

    __slots__ = ("header", "loan", "payload")

    def __init__(self, header: bytes, payload: memoryview | None, *, borrow: bool) -> None:
        self.header = header
        self.loan = LaneLoan() if borrow and payload is not None else None
        if payload is not None and not borrow:
            payload = memoryview(bytes(payload))
        self.payload = payload

    def end(self) -> None:
        """Return the payload to its owner."""
        self.payload = None
        if self.loan is not None:
            self.loan.is_over = True


def configure(connection: socket.socket, config: RuntimeConfig) -> None:
    """Set the options of a tcp connection between hosts."""
    connection.settimeout(0.0)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if config.link_silence_s < 1e6:
        # No TCP_USER_TIMEOUT: it also ends a connection whose receiver computes for long.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, 1 + int(config.link_silence_s)),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Lane:
    """An open lane to a rank: frames in both directions, in order.

    `end` is empty while the peer may send more, and then the reason why it sends no more.
    """

    __slots__ = (
        "_checksum",
        "_config",
        "_copy",
        "_filled",
        "_header",
        "_outbox",
        "_parts",
        "_payload",
        "_place",
        "_staging",
        "_start",
        "_stop",
        "_sum",
        "end",
        "has_received",
        "peer",
        "placer",
        "socket",
    )

    has_checksums = True

    def __init__(self, peer: int, connection: socket.socket, config: RuntimeConfig) -> None:
        self.peer = peer
        self.socket = connection
        self.end = ""
        self.has_received = False
        self.placer: Placer | None = None
        self._config = config
        self._copy = ConnectionCopy(connection.fileno())
        self._outbox: collections.deque[QueuedFrame] = collections.deque()
        self._parts: list[memoryview] = []  # of the first frame of the outbox, once it is under way
        self._staging = memoryview(bytearray(_STAGING_NBYTES))
        self._start = self._stop = 0  # received and unused bytes of the staging memory
        self._header: Header | None = None  # of the long frame whose payload is under way
        self._checksum = self._sum = 0  # that it shall have, and that of what has arrived
        self._payload = memoryview(b"")
        self._place: Place | None = None  # whose memory the payload is
        self._filled = 0

    # -- sending -----------------------------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """Whether frames wait for the system to take them."""
        return bool(self._outbox)

    @property
    def has_staged(self) -> bool:
        """Whether received bytes wait that the system no longer signals."""
        return self._start < self._stop

    def send(self, header: bytes, payload: memoryview | None, *, borrow: bool) -> LaneLoan | None:
        """Send a frame, or queue what the system does not take now."""
        if self.end:
            return None
        if self._outbox:
            frame = QueuedFrame(header, payload, borrow=borrow)
            self._outbox.append(frame)
            return frame.loan
        parts = self._parts_of(header, payload)
        count = self._offer(parts)
        nbytes = sum(map(len, parts))
        if count >= nbytes:
            return None
        frame = QueuedFrame(header, payload, borrow=borrow)
        self._outbox.append(frame)
        self._parts = _after(_parts(parts[0], frame.payload), count)
        return frame.loan

    def flush(self) -> None:
        """Send queued frames, as much as the system takes."""
        while self._outbox and not self.end:
            frame = self._outbox[0]
            if not self._parts:
                self._parts = self._parts_of(frame.header, frame.payload)
            count = self._offer(self._parts)
            self._parts = _after(self._parts, count)
            if self._parts or not self._outbox:
                return
            self._outbox.popleft().end()

    def put(self, frame: QueuedFrame) -> None:
        """Queue a frame that has waited for the lane."""
        self._outbox.append(frame)

    def _parts_of(self, header: bytes, payload: memoryview | None) -> list[memoryview]:
        """Return the bytes of a frame on the stream."""
        has_sum = self.has_checksums and payload is not None and payload.nbytes
        checksum = _CHECKSUM.pack(crc32(payload)) if has_sum else _NO_PAYLOAD
        return _parts(memoryview(header + checksum), payload)

    def _offer(self, parts: list[memoryview]) -> int:
        """Return how many bytes of the parts have gone; all of them if the lane is broken."""
        try:
            return self._give(parts)
        except BlockingIOError:
            return 0
        except OSError:  # what the peer has sent before may still be there: its end decides
            self._drop()
            return sum(map(len, parts))

    def _give(self, parts: list[memoryview]) -> int:
        """Return how many bytes the system has taken."""
        return self.socket.send(parts[0]) if len(parts) == 1 else self.socket.sendmsg(parts)

    def _take(self, memory: memoryview) -> int:
        """Receive bytes; return 0 at the end, and raise BlockingIOError if there are none now."""
        return self.socket.recv_into(memory)

    def _drop(self) -> None:
        for frame in self._outbox:
            frame.end()
        self._outbox.clear()
        self._parts = []

    def unacknowledged(self) -> int:
        """Return how many bytes the other host has not acknowledged."""
        with contextlib.suppress(OSError):
            (held,) = _OUTQ.unpack(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(_OUTQ.size)))
            return int(held)
        return 0

    # -- receiving ---------------------------------------------------------------------------------

    def receive(self) -> Frame | None:
        """Return the next frame that has arrived completely, or None; see `end`.

        Raises WireError for bytes that are no frame.
        """
        frame = self._rest_of_payload() if self._header is not None else self._next_staged()
        while frame is None and self._may_fill():
            frame = self._rest_of_payload() if self._header is not None else self._next_staged()
        return frame

    def _may_fill(self) -> bool:
        """Receive bytes unless a payload is under way; return whether there are new ones."""
        return self._header is None and self._fill()

    def _next_staged(self) -> Frame | None:
        """Return the next frame of the staging memory, or begin to receive a long one."""
        start = self._start
        if self._stop - start < _PREFIX_NBYTES:
            return None
        staging = self._staging
        header = parse_header(
            bytes(staging[start : start + HEADER_NBYTES]), self._config.segment_bytes
        )
        (checksum,) = _CHECKSUM.unpack_from(staging, start + HEADER_NBYTES)
        nbytes = header.nbytes if header.kind in CARRIERS else 0
        begin = start + _PREFIX_NBYTES
        if begin + nbytes <= self._stop:
            self._start = begin + nbytes
            payload = bytes(staging[begin : begin + nbytes])
            self._check(header, payload, checksum)
            return Frame(header, payload)
        if _PREFIX_NBYTES + nbytes > _STAGING_NBYTES:
            self._begin_long(header, checksum, staging[begin : self._stop])
            return self._rest_of_payload()
        return None

    def _fill(self) -> bool:
        """Receive bytes into the staging memory; return whether there were any."""
        left = self._stop - self._start
        if self._start:
            self._staging[:left] = self._staging[self._start : self._stop]
            self._start, self._stop = 0, left
        nbytes = self._receive_into(self._staging[left:])
        self._stop += nbytes
        return nbytes > 0

    def _begin_long(self, header: Header, checksum: int, first: memoryview) -> None:
        """Begin to receive a long payload, whose first bytes are staged."""
        self._header, self._checksum, self._sum = header, checksum, 0
        self._start = self._stop = self._filled = 0
        if self.placer is not None and header.source == self.peer:
            self._place = self.placer(header)
        if self._place is not None:
            self._payload = self._place.memory
            with self._place.lock:
                if self._place.is_open:
                    self._payload[: len(first)] = first
        else:
            self._payload = np.empty(header.nbytes, np.uint8).data
            self._payload[: len(first)] = first
        self._count(first)

    def _count(self, received: memoryview) -> None:
        """Count bytes of the payload that have arrived, while they are in the cache."""
        self._filled += len(received)
        if self.has_checksums:
            self._sum = crc32(received, self._sum)

    def _rest_of_payload(self) -> Frame | None:
        while self._filled < len(self._payload):
            if self._place is None:
                is_new = self._receive_piece()
            else:
                with self._place.lock:
                    if self._place.is_open:
                        is_new = self._receive_piece()
                    else:  # nobody waits for it any more
                        self._payload = np.empty(len(self._payload), np.uint8).data
                        self._place = None
                        continue
            if not is_new:
                return None
        header, payload = self._header, self._payload
        assert header is not None
        self._header, self._payload, self._place = None, memoryview(b""), None
        if self.has_checksums and self._sum != self._checksum:
            raise WireError(f"the checksum of a payload of rank {header.source} is wrong")
        return Frame(header, payload)

    def _receive_piece(self) -> bool:
        """Receive bytes of the payload; return whether there were any."""
        begin = self._filled
        nbytes = self._receive_into(self._payload[begin : begin + _PIECE_NBYTES])
        if nbytes:
            self._count(self._payload[begin : begin + nbytes])
        return nbytes > 0

    def _receive_into(self, memory: memoryview) -> int:
        """Receive bytes; 0 if there are none now, or never more."""
        if self.end:
            return 0
        try:
            nbytes = self._take(memory)
        except BlockingIOError:
            return 0
        except OSError:
            nbytes = 0
        if nbytes:
            self.has_received = True
        else:
            self.end = self._copy.reason(self._config) or CLOSED
            self._drop()
        return nbytes

    def _check(self, header: Header, payload: bytes | memoryview, checksum: int) -> None:
        if self.has_checksums and crc32(payload) != checksum:
            raise WireError(f"the checksum of a payload of rank {header.source} is wrong")

    def close(self) -> None:
        """Close the lane; drop queued frames, and what has arrived and was not received."""
        self.end = self.end or CLOSED
        self._header = self._place = None
        self._start = self._stop = 0
        self._drop()
        self._copy.close()
        self.socket.close()


def _parts(prefix: memoryview, payload: memoryview | None) -> list[memoryview]:
    """Return a short frame in one part, and a long one in two; the prefix may have both already."""
    if payload is None or not payload.nbytes or len(prefix) > _PREFIX_NBYTES:
        return [prefix]
    if payload.nbytes <= _JOINED_NBYTES_MAX:
        return [memoryview(bytes(prefix) + payload)]
    return [prefix, payload]


def _after(parts: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return what is left of parts behind so many bytes."""
    left = []
    for part in parts:
        if nbytes < len(part):
            left.append(part[nbytes:])
        nbytes = max(0, nbytes - len(part))
    return left
