"""How workers start: forked from one process with NumPy imported, or as fresh processes.

`ForkServer` is the launcher's side of `syncvar.bootstrap.fork_server`. An interpreter takes as long
to start as the launcher to read its options. So the launcher may start the server first
(`start_early`), and send the order when it knows the options. A server without an order has
imported nothing. The code that starts it must not wait for imports, so functions import the rest.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from syncvar.bootstrap.worker_entry import command_of
from syncvar.core.fork_cleanup import end_with, libc
from syncvar_launcher.local.process_sessions import process_state
from syncvar_launcher.options.worker_environment import WITHHELD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from syncvar_launcher.options.launch_options import RankProgram

# How workers on hosts start, as far as the launcher knows it before their agents run.
ON_HOSTS = {
    "auto": "forked on each host that has several, where that is possible, else fresh processes",
    "spawn": "fresh processes: --start-method spawn",
    "fork": "forked: --start-method fork",
}
SHOW_IMPORTS = ("PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE")

_SCRIPT_MAX = 4 << 20
_PR_SET_CHILD_SUBREAPER = 36
_FORK_FD = "SYNCVAR_FORK_FD"
_ANSWER_MAX = 4096
_LENGTH_BYTES = 8
_PART = 1 << 16  # command lines may be longer than what a socket takes at once
_SERVER = "the process that workers are forked from"
_LOOK_S = 0.1  # between two looks at what may end a wait for an answer

# Prefixes of options that rule out a server with our variables and our folder.
_NOT_AHEAD = (
    *("-h", "--help", "--version", "--dry-run", "spawn", "--start-method=spawn", "--no-python"),
    *("--join", "--listen", "-H", "--host", "--env-clear", "--cwd"),
)

# Prefixes of variables that an interpreter and its libraries read only when they start.
_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "LOCPATH", "MALLOC_", "GLIBC_", "TZ", "HOME"),
    *("COV", "ASAN_", "LSAN_", "UBSAN_"),
)


def worker_command(kind: str, target: str, args: Sequence[str], *, is_forked: bool) -> list[str]:
    """Return the command line of a worker, or of the fork server if `is_forked`.

    `kind` is "script", "module" or "command".

    Example:
        >>> worker_command("module", "train", ["--lr", "1"], is_forked=False)[2:]
        ['syncvar.bootstrap.worker_main', '-m', 'train', '--lr', '1']
        >>> worker_command("command", "/bin/true", [], is_forked=False)
        ['/bin/true']
    """
    if kind == "command":
        return [target, *args]
    module = "fork_server" if is_forked else "worker_main"
    return [*command_of(f"syncvar.bootstrap.{module}"), *worker_arguments(kind, target, args)]


def worker_arguments(kind: str, target: str, args: Sequence[str]) -> list[str]:
    """Return the arguments of `worker_main` and `fork_server`: the program with its arguments."""
    return ["-m", target, *args] if kind == "module" else [target, *args]


def server_command(kind: str, target: str, server: int) -> list[str]:
    """Return the command line of a server.

    It names the workers' program, from which the server may import update rules.

    Example:
        >>> server_command("script", "train.py", 1)[2:]
        ['syncvar.parameter_server.server_main', 'server', '1', 'train.py']
    """
    program = {"module": ["-m", target], "script": [target], "command": []}[kind]
    command = command_of("syncvar.parameter_server.server_main")
    return [*command, "server", str(server), *program]


class StartMethod(NamedTuple):
    """How the workers of a host start."""

    is_forked: bool  # whether they are forked from one process; else each is a fresh interpreter
    reason: str  # reason, in one sentence without a subject
    may_change: bool = False  # whether the fork server may still decide for fresh processes

    def command(self, program: RankProgram) -> list[str]:
        """Return the command line of a worker, or of the fork server."""
        return worker_command(program.kind, program.target, program.args, is_forked=self.is_forked)

    def __str__(self) -> str:
        return f"{'forked' if self.is_forked else 'fresh processes'}: {self.reason}"


def plan_start(
    method: str,
    programs: Sequence[RankProgram],
    workers: int,
    cwd: str,
    environ: Mapping[str, str],
) -> StartMethod:
    """Decide how the workers of a host start; all of them start in the same way.

    It searches scripts and modules, in the folder `cwd`, for variables that NumPy reads only when
    it is imported. `environ` has the variables of all programs.

    Example:
        >>> from syncvar_launcher.options.launch_options import RankProgram
        >>> print(plan_start("auto", [RankProgram("command", "/bin/true", (), {}, 4)], 4, "/", {}))
        fresh processes: /bin/true is a program of its own
        >>> print(plan_start("spawn", [RankProgram("script", "a.py", (), {}, 4)], 4, "/", {}))
        fresh processes: --start-method spawn
    """
    if method != "auto":
        return StartMethod(method == "fork", f"--start-method {method}")
    reason = _no_fork_reason(programs, workers, cwd, environ)
    if reason:
        return StartMethod(is_forked=False, reason=reason)
    return StartMethod(
        is_forked=True,
        reason="from one process that has imported NumPy and syncvar",
        may_change=True,
    )


def _no_fork_reason(
    programs: Sequence[RankProgram], workers: int, cwd: str, environ: Mapping[str, str]
) -> str:
    """Return why workers cannot be forked from one process, or an empty text."""
    for one in programs:
        if one.kind == "command":
            return f"{one.target} is a program of its own"
    if workers == 1:
        return "one worker shares what it imports with nobody"
    for name in SHOW_IMPORTS:
        if any(variables.get(name) for variables in (environ, *(one.env for one in programs))):
            return f"{name} shows what each worker imports"
    for one in programs:
        found = _find_read_once(one.kind, one.target, cwd)
        if found:
            names = ", ".join(found)
            return f"{one.target} names {names}, which NumPy reads only when it is imported"
    return _difference(programs, cwd) if len(programs) > 1 else ""


def _difference(programs: Sequence[RankProgram], cwd: str) -> str:
    """Return in what programs differ that one process cannot do for all, or an empty text."""
    from syncvar.bootstrap.preloaded_imports import READ_ONCE

    shared = shared_variables(programs)
    own = sorted({name for one in programs for name in one.env} - shared.keys())
    early = [name for name in own if name.startswith(_AT_START) or READ_ONCE.fullmatch(name)]
    if early:
        return (
            f"the programs differ in {', '.join(early)}, which Python or NumPy reads at its start"
        )
    folders = {
        os.path.realpath(cwd if one.kind == "module" else os.path.join(cwd, one.target, ".."))
        for one in programs
    }
    return "the programs are in different folders" if len(folders) > 1 else ""


def shared_variables(programs: Sequence[RankProgram]) -> dict[str, str]:
    """Return the variables that all programs of a job have with the same value.

    Example:
        >>> from syncvar_launcher.options.launch_options import RankProgram
        >>> first = RankProgram("script", "a.py", (), {"A": "1", "B": "2"}, 1)
        >>> shared_variables([first, first._replace(env={"A": "1", "B": "3"})])
        {'A': '1'}
    """
    first, *others = (one.env for one in programs)
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
    }


def _find_read_once(kind: str, target: str, cwd: str) -> list[str]:
    """Return the variables in a script's text that NumPy reads once, sorted."""
    from syncvar.bootstrap.preloaded_imports import READ_ONCE

    path = os.path.join(cwd, target.replace(".", os.sep) if kind == "module" else target)
    for name in (f"{path}.py",) * (kind == "module") + (path, os.path.join(path, "__main__.py")):
        try:
            with open(name, encoding="utf-8", errors="replace") as file:
                return sorted(set(READ_ONCE.findall(file.read(_SCRIPT_MAX))))
        except OSError:
            continue
    return []


