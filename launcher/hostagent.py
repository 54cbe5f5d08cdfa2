"""The agent of one host of several: started by ssh, it starts the workers there, and speaks for them over its two pipes.

Nothing of the job is on its command line: all it is told comes on standard input, and the end of that input is the end of
its workers, as is a silence of the launcher longer than `lost_after_s` while they run. Whoever kills the agent leaves its
guardian, which kills the workers' sessions and removes the private folder.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.begin import command_of
from syncvar.env import PREFIX
from syncvar.errors import ConfigError, SyncvarError, WireError
from syncvar.runtime.state import RECORDS
from syncvar.wire import PROTOCOL_VERSION
from syncvar_launcher.addresses import Listeners, interfaces, reachable
from syncvar_launcher.agent import Agent, Ended, Event, Output, Spoke
from syncvar_launcher.directory import JobDirectory
from syncvar_launcher.environment import inherited
from syncvar_launcher.exits import CONFIGURATION, LIMITS, describe_exit
from syncvar_launcher.forking import ForkServer, ServerEnded
from syncvar_launcher.inquiries import ANSWER_S
from syncvar_launcher.limits import OF_LIMITS, LimitTooLow, cannot_start
from syncvar_launcher.messages import FIRST_CREDIT, GREETING, Message, Order, Reader, pack
from syncvar_launcher.options import core_count, usable_cores
from syncvar_launcher.sharing import Sharing
from syncvar_launcher.stacks import Asked, Stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["main"]

_CHUNK = 1 << 18
_UNSENT_MAX = 8 << 20
_RECORD_MAX = 8 << 20
_FLIGHT = "flight"
_STACKS_S = 0.25
_PAUSE_S = 0.005
_IDLE_S = 300.0  # without workers: the launcher logs in elsewhere, or pauses before a restart
_KEY = "SYNCVAR_KEY_FD"


def main() -> int:
    """Serve one launcher, on standard input and output, until it has gone."""
    out = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no message
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, lambda *_: None)  # not ignored: workers would inherit that
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    agent = HostAgent(0, out)
    signal.signal(signal.SIGTERM, lambda *_: agent.leave())
    try:
        return agent.serve()
    finally:
        agent.close()


class HostAgent:
    """What one launcher has asked for on this host.

    Args:
        source: Descriptor on which messages come.
        sink: Descriptor to which they go.
    """

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self._reader = Reader()
        self._unsent: deque[memoryview] = deque([memoryview(GREETING)])
        self._unsent_bytes = 0
        self._is_over = False
        self._heard = time.monotonic()
        self._beat_s, self._lost_after_s = 1.0, 60.0
        self._looked = 0.0
        self._listeners: Listeners | None = None
        self._start: _Start | None = None
        self._is_stopped = False
        self._answers: dict[str, Callable[[Message], None]] = {
            "ask": self._asked, "listen": self._listen, "reach": self._reach, "begin": self._begin, "signal": self._signal,
            "signal_groups": self._signal_groups, "note": self._note, "inquire": self._inquire, "kill": self._kill, "stop": self._stop,
            "resume": self._resume, "abort": self._abort, "credit": self._credit, "input": self._input, "end": self._end, "beat": self._beat,
        }  # fmt: skip

    def leave(self) -> None:
        """End as soon as possible."""
        self._is_over = True

    def serve(self) -> int:
        """Do what is asked until the input ends; return the exit code."""
        while not self._is_over:
            poller = select.poll()
            poller.register(self._source, select.POLLIN)
            if self._unsent:
                poller.register(self._sink, select.POLLOUT)
            start = self._start
            for descriptor in start.writable() if start is not None else ():
                poller.register(descriptor, select.POLLOUT)
            watched = [*(self._listeners.descriptors() if self._listeners else ())]
            if start is not None:
                watched += start.descriptors(is_full=self._unsent_bytes > _UNSENT_MAX)
            for descriptor in watched:
                poller.register(descriptor, select.POLLIN)
            wait_s = _PAUSE_S if start is not None and start.asked else self._beat_s
            ready = [descriptor for descriptor, _ in poller.poll(wait_s * 1000)]
            if self._source in ready:
                self._take()
            for descriptor in ready:
                if self._listeners is not None:
                    self._listeners.readable(descriptor)
                if start is not None and start is self._start:
                    try:
                        for event in start.readable(descriptor):
                            self._tell(event)
                    except ConfigError as error:  # the workers cannot be forked
                        self._refuse(error)
            self._look(time.monotonic())
            self._flush()
        return 0

    def close(self) -> None:
        """Kill what runs, and let go of everything. Idempotent."""
        start, self._start = self._start, None
        if start is not None:
            start.close()
        if self._listeners is not None:
            self._listeners.close()

    # -- what the launcher says -----------------------------------------------------------------------------------

    def _take(self) -> None:
        try:
            data = os.read(self._source, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._is_over = True
            return
        self._heard = time.monotonic()
        try:
            for message in self._reader.feed(data):
                answer = self._answers.get(message["kind"])
                if answer is None:
                    raise WireError(f"a message {message['kind']!r} is for the launcher")
                answer(message)
        except WireError as error:
            sys.stderr.write(f"syncvar: the launcher is not understood: {error}\n")
            self._is_over = True

    def _asked(self, message: Message) -> None:
        self._beat_s, self._lost_after_s = max(0.05, message["beat_s"]), message["lost_after_s"]
        self._send("facts", facts=facts_of(message["kind_of_target"], message["target"], message["cwd"]))

    def _listen(self, message: Message) -> None:
        if self._listeners is not None:
            self._listeners.close()
        self._listeners = Listeners([str(one) for one in message["addresses"]], message["token"])
        self._send("listening", ports=self._listeners.ports)

    def _reach(self, message: Message) -> None:
        targets = [(str(address), int(port)) for address, port in message["targets"]]
        self._send("reached", answers=reachable(targets, message["token"], message["timeout_s"], self._listeners))

    def _begin(self, message: Message) -> None:
        if self._listeners is not None:
            self._listeners.close()
            self._listeners = None
        try:
            self._start = _Start(Order.read(message["start"]))
        except WireError:
            raise
        except (SyncvarError, OSError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        is_limit = isinstance(error, LimitTooLow) or getattr(error, "errno", 0) in OF_LIMITS
        self._send("refused", reason=str(error), code=LIMITS if is_limit else CONFIGURATION)

    def _signal(self, message: Message) -> None:
        if self._start is not None:
            self._start.agent.send(message["ranks"], message["number"])

    def _signal_groups(self, message: Message) -> None:
        if self._start is not None:
            self._start.agent.send_groups(message["number"])

    def _note(self, message: Message) -> None:
        if self._start is not None:
            self._send("placed", places=self._start.note(message["ranks"]))

    def _inquire(self, message: Message) -> None:
        if self._start is not None:
            self._start.ask(message["number"], message["rank"], all_threads=message["all_threads"])

    def _kill(self, message: Message) -> None:
        if self._start is not None:
            self._start.agent.kill(message["ranks"])

    def _stop(self, _: Message) -> None:
        self._is_stopped = True
        if self._start is not None:
            self._start.stop()

    def _resume(self, _: Message) -> None:
        self._is_stopped = False
        if self._start is not None:
            self._start.resume()

    def _abort(self, message: Message) -> None:
        if self._start is not None:
            self._start.sharing.abort(message["generation"])

    def _credit(self, message: Message) -> None:
        if self._start is not None:
            self._start.credit[message["rank"], message["stream"]] += message["count"]

    def _input(self, message: Message) -> None:
        if self._start is not None:
            self._start.feed(message["data"])

    def _end(self, _: Message) -> None:
        start, self._start = self._start, None
        if start is not None:
            for event in start.finish():
                self._tell(event)
            for name, data in start.records():
                self._send("record", name=name, data=data)
            start.close()
        self._send("closed")

    def _beat(self, _: Message) -> None:
        pass

    # -- what this host says --------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        if not self._is_stopped and now - self._heard > (self._lost_after_s if self._start is not None else max(self._lost_after_s, _IDLE_S)):
            sys.stderr.write(f"syncvar: the launcher is silent since {now - self._heard:.1f} s; its workers here are ended\n")
            self._is_over = True
        if self._start is not None:
            for sentence in self._start.sharing.take_said():
                self._send("said", sentence=sentence)
            if pids := self._start.take_begun():
                self._send("began", pids=pids)
            for number, instead, threads in self._start.stood(now):
                self._send("stood", number=number, instead=instead, threads=threads)
            if count := self._start.feed_on():
                self._send("fed", count=count)
        if now - self._looked >= self._beat_s:
            self._looked = now
            self._send("states", states={} if self._start is None else self._start.look())

    def _tell(self, event: Event) -> None:
        if isinstance(event, Output):
            self._send("output", rank=event.rank, stream=event.stream, data=event.data)
        elif isinstance(event, Spoke):
            self._send("spoke", rank=event.rank, record=event.record)
        elif isinstance(event, Ended):
            self._send("ended", rank=event.rank, status=event.status, beyond=event.beyond)

    def _send(self, kind: str, **fields: Any) -> None:
        data = pack(kind, **fields)
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        if not self._is_over:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                count = os.write(self._sink, self._unsent[0])
            except BlockingIOError:
                return
            except OSError:  # the launcher, or the way to it, is gone
                self._is_over = True
                return
            self._unsent_bytes -= count
            if count == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][count:]


class _Start:
    """One start of the ranks of this host.

    Args:
        order: What the launcher wants.
    """

    def __init__(self, order: Order) -> None:
        self.credit = {(one.rank, stream): FIRST_CREDIT for one in order.ranks for stream in ("out", "err")}
        self._order = order
        self._stopped: set[int] = set()
        self._begun: dict[int, int] = {}
        self.asked: dict[int, tuple[Asked, float]] = {}
        self._input = self._input_end = -1
        self._unfed = bytearray()
        self._has_all = self._is_finished = False
        self._stack = contextlib.ExitStack()
        try:
            with _private():
                directory = JobDirectory(os.environ)
            self._stack.callback(directory.remove)
            self._folder = directory.path
            self._server: ForkServer | None = None
            if order.start_method == "fork":
                self._server = ForkServer(self._command(), self._base(), Path(order.cwd))
                self._stack.callback(self._server.close)
            self.agent = Agent(directory.path, directory.lock, self._server)
            self._stack.callback(self.finish)
            with _private():
                self.sharing = self._share(order, directory.path)
            self._stack.callback(self.sharing.close)
            self._stacks = Stacks(
                self.agent, lambda _: str(directory.path), order.cwd, is_command=order.kind_of_target == "command"
            )
            if self._server is None:
                self._start_all()
        except BaseException:
            self._stack.close()
            raise

    @staticmethod
    def _share(order: Order, folder: Path) -> Sharing:
        return Sharing(
            order.job, order.arena_bytes, [len(order.ranks)], [order.core_count], [folder],
            why_not=order.why_no_arena, generation=order.generation, hands_over=order.hands_over,
        )  # fmt: skip

    def writable(self) -> list[int]:
        """Return the descriptors to poll for writing: rank 0's standard input, while there is something for it."""
        return [self._input_end] if self._unfed and self._input_end >= 0 else []

    def descriptors(self, *, is_full: bool) -> list[int]:
        """Return the descriptors to poll for reading."""
        watched = [*self.agent.descriptors(lambda rank, stream: not is_full and self.credit[rank, stream] > 0), *self.sharing.descriptors()]
        return watched if self._server is None else [self._server.descriptor(), *watched]

    def readable(self, descriptor: int) -> list[Event]:
        """Handle a descriptor that poll reported."""
        if self._server is not None and descriptor == self._server.descriptor():
            return self._server_speaks(self._server)
        self.sharing.readable(descriptor)
        events = list(self.agent.readable(descriptor))
        for event in events:
            if isinstance(event, Output):
                self.credit[event.rank, event.stream] -= len(event.data)
        return events

    def look(self) -> dict[int, list[Any]]:
        """Return the state and the seconds of work of each worker that runs."""
        self.agent.look()
        running = [rank for rank, worker in self.agent.workers.items() if worker.status is None]
        return {rank: [self.agent.state(rank), self.agent.busy_s(rank), self._stacks.pid(rank)] for rank in running}

    def take_begun(self) -> dict[int, int]:
        """Return, once, the process of each rank that has been started."""
        begun, self._begun = self._begun, {}
        return begun

    def ask(self, number: int, rank: int, *, all_threads: bool) -> None:
        """Ask a rank where it stands."""
        self.asked[number] = self._stacks.ask(rank, all_threads=all_threads), time.monotonic() + ANSWER_S

    def stood(self, now: float) -> Iterator[tuple[int, str, list[Any]]]:
        """Yield the answers that are there, each with its number."""
        for number, (asked, until) in list(self.asked.items()):
            threads = self._stacks.answer(asked, is_last=now >= until)
            if threads is not None or now >= until:
                del self.asked[number]
                yield number, asked.instead, [[one.ident, one.is_main, [list(frame) for frame in one.frames]] for one in threads or ()]

    def feed(self, data: bytes) -> None:
        """Pass on what came on the launcher's standard input; empty bytes are its end."""
        self._unfed += data
        self._has_all = not data

    def feed_on(self) -> int:
        """Write what the pipe of rank 0 takes of its standard input; return how much of it is done with."""
        count = 0
        while self._unfed and self._input_end >= 0:
            try:
                written = os.write(self._input_end, self._unfed[:65536])
            except BlockingIOError:
                break
            except OSError:  # it reads no more
                written = len(self._unfed)
            del self._unfed[:written]
            count += written
        if self._has_all and not self._unfed and self._input_end >= 0:
            os.close(self._input_end)
            self._input_end = -1
        return count

    def note(self, ranks: list[int]) -> dict[int, str]:
        """Return where ranks stand, those that tell it within a moment."""
        self._stacks.note(ranks)
        self._stacks.await_noted(_STACKS_S)
        self._stacks.read_noted()
        return {rank: line for rank, line in self._stacks.places.items() if rank in ranks}

    def stop(self) -> None:
        """Stop the sessions of all workers."""
        self._stopped |= self.agent.stop()

    def resume(self) -> None:
        """Let those go on that `stop` has stopped."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def finish(self) -> list[Event]:
        """Kill what is left, and return what was written; nothing the second time."""
        if self._is_finished:
            return []
        self._is_finished = True
        events = list(self.agent.close())
        for descriptor in (self._input, self._input_end):
            if descriptor >= 0:
                os.close(descriptor)
        self._input = self._input_end = -1
        return events

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Yield the flight records that the ranks have left, each with its name."""
        for path in sorted((self._folder / _FLIGHT).glob(RECORDS)):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                if len(data) <= _RECORD_MAX:
                    yield path.name, data

    def close(self) -> None:
        """Let go of the private folder."""
        self._stack.close()

    def _command(self) -> list[str]:
        order = self._order
        if order.kind_of_target == "command":
            return [order.target, *order.args]
        how = ["-m", order.target] if order.kind_of_target == "module" else [order.target]
        return [*command_of("syncvar.forkserver" if order.start_method == "fork" else "syncvar.bootstrap"), *how, *order.args]

    def _base(self) -> dict[str, str]:
        """Return what all ranks get: what the login gave this agent, without settings of another job, and what was asked for."""
        own = {name: value for name, value in inherited(os.environ, is_clear=self._order.is_clear).items() if not name.startswith(PREFIX)}
        return {**own, **self._order.environ}

    def _start_all(self) -> None:
        order, base, argv = self._order, self._base(), self._command()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        secret = _secret_descriptor(order.secret)
        try:
            for one in order.ranks:
                stdin = null
                if one.has_input:
                    self._input, self._input_end = os.pipe2(os.O_CLOEXEC)
                    os.set_blocking(self._input_end, False)
                    stdin = self._input
                own = {**base, **one.environ, "SYNCVAR_HOST_DIRECTORY": str(self._folder), "SYNCVAR_FLIGHT_DIR": str(self._folder / _FLIGHT)}
                self.agent.start(
                    one.rank, argv, own, Path(order.cwd), one.cores, stdin=stdin, terminal=False, named={_KEY: secret},
                )  # fmt: skip
                self._begun[one.rank] = self.agent.workers[one.rank].process.pid
        except OSError as error:
            raise cannot_start(argv[0], error) from error
        finally:
            os.close(null)
            os.close(secret)
            if self._input >= 0:
                os.close(self._input)
                self._input = -1

    def _server_speaks(self, server: ForkServer) -> list[Event]:
        self._server = None
        status = server.why_not_ready()
        if status is None:
            try:
                self._start_all()
            except ServerEnded as ended:
                status = ended.status
            finally:
                server.close()
        if status is not None:
            raise ConfigError(f"the process that workers are forked from {describe_exit(status)}; --start-method spawn does without it")
        return []


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Make what is made meanwhile this user's alone; workers keep the mask of the login."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def facts_of(kind: str, target: str, cwd: str) -> dict[str, Any]:
    """Return what the launcher has to know of this host before anything is started.

    Args:
        kind: "script", "module" or "command".
        target: What is to be run.
        cwd: The folder in which it starts.
    """
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "python": platform.python_version(),
        "syncvar": _version("syncvar"),
        "numpy": _version("numpy"),
        "protocol": PROTOCOL_VERSION,
        "byte_order": sys.byteorder,
        "cores": list(usable_cores()),
        "cpu_count": os.cpu_count() or 1,
        "core_count": core_count(),
        "processor": os.uname().machine,
        "interfaces": [list(one) for one in interfaces()],
        "launcher_at": connection[0] if len(connection) == 4 else "",
        "reached_at": connection[2] if len(connection) == 4 else "",
        "has_folder": Path(cwd).is_dir(),
        "has_target": kind != "script" or (Path(cwd) / target).exists(),
        "pid": os.getpid(),
    }


def _machine() -> str:
    """Return what tells this machine from others, whatever it is called: its identity, its boot, and its network."""
    parts = [os.uname().nodename]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError):
            parts.append(Path(path).read_text("ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _secret_descriptor(secret: bytes) -> int:
    """Return a descriptor of the job's secret: nobody else can open what it refers to, and it is in no command line."""
    descriptor = os.memfd_create("syncvar-key", os.MFD_CLOEXEC)
    os.write(descriptor, secret)
    return descriptor


