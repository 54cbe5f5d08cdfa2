"""The launcher's side of the fork server, `syncvar.bootstrap.fork_server`.

An interpreter takes as long to start as the launcher to read its options. So the launcher may start
the server first and send the order when it knows the options. A server without an order has
imported nothing. The code that starts it must not wait for imports; later code imports what it
needs.
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
"""Prefixes of options that rule out a server with our variables and our folder."""

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
"""Prefixes of variables that an interpreter and its libraries read only when they start."""


class ServerEnded(Exception):
    """The server has ended, or does not answer, before all workers were forked.

    Args:
        status: The exit code, or minus the signal; 69 without an answer.
        sentence: The text; by default that it has ended.
    """

    def __init__(self, status: int, sentence: str = "") -> None:
        self.status = status
        self.sentence = sentence or f"{_SERVER} {_ended(status)} before all were forked"
        super().__init__(self.sentence)


class ForkUnsupported(NamedTuple):
    """The reason not to fork workers from a server.

    Args:
        why: A sentence.
        is_certain: Whether forking cannot work; else workers might lack something that fresh
            processes have.
        status: The status of an ended server, as in `ServerEnded`; None while it runs.
    """

    why: str
    is_certain: bool
    status: int | None = None


class ForkedWorker:
    """A forked process, our child after `ForkServer.close`, with some methods of Popen.

    `pid` is its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the end; return the same as `poll`."""
        return self._wait(0)

    def _wait(self, how: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


class ForkServer:
    """A process that imports NumPy and syncvar, and from which workers are forked.

    It starts at once, and imports when `order` is called.

    Args:
        argv: The command line, of which only the first words count.
        environ: The environment.
        cwd: The folder of the server and of the workers.
        pass_fds: Descriptors that all workers inherit.

    Attributes:
        limit_s: The longest wait for one answer, in seconds.
        waits: A function that it calls every 0.1 s while it waits; it may raise.
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
        """Return whether this server can serve workers with such an environment and folder.

        `order` can change variables, except those that the interpreter has already read.
        """
        is_whole = self._environ.keys() <= environ.keys() and not any(
            name.startswith(_AT_START) for name in self._beyond(environ)
        )
        return is_whole and self._cwd == str(cwd)

    def order(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Let the server import what workers need.

        Args:
            arguments: The arguments of `syncvar.bootstrap.worker_main`.
            environ: The environment of all workers.
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
        """Return the variables that the server lacks, or has with another value."""
        return {name: value for name, value in environ.items() if self._environ.get(name) != value}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def descriptor(self) -> int:
        """Return the descriptor to poll for reading: the server is ready, or has ended."""
        return self._end.fileno()

    def refusal(self) -> ForkUnsupported | None:
        """Return the reason not to fork, or None; call it when the descriptor is readable."""
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
            cores: The cores that it may use, or None for all.
            descriptors: Its "stdin", "stdout" and "stderr", and others by the variable that gets
                their number.
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
        """Return the server and the state of its process, for messages."""
        return (
            f"{_SERVER} (process {self._process.pid}, state "
            f"{process_state(self._process.pid) or 'gone'})"
        )

    def release(self) -> None:
        """Let the forked workers begin after `close`; without it `close` ends them."""
        if not self._has_forked:
            return
        data = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answered(self._end.send, _packed({}))
            data = self._answered(self._end.recv, _ANSWER_MAX)
        if not data:
            raise ServerEnded(self._process.wait())

    def close(self) -> None:
        """End the server; its workers become our children. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._end.close()
        adopt_orphans(is_on=False)

    def _answered(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call on the socket, as soon as the server takes part."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                return call(*arguments)
            self.waits()
            waited_s = time.monotonic() - began
            if waited_s >= self.limit_s:
                from syncvar.core.exit_status import RENDEZVOUS

                sentence = f"{self.describe()} has not answered for {waited_s:.0f} s"
                self._process.kill()
                self._process.wait()
                raise ServerEnded(RENDEZVOUS, sentence)


def start_early(arguments: Sequence[str], environ: Mapping[str, str]) -> ForkServer | None:
    """Start a server before the launcher has read its options; None if they seem to need none.

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
            [*command_of("syncvar.bootstrap.fork_server"), *arguments],
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
    from syncvar.core.exit_status import describe_exit

    return describe_exit(status)
