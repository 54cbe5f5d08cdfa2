"""Asks the launchers of running jobs over their private sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_SOCKET = "status"
_LIMIT_S = 5.0  # the launcher itself waits 2 s for its ranks
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


def running_jobs(folders: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the socket of each running job in private folders, and what it is."""
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                path = os.path.join(entry.path, _SOCKET)
                answer = ask(path, question="job")
                if answer is not None:
                    yield path, answer["job"]


def job_folders(environ: Mapping[str, str]) -> list[str]:
    """Return the possible private folders of this user's jobs."""
    user = os.getuid()
    parents = [environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"]
    shared = [environ.get("TMPDIR", ""), "/tmp"]  # noqa: S108  (`ask` checks the owner)
    found = [os.path.join(parent, "syncvar") for parent in parents if parent]
    found += [os.path.join(parent, f"syncvar-{user}") for parent in shared if parent]
    return list(dict.fromkeys(found))


def ask(path: str, **request: Any) -> dict[str, Any] | None:
    """Return a launcher's answer; None without a launcher of this user, or without an answer."""
    with (
        contextlib.suppress(OSError, ValueError, msgpack.UnpackException),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end,
    ):
        end.settimeout(_LIMIT_S)
        end.connect(path)
        _, user, _ = _CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user == os.getuid():
            end.sendall(msgpack.packb(request))
            answer: dict[str, Any] = msgpack.unpackb(b"".join(_received(end)), strict_map_key=False)
            return answer
    return None


def _received(end: socket.socket) -> Iterable[bytes]:
    while data := end.recv(1 << 16):
        yield data
