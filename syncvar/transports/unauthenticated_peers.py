"""Connections to a tcp listener whose other end has not proved that it is a member: few may stay, and not for long.

ZeroMQ accepts every connection and gives it the handshake's time limit. Whoever opens a thousand and says nothing would
use up this process's descriptors for that long. So connections that have had time to prove themselves are closed, the
oldest first, until few are left; members are never closed, and no new connection is refused, since it may be a member's.
A stranger who sends more than a handshake needs is closed at the next look.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import struct

from syncvar.protocol.message_limits import UNPROVED_NBYTES_MAX

__all__ = ["UNPROVED_NBYTES", "UNPROVED_PLAIN_NBYTES", "WAITING_MAX", "UnauthenticatedPeers"]

WAITING_MAX = 16
"""How many connections may stay that have not proved themselves within PROVE_S."""

PROVE_S = 1.0
LOOK_EVERY_S = 1.0  # where there are no strangers
_BUSY_S = 0.1
_DESCRIPTORS_SHARE = (
    4  # one part in so many of all descriptors may be those of strangers, however new they are
)

# What a listener sends before a client has proved itself: greeting 64 bytes, WELCOME 170 (RFC 26), or at most 20 of refusal.
# READY, which a member alone is sent, is longer than what is left up to this number.
UNPROVED_NBYTES = 256

# Where nothing is encrypted: greeting 64 bytes, at most 20 of refusal. With READY a member has been sent 107 at least.
UNPROVED_PLAIN_NBYTES = 96
_COUNTERS = struct.Struct(
    "=120xQQ"
)  # tcp_info: tcpi_bytes_acked and tcpi_bytes_received, since Linux 4.1


class UnauthenticatedPeers:
    """The strangers at one tcp port of this process.

    Args:
        port: On which a socket of this process listens.
        unproved_nbytes: The most that the listener sends before the other end has proved itself.
    """

    def __init__(self, port: int, unproved_nbytes: int = UNPROVED_NBYTES) -> None:
        self._port = port
        self._unproved_nbytes = unproved_nbytes
        self._since: dict[int, float] = {}
        self.closed = 0
        self.listener: socket.socket | None = None
        for one in self._sockets():
            if self.listener is None and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self.listener = one
            else:
                one.close()

    def close(self) -> None:
        """Let go of the listener. Idempotent."""
        if self.listener is not None:
            self.listener.close()

    def look(self, now: float) -> float:
        """Close those that are too many; return after how many seconds to look again."""
        unproved: dict[int, socket.socket] = {}
        talkative = set()
        for one in self._sockets():
            inode = os.fstat(one.fileno()).st_ino
            received = None if inode in unproved else self._heard_of_stranger(one)
            if received is None:
                one.close()
                continue
            unproved[inode] = one
            if received > UNPROVED_NBYTES_MAX:
                talkative.add(inode)
        self._since = {inode: self._since.get(inode, now) for inode in unproved}
        oldest_first = sorted(self._since, key=lambda inode: self._since[inode])
        late = [inode for inode in oldest_first if now - self._since[inode] >= PROVE_S]
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTORS_SHARE
        ending = talkative | {
            *late[: max(0, len(late) - WAITING_MAX)],
            *oldest_first[: max(0, len(oldest_first) - room)],
        }
        for inode, one in unproved.items():
            if inode in ending:
                with contextlib.suppress(OSError):
                    one.shutdown(
                        socket.SHUT_RDWR
                    )  # ZeroMQ sees the end and closes its own descriptor
            one.close()
        self.closed += len(ending)
        return _BUSY_S if unproved else LOOK_EVERY_S

    def _heard_of_stranger(self, one: socket.socket) -> int | None:
        """Return how many bytes a stranger has sent; None where the other end is a member."""
        with contextlib.suppress(OSError, struct.error):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
            sent, received = _COUNTERS.unpack(info)
            return int(received) if sent <= self._unproved_nbytes else None
        return None

    def _sockets(self) -> list[socket.socket]:
        """Return copies of this process's tcp sockets at the port; a copy stays what it is when ZeroMQ closes its own."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                copy = os.dup(int(name))
                try:
                    if self._is_here(copy):
                        found.append(socket.socket(fileno=copy))
                        copy = -1
                finally:
                    if copy >= 0:
                        os.close(copy)
        return found

    def _is_here(self, descriptor: int) -> bool:
        one = socket.socket(fileno=descriptor)
        try:
            is_tcp = (
                one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
            )
            return is_tcp and bool(one.getsockname()[1] == self._port)
        finally:
            one.detach()
