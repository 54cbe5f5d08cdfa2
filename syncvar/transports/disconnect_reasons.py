"""Reasons of disconnections: the other process closed the connection, or was silent for too long.

ZeroMQ only says that a connection has ended. A copy of its descriptor outlives ZeroMQ's own, and
the system tells from it whether the other end closed the connection. Connections within a host are
closed and never silent.
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

CLOSED = "it closed the connection without a goodbye"
_ENDED_HERE = "this rank closed the connection: what came on it was late, or no message of this job"

# tcp_info: state (numbers of tcp_states.h), retransmits, probes, milliseconds since data came.
_INFO = struct.Struct("=BxBB48xI")
_ACKNOWLEDGED = struct.Struct("=120xQ")  # tcp_info: acknowledged bytes
_ESTABLISHED, _CLOSE = 1, 7
_IPPROTO_TCP, _TCP_INFO = 6, 11


class Sent(NamedTuple):
    """The state of the bytes written to a connection.

    Attributes:
        acknowledged: Bytes that the other host has received.
        held: Bytes that it has not received yet.
        is_steady: The system would take more, and no acknowledgement came during the look.
    """

    acknowledged: int = 0
    held: int = 0
    is_steady: bool = True

    @property
    def written(self) -> int:
        """Bytes written."""
        return self.acknowledged + self.held


class ConnectionCopy:
    """A copy of the descriptor of a tcp connection; empty for another type, or one that has ended.

    Args:
        descriptor: ZeroMQ's own descriptor.
    """

    __slots__ = ("_socket",)

    def __init__(self, descriptor: int) -> None:
        import socket  # ranks of one host start faster without it

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
        """Return why the connection has ended, and close the copy. Call it after ZeroMQ's event."""
        if self._socket is None:
            return CLOSED
        reason = CLOSED
        with contextlib.suppress(OSError, struct.error):
            info = self._socket.getsockopt(_IPPROTO_TCP, _TCP_INFO, _INFO.size)
            state, retransmits, probes, idle_ms = _INFO.unpack(info)
            is_late = idle_ms >= 1000 * config.lost_after_s
            if is_late and (state == _ESTABLISHED or (state == _CLOSE and (retransmits or probes))):
                silence_s = idle_ms / 1000
                reason = f"silent for {silence_s:.1f} s: nothing came from it on its connection"
            elif state == _ESTABLISHED:  # the other end has not closed it
                reason = _ENDED_HERE
        self.close()
        return reason

    def sent(self) -> Sent:
        """Return the state of the written bytes; all zero without a connection."""
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
    """Return the reason for a process that did not answer a new connection for so long."""
    return f"silent for {seconds:.1f} s: it did not answer a new connection"
