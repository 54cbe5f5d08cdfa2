"""The launcher's side of `syncvar.bootstrap.prefork.fork_server`: one process is started, and workers are forked from it.

An interpreter takes as long to begin as the launcher to read its options. So the server may be started ahead, before
anything is known, and is told what it is for when that is known; where it was not needed it has imported nothing yet.
What starts it must not wait for an import: what is needed later is imported later.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from syncvar.bootstrap.worker_entry import command_of
from syncvar_launcher.local.child_processes import adopt_orphans, child_of
from syncvar_launcher.local.process_sessions import process_state
from syncvar_launcher.local.start_method import SHOW_IMPORTS
from syncvar_launcher.options.worker_environment import WITHHELD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_FORK_FD = "SYNCVAR_FORK_FD"
_ANSWER_MAX = 4096
_LENGTH_BYTES = 8
_PART = 1 << 16  # command lines may be longer than what a socket takes at once
_SERVER = "the process that workers are forked from"
_LOOK_S = 0.1  # between two looks at what may end a wait for an answer

_NOT_AHEAD = (
    "-h",
    "--help",
    "--version",
    "--dry-run",
    "spawn",
    "--start-method=spawn",
    "--no-python",
    "--join",
    "--listen",
    "-H",
    "--host",
    "--env-clear",
    "--cwd",
)
"""Beginnings of words with which nothing is forked here, or not from a process that has this one's variables and folder."""

_AT_START = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "LOCPATH",
    "MALLOC_",
    "GLIBC_",
    "TZ",
    "HOME",
    "COV",
    "ASAN_",
    "LSAN_",
    "UBSAN_",
)
"""Beginnings of variables that an interpreter and its libraries read when they begin, and not again."""


class ServerEnded(Exception):
    """The server has ended, or does not answer, before all workers were forked.

    Args:
        status: Its exit code, or minus the signal that ended it; 69 where it does not answer.
        sentence: What happened; by default that it has ended.
    """

    def __init__(self, status: int, sentence: str = "") -> None:
        self.status = status
        self.sentence = sentence or f"{_SERVER} {_ended(status)} before all were forked"
        super().__init__(self.sentence)


class ForkUnsupported(NamedTuple):
    """Why workers are better not forked from a server.

    Args:
        why: A sentence.
        is_certain: They cannot be; else they might lack something that fresh processes have.
        status: With what it has ended, as for `ServerEnded`; None where it has not.
    """

    why: str
    is_certain: bool
    status: int | None = None


