"""Streams of messages over Unix sockets between two processes of one host, without a thread.

The thread that waits for an answer reads the socket itself. A short message costs one system call
at each end. Sending never waits: what a socket does not take at once is kept and sent later.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from syncvar.parameter_server.transport.framing import NBYTES_MAX, Packed, length_of

_CHUNK_NBYTES = 128 << 10
_JOINED_NBYTES_MAX = 32 << 10  # shorter messages are joined: that is less work than many pieces
_PIECES_MAX = 512  # of one system call; the limit of Linux is 1024
_BACKLOG = 4096


class UnixListener:
    """The socket at `path` where processes of this host connect; only for this user."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._path.unlink(missing_ok=True)
            self._socket.bind(path)
            self._path.chmod(0o600)
            self._socket.listen(_BACKLOG)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor for a poller."""
        return self._socket.fileno()

    def accept(self) -> Pipe | None:
        """Return a new pipe of another process, or None."""
        try:
            connected, _ = self._socket.accept()
        except OSError:
            return None
        return Pipe(connected)

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


class Pipe:
    """One end of a stream.

    Attributes:
        peer: Data of the owner about the other end.
        is_over: Whether the stream has ended.
        has_more: Whether `receive` may return another message that no poller signals.
    """

    def __init__(self, connected: socket.socket, *, is_opener: bool = False) -> None:
        connected.settimeout(0.0)
        self._socket = connected
        self.is_opener = is_opener
        self.peer: Any = None
        self.is_over = False
        self._unsent: deque[memoryview] = deque()
        self._buffer = memoryview(bytearray(_CHUNK_NBYTES))
        self._is_full = False  # the last read filled the buffer
        self._chunk = memoryview(b"")  # received bytes of the next messages
        self.has_more = True
        self._filling: memoryview | None = None  # a message that is partly received
        self._filled = 0

    @classmethod
    def open(cls, path: str, hello: Packed) -> Pipe:
        """Connect and send a hello; the pipe is over if no process listens."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        pipe = cls(connected, is_opener=True)
        try:
            connected.connect(path)
        except OSError:
            pipe.close()
        else:
            pipe.send(hello)
        return pipe

    def fileno(self) -> int:
        """Return the descriptor for a poller."""
        return self._socket.fileno()

    @property
    def is_behind(self) -> bool:
        """Whether there are unsent bytes."""
        return bool(self._unsent)

    def send(self, message: Packed) -> bool:
        """Send a message without separate parts; its buffers must not change. False if over."""
        if self.is_over:
            return False
        pieces: list[Any] = message.pieces
        if message.nbytes <= _JOINED_NBYTES_MAX:
            pieces = [b"".join(pieces)]
        if not self._unsent:
            with contextlib.suppress(BlockingIOError):
                sent = self._put(pieces)
                if sent == message.nbytes:
                    return True
                pieces = _after(pieces, sent)
        if not self.is_over:
            self._unsent.extend(_after(pieces, 0))
        return not self.is_over

    def flush(self) -> None:
        """Send unsent bytes, as many as the socket takes now."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._put(list(self._unsent))
                while self._unsent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.popleft())
                if sent:
                    self._unsent[0] = self._unsent[0][sent:]

    def receive(self, nbytes_max: int = NBYTES_MAX) -> memoryview | None:
        """Return the next whole message, which does not change, or None.

        Call it until it returns None, or until `has_more` is False.
        """
        if self._filling is not None:
            return self._fill()
        if len(self._chunk) < 8:
            try:
                nbytes = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return None
            except OSError:
                nbytes = 0
            if not nbytes:
                self.is_over = True
                return None
            self._is_full = nbytes == _CHUNK_NBYTES
            # One buffer for all reads: the system would allocate and free a new one each time.
            received = bytes(self._buffer[:nbytes])
            self._chunk = memoryview(bytes(self._chunk) + received if self._chunk else received)
            if len(self._chunk) < 8:
                return None
        nbytes = length_of(self._chunk, nbytes_max)
        if nbytes <= len(self._chunk):
            message, self._chunk = self._chunk[:nbytes], self._chunk[nbytes:]
            self.has_more = self._is_full or len(self._chunk) >= 8
            return message
        self._filling = memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]
        self._filled = len(self._chunk)
        self._filling[: self._filled] = self._chunk
        self._chunk = memoryview(b"")
        return self._fill()

    def close(self, linger_s: float = 0.0) -> None:
        """Flush for at most `linger_s`, and close. Idempotent."""
        until = time.monotonic() + linger_s
        while self._unsent and not self.is_over and (left_s := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            poll.poll(1000 * left_s + 1)
            self.flush()
        self._end()
        self._socket.close()

    def _fill(self) -> memoryview | None:
        whole = self._filling
        assert whole is not None, "a message is partly received"
        while self._filled < len(whole):
            try:
                nbytes = self._socket.recv_into(whole[self._filled :])
            except BlockingIOError:
                return None
            except OSError:
                nbytes = 0
            if not nbytes:
                self._end()
                return None
            self._filled += nbytes
        self._filling = None
        self.has_more = True
        return whole.toreadonly()

    def _put(self, pieces: list[Any]) -> int:
        try:
            if len(pieces) == 1:
                return self._socket.send(pieces[0])
            return self._socket.sendmsg(pieces[:_PIECES_MAX])
        except BlockingIOError:
            raise
        except OSError:  # the other process has ended
            self._end()
            return 0

    def _end(self) -> None:
        self.is_over = True
        self._unsent.clear()


def _after(pieces: list[Any], nbytes: int) -> list[memoryview]:
    """Return the pieces without their first `nbytes` bytes."""
    left: list[memoryview] = []
    for one in pieces:
        size = memoryview(one).nbytes
        if size > nbytes:
            left.append(memoryview(one).cast("B")[nbytes:])
        nbytes = max(0, nbytes - size)
    return left
