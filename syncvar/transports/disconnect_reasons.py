"""Why a connection has ended: the other process closed it, or was silent for too long.

ZeroMQ says only that a connection is over. A copy of its descriptor outlives ZeroMQ's own, and the system says of
that whether the other end has closed it. Connections within a host are closed and never silent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import socket

    from syncvar.core.settings import RuntimeConfig

__all__ = ["CLOSED", "ConnectionCopy", "Sent", "unanswered"]

CLOSED = "it closed the connection without a goodbye"
_ENDED_HERE = "this rank closed the connection: what came on it was late, or no message of this job"

# tcp_info: state, retransmits, probes, and milliseconds since data came; numbers of states as in the kernel's tcp_states.h
_INFO = struct.Struct("=BxBB48xI")
_ACKNOWLEDGED = struct.Struct("=120xQ")  # tcp_info: bytes that the other end has acknowledged
_ESTABLISHED, _CLOSE = 1, 7
_IPPROTO_TCP, _TCP_INFO = 6, 11


class Sent(NamedTuple):
    """What has become of the bytes that were written to a connection.

    Attributes:
        acknowledged: How many the other end's host has.
        held: How many it does not have yet.
        is_steady: The system would take more, and none was acknowledged during the look.
    """

    acknowledged: int = 0
    held: int = 0
    is_steady: bool = True

    @property
    def written(self) -> int:
        """How many were written."""
        return self.acknowledged + self.held


class ConnectionCopy:
    """A copy of the descriptor of a tcp connection; nothing for another connection, or one that has ended.

    Args:
        descriptor: ZeroMQ's own.
    """

    __slots__ = ("_socket",)

    def __init__(self, descriptor: int) -> None:
        import socket  # ranks of one host have no tcp connection, and start sooner without it

        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError), contextlib.ExitStack() as undoing:
            number = os.dup(descriptor)
            undoing.callback(os.close, number)
            copy = socket.socket(fileno=number)
            undoing.pop_all()
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                self._socket = copy
            else:
                copy.close()

    def reason(self, config: RuntimeConfig) -> str:
        """Return in words why the connection is over, and close the copy. Call it when ZeroMQ says that it is over."""
        if self._socket is None:
            return CLOSED
        reason = CLOSED
        with contextlib.suppress(OSError, struct.error):
            info = self._socket.getsockopt(_IPPROTO_TCP, _TCP_INFO, _INFO.size)
            state, retransmits, probes, idle_ms = _INFO.unpack(info)
            is_late = idle_ms >= 1000 * config.lost_after_s
            if is_late and (state == _ESTABLISHED or (state == _CLOSE and (retransmits or probes))):
                reason = (
                    f"silent for {idle_ms / 1000:.1f} s: nothing came from it on its connection"
                )
            elif state == _ESTABLISHED:  # the other end has not closed it
                reason = _ENDED_HERE
        self.close()
        return reason

    def sent(self) -> Sent:
        """Return what has become of the bytes that were written; all zero where there is no connection."""
        if self._socket is None:
            return Sent()
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        try:
            before = self._acknowledged()
            held = fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0\0\0\0")
            is_steady = self._acknowledged() == before and bool(writable.poll(0))
        except (OSError, struct.error):  # the connection has ended
            return Sent()
        return Sent(before, struct.unpack("=i", held)[0], is_steady)

    def _acknowledged(self) -> int:
        assert self._socket is not None
        info = self._socket.getsockopt(_IPPROTO_TCP, _TCP_INFO, _ACKNOWLEDGED.size)
        count: int = _ACKNOWLEDGED.unpack(info)[0]
        return count

    def close(self) -> None:
        """Close the copy. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def unanswered(seconds: float) -> str:
    """Return in words that a process has not answered a new connection for so long."""
    return f"silent for {seconds:.1f} s: it did not answer a new connection"
