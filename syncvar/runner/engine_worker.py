"""Runs in a worker of an engine: describes the place, then acts as a rank for one call.

The worker belongs to the engine before and after, so nothing of a rank stays in it, neither threads
nor variables.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import TYPE_CHECKING

from syncvar.bootstrap.job_private import base_directory
from syncvar.bootstrap.process import is_initialized, member
from syncvar.bootstrap.rendezvous import leave
from syncvar.bootstrap.worker_main import failure_of
from syncvar.protocol.exception_codec import pack_exception
from syncvar.runner.call_parts import CallPart, End, EngineSlot, packed, unpacked
from syncvar.runner.remote_call import called
from syncvar.runtime.flight_recorder.recorder import boot_identity

if TYPE_CHECKING:
    from collections.abc import Iterator

_INHERITED = ("XDG_RUNTIME_DIR", "TMPDIR")
_held: list[socket.socket] = []  # at most one


def arrive(address: str) -> bytes:
    """Return a packed `EngineSlot`."""
    spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("mnt", "pid", "net")]
    ground = "/".join([boot_identity(), *spaces, str(os.getuid()), str(base_directory(os.environ))])
    return packed(
        EngineSlot(ground, socket.gethostname(), address, _held_port(address), os.getpid())
    )


def _held_port(address: str) -> int:
    """Return a port that is reserved for this process until it has been a rank.

    A socket stays bound to it, so that the system gives it to no other process. Both that socket
    and ZeroMQ's set SO_REUSEADDR, and the first never listens. So the second may bind.
    """
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    _release_port()
    _held.append(held)
    return int(held.getsockname()[1])


def _release_port() -> None:
    while _held:
        _held.pop().close()


def play(data: bytes) -> bytes:
    """Act as a rank for one call; return a packed `End`."""
    part = unpacked(CallPart, data)
    if part.pid != os.getpid():
        return packed(
            End(
                error="PeerLost",
                message="its process was lost, and started again by the engine",
                exit_code=70,
            )
        )
    environ = {name: os.environ[name] for name in _INHERITED if name in os.environ} | part.environ
    patience_s, has_met = 0.0, False
    try:
        with _looking_in(part.folders), member(environ):
            try:
                result = called(part.call, part.rank)
            finally:
                has_met = is_initialized()
        patience_s = float("inf")  # until all have left; the driver may end it earlier
        end = End(result, has_met=has_met)
    except BaseException as error:  # the engine would report a different error
        failure = failure_of(error)
        raised = pack_exception(error)
        end = End(
            b"", failure.error, failure.message, failure.text, failure.exit_code, has_met, raised
        )
    leave(patience_s)
    _release_port()
    return packed(end)


@contextlib.contextmanager
def _looking_in(folders: list[str]) -> Iterator[None]:
    """Append the caller's module path to this process's own."""
    before = list(sys.path)
    sys.path += [folder for folder in folders if folder not in before and os.path.exists(folder)]
    try:
        yield
    finally:
        sys.path[:] = before
