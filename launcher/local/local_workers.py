"""The worker processes of one host: starts, polls, signals and ends them.

Each worker leads its own session. Its output comes through two pipes, its status messages through a
third, its exit through a pidfd. Nothing here blocks: the owner polls the descriptors and calls
`readable`.

A worker gets the job's secret in an open file without a name. The secret never stands on a command
line or in a variable. Programs of `--no-python` get it as a file in the private folder of the job,
because a wrapper may close inherited descriptors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgpack

from syncvar.core.fork_cleanup import libc
from syncvar.core.output_files import PRIVATE, create_file
from syncvar.core.process_ids import is_server
from syncvar_launcher.local.host_resources import OutOfMemory
from syncvar_launcher.local.process_sessions import (
    busy_ticks,
    expects,
    groups,
    kill_sessions,
    process_state,
    resident_pages,
    signal_sessions,
    start_time,
)
from syncvar_launcher.local.worker_start import child_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from syncvar_launcher.local.worker_start import ForkedWorker, ForkServer

_CHUNK = 65536
_RECORD_MAX = 1 << 20
_tgkill = getattr(libc, "tgkill", None)  # not in every libc
_HARMLESS = (signal.SIGCONT, signal.SIGURG, signal.SIGWINCH)  # they end no process
_KEY_FILE_NAME = "key"


class WorkerOutput(NamedTuple):
    """A worker wrote output; empty bytes mean that the stream has ended."""

    rank: int
    stream: Literal["out", "err"]
    data: bytes


class WorkerStatus(NamedTuple):
    """A worker's bootstrap sent a status message."""

    rank: int
    record: dict[str, str | int]


class WorkerExited(NamedTuple):
    """A worker's process ended: exit code or minus the signal, and what else is known."""

    rank: int
    status: int
    beyond: str = ""


class WorkerStarted(NamedTuple):
    """A worker's process has started on its host."""

    rank: int
    pid: int


class WorkerUnreachable(NamedTuple):
    """A worker's host is lost, or the worker cannot start; `code` stands for its exit code."""

    rank: int
    reason: str
    code: int = 70


class Spared(NamedTuple):
    """Workers that got no signal, because they do not expect it and it would have ended them."""

    number: int
    ranks: list[int]


class HostArrived(NamedTuple):
    """A host has come to an elastic job, and can get workers."""

    slot: Any  # the `HostSlot` of the room `hosts`


Event = (
    WorkerOutput
    | WorkerStatus
    | WorkerStarted
    | WorkerExited
    | WorkerUnreachable
    | Spared
    | HostArrived
)

_Role = Literal["pidfd", "out", "err", "status"]
_ROLES: tuple[_Role, ...] = ("pidfd", "out", "err", "status")


class WorkerSpec(NamedTuple):
    """The program, streams and limits of one worker or server."""

    rank: int  # rank, or the number of the server's process
    argv: Sequence[str]  # command line
    environ: Mapping[str, str]  # whole environment; `start` adds the descriptor of the status pipe
    cwd: Path  # folder in which it starts
    cores: Sequence[int] | None  # cores that it may use, or None for all
    stdin: int  # descriptor of its standard input
    # Descriptors of its standard output and error (of a debugged rank); None for pipes to here.
    outputs: tuple[int, int] | None = None
    # descriptor that reads what it writes to `outputs`; -1 for none. `start` takes ownership
    source: int = -1
    pass_fds: Sequence[int] = ()  # descriptors that it inherits
    # more of them, by the variable that gets the number
    named: Mapping[str, int] = MappingProxyType({})
    is_fresh: bool = False  # whether it is a fresh process, even beside forked ones
    program: int = 0  # index of its program among those of the job


