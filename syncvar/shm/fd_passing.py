"""Pass the segment's descriptor from the launcher to the workers of its job over a unix socket.

A worker sends one request; the answer is the descriptor, or the reason why there is none. The
server runs in the launcher's loop and never blocks, whatever a client sends. Each generation has
one segment, created when its first rank asks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.shm.segment_file import CreatedSegment

_REQUEST = struct.Struct("=8s64sQQ")
_MAGIC = b"SVSHM\0\0\1"
_YES, _NO = b"\1", b"\0"
_ANSWER_MAX = 4096
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_FD = struct.Struct("=i")
_PAUSE_S = 0.005


def fd_socket_path(directory: str) -> str:
    """Return the path of the socket that passes the descriptor, in the host's private folder."""
    return f"{directory}/shm"


def servers_fd_socket_path(directory: str) -> str:
    """Return the path for the segment that the servers and workers of a host share."""
    return f"{directory}/servers-shm"


class FdServer:
    """The launcher's side of the socket.

    `make` creates the segment of a generation: (segment, "") or (None, reason). Requests for
    generations before `generation`, and for another job, fail.
    """

    def __init__(
        self,
        path: str,
        job_id: str,
        local_world_size: int,
        make: Callable[[int], tuple[CreatedSegment | None, str]],
        generation: int = 0,
    ) -> None:
        self.path = path
        self.refused_requests = 0
        self._job = _job_bytes(job_id)
        self._local_world_size = local_world_size
        self._make = make
        self._segments: dict[int, tuple[CreatedSegment | None, str]] = {}
        self._fetched: dict[int, set[int]] = {}
        self._newest = generation
        # Of an elastic job: requests for a later generation than the present one wait for `expect`.
        self.awaits_generations = False
        self._early: list[tuple[socket.socket, bytes]] = []
        self._aborts_all = False
        self._has_message = False
        self._messages: list[str] = []
        self._waiting: dict[int, socket.socket] = {}  # clients without a request, oldest first
        self._waiting_max = 2 * local_world_size + 16
        flags = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        self._listener = socket.socket(socket.AF_UNIX, flags)
        try:
            self._listener.bind(path)
            os.chmod(path, 0o600)
            self._listener.listen(2 * local_world_size + 16)
        except OSError:
            self._listener.close()
            raise

    # -- the launcher's loop -----------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return [self._listener.fileno(), *self._waiting] if self._listener.fileno() >= 0 else []

    def readable(self, descriptor: int) -> None:
        """Handle a descriptor that poll reported; ignore others."""
        if descriptor in self._waiting:
            self._serve(self._waiting.pop(descriptor))
        elif descriptor == self._listener.fileno():
            for _ in range(self._waiting_max):
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # the client is gone, or the launcher is out of descriptors
                    return
                self._take(connection)

    def take_messages(self) -> list[str]:
        """Return the messages for the user since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def segment_of(self, generation: int) -> tuple[CreatedSegment | None, str]:
        """Return a generation's segment, created on the first call, or the reason for none."""
        found = self._segments.get(generation)
        if found is None:
            found = self._segments[generation] = self._make(generation)
            self._fetched[generation] = set()
            self._newest = max(self._newest, generation)
            shm, reason = found
            if shm is not None and self._aborts_all:
                shm.abort()
            message = f"no shared memory, data go through unix sockets: {reason}"
            message = message if shm is None else shm.notice
            if message and not self._has_message:  # the next generations would repeat it
                self._has_message = True
                self._messages.append(message)
        return found

    def expect(self, generation: int, local_world_size: int) -> None:
        """Serve a later generation, of so many ranks on this host; refuse all earlier ones."""
        self._newest, self._local_world_size = generation, local_world_size
        self._forget_before(generation)
        early, self._early = self._early, []
        for connection, request in early:
            self._reply(connection, request)

    def abort(self, generation: int | None = None) -> None:
        """Set the abort word of a generation; without one, of all present and later segments."""
        if generation is None:
            self._aborts_all = True
        for number, (shm, _) in self._segments.items():
            if shm is not None and generation in (None, number):
                shm.abort()

    def close(self) -> None:
        """Close everything. Idempotent."""
        early = [connection for connection, _ in self._early]
        for connection in (self._listener, *self._waiting.values(), *early):
            connection.close()
        self._waiting.clear()
        self._early.clear()
        for shm, _ in self._segments.values():
            if shm is not None:
                shm.close()
        self._segments.clear()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    # -- inside ------------------------------------------------------------------------------------

    def _take(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        if _peer_user(connection) != os.getuid():
            self.refused_requests += 1
            connection.close()
            return
        while len(self._waiting) >= self._waiting_max:
            self.refused_requests += 1
            self._waiting.pop(next(iter(self._waiting))).close()
        self._waiting[connection.fileno()] = connection

    def _serve(self, connection: socket.socket) -> None:
        try:
            request = connection.recv(_REQUEST.size + 1)
        except BlockingIOError:  # poll reported an older descriptor of this number
            self._waiting[connection.fileno()] = connection
            return
        except OSError:
            request = b""
        if self.awaits_generations and self._is_early(request):
            self._early.append((connection, request))
            return
        self._reply(connection, request)

    def _is_early(self, request: bytes) -> bool:
        """Return whether a request is for a generation of which nothing is known yet."""
        if len(request) != _REQUEST.size or len(self._early) >= self._waiting_max:
            return False
        magic, job, generation, _ = _REQUEST.unpack(request)
        return (magic, job) == (_MAGIC, self._job) and int(generation) > self._newest

    def _reply(self, connection: socket.socket, request: bytes) -> None:
        with connection:
            try:
                fd, reason = self._answer(request)
                if fd < 0:
                    self.refused_requests += 1
                    connection.send(_NO + reason.encode()[: _ANSWER_MAX - 1])
                else:
                    socket.send_fds(connection, [_YES], [fd])
            except OSError:
                self.refused_requests += 1  # the client is gone, or does not read

    def _answer(self, request: bytes) -> tuple[int, str]:
        if len(request) != _REQUEST.size:
            return -1, "the request has the wrong length"
        magic, job, generation, local_rank = _REQUEST.unpack(request)
        if magic != _MAGIC:
            return -1, "the launcher's version of syncvar differs from the worker's"
        if job != self._job:
            return -1, "this is another job"
        if local_rank >= self._local_world_size:
            return -1, f"there is no local rank {local_rank} among {self._local_world_size}"
        if generation < self._newest and generation not in self._segments:
            return -1, f"generation {generation} has ended; the current one is {self._newest}"
        shm, reason = self.segment_of(generation)
        self._fetched[generation].add(local_rank)
        if len(self._fetched[generation]) == self._local_world_size:
            self._forget_before(generation)
        return (shm.fd, "") if shm is not None else (-1, reason)

    def _forget_before(self, generation: int) -> None:
        for number in [number for number in self._segments if number < generation]:
            shm, _ = self._segments.pop(number)
            del self._fetched[number]
            if shm is not None:
                shm.close()


def fetch(
    path: str, job_id: str, generation: int, local_rank: int, timeout_s: float
) -> tuple[int, None] | tuple[None, str]:
    """Ask the launcher for a generation's segment; return (descriptor, None) or (None, reason)."""
    deadline = time.monotonic() + timeout_s
    try:
        flags = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
        with socket.socket(socket.AF_UNIX, flags) as connection:
            connection.settimeout(max(0.001, timeout_s))
            while True:
                try:
                    connection.connect(path)
                    break
                except BlockingIOError:  # the launcher's backlog is full
                    if time.monotonic() + _PAUSE_S > deadline:
                        raise
                    time.sleep(_PAUSE_S)
            if _peer_user(connection) != os.getuid():
                return None, f"{path} belongs to another user"
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.send(_REQUEST.pack(_MAGIC, _job_bytes(job_id), generation, local_rank))
            answer, fds = _receive(connection)
    except TimeoutError:
        return None, f"the launcher did not send shared memory within {timeout_s:g} s"
    except OSError as error:
        return None, f"the launcher sends no shared memory ({path}: {error.strerror})"
    if answer[:1] == _YES and len(fds) == 1:
        return fds[0], None
    for fd in fds:
        os.close(fd)
    return None, answer[1:].decode(errors="replace") or "the launcher closed the connection"


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    # socket.recv_fds drops MSG_CMSG_CLOEXEC: a child started meanwhile would inherit the
    # descriptor.
    answer, extra, _, _ = connection.recvmsg(
        _ANSWER_MAX, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC
    )
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    return answer, [
        fd
        for level, kind, data in extra
        if (level, kind) == rights
        for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size])
    ]


def _job_bytes(job_id: str) -> bytes:
    return job_id.encode()[:64].ljust(64, b"\0")


def _peer_user(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return int(user)
