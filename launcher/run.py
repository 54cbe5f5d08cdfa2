"""The launcher: options in, workers out, one loop that listens to all of them, an exit code that tells the truth."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.env import RankEnvironment
from syncvar.errors import ConfigError, SyncvarError
from syncvar.runtime.store import Store
from syncvar.topology import HostMap, divided
from syncvar.wire import KEY_BYTES, Health, pack_object
from syncvar_launcher import exits, options
from syncvar_launcher.agent import Agent, Ended, Event, Output, Spoke
from syncvar_launcher.binding import Binding, blas_environment, blas_threads, plan_binding
from syncvar_launcher.directory import JobDirectory, runtime_directory
from syncvar_launcher.flight import FlightRecords
from syncvar_launcher.output import OutputForwarder, Sink
from syncvar_launcher.report import Failure, Other, failure_block
from syncvar_launcher.sharing import Sharing, why_no_arena
from syncvar_launcher.show import dry_run_text
from syncvar_launcher.supervise import Action, Announce, Cause, Outcome, Supervisor, Terminate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar_launcher.options import LaunchOptions

__all__ = ["Job", "main"]

_LOOPBACK = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEY_FD = "SYNCVAR_KEY_FD"
_NEVER_PASSED = (_KEY_FD, "SYNCVAR_KEY", "SYNCVAR_STATUS_FD", "SYNCVAR_PASS_FDS", "SYNCVAR_PARENT_FD", "SYNCVAR_OUTCOME_FILE")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `syncvar-launch`; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        chosen = options.parse(arguments, os.environ, Path.cwd())
        job = Job(chosen, arguments, os.environ)
        if chosen.dry_run:
            sys.stdout.write(job.dry_run())
            return 0
        return job.run()
    except ConfigError as error:
        sys.stderr.write(f"syncvar-launch: {error}\n")
        return exits.CONFIGURATION
    except SyncvarError as error:
        sys.stderr.write(f"syncvar-launch: {error}\n")
        return exits.INTERNAL


class Job:
    """One launch on one host.

    Args:
        chosen: The options.
        arguments: The command line as it was given, for advice in messages.
        environ: The launcher's environment.
    """

    def __init__(self, chosen: LaunchOptions, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self.options = chosen
        self.arguments = list(arguments)
        self.environ = environ
        self.config = chosen.runtime
        self.job_id = secrets.token_hex(16)
        self.hosts = HostMap(divided(chosen.workers, chosen.fake_hosts))
        self.host = socket.gethostname()
        self.flight_name = f"syncvar-flight-{self.job_id[:8]}"
        self.flight_dir = chosen.log_dir or Path.cwd() / self.flight_name
        self.usable = options.usable_cores()
        self.core_count = options.core_count()
        why_no_arena(chosen, os.uname().machine)  # raises where the settings do not fit together
        self.binding: Binding = plan_binding(
            chosen.workers, self.usable, os.cpu_count() or 1, chosen.bind, chosen.cores_per_worker
        )

    # -- what a worker gets ---------------------------------------------------------------------------------------

    def command(self) -> list[str]:
        """Return the command line of a worker."""
        chosen = self.options
        if chosen.kind == "command":
            return [chosen.target, *chosen.args]
        how = ["-m", chosen.target] if chosen.kind == "module" else [chosen.target]
        return [sys.executable, "-m", "syncvar.bootstrap", *how, *chosen.args]

    def host_name(self, rank: int) -> str:
        """Return the name of a rank's host, for messages; a fake one has its number beside it."""
        return f"{self.host}#{self.hosts.host_of(rank)}" if len(self.hosts.sizes) > 1 else self.host

    def own_environment(self, rank: int, rendezvous: str, directory: str, torch: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that the launcher sets for a rank."""
        chosen = self.options
        host = self.hosts.host_of(rank)
        contract = RankEnvironment(
            rank=rank,
            world_size=chosen.workers,
            local_rank=self.hosts.local_rank(rank),
            local_world_size=self.hosts.sizes[host],
            host_index=host,
            host_count=len(self.hosts.sizes),
            generation=0,
            rendezvous=rendezvous,
            job_id=self.job_id,
            host=self.host_name(rank),
            flight_dir=str(self.flight_dir),
            host_directory=directory,
            host_address=_LOOPBACK if len(self.hosts.sizes) > 1 else "",
        )
        threads = blas_threads(chosen.workers, self.core_count, chosen.cores_per_worker)
        return {
            **blas_environment(threads, {**self.environ, **chosen.env}),
            **self.config.to_mapping(),
            **torch,
            **chosen.env,
            **contract.to_mapping(),
        }

    def dry_run(self) -> str:
        """Return what a launch would do, as text."""
        torch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "<free port>"} if self.options.torch_env else {}
        hidden = {"SYNCVAR_JOB_ID": "<random>"}
        if self.options.log_dir is None:
            hidden["SYNCVAR_FLIGHT_DIR"] = "syncvar-flight-<random>"
        environments = [
            self.own_environment(rank, "ipc://<private directory>/store", "<private directory>", torch) | hidden
            for rank in range(self.options.workers)
        ]
        folder, _ = runtime_directory(self.environ)
        folders = [folder] * len(self.hosts.sizes)
        _, transport = Sharing(self.options, self.job_id, self.core_count, folders, hands_over=False).describe()
        return dry_run_text(
            self.options,
            self.binding.cores,
            environments,
            self.command(),
            host=self.host,
            binding=self.binding.reason,
            transport=transport,
        )

    # -- running --------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Start the workers, wait for them, and return the exit code."""
        forwarder = _forwarder(self.options)
        directory = JobDirectory(self.environ)
        try:
            return _Run(self, forwarder, directory).run()
        finally:
            directory.remove()


class _Run:
    """The loop of one launch."""

    def __init__(self, job: Job, forwarder: OutputForwarder, directory: JobDirectory) -> None:
        chosen = job.options
        self.job = job
        self.options = chosen
        self.config = job.config
        self.forwarder = forwarder
        self.directory = directory
        self.began = time.monotonic()
        self.signals: deque[int] = deque()
        self.positions: dict[int, str] = {}
        self.has_said = False
        FlightRecords(job.flight_dir).remove()  # of an earlier job with the same folder for its output
        umask = os.umask(0o077)
        try:
            self.rendezvous = f"ipc://{directory.path}/store"
            self.store = Store(self.rendezvous, chosen.workers, job.job_id, job.config)
            self.host_directories = [directory.path]
            if len(job.hosts.sizes) > 1:
                self.host_directories = [directory.path / f"h{host}" for host in range(len(job.hosts.sizes))]
                for folder in self.host_directories:
                    folder.mkdir(mode=0o700)
            self.sharing = Sharing(chosen, job.job_id, job.core_count, self.host_directories)
        finally:
            os.umask(umask)
        self.agent = Agent(directory.path, directory.lock)
        self.supervisor = Supervisor(
            chosen.workers, job.config, chosen.kind == "command", self.began, chosen.timeout_s
        )
        self.health = Health(job.config.suspect_after_s, job.config.lost_after_s)
        self.looked = 0.0
        # The read end of a pipe whose other end `sv.run` holds: its end means that the calling program is gone.
        self.parent = int(job.environ.get("SYNCVAR_PARENT_FD", "-1"))
        if self.parent >= 0:
            os.set_inheritable(self.parent, False)

    def run(self) -> int:
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        previous_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            self._start()
            self._loop(wake_read)
        finally:
            for event in self.agent.close():
                self._handle(event)
            self.store.close()
            self.sharing.close()
            signal.set_wakeup_fd(previous_wake)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake_read)
            os.close(wake_write)
        outcome = self.supervisor.outcome()
        self._tell(outcome)
        self.forwarder.finish()
        return outcome.exit_code

    def _start(self) -> None:
        chosen = self.options
        torch = _torch_environment() if chosen.torch_env else {}
        inherited = [int(text) for text in self.job.environ.get("SYNCVAR_PASS_FDS", "").split(",") if text]
        base = {name: value for name, value in self.job.environ.items() if name not in _NEVER_PASSED}
        argv = self.job.command()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        key: int | None = None
        if len(self.job.hosts.sizes) > 1:
            key = _secret_descriptor(self.directory.path)
            inherited.append(key)
            base[_KEY_FD] = str(key)
        if sys.stderr.isatty() or chosen.verbose:
            self.forwarder.say(
                f"syncvar {_version()} | {chosen.workers} rank{'s' * (chosen.workers > 1)} on {self.job.host} | "
                f"{self.sharing.describe()[0]} | {self.job.binding.reason}\n"
            )
        try:
            for rank in range(chosen.workers):
                has_terminal = chosen.debug == rank
                has_input = has_terminal if chosen.debug is not None else rank == 0
                self.agent.start(
                    rank,
                    argv,
                    base | self.job.own_environment(rank, self.rendezvous, self._directory_of(rank), torch),
                    chosen.cwd,
                    self.job.binding.cores[rank],
                    stdin=0 if has_input else null,
                    terminal=has_terminal,
                    pass_fds=inherited,
                )
        except OSError as error:
            raise ConfigError(f"a worker cannot be started: {argv[0]}: {error.strerror}") from error
        finally:
            os.close(null)
            if key is not None:
                os.close(key)

    def _directory_of(self, rank: int) -> str:
        return str(self.host_directories[self.job.hosts.host_of(rank)])

    def _loop(self, wake_read: int) -> None:
        idle: float | None = None
        while not self.supervisor.is_over:
            now = time.monotonic()
            due = min(self.supervisor.next_due(), self.looked + self.config.heartbeat_interval_s, now + 1.0)
            if idle is not None:
                due = min(due, idle)
            poller = zmq.Poller()
            poller.register(self.store.socket, zmq.POLLIN)
            poller.register(wake_read, zmq.POLLIN)
            if self.parent >= 0:
                poller.register(self.parent, zmq.POLLIN)
            for descriptor in (*self.agent.descriptors(), *self.sharing.descriptors()):
                poller.register(descriptor, zmq.POLLIN)
            ready: list[Any] = [item for item, _ in poller.poll(int(max(0.0, due - now) * 1000) + 1)]
            now = time.monotonic()
            # What workers say of themselves comes before what is seen of them.
            self._serve(now)
            for item in ready:
                if item == wake_read:
                    os.read(wake_read, 4096)
                elif item == self.parent:
                    self.parent = -1
                    self._do(self.supervisor.signalled(signal.SIGHUP, now))
                elif isinstance(item, int):
                    for event in self.agent.readable(item):
                        self._handle(event)
                    self.sharing.readable(item)
            while self.signals:
                self._interrupt(self.signals.popleft(), now)
            self._look(now)
            self._do(self.supervisor.tick(now))
            for sentence in (*self.store.take_said(), *self.sharing.take_said()):
                self.has_said = True
                self.forwarder.say(f"syncvar: {sentence}\n")
            if self.store.failure is not None and self.supervisor.job_cause is None:
                self._do(self.supervisor.did_not_meet(self.store.failure.reason, now))
            idle = self.forwarder.tick(now)
            if self.forwarder.broken and not self.supervisor.interrupted:
                self._do(self.supervisor.signalled(signal.SIGPIPE, now))

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Output):
            if event.data:
                self.forwarder.feed(event.rank, event.stream, event.data, now)
            else:
                self.forwarder.close(event.rank, event.stream)
        elif isinstance(event, Spoke):
            if event.record.get("event") == "goodbye":
                self.supervisor.goodbye(event.rank)
            elif event.record.get("event") == "failed":
                self._do(self.supervisor.failed(event.rank, event.record, now))
        elif isinstance(event, Ended):
            self._serve(now)
            coordinator = self.store.coordinator
            joined = event.rank in coordinator.roll.members and event.rank not in coordinator.left
            self._do(self.supervisor.exited(event.rank, event.status, now, joined=joined))
            if event.rank not in self.supervisor.causes:
                self.store.finished(event.rank, now)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Announce):
                self.sharing.abort()  # first of all: who waits in shared memory looks at nothing else
                self._note_positions()
                self.store.ended(action.rank, action.reason, time.monotonic())
            elif isinstance(action, Terminate):
                self.agent.send(action.ranks, signal.SIGTERM)
            else:
                self.agent.kill(action.ranks)

    def _serve(self, now: float) -> None:
        self.store.serve(now)
        coordinator = self.store.coordinator
        if coordinator.broken_by is not None:  # a rank gave up; the others have just been told why
            self.sharing.abort(coordinator.roll.generation)

    def _interrupt(self, number: int, now: float) -> None:
        debugged = self.options.debug
        if debugged is not None and number == signal.SIGINT and debugged in self.supervisor.running:
            self.agent.send([debugged], signal.SIGINT)  # Ctrl-C belongs to the rank that has the terminal
            return
        self._do(self.supervisor.signalled(number, now))

    def _look(self, now: float) -> None:
        if now - self.looked < self.config.heartbeat_interval_s:
            return
        self.looked = now
        for rank in sorted(self.supervisor.running):
            stopped = self.agent.state(rank) == "T"
            opinion = self.health.observe(rank, "its process is stopped (state T)" if stopped else "", now)
            if opinion is None:
                continue
            if opinion.is_lost:
                self._do(self.supervisor.silent(rank, opinion.reason, now))
            else:
                self.forwarder.say(f"syncvar: rank {rank} on {self.job.host_name(rank)}: {opinion.reason}\n")

    def _signalled(self, number: int, _frame: object) -> None:
        self.signals.append(number)

    # -- the last word --------------------------------------------------------------------------------------------

    def _note_positions(self) -> None:
        """Remember, at the first failure, what every rank was doing."""
        if not self.positions:
            coordinator = self.store.coordinator
            self.positions = {rank: coordinator.position(rank) for rank in range(self.options.workers)}

    def _tell(self, outcome: Outcome) -> None:
        cause = outcome.cause
        if outcome.interrupted:
            name = exits.signal_name(outcome.interrupted)
            self.forwarder.say(f"syncvar: interrupted by {name}; all ranks have ended\n")
        flight_dir = self._flight_dir(outcome)
        if cause is None:
            if flight_dir:
                self.forwarder.say(f"syncvar: evidence: flight records in {flight_dir}\n")
            return
        log_dir = str(self.options.log_dir) if self.options.log_dir else ""
        failure = Failure(
            rank=cause.rank,
            status=cause.status,
            host=self.job.host_name(cause.rank) if cause.rank >= 0 else "",
            reason=cause.reason.split("\n", 1)[0] if cause.error not in ("", "SystemExit") or not cause.status else "",
            call=self._call(cause),
            elapsed_s=time.monotonic() - self.began,
            traceback=cause.traceback,
            last_lines=self.forwarder.last_lines(cause.rank) if cause.rank >= 0 else (),
        )
        others = [Other(rank, self._position(rank)) for rank in range(self.options.workers) if rank != cause.rank]
        outcome_file = self.job.environ.get("SYNCVAR_OUTCOME_FILE")
        arguments = [] if outcome_file else self.job.arguments  # `sv.run` has no command line to try again
        text = failure_block(failure, others, arguments=arguments, log_dir=log_dir, flight_dir=flight_dir)
        if outcome_file:
            told = {"rank": cause.rank, "host": self.job.host_name(max(cause.rank, 0)), "exit_code": outcome.exit_code, "text": text}
            Path(outcome_file).write_bytes(pack_object(told))
        else:
            self.forwarder.say(text)

    def _flight_dir(self, outcome: Outcome) -> str:
        """Return the folder of the flight records, or an empty text; who has no use for records is left none.

        Ranks write theirs when something goes wrong, which the program may have dealt with. After an interruption they
        are of use where something had been said, for instance that ranks wait for others.
        """
        records = FlightRecords(self.job.flight_dir)
        if outcome.cause is None and self.options.log_dir is None and not (outcome.interrupted and self.has_said):
            records.remove()
            return ""
        if not records.paths():
            return ""
        return str(self.job.flight_dir) if self.options.log_dir else self.job.flight_name

    def _call(self, cause: Cause) -> str:
        position = self.positions.get(cause.rank, "")
        return position.removeprefix("waiting in ") if position.startswith("waiting in ") else ""

    def _position(self, rank: int) -> str:
        told = self.supervisor.causes.get(rank)
        position = self.positions.get(rank) or self.store.coordinator.position(rank)
        if told is not None and told.error:
            what = told.reason.removeprefix("uncaught ").split("\n", 1)[0]
            return f"{position}; then {told.error}" if position.startswith("waiting") else what
        return position


def _forwarder(chosen: LaunchOptions) -> OutputForwarder:
    sinks = []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        is_terminal = stream.isatty()
        sinks.append(Sink(stream.buffer.raw if hasattr(stream.buffer, "raw") else stream.buffer, is_terminal, chosen.color_on(is_terminal)))
    return OutputForwarder(
        sinks[0],
        sinks[1],
        mode=chosen.output,
        clock=time.time if chosen.timestamps else None,
        log_dir=chosen.log_dir,
        ranks=tuple(range(chosen.workers)),
    )


def _secret_descriptor(directory: Path) -> int:
    """Return a descriptor of a fresh secret: nobody else can open what it refers to, and it is in no command line."""
    try:
        descriptor = os.memfd_create("syncvar-key", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        path = directory / "key"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        path.unlink()
    os.write(descriptor, secrets.token_bytes(KEY_BYTES))
    return descriptor


def _torch_environment() -> dict[str, str]:
    """Return the variables by which torch.distributed meets; the one place where a free port is guessed."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def _version() -> str:
    import syncvar

    return syncvar.__version__