@dataclass(slots=True)
class WorkerProcess:
    """One worker's process and descriptors (-1 when closed)."""

    rank: int
    process: subprocess.Popen[bytes] | ForkedWorker
    started: int
    pidfd: int
    out: int
    err: int
    status_pipe: int
    unread: bytearray = field(default_factory=bytearray)  # the start of a status message
    status: int | None = None
    # Whether it saves before it ends on SIGTERM, see `syncvar.core.exit_status`.
    takes_notice: bool = False


class LocalWorkers:
    """The worker processes of this host; `lock` is the descriptor of the directory's lock."""

    def __init__(self, directory: Path, lock: int, server: ForkServer | None = None) -> None:
        self._server = server
        self.workers: dict[int, WorkerProcess] = {}
        self._pid = os.getpid()
        self._memory = OutOfMemory(time.monotonic())
        self._owner: dict[int, tuple[WorkerProcess, _Role]] = {}
        self._stopped: set[int] = set()
        read, self._cleanup_pipe = os.pipe2(os.O_CLOEXEC)
        try:
            # By path and isolated: it must start in milliseconds, whatever site-packages hold.
            program = str(Path(__file__).with_name("process_sessions.py"))
            self._cleanup = subprocess.Popen(
                [sys.executable, "-I", "-S", program, str(directory)],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(lock,),
                cwd="/",
            )
        finally:
            os.close(read)

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker.

        Call it from a thread that lives as long as the launcher: its death ends the worker.

        A forked worker begins after its server's `release` and `close`. The server already has
        command line, folder and `pass_fds`.
        """
        pipe, pipe_end = os.pipe2(os.O_CLOEXEC)
        ends = [pipe_end]
        out, err = spec.source, -1
        inherited = {**spec.named, "SYNCVAR_STATUS_FD": pipe_end}
        try:
            outputs = spec.outputs
            if outputs is None:
                out, out_end = os.pipe2(os.O_CLOEXEC)
                err, err_end = os.pipe2(os.O_CLOEXEC)
                ends += [out_end, err_end]
                outputs = out_end, err_end
            process = self._spawn(spec, outputs, inherited)
        except BaseException:
            for descriptor in (pipe, out, err):
                if descriptor >= 0:
                    os.close(descriptor)
            raise
        finally:
            for descriptor in ends:
                os.close(descriptor)
        started = start_time(process.pid)
        self._inform_cleanup(f"+{process.pid} {started}\n")
        pidfd = os.pidfd_open(process.pid)
        worker = WorkerProcess(spec.rank, process, started, pidfd, out, err, pipe)
        self.workers[spec.rank] = worker
        for descriptor, role in zip((pidfd, out, err, pipe), _ROLES, strict=True):
            if descriptor >= 0:
                if role != "pidfd":
                    os.set_blocking(descriptor, False)
                self._owner[descriptor] = (worker, role)

    def _spawn(
        self, spec: WorkerSpec, outputs: tuple[int, int], inherited: dict[str, int]
    ) -> subprocess.Popen[bytes] | ForkedWorker:
        """Start the process; `inherited` are descriptors by the variable that gets the number."""
        if self._server is not None and not spec.is_fresh:
            streams = {"stdin": spec.stdin, "stdout": outputs[0], "stderr": outputs[1]}
            descriptors = streams | inherited
            return self._server.fork(spec.environ, spec.cores, descriptors, spec.program)
        numbers = {name: str(number) for name, number in inherited.items()}
        return subprocess.Popen(
            list(spec.argv),
            env={**spec.environ, **numbers},
            cwd=spec.cwd,
            stdin=spec.stdin,
            stdout=outputs[0],
            stderr=outputs[1],
            pass_fds=(*inherited.values(), *spec.pass_fds),
            start_new_session=True,
            preexec_fn=child_of(self._pid, spec.cores),  # noqa: PLW1509  (this process has no Python threads)
        )

    def start_fresh(self) -> None:
        """Start each further worker as a fresh process."""
        self._server = None

    def descriptors(self, takes: Callable[[int, Literal["out", "err"]], bool]) -> list[int]:
        """Return the descriptors to poll for reading.

        `takes` returns whether the launcher can use more output of a rank; else it stays in its
        pipe.
        """
        return [
            descriptor
            for descriptor, (worker, role) in self._owner.items()
            if (role != "out" and role != "err") or takes(worker.rank, role)  # noqa: PLR1714  (mypy narrows this)
        ]

    def readable(self, descriptor: int) -> Iterator[Event]:
        """Handle a descriptor that poll reported."""
        found = self._owner.get(descriptor)
        if found is None:
            return
        worker, role = found
        if role == "pidfd":
            yield from self._reap(worker)
        elif role == "status":
            yield from self._listen(worker)
        else:
            if role == "err" and worker.status_pipe in self._owner:
                yield from self._listen(worker)  # it announces a traceback before it writes one
            if descriptor in self._owner:
                yield from self._read(worker, descriptor, role)

    def look(self) -> None:
        """Note the control groups of the workers, to know why they end."""
        running = {
            rank: worker.process.pid
            for rank, worker in self.workers.items()
            if worker.status is None
        }
        self._memory.look(running, time.monotonic())

    def unsent(self) -> list[int]:
        """Return the descriptors to poll for writing: none."""
        return []

    def state(self, rank: int) -> str:
        """Return the state letter of a worker's process; empty after its end."""
        worker = self.workers[rank]
        return process_state(worker.process.pid) if worker.status is None else ""

    def busy_s(self, rank: int) -> float:
        """Return the processor time of a worker's process, in seconds."""
        return busy_ticks(self.workers[rank].process.pid) / os.sysconf("SC_CLK_TCK")

    def resident_nbytes(self, rank: int) -> int:
        """Return the resident memory of a worker's process; 0 after its end."""
        return resident_pages(self.workers[rank].process.pid) * os.sysconf("SC_PAGE_SIZE")

    def send(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to workers; SIGTERM also wakes those that are stopped.

        SIGTERM also goes to the rest of a worker's process group, as with `mpirun`: at its end a
        worker may wait for its children. A worker that takes SIGTERM as a notice still needs its
        children, and ends them itself.
        """
        found = [self.workers.get(rank) for rank in ranks]
        chosen = [worker for worker in found if worker is not None and worker.status is None]
        for worker in chosen:
            with contextlib.suppress(ProcessLookupError):
                # To the main thread: a signal for a stopped process goes to whichever thread wakes
                # first, and Python would not see it before the main thread's sleep or wait is over.
                pid = worker.process.pid
                if _tgkill is None or _tgkill(pid, pid, number):
                    os.kill(pid, number)
                if number == signal.SIGTERM:
                    os.kill(pid, signal.SIGCONT)
        if number == signal.SIGTERM:
            leaders = [worker.process.pid for worker in chosen if not worker.takes_notice]
            for leader, pids in groups(leaders).items():
                for pid in pids:
                    if pid != leader:
                        with contextlib.suppress(OSError):
                            os.kill(pid, signal.SIGTERM)

    def send_groups(self, number: int) -> list[int]:
        """Send a signal to the ranks and their process groups; return the ranks that got none.

        A process that the signal would end gets none.
        """
        ranks = {
            worker.process.pid: worker.rank
            for worker in self.workers.values()
            if worker.status is None and not is_server(worker.rank)
        }
        reached = set()
        for leader, pids in groups(list(ranks)).items():
            for pid in pids:
                if number in _HARMLESS or expects(pid, number):
                    reached.add(leader)
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
        return sorted(rank for pid, rank in ranks.items() if pid not in reached)

    def stop(self) -> None:
        """Stop the sessions of all workers."""
        alive = {
            worker.process.pid: worker.started
            for worker in self.workers.values()
            if worker.status is None
        }
        self._stopped |= signal_sessions(alive, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue what `stop` has stopped."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill the whole sessions of workers, grandchildren included."""
        chosen = [worker for rank, worker in self.workers.items() if rank in ranks]
        kill_sessions({worker.process.pid: worker.started for worker in chosen})
        for worker in chosen:
            if worker.status is None:  # a forked worker may have been stuck before it led a session
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signal.SIGKILL)

    def close(self) -> Iterator[Event]:
        """Kill what still runs, and yield what it wrote."""
        alive = [rank for rank, worker in self.workers.items() if worker.status is None]
        self.kill(alive)
        for rank in alive:
            self.workers[rank].process.wait()
            yield from self._reap(self.workers[rank])
        for descriptor in list(self._owner):
            worker, role = self._owner[descriptor]
            if role == "out" or role == "err":  # noqa: PLR1714  (mypy narrows this)
                yield from self._read(worker, descriptor, role, last=True)
            elif role == "status":
                yield from self._listen(worker)
        for descriptor in list(self._owner):
            self._drop(descriptor)

    def end_cleanup(self) -> None:
        """End the cleanup process. From then on only the caller removes the directory."""
        self._inform_cleanup(".\n")
        os.close(self._cleanup_pipe)
        self._cleanup.wait()

    # -- inside ------------------------------------------------------------------------------------

    def _reap(self, worker: WorkerProcess) -> Iterator[Event]:
        status = worker.process.poll()
        if status is None:
            return
        if worker.pidfd in self._owner:
            self._drop(worker.pidfd)
        if worker.status_pipe in self._owner:
            yield from self._listen(worker)
        if worker.status is None:
            worker.status = status
            beyond = self._memory.ended(worker.rank, status, time.monotonic())
            # First of all, because the other ranks may be waiting for this one.
            yield WorkerExited(worker.rank, status, beyond)
            # Other processes of the worker's session end with it.
            kill_sessions({worker.process.pid: worker.started})
            self._inform_cleanup(f"-{worker.process.pid}\n")

    def _listen(self, worker: WorkerProcess) -> Iterator[Event]:
        while True:
            try:
                data = os.read(worker.status_pipe, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                self._drop(worker.status_pipe)
                break
            worker.unread += data
            if len(worker.unread) > _RECORD_MAX:
                self._drop(worker.status_pipe)
                return
        unpacker = msgpack.Unpacker(raw=False, max_buffer_size=_RECORD_MAX, strict_map_key=True)
        unpacker.feed(bytes(worker.unread))
        end = 0
        try:
            for record in unpacker:
                end = unpacker.tell()
                if isinstance(record, dict) and all(
                    isinstance(value, str | int) for value in record.values()
                ):
                    if record.get("event") == "takes_notice":
                        worker.takes_notice = bool(record.get("on"))
                    yield WorkerStatus(worker.rank, record)
        except (ValueError, msgpack.UnpackException):
            end = len(worker.unread)
        del worker.unread[:end]

    def _read(
        self,
        worker: WorkerProcess,
        descriptor: int,
        stream: Literal["out", "err"],
        *,
        last: bool = False,
    ) -> Iterator[Event]:
        while True:
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(descriptor)
            yield WorkerOutput(worker.rank, stream, data)
            if not data or not last:
                return

    def _drop(self, descriptor: int) -> None:
        self._owner.pop(descriptor, None)
        os.close(descriptor)

    def _inform_cleanup(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._cleanup_pipe, line.encode())


def secret_descriptor(secret: bytes, directory: Path) -> int:
    """Return a descriptor of the secret, which no other user can open.

    Kernels without memfd use a file in the private folder `directory`, and unlink it.
    """
    try:
        descriptor = os.memfd_create("syncvar-key", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        path = directory / "nameless-key"
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        path.unlink()
    os.write(descriptor, secret)
    return descriptor


def write_secret(secret: bytes, directory: Path) -> str:
    """Write the secret to a file that only this user can read, once; return its path.

    `directory` is the private folder of the job on this host.
    """
    path = directory / _KEY_FILE_NAME
    if not path.exists():
        with os.fdopen(create_file(path, PRIVATE), "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
    return str(path)
