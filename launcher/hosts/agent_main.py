"""The agent of one host: it starts the workers there, and talks to the launcher over its two pipes.

ssh starts the agent, and nothing of the job is on its command line: all orders arrive on standard
input. The end of that input ends its workers. If the launcher is silent for longer than
`lost_after_s`, the agent takes the network for cut and ends its workers, as the launcher ends the
others; they may raise PeerLost before. If the agent is killed, its cleanup process kills the
workers' sessions and removes the private folder.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import syncvar
from syncvar.core.errors import ConfigError, SyncvarError, WireError, error_message
from syncvar.core.exit_status import CONFIGURATION, LIMITS, NOTICE_ECHO_S
from syncvar.protocol.frame import PROTOCOL_VERSION
from syncvar_launcher.hosts.agent_protocol import (
    GREETING,
    Message,
    PipeOutbox,
    RankSpec,
    Reader,
    StartRequest,
    checked_list,
    pack,
)
from syncvar_launcher.hosts.agent_workers import CannotFork, HostRanks
from syncvar_launcher.hosts.file_transfer import HostCopy
from syncvar_launcher.hosts.host_checks import Listeners, interfaces, reachable
from syncvar_launcher.local.host_resources import OF_LIMITS, LimitTooLow, tasks_left
from syncvar_launcher.local.local_workers import Event, WorkerExited, WorkerOutput, WorkerStatus
from syncvar_launcher.options.option_table import core_count, usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CHUNK = 1 << 18
_UNSENT_MAX = 8 << 20
_PAUSE_S = 0.005
_IDLE_S = 300.0  # without workers: the launcher logs in to other hosts, or pauses

# Orders about the ranks of an attempt; without an attempt the agent ignores them.
_ATTEMPT_ORDERS: dict[str, Callable[[HostRanks, Message], None]] = {
    "signal": lambda ranks, order: ranks.processes.send(order["ranks"], order["signal_number"]),
    "kill": lambda ranks, order: ranks.processes.kill(order["ranks"]),
    "get_stack": lambda ranks, order: ranks.ask(
        order["request_id"], order["rank"], all_threads=order["all_threads"]
    ),
    "abort": lambda ranks, order: ranks.shm.abort(order["generation"]),
    "begin_generation": lambda ranks, order: ranks.shm.begin_generation(
        order["generation"], {order["host"]: (order["index"], order["size"])}
    ),
    "credit": lambda ranks, order: ranks.add_credit(
        order["rank"], order["stream"], order["nbytes"]
    ),
    "input": lambda ranks, order: ranks.feed(order["data"]),
    "window_size": lambda ranks, order: ranks.resize(
        order["rank"], checked_list(order["size"], int, 2)
    ),
}


def main() -> int:
    """Serve one launcher on standard input and output until it has gone."""
    out = os.dup(1)
    os.dup2(2, 1)  # output of a library must not mix with messages
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, lambda *_: None)  # not ignored: workers would inherit that
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    agent = HostAgent(0, out)
    signal.signal(signal.SIGTERM, lambda *_: agent.handle_notice())
    try:
        return agent.serve()
    finally:
        agent.close()


class HostAgent:
    """Serves one launcher on this host: follows its orders, and reports on the ranks."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self._reader = Reader()
        self._outbox = PipeOutbox(sink)
        self._outbox.add(GREETING)
        self._is_over = False
        self._heard = time.monotonic()
        self._beat_s, self._silence_s = 1.0, 60.0
        self._abort_grace_s, self._term_grace_s = 2.0, 10.0
        self._cut_at: float | None = None  # when the agent gave up the launcher
        self._has_terminated = False
        self._looked = 0.0
        self._listeners: Listeners | None = None
        self._ranks: HostRanks | None = None
        self._tallies: dict[str, bytes] = {}
        self._copy = HostCopy()
        self._call = bytearray()
        self._is_stopped = False
        self._notices, self._is_forwarded = 0, False  # of requests to release this host
        self._noticed_at = 0.0  # when the first one came
        self._handlers: dict[str, Callable[[Message], None]] = {
            "get_facts": self._send_facts,
            "listen": self._listen,
            "connect": self._connect,
            "call_data": self._add_call_data,
            "start": self._start_ranks,
            "restart_rank": self._restart_rank,
            "signal_groups": self._signal_groups,
            "get_places": self._send_places,
            "stop": self._stop,
            "resume": self._resume,
            "end_attempt": self._end_attempt,
            "heartbeat": lambda _: None,
            "stage": self._copy_file,
            "stage_data": self._copy_file,
            "stage_end": self._copy_file,
        }

    def handle_notice(self) -> None:
        """Note a request to release this host.

        Workers get SIGTERM and may save; a second request, or one without workers, ends the agent.
        """
        now = time.monotonic()
        if not self._notices:
            self._noticed_at = now
        elif now - self._noticed_at < NOTICE_ECHO_S:
            return
        self._notices += 1

    def serve(self) -> int:
        """Follow orders until the input ends; return the exit code."""
        while not self._is_over:
            ranks = self._ranks
            ready = self._poll()
            if self._source in ready:
                self._take_orders()
            for descriptor in ready:
                self._read(descriptor, ranks)
            self._look(time.monotonic())
            self._flush()
            if self._notices:
                self._release_host()
        return 0

    def close(self) -> None:
        """Kill what runs, and release everything. Idempotent."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
        if self._listeners is not None:
            self._listeners.close()
        self._copy.close()

    def _poll(self) -> list[int]:
        """Wait for orders, for the workers and for room to write; return what is ready."""
        ranks = self._ranks
        readable = [self._source, *(self._listeners.descriptors() if self._listeners else ())]
        writable = self._outbox.descriptors()
        wait_s = self._beat_s
        if ranks is not None:
            readable += ranks.descriptors(is_full=self._outbox.nbytes > _UNSENT_MAX)
            writable += ranks.writable()
            if ranks.requests:
                wait_s = _PAUSE_S
        poller = select.poll()
        for descriptor in writable:
            poller.register(descriptor, select.POLLOUT)
        for descriptor in readable:
            poller.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poller.poll(wait_s * 1000)]

    def _read(self, descriptor: int, ranks: HostRanks | None) -> None:
        """Handle a descriptor of the listeners, or of the ranks unless an order replaced them."""
        if self._listeners is not None:
            self._listeners.readable(descriptor)
        if ranks is not None and ranks is self._ranks:
            try:
                for event in ranks.readable(descriptor):
                    self._send_event(event)
            except ConfigError as error:  # forking is not possible
                self._refuse(error)

    # -- orders of the launcher --------------------------------------------------------------------

    def _take_orders(self) -> None:
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
                self._follow(message)
        except WireError as error:
            sys.stderr.write(f"syncvar: the launcher is not understood: {error}\n")
            self._is_over = True

    def _follow(self, message: Message) -> None:
        kind = message["kind"]
        if kind in self._handlers:
            self._handlers[kind](message)
        elif kind not in _ATTEMPT_ORDERS:
            raise WireError(f"a message {kind!r} is for the launcher")
        elif self._ranks is not None:
            _ATTEMPT_ORDERS[kind](self._ranks, message)

    def _send_facts(self, message: Message) -> None:
        self._beat_s, self._silence_s = max(0.05, message["beat_s"]), message["silence_s"]
        self._abort_grace_s, self._term_grace_s = message["abort_grace_s"], message["term_grace_s"]
        facts = facts_of([str(one) for one in message["scripts"]], message["cwd"])
        self._send("facts", facts=facts)

    def _listen(self, message: Message) -> None:
        if self._listeners is not None:
            self._listeners.close()
        self._listeners = Listeners([str(one) for one in message["addresses"]], message["token"])
        self._send("listening", ports=self._listeners.ports)

    def _connect(self, message: Message) -> None:
        targets = [(str(address), int(port)) for address, port in message["targets"]]
        results = reachable(targets, message["token"], message["timeout_s"], self._listeners)
        self._send("connected", results=results)

    def _add_call_data(self, message: Message) -> None:
        self._call += message["data"]

    def _start_ranks(self, message: Message) -> None:
        if self._listeners is not None:
            self._listeners.close()
            self._listeners = None
        call, self._call = bytes(self._call), bytearray()
        try:
            self._ranks = HostRanks(StartRequest.read(message["request"]), self._tallies, call)
        except WireError:
            raise
        except (SyncvarError, OSError) as error:
            self._refuse(error)

    def _restart_rank(self, message: Message) -> None:
        if self._ranks is None:
            return
        try:
            self._ranks.restart_rank(RankSpec.read(message["rank_spec"]))
        except WireError:
            raise
        except (SyncvarError, OSError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        is_limit = isinstance(error, LimitTooLow) or getattr(error, "errno", 0) in OF_LIMITS
        code = LIMITS if is_limit else CONFIGURATION
        if isinstance(error, CannotFork):
            code = error.exit_code
        self._send("start_failed", reason=error_message(error), exit_code=code)

    def _signal_groups(self, message: Message) -> None:
        if self._ranks is not None:
            number = message["signal_number"]
            ranks = self._ranks.processes.send_groups(number)
            if ranks:
                self._send("not_signalled", signal_number=number, ranks=ranks)

    def _send_places(self, message: Message) -> None:
        if self._ranks is not None:
            self._send("places", places=self._ranks.note(message["ranks"]))

    def _stop(self, _: Message) -> None:
        self._is_stopped = True
        if self._ranks is not None:
            self._ranks.processes.stop()

    def _resume(self, _: Message) -> None:
        self._is_stopped = False
        if self._ranks is not None:
            self._ranks.processes.resume()

    def _end_attempt(self, _: Message) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            for event in ranks.finish():
                self._send_event(event)
            for name, data in ranks.records():
                self._send("record", name=name, data=data)
            self._tallies = ranks.tallies()
            ranks.close()
        self._send("attempt_ended", is_released=self._notices > 0)

    def _copy_file(self, message: Message) -> None:
        answer = self._copy.take(message)
        if answer is not None:
            self._send("staged", **answer)

    # -- reports to the launcher -------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Report what is new of the ranks; end them if the launcher is silent for too long."""
        limit_s = self._silence_s if self._ranks is not None else max(self._silence_s, _IDLE_S)
        if self._cut_at is None and not self._is_stopped and now - self._heard > limit_s:
            sys.stderr.write(
                f"syncvar: the launcher is silent since {now - self._heard:.1f} s; its workers "
                "here are ended\n"
            )
            self._cut_at = now
            if self._ranks is not None:
                self._ranks.shm.abort()
        if self._cut_at is not None:
            self._end_by_steps(now - self._cut_at)
        if self._ranks is not None:
            for text in self._ranks.shm.take_messages():
                self._send("notice", text=text)
            if pids := self._ranks.pop_started():
                self._send("started", pids=pids)
            for request_id, reason, threads in self._ranks.pop_stacks(now):
                self._send("stack", request_id=request_id, no_stack_reason=reason, threads=threads)
            if count := self._ranks.feed_on():
                self._send("input_consumed", nbytes=count)
        if now - self._looked >= self._beat_s:
            self._looked = now
            self._send("process_states", states={} if self._ranks is None else self._ranks.look())

    def _release_host(self) -> None:
        """Forward the notice to the workers; end after them, or at the next notice."""
        if self._ranks is not None and self._notices == 1:
            running = self._ranks.running()
            if not running:
                self._end_attempt({})  # it sends what the workers have left
            elif not self._is_forwarded:
                self._is_forwarded = True
                self._ranks.processes.send(running, signal.SIGTERM)
        elif self._notices > 1 or not self._outbox.nbytes:
            self._is_over = True

    def _end_by_steps(self, since_s: float) -> None:
        """Let the workers end by themselves, then terminate, then kill them; then end."""
        running = [] if self._ranks is None else self._ranks.running()
        is_late = since_s >= self._abort_grace_s + self._term_grace_s
        if self._ranks is None or not running or is_late:
            self._is_over = True
        elif since_s >= self._abort_grace_s and not self._has_terminated:
            self._has_terminated = True
            self._ranks.processes.send(running, signal.SIGTERM)

    def _send_event(self, event: Event) -> None:
        if isinstance(event, WorkerOutput):
            self._send("output", rank=event.rank, stream=event.stream, data=event.data)
        elif isinstance(event, WorkerStatus):
            self._send("status", rank=event.rank, record=event.record)
        elif isinstance(event, WorkerExited):
            if self._ranks is not None:
                for name, data, is_last in self._ranks.results():
                    self._send("result", name=name, data=data, is_last=is_last)
            self._send("exited", rank=event.rank, status=event.status, detail=event.beyond)

    def _send(self, kind: str, **fields: Any) -> None:
        self._outbox.add(pack(kind, **fields))
        if not self._is_over:
            self._flush()

    def _flush(self) -> None:
        if not self._outbox.flush():  # the launcher, or the connection to it, is gone
            self._is_over = True


def facts_of(scripts: Sequence[str], cwd: str) -> dict[str, Any]:
    """Return the facts that the launcher needs about this host, for scripts and their folder."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "python": platform.python_version(),
        "syncvar": syncvar.__version__,
        "numpy": _version_of_numpy(),
        "protocol": PROTOCOL_VERSION,
        "byte_order": sys.byteorder,
        "cores": list(usable_cores()),
        "cpu_count": os.cpu_count() or 1,
        "core_count": core_count(),
        "processor": os.uname().machine,
        "interfaces": [list(one) for one in interfaces()],
        "launcher_address": connection[0] if len(connection) == 4 else "",
        "login_address": connection[2] if len(connection) == 4 else "",
        "has_folder": Path(cwd).is_dir(),
        "missing_scripts": [one for one in scripts if not (Path(cwd) / one).exists()],
        "pid": os.getpid(),
        "tasks_left": tasks_left(),
    }


def _machine() -> str:
    parts = [os.uname().nodename]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError):
            parts.append(Path(path).read_text("ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def _version_of_numpy() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("numpy")
    except PackageNotFoundError:
        return ""