def child_of(parent: int, cores: Sequence[int] | None = None) -> Callable[[], None]:
    """Return a function for a new child to call before its program.

    The child then ends with `parent`, and uses only `cores`; None for all.
    """

    def prepare() -> None:
        end_with(parent)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare


def adopt_orphans(*, is_on: bool) -> None:
    """Become the parent of descendants whose own parent ends, or stop being it."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


class ServerEnded(Exception):
    """The fork server ended, or does not answer (status 69), before all workers were forked."""

    def __init__(self, status: int, sentence: str = "") -> None:
        self.status = status
        self.sentence = sentence or f"{_SERVER} {_end_text(status)} before all were forked"
        super().__init__(self.sentence)


class ForkUnsupported(NamedTuple):
    """The reason not to fork workers from a server."""

    reason: str  # sentence
    # whether forking is impossible; else forked workers might lack what fresh processes have
    is_certain: bool
    status: int | None = None  # Status of an ended server, as in `ServerEnded`; None while it runs.


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

    def _wait(self, flags: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, flags)
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
            name.startswith(_AT_START) for name in self._changes(environ)
        )
        return is_whole and self._cwd == str(cwd)

    def order(self, programs: Sequence[RankProgram], environ: Mapping[str, str]) -> None:
        """Let the server import what workers need, which run one of these programs each."""
        arguments = [worker_arguments(one.kind, one.target, one.args) for one in programs]
        order = _pack({"programs": arguments, "environ": self._changes(environ)})
        self._environ = environ
        message = len(order).to_bytes(_LENGTH_BYTES, "little") + order
        # If it has ended, `refusal` will find that.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(message), _PART):
                self._call_server(self._end.send, message[start : start + _PART])

    def _changes(self, environ: Mapping[str, str]) -> dict[str, str]:
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
            data = self._call_server(self._end.recv, _ANSWER_MAX)
        if not data:
            status = self._process.wait()
            return ForkUnsupported(
                f"{_SERVER} {_end_text(status)} before it was ready", is_certain=True, status=status
            )
        answer = _unpack(data)
        reason = answer["cannot"] or answer["doubt"]
        return ForkUnsupported(reason, is_certain=bool(answer["cannot"])) if reason else None

    def fork(
        self,
        environ: Mapping[str, str],
        cores: Sequence[int] | None,
        descriptors: Mapping[str, int],
        program: int = 0,
    ) -> ForkedWorker:
        """Fork a worker, which begins after `release` and `close`.

        `descriptors` are its "stdin", "stdout" and "stderr", and others by the variable that gets
        their number. `program` is the index of its program in the order.
        """
        self._has_forked = True
        adopt_orphans(is_on=True)
        request: dict[str, Any] = {
            "environ": self._changes(environ),
            "cores": None if cores is None else list(cores),
            "names": list(descriptors),
            "program": program,
            "server": self._process.pid,
            "launcher": os.getpid(),
        }
        data = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._call_server(
                socket.send_fds, self._end, [_pack(request)], list(descriptors.values())
            )
            data = self._call_server(self._end.recv, _ANSWER_MAX)
        if not data:
            raise ServerEnded(self._process.wait())
        answer = _unpack(data)
        if "pid" not in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return ForkedWorker(answer["pid"])

    def describe(self) -> str:
        """Return the server and the state of its process, for messages."""
        pid = self._process.pid
        return f"{_SERVER} (process {pid}, state {process_state(pid) or 'gone'})"

    def release(self) -> None:
        """Let the forked workers begin after `close`; without it `close` ends them."""
        if not self._has_forked:
            return
        data = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._call_server(self._end.send, _pack({}))
            data = self._call_server(self._end.recv, _ANSWER_MAX)
        if not data:
            raise ServerEnded(self._process.wait())

    def close(self) -> None:
        """End the server; its workers become our children. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._end.close()
        adopt_orphans(is_on=False)

    def _call_server(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the socket until the server answers, and return the result."""
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

    The server shows the command line of the launcher as its own.
    """
    is_ruled_out = any(one.startswith(_NOT_AHEAD) for one in arguments)
    if not arguments or is_ruled_out or not WITHHELD.isdisjoint(environ):
        return None
    if any(environ.get(name) for name in SHOW_IMPORTS):  # its text would stand among the workers'
        return None
    argv = [*command_of("syncvar.bootstrap.fork_server"), *arguments]
    try:
        return ForkServer(argv, dict(environ), os.getcwd())  # noqa: PTH109
    except OSError:  # later code tries once more, and shows the reason
        return None


def _pack(message: Mapping[str, Any]) -> bytes:
    import msgpack

    packed: bytes = msgpack.packb(message, unicode_errors="surrogateescape")
    return packed


def _unpack(data: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(data)


def _end_text(status: int) -> str:
    from syncvar.core.exit_status import describe_exit

    return describe_exit(status)