class ForkedWorker:
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
    """A process that imports what workers need while the launcher goes on; started at once, and ordered to when `order` is called.

    Args:
        argv: Its command line, of which only the beginning counts: what the workers run is told by `order`.
        environ: Its environment.
        cwd: Where it starts, and with it the workers.
        pass_fds: Descriptors that all workers inherit.

    Attributes:
        limit_s: Longest wait for one answer, in seconds.
        waits: A function that the server object calls every 0.1 s while it waits; it may raise.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        cwd: str | Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._environ = environ
        self._cwd = str(cwd)
        self._has_forked = False
        self.limit_s = float("inf")
        self.waits: Callable[[], None] = lambda: None
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
        self._end.settimeout(_LOOK_S)

    def suits(self, environ: Mapping[str, str], cwd: Path) -> bool:
        """Return whether it can become what would be started with these: `order` brings variables, but not those that were read already."""
        is_whole = self._environ.keys() <= environ.keys() and not any(
            name.startswith(_AT_START) for name in self._beyond(environ)
        )
        return is_whole and self._cwd == str(cwd)

    def order(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Tell it to import what workers need, as they would.

        Args:
            arguments: What the workers run, as `syncvar.bootstrap.worker_main` takes it.
            environ: What all workers have in their environment.
        """
        order = _packed({"arguments": list(arguments), "environ": self._beyond(environ)})
        self._environ = environ
        told = len(order).to_bytes(_LENGTH_BYTES, "little") + order
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # it has ended, as `refusal` will find
            for start in range(0, len(told), _PART):
                self._answered(self._end.send, told[start : start + _PART])

    def _beyond(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that it has not, or has with another value."""
        return {name: value for name, value in environ.items() if self._environ.get(name) != value}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def descriptor(self) -> int:
        """Return the descriptor to poll for reading: the server is ready, or has ended."""
        return self._end.fileno()

    def refusal(self) -> ForkUnsupported | None:
        """Return, after its descriptor could be read, why workers are better not forked; None where nothing speaks against it."""
        data = b""
        with contextlib.suppress(ConnectionResetError):  # it has not even read its order
            data = self._answered(self._end.recv, _ANSWER_MAX)
        if not data:
            status = self._process.wait()
            return ForkUnsupported(
                f"{_SERVER} {_ended(status)} before it was ready", is_certain=True, status=status
            )
        answer = _unpacked(data)
        why = answer["cannot"] or answer["doubt"]
        return ForkUnsupported(why, is_certain=bool(answer["cannot"])) if why else None

    def fork(
        self,
        environ: Mapping[str, str],
        cores: Sequence[int] | None,
        descriptors: Mapping[str, int],
    ) -> ForkedWorker:
        """Fork a worker, which begins after `release` and `close`.

        Args:
            environ: Its whole environment.
            cores: The cores it may use, or None for all.
            descriptors: By name what it gets: "stdin", "stdout" and "stderr", and others by the variable that is to
                tell their number.
        """
        self._has_forked = True
        adopt_orphans(is_on=True)
        request: dict[str, Any] = {
            "environ": self._beyond(environ),
            "cores": None if cores is None else list(cores),
            "names": list(descriptors),
            "server": self._process.pid,
            "launcher": os.getpid(),
        }
        data = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answered(
                socket.send_fds, self._end, [_packed(request)], list(descriptors.values())
            )
            data = self._answered(self._end.recv, _ANSWER_MAX)
        if not data:
            raise ServerEnded(self._process.wait())
        answer = _unpacked(data)
        if "pid" not in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return ForkedWorker(answer["pid"])

    def describe(self) -> str:
        """Return the server and the state of its process in words."""
        return (
            f"{_SERVER} (process {self._process.pid}, state "
            f"{process_state(self._process.pid) or 'gone'})"
        )

    def release(self) -> None:
        """Let the forked workers begin after `close`, which otherwise ends them."""
        if not self._has_forked:
            return
        data = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answered(self._end.send, _packed({}))
            data = self._answered(self._end.recv, _ANSWER_MAX)
        if not data:
            raise ServerEnded(self._process.wait())

    def close(self) -> None:
        """End the server: its workers, each of which leads its session, become our children. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._end.close()
        adopt_orphans(is_on=False)

    def _answered(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call on the socket returns, as soon as the server takes part."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                return call(*arguments)
            self.waits()
            waited_s = time.monotonic() - began
            if waited_s >= self.limit_s:
                from syncvar.core.exit_codes import RENDEZVOUS

                sentence = f"{self.describe()} has not answered for {waited_s:.0f} s"
                self._process.kill()
                self._process.wait()
                raise ServerEnded(RENDEZVOUS, sentence)


def started_ahead(arguments: Sequence[str], environ: Mapping[str, str]) -> ForkServer | None:
    """Start a server before the options have been read; None where they look as if none were needed, or another one.

    Args:
        arguments: The command line of the launcher, which the server shows as its own.
        environ: The environment of the launcher.
    """
    if (
        not arguments
        or any(one.startswith(_NOT_AHEAD) for one in arguments)
        or not WITHHELD.isdisjoint(environ)
    ):
        return None
    if any(environ.get(name) for name in SHOW_IMPORTS):  # its words would stand among the workers'
        return None
    try:
        return ForkServer(
            [*command_of("syncvar.bootstrap.prefork.fork_server"), *arguments],
            dict(environ),
            os.getcwd(),
        )  # noqa: PTH109
    except OSError:  # whoever needs it tries once more, and says why it cannot be
        return None


def _packed(told: Mapping[str, Any]) -> bytes:
    import msgpack

    packed: bytes = msgpack.packb(told, unicode_errors="surrogateescape")
    return packed


def _unpacked(data: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(data)


def _ended(status: int) -> str:
    from syncvar.core.exit_codes import describe_exit

    return describe_exit(status)
