"""Links between two processes of one host: streams of messages over Unix sockets, without a thread of ZeroMQ at either end.

The thread that waits for an answer reads it from the socket itself, and nobody else has to run in between. A short message is one
system call at each end. What a socket does not take at once is kept and sent when it does: sending never waits.
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
_PIECES_MAX = 512  # of one system call, which takes 1024
_BACKLOG = 4096


class UnixListener:
    """Where the processes of a host open pipes to this one.

    Args:
        path: Of the socket, which only this user may open.

    Raises:
        OSError: The system refuses.
    """

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
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def accept(self) -> Pipe | None:
        """Return a pipe that somebody has opened, or None."""
        try:
            made, _ = self._socket.accept()
        except OSError:
            return None
        return Pipe(made)

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


class Pipe:
    """One end.

    Args:
        connected: The socket.
        is_opener: This end has opened it.

    Attributes:
        peer: What its owner knows of the other end.
        is_over: Nothing can be sent or comes any more.
        has_more: Whether `receive` may have another message in hand, of which the descriptor does not tell.
    """

    def __init__(self, connected: socket.socket, *, is_opener: bool = False) -> None:
        connected.setblocking(False)
        self._socket = connected
        self.is_opener = is_opener
        self.peer: Any = None
        self.is_over = False
        self._unsent: deque[memoryview] = deque()
        self._room = memoryview(bytearray(_CHUNK_NBYTES))
        self._is_full = False  # the last look found as much as it would take
        self._chunk = memoryview(b"")  # what has come and is not taken
        self.has_more = True
        self._filling: memoryview | None = None  # a message of which a part has come
        self._filled = 0

    @classmethod
    def open(cls, path: str, hello: Packed) -> Pipe:
        """Open a pipe, and introduce this end; the pipe is over where nobody is there."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        made = cls(connected, is_opener=True)
        try:
            connected.connect(path)
        except OSError:
            made.close()
        else:
            made.send(hello)
        return made

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    @property
    def is_behind(self) -> bool:
        """Whether something is kept that was not sent yet."""
        return bool(self._unsent)

    def send(self, message: Packed) -> bool:
        """Send a message that has nothing apart; what it consists of must not change any more.

        Returns:
            Whether it is on its way.
        """
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
        """Send what is kept, as much as the socket takes now."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._put(list(self._unsent))
                while self._unsent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.popleft())
                if sent:
                    self._unsent[0] = self._unsent[0][sent:]

    def receive(self, nbytes_max: int = NBYTES_MAX) -> memoryview | None:
        """Return the next message, or None where it has not come as a whole; it stays as it is.

        Call it until it returns None, or has no more.

        Args:
            nbytes_max: The longest message that the other end may send now.

        Raises:
            ValueError: What comes is no message, or a longer one.
        """
        if self._filling is not None:
            return self._fill()
        if len(self._chunk) < 8:
            try:
                nbytes = self._socket.recv_into(self._room)
            except BlockingIOError:
                return None
            except OSError:
                nbytes = 0
            if not nbytes:
                self.is_over = True
                return None
            self._is_full = nbytes == _CHUNK_NBYTES
            came = bytes(
                self._room[:nbytes]
            )  # a chunk of its own each time would come from the system, and go back to it
            self._chunk = memoryview(bytes(self._chunk) + came if self._chunk else came)
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
        """Flush for at most so many seconds, and close. Idempotent."""
        until = time.monotonic() + linger_s
        while self._unsent and not self.is_over and (left_s := until - time.monotonic()) > 0:
            waiting = select.poll()
            waiting.register(self._socket, select.POLLOUT)
            waiting.poll(1000 * left_s + 1)
            self.flush()
        self._end()
        self._socket.close()

    def _fill(self) -> memoryview | None:
        whole = self._filling
        assert whole is not None, "a message is filled that has begun"
        while self._filled < len(whole):
            try:
                came = self._socket.recv_into(whole[self._filled :])
            except BlockingIOError:
                return None
            except OSError:
                came = 0
            if not came:
                self._end()
                return None
            self._filled += came
        self._filling = None
        self.has_more = True
        return whole.toreadonly()

    def _put(self, pieces: list[Any]) -> int:
        try:
            return (
                self._socket.send(pieces[0])
                if len(pieces) == 1
                else self._socket.sendmsg(pieces[:_PIECES_MAX])
            )
        except BlockingIOError:
            raise
        except OSError:  # the other process has ended
            self._end()
            return 0

    def _end(self) -> None:
        self.is_over = True
        self._unsent.clear()


def _after(pieces: list[Any], nbytes: int) -> list[memoryview]:
    """Return what is left of pieces after so many bytes of them."""
    left: list[memoryview] = []
    for one in pieces:
        size = memoryview(one).nbytes
        if size > nbytes:
            left.append(memoryview(one).cast("B")[nbytes:])
        nbytes = max(0, nbytes - size)
    return left
