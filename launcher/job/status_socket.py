"""The socket on which a launcher answers `syncvar status`, `syncvar stacks` and other commands."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from syncvar_launcher.local.stack_requests import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syncvar_launcher.job.workers import Workers
    from syncvar_launcher.local.stack_requests import StackRequest

SOCKET = "status"
"""The name of the status socket in the private folder of a job."""

_REQUEST_MAX = 4096
_OPEN_MAX = 8
_BACKLOG = 128  # clients that wait for their turn
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_PATIENCE_S = 10.0  # with a client that asks nothing, or does not read the answer
_STATUS_S = 2.0  # for a round of answers of the ranks; without one the last round counts


class JobView(Protocol):
    """What the socket answers about a job."""

    def about(self) -> dict[str, Any]:
        """Return the identity of the job."""

    def position(self, number: int) -> str:
        """Return what a rank or server is doing."""

    def want(self, now: float) -> int:
        """Ask the ranks for their calls; return the round that has the answers."""

    def has_round(self, number: int) -> bool:
        """Return whether a round has ended."""

    def status(self, now: float, *, has_log: bool) -> dict[str, Any]:
        """Return the answer to the question "status"."""


@dataclass(slots=True, eq=False)
class _Client:
    """One connection."""

    end: socket.socket
    until: float
    requests: dict[int, StackRequest] = field(default_factory=dict)
    awaited_round: int = -1  # of answers of the ranks, for the question "status"
    has_log: bool = False
    answer: bytes = b""

    @property
    def is_pending(self) -> bool:
        """Whether a question has come that has no answer yet."""
        return bool(self.requests) or self.awaited_round >= 0


class StatusSocket:
    """Answers questions about a running job over a socket in its private folder.

    One message asks, one map answers, and the connection closes. The loop of the launcher never
    waits for the client, whatever the client sends or leaves unread. Clients of other users get no
    answer, although the folder would admit root.
    """

    def __init__(
        self, directory: Path, view: JobView, workers: Workers, processes: Sequence[int]
    ) -> None:
        self._view = view
        self._workers = workers
        self._processes = processes
        self._open: list[_Client] = []
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        with contextlib.suppress(OSError):  # then the job runs without this socket
            path = str(directory / SOCKET)
            self._listener.bind(path)
            os.chmod(path, 0o600)
            self._listener.listen(_BACKLOG)

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        unasked = [one.end.fileno() for one in self._open if not one.is_pending and not one.answer]
        is_full = len(self._open) >= _OPEN_MAX and all(one.is_pending for one in self._open)
        return unasked if is_full else [self._listener.fileno(), *unasked]

    def readable(self, descriptor: int, now: float) -> None:
        """Handle a descriptor that poll reported; ignore others."""
        if descriptor == self._listener.fileno():
            with contextlib.suppress(OSError):
                end, _ = self._listener.accept()
                if (
                    len(self._open) >= _OPEN_MAX
                ):  # in place of the oldest that asks or reads nothing
                    self._drop(next(one for one in self._open if not one.is_pending))
                end.settimeout(0)
                self._open.append(_Client(end, now + _PATIENCE_S))
                if not _is_ours(end):
                    self._drop(self._open[-1])
            return
        for one in self._open:
            if one.end.fileno() == descriptor:
                self._read(one, now)
                return

    def due(self, now: float) -> float:
        """Return when to call `tick`, in seconds of the clock; infinite without clients."""
        return (
            now + 0.005
            if any(one.is_pending or one.answer for one in self._open)
            else min((one.until for one in self._open), default=float("inf"))
        )

    def tick(self, now: float) -> None:
        """Send the answers that are complete, and close finished and overdue connections."""
        for one in list(self._open):
            if one.requests:
                answers = [self._workers.answer(request) for request in one.requests.values()]
                if now >= one.until or None not in answers:
                    ranks = [self._state_of(*item) for item in one.requests.items()]
                    self._finish(one, {"job": self._view.about(), "ranks": ranks}, now)
            elif one.awaited_round >= 0 and (
                now >= one.until or self._view.has_round(one.awaited_round)
            ):
                self._finish(one, self._view.status(now, has_log=one.has_log), now)
            if one.answer:
                with contextlib.suppress(BlockingIOError):
                    try:
                        one.answer = one.answer[one.end.send(one.answer) :]
                    except ConnectionError:
                        one.answer = b""
                if not one.answer:
                    self._drop(one)
                    continue
            if now >= one.until:
                self._drop(one)

    def close(self) -> None:
        """Close everything. Idempotent."""
        for one in list(self._open):
            self._drop(one)
        self._listener.close()

    # -- inside ------------------------------------------------------------------------------------

    def _read(self, one: _Client, now: float) -> None:
        try:
            request = msgpack.unpackb(one.end.recv(_REQUEST_MAX))
            question = request["question"]
        except (OSError, ValueError, TypeError, KeyError, msgpack.UnpackException):
            self._drop(one)
            return
        if question == "stacks":
            all_threads = bool(request.get("all_threads"))
            one.requests = {
                rank: self._workers.ask(rank, all_threads=all_threads) for rank in self._processes
            }
            one.until = now + ANSWER_S
        elif question == "status":
            one.has_log = bool(request.get("log"))
            one.awaited_round = self._view.want(now)
            one.until = now + _STATUS_S
        else:
            self._finish(one, {"job": self._view.about()}, now)

    def _finish(self, one: _Client, answer: dict[str, Any], now: float) -> None:
        one.requests, one.awaited_round = {}, -1
        one.answer = msgpack.packb(answer)
        one.until = now + _PATIENCE_S

    def _state_of(self, rank: int, request: StackRequest) -> dict[str, Any]:
        threads = self._workers.answer(request, is_last=True)
        return {
            "rank": rank,
            "pid": self._workers.pid(rank),
            "position": self._view.position(rank),
            "instead": request.instead,
            "threads": None
            if threads is None
            else [
                [one.ident, one.is_main, [list(frame) for frame in one.frames]] for one in threads
            ],
        }

    def _drop(self, one: _Client) -> None:
        self._open.remove(one)
        one.end.close()


def _is_ours(end: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(user == os.getuid())
