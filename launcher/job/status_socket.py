"""Answers questions about a running job over a socket in its private folder.

One message asks, one map answers, and the connection closes. The loop of the launcher never waits
for the client, whatever the client sends or leaves unread. Clients of other users get no answer,
although the folder would admit root.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from syncvar_launcher.job.workers import Workers
    from syncvar_launcher.local.stack_requests import StackRequest

SOCKET = "inquiries"
ANSWER_S = 2.0  # for the stacks of ranks; the answer names ranks without one
_REQUEST_MAX = 4096
_OPEN_MAX = 8
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_PATIENCE_S = 10.0  # with a client that asks nothing, or does not read the answer


@dataclass(slots=True, eq=False)
class _Inquiry:
    """One connection."""

    end: socket.socket
    until: float
    asked: dict[int, StackRequest] = field(default_factory=dict)
    answer: bytes = b""


class StatusSocket:
    """The launcher's side.

    Args:
        directory: The private folder of the job.
        about: Returns the description of the job.
        workers: The workers, which answer with their stacks.
        position: Returns what a rank or server is doing, also after its process has ended.
        processes: The numbers of the ranks and servers.
    """

    def __init__(
        self,
        directory: Path,
        about: Callable[[], dict[str, Any]],
        workers: Workers,
        position: Callable[[int], str],
        processes: Sequence[int],
    ) -> None:
        self._about = about
        self._workers = workers
        self._position = position
        self._processes = processes
        self._open: list[_Inquiry] = []
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        with contextlib.suppress(OSError):  # then the job runs without this socket
            path = str(directory / SOCKET)
            self._listener.bind(path)
            os.chmod(path, 0o600)
            self._listener.listen(_OPEN_MAX)

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        unasked = [one.end.fileno() for one in self._open if not one.asked and not one.answer]
        return [self._listener.fileno(), *unasked] if len(self._open) < _OPEN_MAX else unasked

    def readable(self, descriptor: int, now: float) -> None:
        """Handle a descriptor that poll reported; ignore others."""
        if descriptor == self._listener.fileno():
            with contextlib.suppress(OSError):
                end, _ = self._listener.accept()
                end.setblocking(False)
                self._open.append(_Inquiry(end, now + _PATIENCE_S))
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
            if any(one.asked or one.answer for one in self._open)
            else min((one.until for one in self._open), default=float("inf"))
        )

    def tick(self, now: float) -> None:
        """Send the answers that are complete, and close finished and overdue connections."""
        for one in list(self._open):
            if one.asked:
                told = {rank: self._workers.answer(asked) for rank, asked in one.asked.items()}
                if now >= one.until or None not in told.values():
                    self._finish(
                        one,
                        {
                            "job": self._about(),
                            "ranks": [self._told(rank, one.asked[rank]) for rank in told],
                        },
                        now,
                    )
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

    def _read(self, one: _Inquiry, now: float) -> None:
        try:
            request = msgpack.unpackb(one.end.recv(_REQUEST_MAX))
            question = request["question"]
        except (OSError, ValueError, TypeError, KeyError, msgpack.UnpackException):
            self._drop(one)
            return
        if question == "stacks":
            all_threads = bool(request.get("all_threads"))
            one.asked = {
                rank: self._workers.ask(rank, all_threads=all_threads) for rank in self._processes
            }
            one.until = now + ANSWER_S
        else:
            self._finish(one, {"job": self._about()}, now)

    def _finish(self, one: _Inquiry, answer: dict[str, Any], now: float) -> None:
        one.asked = {}
        one.answer = msgpack.packb(answer)
        one.until = now + _PATIENCE_S

    def _told(self, rank: int, asked: StackRequest) -> dict[str, Any]:
        threads = self._workers.answer(asked, is_last=True)
        return {
            "rank": rank,
            "pid": self._workers.pid(rank),
            "position": self._position(rank),
            "instead": asked.instead,
            "threads": None
            if threads is None
            else [
                [one.ident, one.is_main, [list(frame) for frame in one.frames]] for one in threads
            ],
        }

    def _drop(self, one: _Inquiry) -> None:
        self._open.remove(one)
        one.end.close()


def _is_ours(end: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(user == os.getuid())
