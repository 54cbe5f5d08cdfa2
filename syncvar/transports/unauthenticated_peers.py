"""Limits unauthenticated connections to a tcp listener: few may stay, and not for long.

ZeroMQ accepts every connection and gives it the handshake's time limit, so a thousand silent
connections could use up this process's descriptors. This module closes connections that had time to
authenticate, the oldest first, until few are left. It never closes members and refuses no new
connection, which may be a member's. It also closes a client that sends more than a handshake needs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import struct

from syncvar.protocol.frame import UNPROVED_NBYTES_MAX

WAITING_MAX = 16
"""Number of connections that may stay without authentication after PROVE_S."""

PROVE_S = 1.0
LOOK_EVERY_S = 1.0  # without unauthenticated connections
_BUSY_S = 0.1
_DESCRIPTORS_SHARE = 4  # unauthenticated connections may use one in so many of all descriptors

# A listener sends an unauthenticated client 64 bytes of greeting, then 170 of WELCOME (RFC 26) or
# at most 20 of refusal. READY, which only members receive, exceeds this limit.
UNPROVED_NBYTES = 256

# Without encryption: 64 bytes of greeting, at most 20 of refusal. With READY at least 107.
UNPROVED_PLAIN_NBYTES = 96
_COUNTERS = struct.Struct("=120xQQ")  # tcp_info: bytes acked and received, since Linux 4.1


class UnauthenticatedPeers:
    """The unauthenticated connections at one tcp port of this process.

    Args:
        port: Port on which a socket of this process listens.
        unproved_nbytes: Most bytes that the listener sends before the client authenticates.
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
        """Close the copy of the listener. Idempotent."""
        if self.listener is not None:
            self.listener.close()

    def look(self, now: float) -> float:
        """Close surplus connections; return after how many seconds to look again."""
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
                    one.shutdown(socket.SHUT_RDWR)  # ZeroMQ then closes its own descriptor
            one.close()
        self.closed += len(ending)
        return _BUSY_S if unproved else LOOK_EVERY_S

    def _heard_of_stranger(self, one: socket.socket) -> int | None:
        """Return the bytes that an unauthenticated client has sent; None for a member."""
        with contextlib.suppress(OSError, struct.error):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
            sent, received = _COUNTERS.unpack(info)
            return int(received) if sent <= self._unproved_nbytes else None
        return None

    def _sockets(self) -> list[socket.socket]:
        """Return copies of this process's tcp sockets at the port; they outlive ZeroMQ's own."""
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
            is_inet = one.family in (socket.AF_INET, socket.AF_INET6)
            is_tcp = is_inet and one.type == socket.SOCK_STREAM
            return is_tcp and bool(one.getsockname()[1] == self._port)
        finally:
            one.detach()
