"""The loop of one attempt: it starts all ranks of a job, and runs until the last one has ended.

With `--max-restarts` a job may need several attempts. Each has its own private directory with its
own rendezvous and shared memory. A message of a rank of an earlier attempt reaches nothing, or the
rendezvous server rejects it because of its generation.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any

import zmq

import syncvar
from syncvar.bootstrap.rendezvous_server import RendezvousServer
from syncvar.core import exit_codes
from syncvar.core.network import tcp_endpoint
from syncvar.core.output_files import LOST_FILE_EVENT
from syncvar.core.process_ids import SERVER_0, is_server, process_name
from syncvar.core.status_pipe import STARTED
from syncvar.protocol.membership import Health
from syncvar_launcher.io.nonblocking_writer import Outlets, await_readers, patience_s
from syncvar_launcher.job.attempt_report import AttemptReport
from syncvar_launcher.job.direct_workers import DirectWorkers
from syncvar_launcher.job.failure_report import (
    SecondaryFailure,
    ending_sentence,
    mask_arguments,
    spared_block,
)
from syncvar_launcher.job.rank_states import RankStates
from syncvar_launcher.job.start_clock import clock
from syncvar_launcher.job.start_progress import StartProgress
from syncvar_launcher.job.status_socket import StatusSocket
from syncvar_launcher.job.supervisor import (
    Action,
    DropServer,
    JobOutcome,
    NotifyPeerLost,
    RestartServer,
    Supervisor,
    Terminate,
)
from syncvar_launcher.local.fork_client import ForkUnsupported, ServerEnded
from syncvar_launcher.local.local_workers import (
    Event,
    LocalWorkers,
    Spared,
    WorkerExited,
    WorkerOutput,
    WorkerStarted,
    WorkerStatus,
    WorkerUnreachable,
)
from syncvar_launcher.local.start_method import StartMethod

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.bootstrap.job_directory import JobDirectory
    from syncvar_launcher.io.output import OutputForwarder, Stream
    from syncvar_launcher.io.signal_watch import SignalWatch
    from syncvar_launcher.job.event_log import EventLog
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.workers import Workers
    from syncvar_launcher.local.fork_client import ForkServer

_CLEAN_STATUSES = (0, exit_codes.PREEMPTED)
_LAST_MESSAGE_S = 5.0  # a rank's last messages may arrive this long after the news of its end
_PAUSE_S = 0.01
_STACKS_S = 0.25  # for ranks to show their stacks before SIGTERM; most need microseconds


class _Interrupted(Exception):  # noqa: N818  (no error)
    """A signal asks the launcher to end while it starts ranks."""


class Attempt:
    """One start of all ranks.

    Args:
        job: The job.
        forwarder: Shows the output of the ranks.
        events: The log of events.
        outlets: The standard streams of the launcher.
        directory: The private directory of this attempt.
        watch: The signals that the launcher has received.
        number: The first generation of the membership that ranks may join.
        restarts: The number of restarts so far.
        began: When the job began, in seconds of the clock of `watch`.
        server: The process from which workers are forked; None for fresh processes.
        had_met: Whether all ranks have met in an earlier attempt.
    """

    def __init__(  # noqa: PLR0913  (the parts of the launcher meet here)
        self,
        job: Job,
        forwarder: OutputForwarder,
        events: EventLog,
        outlets: Outlets,
        directory: JobDirectory,
        watch: SignalWatch,
        *,
        number: int,
        restarts: int,
        began: float,
        server: ForkServer | None = None,
        had_met: bool = False,
    ) -> None:
        chosen = job.options
        self.job = job
        self.options = chosen
        self.config = job.config
        self.forwarder = forwarder
        self.events = events
        self.outlets = outlets
        self.watch = watch
        self.number = number
        self.restarts = restarts
        self.began, self.job_began = watch.now(), began
        self.has_met = had_met
        self.met: int | None = None  # the generation that has met last
        self.server = server
        self._open(directory)
        self.supervisor = Supervisor(
            chosen.ranks.workers,
            job.config,
            chosen.program.kind == "command",
            began,
            chosen.limits.timeout_s,
            job.mirrors(),
            chosen.limits.max_restarts - restarts,
        )
        self.report = AttemptReport(
            job,
            self.supervisor,
            self.workers,
            self.store,
            forwarder,
            watch,
            began=self.began,
        )
        self.report.is_restart = restarts > 0
        self.health = Health(job.config.suspect_after_s, job.config.lost_after_s)
        processes = self.report.processes
        self.inquiries = StatusSocket(
            directory.path, self._about, self.workers, self.report.position, processes
        )
        # A program that our bootstrap does not start cannot report that it has begun.
        reporting = job.servers if chosen.program.kind == "command" else processes
        self.progress = StartProgress(
            reporting, job.config.missing_report_s, job.config.rendezvous_timeout_s, self.began
        )
        self.states = RankStates(self.workers, self.progress.missing)
        self.store.seen = lambda rank: self.states.activity(rank, watch.now())
        self.store.place = self.workers.place_now
        self.store.absent = self.states.absent
        # Ends that are not judged yet, with the time until which more messages may arrive.
        self.ends: dict[int, tuple[WorkerExited, float]] = {}
        self.looked = 0.0

    def _open(self, directory: JobDirectory) -> None:
        """Make the rendezvous and the set of workers, and start no process yet."""
        job = self.job
        # First of all: if this process is killed, the cleanup process removes the directory.
        here = LocalWorkers(directory.path, directory.lock, self.server)
        args = (self.options.ranks.workers, job.job_id, job.config, self.number)
        starts = {"generation": self.number, "restarts": self.restarts}
        if job.host_group is not None:
            keys = None
            if job.config.encryption != "off":
                from syncvar.transports.curve import link_keys

                keys = link_keys(job.host_group.secret, job.job_id)
            self.store = RendezvousServer(tcp_endpoint(job.host_group.address, "*"), *args, keys)
            self.workers: Workers = job.host_group.workers_of(
                job, here, directory.path, self.store.endpoint, **starts
            )
            return
        umask = os.umask(0o077)
        try:
            rendezvous = f"ipc://{directory.path}/store"
            self.store = RendezvousServer(rendezvous, *args)
            self.workers = DirectWorkers(job, here, directory.path, rendezvous, **starts)
        finally:
            os.umask(umask)

    @property
    def next_number(self) -> int:
        """The first generation that no rank of this attempt can have joined."""
        coming = self.store.coordinator.next_handshake
        return coming.generation + 1 if coming.members else coming.generation

    def run(self) -> JobOutcome:
        """Start the ranks, and return when all have ended."""
        drop_passing(self.forwarder, self.watch, "before the ranks began")
        try:
            if self.server is None:
                self._start()
            clock.stop()
            self._loop()
        finally:
            clock.stop()
            outlets, limit = self.outlets, self.supervisor.now + self.supervisor.timeout_s
            for event in self.workers.close():
                self._handle(event)
                await_readers(self.forwarder, outlets, self.watch, outlets.has_room, limit)
            self.inquiries.close()
            self.store.close()
        return self.supervisor.outcome()

    # -- starting ----------------------------------------------------------------------------------

    def _start(self) -> None:
        is_local, is_verbose = self.job.host_group is None, self.options.output.verbose
        if (sys.stderr.isatty() or is_verbose) and not self.restarts:
            bound = f" | {self.job.binding.reason}" if is_local else ""
            transport, _ = self.workers.describe()
            version = syncvar.__version__
            self.forwarder.say(f"syncvar {version} | {self.job.summary()} | {transport}{bound}\n")
        if is_local and is_verbose:
            self.forwarder.say(f"syncvar: workers are {self.job.beginning}\n")
        for event in self.workers.start():
            self._handle(event)

    def _handle_server(self) -> None:
        """Start the workers after their fork server has reported; give up if it has ended."""
        assert self.server is not None
        server, self.server = self.server, None
        server.limit_s, server.waits = self.config.rendezvous_timeout_s, self._raise_if_signalled
        try:
            with server:
                refusal = self._fork_from(server)
        except _Interrupted:
            self.server = server  # all ranks end with it
            number = self.watch.pending.popleft()
            self._log_signal("signal", number)
            self._do(self.supervisor.signalled(number, self.watch.now()))
            return
        if refusal is not None:
            self.supervisor.never_began(
                f"{refusal.why}; --start-method spawn does without it",
                exit_codes.exit_code_of(refusal.status or exit_codes.INTERNAL),
            )

    def _fork_from(self, server: ForkServer) -> ForkUnsupported | None:
        """Start the workers from their server; return the reason if that was not possible."""
        try:
            refusal = server.refusal()
            if refusal is not None and self.job.beginning.may_change:
                server.close()
                self.job.beginning = StartMethod(is_forked=False, reason=refusal.why)
                self.events.add("notice", text=f"workers are {self.job.beginning}")
                refusal = None
            if refusal is None or not refusal.is_certain:
                refusal = None
                self._start()
                clock.enter(f"lets the ranks begin that {server.describe()} has forked")
                server.release()
        except ServerEnded as ended:
            refusal = ForkUnsupported(ended.sentence, is_certain=True, status=ended.status)
        finally:
            clock.stop()
        return refusal

    def _raise_if_signalled(self) -> None:
        if self.watch.pending:
            raise _Interrupted

    # -- the loop ----------------------------------------------------------------------------------

    def _loop(self) -> None:
        idle: float | None = None
        while not self.supervisor.is_over:
            now = self.watch.now()
            due = self._due(now, idle)
            # The launcher reacts to a signal after one more poll: that shows which ranks had ended
            # before the signal.
            is_signalled = bool(self.watch.pending)
            if is_signalled:
                due = now
            forking = None if self.server is None else self.server.descriptor()
            ready = self._poll(max(0.0, due - now), forking)
            now = self.watch.now()
            self.forwarder.flush()
            # Messages of workers come before news of their ends.
            self._serve(now)
            self._judge_ends(now)
            for descriptor in ready:
                if descriptor == forking:
                    self._handle_server()
                self.watch.readable(descriptor)
                for event in self.workers.readable(descriptor):
                    self._handle(event)
                self.inquiries.readable(descriptor, now)
            self.inquiries.tick(now)
            self._handle_signals(now, is_due=is_signalled)
            self._look(now)
            self._look_at_start(now)
            self._do(self.supervisor.tick(now))
            self._show_notices()
            if self.store.failure is not None and self.supervisor.job_cause is None:
                self._do(self.supervisor.did_not_meet(self.store.failure.reason, now))
            idle = self.forwarder.tick(now)
            self.events.flush()
            if self.forwarder.broken and not self.supervisor.interrupted:
                self._do(self.supervisor.signalled(signal.SIGPIPE, now))

    def _due(self, now: float, idle: float | None) -> float:
        """Return when the next poll must end, in seconds of the clock."""
        times = [
            self.supervisor.next_due(),
            self.looked + self.config.heartbeat_interval_s,
            now + (_PAUSE_S if self.ends else 1.0),
            self.outlets.give_up_late(now),
            self.inquiries.due(now),
        ]
        if idle is not None:
            times.append(idle)
        if self.supervisor.is_ending:
            self.outlets.patience_s = min(self.outlets.patience_s, patience_s(self.config))
        else:
            times.append(self.progress.due())
        return min(times)

    def _poll(self, timeout_s: float, forking: int | None) -> list[int]:
        """Return the descriptors that are ready, after at most the timeout."""
        poller = zmq.Poller()
        poller.register(self.store.socket, zmq.POLLIN)
        for descriptor in (
            *([] if forking is None else [forking]),
            *self.watch.descriptors(),
            *self.workers.descriptors(self._takes),
            *self.inquiries.descriptors(),
        ):
            poller.register(descriptor, zmq.POLLIN)
        for descriptor in (*self.outlets.descriptors(), *self.workers.unsent()):
            poller.register(descriptor, zmq.POLLOUT)
        ready: list[Any] = [item for item, _ in poller.poll(int(timeout_s * 1000) + 1)]
        return [item for item in ready if isinstance(item, int)]

    def _takes(self, rank: int, stream: Stream) -> bool:
        """Return whether the launcher can use more output of a rank."""
        if not self.outlets.is_full(stream):
            return True
        return rank != self.options.ranks.debug and not self.forwarder.is_forwarded(rank)

    def _serve(self, now: float) -> None:
        self.store.serve(now)
        for server, of in self.store.servers.take_copies():
            self.supervisor.copied(server, of)
            self.events.add("server_copy", server=server, of=of)
            self.forwarder.say(
                f"syncvar: server {server} has a new copy of the variables of server {of}\n"
            )
        coordinator = self.store.coordinator
        if coordinator.handshake.is_complete and coordinator.handshake.generation != self.met:
            self.has_met, self.met = True, coordinator.handshake.generation
            self.events.add("met", generation=self.met, after_s=now - self.began)
        if coordinator.broken_by is not None:  # a rank gave up, and the server has told the others
            self.workers.abort(coordinator.handshake.generation)

    def _show_notices(self) -> None:
        for sentence in (*self.store.take_said(), *self.workers.take_said()):
            self.report.has_notice = True
            kind = "stall" if sentence in self.store.stalls else "notice"
            self.events.add(kind, text=sentence)
            self.forwarder.say(f"syncvar: {sentence}\n")

    # -- events of workers -------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        now = self.watch.now()
        if isinstance(event, WorkerOutput):
            self._handle_output(event, now)
        elif isinstance(event, WorkerStatus):
            self._handle_status(event, now)
        elif isinstance(event, Spared):
            self._show_spared(event)
        elif isinstance(event, WorkerStarted):
            self.progress.advance(now)
            host = self.job.host_name(event.rank)
            self.events.add(
                **_event("start", event.rank), host=host, pid=event.pid, restarts=self.restarts
            )
        elif isinstance(event, WorkerUnreachable):
            self._log_end(event.rank, None, None)
            self._do(self.supervisor.gone(event.rank, event.reason, now, event.code))
        else:
            code, number = (event.status, None) if event.status >= 0 else (None, -event.status)
            self._log_end(event.rank, code, number)
            self.ends[event.rank] = event, now + _LAST_MESSAGE_S
            self._judge_ends(now)

    def _handle_output(self, event: WorkerOutput, now: float) -> None:
        if event.rank == self.options.ranks.debug:
            self.forwarder.pass_raw(event.stream, event.data)
        elif event.data:
            self.forwarder.feed(event.rank, event.stream, event.data, now)
        else:
            self.forwarder.close(event.rank, event.stream)

    def _handle_status(self, event: WorkerStatus, now: float) -> None:
        rank, record = event.rank, event.record
        kind = record.get("event")
        if kind == STARTED:
            self.progress.reached(rank, now)
        elif kind == "goodbye":
            self.supervisor.goodbye(rank)
        elif kind == "takes_notice":
            self.supervisor.takes_notice(rank, is_on=bool(record.get("on")))
        elif kind == LOST_FILE_EVENT:
            self.job.lost_files.add_record(rank, record)
        elif kind == "failed":
            error, message = record["error"], record["message"]
            self.events.add(**_event("failed", rank), error=error, message=message)
            actions = self.supervisor.failed(rank, record, now, joined=self._is_member(rank))
            if rank in self.supervisor.causes:  # the report shows the traceback, once for all
                self.forwarder.conceal(rank, "err", str(record.get("written", "")))
            self._do(actions)

    def _log_end(self, rank: int, code: int | None, number: int | None) -> None:
        self.progress.reached(rank, self.watch.now())
        pid = self.workers.pid(rank)
        self.events.add(**_event("end", rank), pid=pid, exit_code=code, signal=number)

    def _judge_ends(self, now: float) -> None:
        """Pass the ends of processes to the supervisor.

        A clean end of a member waits until the rank's last messages have arrived: the control
        channel carries its goodbye, another path the news of its end, in any order. A channel that
        is closed carries no more messages.
        """
        self._serve(now)
        for rank, (event, until) in list(self.ends.items()):
            is_open = now < until and not self.store.has_closed(rank, now)
            if event.status in _CLEAN_STATUSES and self._is_member(rank) and is_open:
                continue
            del self.ends[rank]
            joined = self._is_member(rank)
            self._do(
                self.supervisor.exited(rank, event.status, now, joined=joined, beyond=event.beyond)
            )
            has_failed = rank in self.supervisor.causes and rank not in self.supervisor.stopped
            if not (is_server(rank) or has_failed or self.supervisor.will_restart(rank)):
                self.store.finished(rank, now)
            if self.options.ranks.servers:
                reason = exit_codes.describe_exit(event.status) if event.status else ""
                self.store.servers.ended(rank, reason)

    def _is_member(self, rank: int) -> bool:
        coordinator = self.store.coordinator
        return rank in coordinator.handshake.members and rank not in coordinator.left

    # -- actions of the supervisor -----------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, NotifyPeerLost):
                self.report.note_positions(but=action.rank if action.has_ended else -1)
                self.workers.abort()  # first: a rank that waits in shared memory sees nothing else
                if is_server(action.rank):
                    self.store.servers.ended(action.rank, action.reason)
                notify = self.store.ended if action.has_ended else self.store.fence_rank
                notify(action.rank, action.reason, self.watch.now())
            elif isinstance(action, DropServer):
                self._drop_server(action)
            elif isinstance(action, RestartServer):
                self._restart_alone(action)
            elif self.server is not None:  # no rank has begun
                self.server = None
                is_soft = isinstance(action, Terminate)
                for number in sorted(self.supervisor.running):
                    status = -signal.SIGTERM if is_soft else -signal.SIGKILL
                    self._handle(WorkerExited(number, status))
            elif isinstance(action, Terminate):
                self.report.note_positions()
                self.workers.await_noted(_STACKS_S)
                self.workers.send(action.ranks, signal.SIGTERM)
            else:
                self.workers.kill(action.ranks)

    def _drop_server(self, action: DropServer) -> None:
        """Continue without a server, whose variables another one has copied."""
        server, lost = action.rank - SERVER_0, self.supervisor.lost
        self.store.servers.ended(action.rank, action.reason)
        self.events.add("server_lost", server=server, why=action.reason)
        heir = next(one for one in self.job.heirs(server) if one + SERVER_0 not in lost)
        name, host = process_name(action.rank), self.job.host_name(action.rank)
        self.forwarder.say(
            f"syncvar: {name} on {host} is lost: {action.reason}; server {heir} has copies of its "
            "variables and takes its place\n"
        )

    def _restart_alone(self, action: RestartServer) -> None:
        count = self.supervisor.restarted[action.rank]
        self.events.add("rank_restart", rank=action.rank, why=action.reason, number=count)
        name, host = process_name(action.rank), self.job.host_name(action.rank)
        self.forwarder.say(
            f"syncvar: {name} on {host} is started again alone ({count}): {action.reason}\n"
        )
        self.store.servers.begins_again(action.rank, count)
        if self.options.program.kind != "command":
            self.progress.expect(action.rank, self.watch.now())
        for event in self.workers.restart_rank(action.rank, count):
            self._handle(event)

    # -- signals -----------------------------------------------------------------------------------

    def _handle_signals(self, now: float, *, is_due: bool) -> None:
        if self.watch.is_to_stop:
            self._stop()
        if self.watch.passing:
            self._forward_signals()
        while self.watch.pending and (is_due or self.supervisor.is_over):
            self._interrupt(self.watch.pending.popleft(), now)

    def _interrupt(self, number: int, now: float) -> None:
        self._log_signal("signal", number)
        debugged = self.options.ranks.debug
        if debugged is not None and number == signal.SIGINT and debugged in self.supervisor.running:
            # Ctrl-C belongs to the rank that has the terminal.
            self.workers.send([debugged], signal.SIGINT)
            return
        if self.supervisor.interrupted or self.supervisor.is_over:
            self.outlets.patience_s = 0.0  # a second signal also ends the wait for readers
            self._do(self.supervisor.signalled(number, now))
            return
        actions = self.supervisor.signalled(number, now)
        grace_s = self.supervisor.grace_s(now)
        if grace_s is not None:  # before the launcher sends signals, which may take a while
            self.forwarder.say(f"syncvar: {ending_sentence(number, grace_s)}\n")
            self.forwarder.flush()
        self._do(actions)

    def _forward_signals(self) -> None:
        """Forward signals to the ranks and their children, as mpirun does."""
        if not self.workers.workers:
            drop_passing(self.forwarder, self.watch, "before the ranks began")
        while self.watch.passing:
            number = self.watch.passing.popleft()
            self._log_signal("signal_forwarded", number)
            spared = self.workers.send_groups(number)
            if spared:
                self._show_spared(Spared(number, spared))
            elif self.options.output.verbose:
                name = exit_codes.signal_name(number) or number
                self.forwarder.say(f"syncvar: {name} passed on to all ranks\n")

    def _log_signal(self, event: str, number: int) -> None:
        self.events.add(event, signal=number, name=exit_codes.signal_name(number))

    def _show_spared(self, event: Spared) -> None:
        """Show which ranks got no signal because it would have ended them, and what they do."""
        places = [SecondaryFailure(rank, self.report.position(rank)) for rank in event.ranks]
        self.forwarder.say(spared_block(event.number, places, os.getpid()))

    def _stop(self) -> None:
        """Stop all ranks and this process, as Ctrl-Z asks; continue them after SIGCONT.

        A signal of the terminal does not reach the ranks, because each leads a session. The clocks
        of the launcher stand meanwhile, those of the ranks run: a waiting call meets its own
        deadline, and connections close that were silent for longer than `lost_after_s`.
        """
        self.workers.stop()
        lasted_s = self.watch.stop()
        self.workers.resume()
        has_links = len(self.supervisor.running) > 1 and not self.workers.is_complete
        if lasted_s >= self.config.lost_after_s and has_links:
            self.forwarder.say(
                f"syncvar: the job was stopped for {lasted_s:.0f} s; connections between ranks "
                f"count as lost after {self.config.lost_after_s:g} s (lost_after_s)\n"
            )

    # -- watching ----------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        if now - self.looked < self.config.heartbeat_interval_s:
            return
        self.looked = now
        running = sorted(self.supervisor.running & self.workers.workers.keys())
        self.workers.look()
        asked = self.store.coordinator.stalls.pinged
        self.states.watch([rank for rank in running if rank in asked], now)
        for rank in running:
            stopped = self.workers.state(rank) == "T"
            reason = "its process is stopped (state T)" if stopped else ""
            opinion = self.health.observe(rank, reason, now)
            if opinion is None:
                continue
            if opinion.is_lost:
                self._do(self.supervisor.silent(rank, opinion.reason, now))
            else:
                name, host = process_name(rank), self.job.host_name(rank)
                self.forwarder.say(f"syncvar: {name} on {host}: {opinion.reason}\n")

    def _look_at_start(self, now: float) -> None:
        """Show that the start makes no progress; give up at its deadline."""
        overdue = None if self.supervisor.is_ending else self.progress.look(now)
        if overdue is None:
            return
        states = [f"{process_name(one)}: {self.states.process(one)}" for one in overdue.missing]
        if self.server is not None:
            states = [f"{self.server.describe()} has not imported NumPy and syncvar"]
        sentence = overdue.sentence(states, set(self.store.coordinator.handshake.members))
        if not overdue.has_failed:
            self.report.has_notice = True
            self.events.add("stall", text=sentence)
            self.forwarder.say(f"syncvar: {sentence}\n")
            return
        self.progress.missing.clear()
        if self.server is None:
            self._do(self.supervisor.did_not_meet(sentence, now))
            return
        server, self.server = self.server, None
        server.close()
        self.supervisor.never_began(sentence, exit_codes.RENDEZVOUS)

    def _about(self) -> dict[str, Any]:
        return {
            "name": self.job.job_id[:8],
            "pid": os.getpid(),
            "workers": self.options.ranks.workers,
            "servers": self.options.ranks.servers,
            "lasted_s": self.watch.now() - self.job_began,
            "command": shlex.join(["syncvar-launch", *mask_arguments(self.job.arguments)]),
            "folder": str(self.options.program.cwd),
        }


def _event(name: str, number: int) -> dict[str, Any]:
    """Return the name of an event in the life of a process, and the rank or server."""
    if is_server(number):
        return {"event": f"server_{name}", "server": number - SERVER_0}
    return {"event": f"rank_{name}", "rank": number}


def drop_passing(forwarder: OutputForwarder, watch: SignalWatch, when: str) -> None:
    """Drop signals to forward, because no rank runs, and show that."""
    while watch.passing:
        number = watch.passing.popleft()
        name = exit_codes.signal_name(number) or number
        forwarder.say(f"syncvar: {name} came {when}, and is dropped\n")
