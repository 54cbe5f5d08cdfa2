"""The launcher's side of `syncvar.forkserver`: one process is started, and workers are forked from it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgpack

from syncvar.exits import describe_exit
from syncvar_launcher.children import adopt_orphans, child_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["ForkServer", "Forked", "Refusal", "ServerEnded"]

_FORK_FD = "SYNCVAR_FORK_FD"
_ANSWER_MAX = 4096
_SERVER = "the process that workers are forked from"


class ServerEnded(Exception):
    """The server has ended before all workers were forked.

    Args:
        status: Its exit code, or minus the signal that ended it.
    """

    def __init__(self, status: int) -> None:
        self.status = status
        self.sentence = f"{_SERVER} {describe_exit(status)} before all were forked"
        super().__init__(self.sentence)


class Refusal(NamedTuple):
    """Why workers are better not forked from a server.

    Args:
        why: A sentence.
        is_certain: They cannot be; else they might lack something that fresh processes have.
        status: With what it has ended, as for `ServerEnded`; None where it has not.
    """

    why: str
    is_certain: bool
    status: int | None = None


class Forked:
    """A process that was forked for us, and is our child since `ForkServer.close`; as much of a Popen as is needed.

    Args:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait until it has ended; return as `poll` does."""
        return self._wait(0)

    def _wait(self, how: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


class ForkServer:
    """A process that imports what workers need while the launcher goes on; started at once.

    Args:
        argv: Its command line.
        environ: Its environment: what all workers have in theirs.
        cwd: Where it starts, and with it the workers.
        pass_fds: Descriptors that all workers inherit.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], cwd: Path, pass_fds: Sequence[int] = ()) -> None:
        self._environ = environ
        self._has_forked = False
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                list(argv),
                env={**environ, _FORK_FD: str(theirs.fileno())},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *pass_fds),
                start_new_session=True,
                preexec_fn=child_of(os.getpid()),  # noqa: PLW1509  (this process has no Python threads)
            )
        except BaseException:
            self._end.close()
            raise
        finally:
            theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def descriptor(self) -> int:
        """Return the descriptor to poll for reading: the server is ready, or has ended."""
        return self._end.fileno()

    def refusal(self) -> Refusal | None:
        """Return, after its descriptor could be read, why workers are better not forked; None where nothing speaks against it."""
        data = self._end.recv(_ANSWER_MAX)
        if not data:
            status = self._process.wait()
            return Refusal(f"{_SERVER} {describe_exit(status)} before it was ready", is_certain=True, status=status)
        answer = msgpack.unpackb(data)
        why = answer["cannot"] or answer["doubt"]
        return Refusal(why, is_certain=bool(answer["cannot"])) if why else None

    def fork(
        self, environ: Mapping[str, str], cores: Sequence[int] | None, descriptors: Mapping[str, int]
    ) -> Forked:
        """Fork a worker, which begins when `close` has been called.

        Args:
            environ: Its whole environment.
            cores: The cores it may use, or None for all.
            descriptors: By name what it gets: "stdin", "stdout" and "stderr", and others by the variable that is to
                tell their number.

        Raises:
            OSError: The system refuses.
            ServerEnded: There is nothing to fork from any more.
        """
        self._has_forked = True
        adopt_orphans(is_on=True)
        request: dict[str, Any] = {
            "environ": {name: value for name, value in environ.items() if self._environ.get(name) != value},
            "cores": None if cores is None else list(cores),
            "names": list(descriptors),
            "server": self._process.pid,
            "launcher": os.getpid(),
        }
        data = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._end, [msgpack.packb(request, unicode_errors="surrogateescape")], list(descriptors.values()))
            data = self._end.recv(_ANSWER_MAX)
        if not data:
            raise ServerEnded(self._process.wait())
        answer = msgpack.unpackb(data)
        if "pid" not in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return Forked(answer["pid"])

    def close(self) -> None:
        """End the server: its workers, each of which leads its session, become our children, and begin. Idempotent."""
        if self._has_forked:
            self._has_forked = False
            with contextlib.suppress(OSError):
                self._end.send(msgpack.packb({}))
                self._end.recv(_ANSWER_MAX)
        self._process.kill()
        self._process.wait()
        self._end.close()
        adopt_orphans(is_on=False)
