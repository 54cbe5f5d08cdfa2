"""One start of all ranks of a job: from the first process to the last one's end, and what is said of it.

With `--max-restarts` a job may need several. Each has its own private directory, and in it its own rendezvous and segments;
what a rank of an earlier start still sends or asks finds nobody, or is refused for its generation.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

import syncvar
from syncvar.bootstrap.rendezvous_server import RendezvousServer
from syncvar.core import exit_codes
from syncvar.core.network import tcp_endpoint
from syncvar.core.output_files import LOST_FILE_EVENT
from syncvar.core.process_ids import SERVER_0, is_server, process_name
from syncvar.core.restart_policy import Ending
from syncvar.core.stack_dump import doing
from syncvar.core.status_pipe import BEGUN
from syncvar.protocol.failure_detector import Health
from syncvar.protocol.object_codec import pack_object
from syncvar_launcher.io.nonblocking_writer import Outlets, await_readers, patience_s
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.direct_workers import DirectWorkers
from syncvar_launcher.job.failure_report import (
    FailureReport,
    SecondaryFailure,
    WorkerTraceback,
    ending_sentence,
    failure_block,
    failure_sentence,
    interrupted_block,
    mask_arguments,
    spared_block,
)
from syncvar_launcher.job.start_clock import clock
from syncvar_launcher.job.start_progress import StartProgress
from syncvar_launcher.job.status_socket import StatusSocket
from syncvar_launcher.job.supervisor import (
    Action,
    DropServer,
    FailureCause,
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
    from collections.abc import Container, Sequence

    from syncvar.bootstrap.job_directory import JobDirectory
    from syncvar_launcher.io.output import OutputForwarder, Stream
    from syncvar_launcher.io.signal_watch import SignalWatch
    from syncvar_launcher.job.event_log import EventLog
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.workers import Workers
    from syncvar_launcher.local.fork_client import ForkServer

__all__ = ["Attempt", "drop_passing"]

_BUSY_SHARE = 0.2  # of a core
_IN_ORDER = (0, exit_codes.PREEMPTED)  # the statuses of ranks that have left
_WORD_S = 5.0  # for what a rank has said to arrive behind the news that it has ended
_PAUSE_S = 0.01
_ABSENT_SHOWN = 4  # of the ranks that have not joined, each with what it does
_STACKS_S = 0.25  # for ranks to say where they stand, before they are told to end; those that run Python take microseconds


class _Interrupted(Exception):  # noqa: N818  (nothing has gone wrong)
    """A signal asks for the end, while the launcher starts ranks."""


class Attempt:
    """The loop of one start.

    Args:
        job: What is started.
        forwarder: Where the output of the ranks goes.
        events: Where what happens is noted.
        outlets: What the forwarder writes to.
        directory: A private directory, fresh.
        watch: What asks to end.
        number: The first generation of the membership that ranks may join.
        restarts: How often the job has been started again before.
        server: What workers are forked from; None where each is a fresh process.
        began: When the job began, in seconds of the clock of `watch`; its time limit counts from then.
        had_met: All ranks have met in an earlier start.
    """

    def __init__(
        self,
        job: Job,
        forwarder: OutputForwarder,
        events: EventLog,
        outlets: Outlets,
        directory: JobDirectory,
        watch: SignalWatch,
        number: int,
        restarts: int,
        began: float,
        server: ForkServer | None = None,
        *,
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
        self.met: int | None = None  # which generation has met last
        self.positions: dict[int, str] = {}
        self.has_said = False
        self.server = server
        self._open(job, directory, server)
        self.supervisor = Supervisor(
            chosen.ranks.workers,
            job.config,
            chosen.program.kind == "command",
            began,
            chosen.limits.timeout_s,
            job.mirrors(),
            chosen.limits.max_restarts - restarts,
        )
        self.health = Health(job.config.suspect_after_s, job.config.lost_after_s)
        self.inquiries = StatusSocket(
            directory.path, self._about, self.workers, self._known, self._processes
        )
        self.store.seen = self._activity
        self.store.place = self.workers.place_now
        self.store.absent = self._absent
        # A program that is not started by our own bootstrap does not say that it has begun.
        telling = self.job.servers if chosen.program.kind == "command" else self._processes
        self.progress = StartProgress(
            telling, job.config.missing_report_s, job.config.rendezvous_timeout_s, self.began
        )
        self.busy: dict[int, tuple[float, float]] = {}
        self.ends: dict[
            int, tuple[WorkerExited, float]
        ] = {}  # not judged yet, each with the time until which more may come
        self.looked = 0.0

    def _open(self, job: Job, directory: JobDirectory, server: ForkServer | None) -> None:
        """Make the rendezvous and the set of workers, none of which is started yet."""
        # First of all: if this process is killed, the cleanup process removes the directory.
        here = LocalWorkers(directory.path, directory.lock, server)
        args = (self.options.ranks.workers, job.job_id, job.config, self.number)
        starts = {"generation": self.number, "restarts": self.restarts}
        if job.fleet is not None:
            keys = None
            if job.config.encryption != "off":
                from syncvar.transports.curve import link_keys

                keys = link_keys(job.fleet.secret, job.job_id)
            self.store = RendezvousServer(tcp_endpoint(job.fleet.address, "*"), *args, keys)
            self.workers: Workers = job.fleet.workers_of(
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

    def run(self) -> JobOutcome:
        """Start the ranks and stay until all have ended."""
        drop_passing(self.forwarder, self.watch, "before the ranks began")
        try:
            if self.server is None:
                self._start()
            clock.stop()
            self._loop()
        finally:
            clock.stop()
            limit = self.supervisor.now + self.supervisor.timeout_s
            for event in self.workers.close():
                self._handle(event)
                await_readers(
                    self.forwarder, self.outlets, self.watch, self.outlets.has_room, limit
                )
            self.inquiries.close()
            self.store.close()
        return self.supervisor.outcome()

    def ending(self, outcome: JobOutcome) -> Ending:
        """Return what the rules of restarting look at."""
        cause = outcome.cause
        return Ending(
            exit_code=outcome.exit_code,
            why=failure_sentence(self._failure(cause)._replace(elapsed_s=None))
            if cause is not None
            else "",
            error=cause.error if cause is not None else "",
            was_told=outcome.interrupted != 0 or bool(self.watch.pending),
            had_met=self.has_met,
            lasted_s=self.watch.now() - self.began,
        )

    @property
    def next_number(self) -> int:
        """The generation that no rank of this start has joined or could have joined."""
        coming = self.store.coordinator.next_roll
        return coming.generation + 1 if coming.members else coming.generation

    def _start(self) -> None:
        is_local, is_verbose = self.job.fleet is None, self.options.output.verbose
        if (sys.stderr.isatty() or is_verbose) and not self.restarts:
            bound = f" | {self.job.binding.reason}" if is_local else ""
            transport, _ = self.workers.describe()
            version = syncvar.__version__
            self.forwarder.say(f"syncvar {version} | {self.job.summary()} | {transport}{bound}\n")
        if is_local and is_verbose:
            self.forwarder.say(f"syncvar: workers are {self.job.beginning}\n")
        for event in self.workers.start():
            self._handle(event)

    def _server_speaks(self) -> None:
        """Start the workers, now that their server is ready, or give up where it has ended instead."""
        assert self.server is not None
        server, self.server = self.server, None
        server.limit_s, server.waits = self.config.rendezvous_timeout_s, self._raise_if_signalled
        try:
            with server:
                refusal = self._fork_from(server)
        except _Interrupted:
            self.server = server  # its end is that of all ranks
            number = self.watch.pending.popleft()
            self.events.add("signal", signal=number, name=exit_codes.signal_name(number))
            self._do(self.supervisor.signalled(number, self.watch.now()))
            return
        if refusal is not None:
            self.supervisor.never_began(
                f"{refusal.why}; --start-method spawn does without it",
                exit_codes.exit_code_of(refusal.status or exit_codes.INTERNAL),
            )

    def _fork_from(self, server: ForkServer) -> ForkUnsupported | None:
        """Start the workers from their server; return why that was not possible."""
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

    def _never_begin(self, status: int) -> None:
        """Let all end before they begin."""
        for number in sorted(self.supervisor.running):
            self._handle(WorkerExited(number, status))

    def _loop(self) -> None:
        idle: float | None = None
        while not self.supervisor.is_over:
            now = self.watch.now()
            due = min(
                self.supervisor.next_due(),
                self.looked + self.config.heartbeat_interval_s,
                now + 1.0,
            )
            if idle is not None:
                due = min(due, idle)
            if self.supervisor.is_ending:
                self.outlets.patience_s = min(self.outlets.patience_s, patience_s(self.config))
            else:
                due = min(due, self.progress.due())
            due = min(due, self.outlets.give_up_late(now), self.inquiries.due(now))
            if self.ends:
                due = min(due, now + _PAUSE_S)
            # Who is told to end acts on what it knows of the ranks: one that had ended before is seen by a poll that begins after.
            is_told = bool(self.watch.pending)
            if is_told:
                due = now
            poller = zmq.Poller()
            poller.register(self.store.socket, zmq.POLLIN)
            forking = [] if self.server is None else [self.server.descriptor()]
            for descriptor in (
                *forking,
                *self.watch.descriptors(),
                *self.workers.descriptors(self._takes),
                *self.inquiries.descriptors(),
            ):
                poller.register(descriptor, zmq.POLLIN)
            for descriptor in (*self.outlets.descriptors(), *self.workers.unsent()):
                poller.register(descriptor, zmq.POLLOUT)
            ready: list[Any] = [
                item for item, _ in poller.poll(int(max(0.0, due - now) * 1000) + 1)
            ]
            now = self.watch.now()
            self.forwarder.flush()
            # What workers say of themselves comes before what is seen of them.
            self._serve(now)
            self._judge_ends(now)
            for item in ready:
                if isinstance(item, int):
                    if item in forking:
                        self._server_speaks()
                    self.watch.readable(item)
                    for event in self.workers.readable(item):
                        self._handle(event)
                    self.inquiries.readable(item, now)
            self.inquiries.tick(now)
            if self.watch.is_to_stop:
                self._stop()
            if self.watch.passing:
                self._pass_on()
            while self.watch.pending and (is_told or self.supervisor.is_over):
                self._interrupt(self.watch.pending.popleft(), now)
            self._look(now)
            self._look_at_start(now)
            self._do(self.supervisor.tick(now))
            for sentence in (*self.store.take_said(), *self.workers.take_said()):
                self.has_said = True
                self.events.add(
                    "stall" if sentence in self.store.stalls else "notice", text=sentence
                )
                self.forwarder.say(f"syncvar: {sentence}\n")
            if self.store.failure is not None and self.supervisor.job_cause is None:
                self._do(self.supervisor.did_not_meet(self.store.failure.reason, now))
            idle = self.forwarder.tick(now)
            self.events.flush()
            if self.forwarder.broken and not self.supervisor.interrupted:
                self._do(self.supervisor.signalled(signal.SIGPIPE, now))

    def _takes(self, rank: int, stream: Stream) -> bool:
        return not (
            self.outlets.is_full(stream)
            and (rank == self.options.ranks.debug or self.forwarder.is_forwarded(rank))
        )

    def _handle(self, event: Event) -> None:
        now = self.watch.now()
        if isinstance(event, WorkerOutput):
            if event.rank == self.options.ranks.debug:
                self.forwarder.pass_raw(event.stream, event.data)
            elif event.data:
                self.forwarder.feed(event.rank, event.stream, event.data, now)
            else:
                self.forwarder.close(event.rank, event.stream)
        elif isinstance(event, WorkerStatus):
            if event.record.get("event") == BEGUN:
                self.progress.reached(event.rank, now)
            elif event.record.get("event") == "goodbye":
                self.supervisor.goodbye(event.rank)
            elif event.record.get("event") == "failed":
                self.events.add(
                    **_event("failed", event.rank),
                    error=event.record["error"],
                    message=event.record["message"],
                )
                actions = self.supervisor.failed(
                    event.rank, event.record, now, joined=self._is_member(event.rank)
                )
                if event.rank in self.supervisor.causes:
                    self.forwarder.conceal(
                        event.rank, "err", str(event.record.get("written", ""))
                    )  # `tell` shows it, once for all
                self._do(actions)
            elif event.record.get("event") == "takes_notice":
                self.supervisor.takes_notice(event.rank, is_on=bool(event.record.get("on")))
            elif event.record.get("event") == LOST_FILE_EVENT:
                self.job.lost_files.add_record(event.rank, event.record)
        elif isinstance(event, Spared):
            self._spare(event)
        elif isinstance(event, WorkerStarted):
            self.progress.advance(now)
            self.events.add(
                **_event("start", event.rank),
                host=self.job.host_name(event.rank),
                pid=event.pid,
                restarts=self.restarts,
            )
        elif isinstance(event, WorkerUnreachable):
            self.progress.reached(event.rank, now)
            self.events.add(
                **_event("end", event.rank),
                pid=self.workers.pid(event.rank),
                exit_code=None,
                signal=None,
            )
            self._do(self.supervisor.gone(event.rank, event.reason, now, event.code))
        elif isinstance(event, WorkerExited):
            self.progress.reached(event.rank, now)
            code, number = (event.status, None) if event.status >= 0 else (None, -event.status)
            self.events.add(
                **_event("end", event.rank),
                pid=self.workers.pid(event.rank),
                exit_code=code,
                signal=number,
            )
            self.ends[event.rank] = event, now + _WORD_S
            self._judge_ends(now)

    def _judge_ends(self, now: float) -> None:
        """Judge the ends of processes; one that may be in order not before all has come that the rank has said.

        A rank says on its control channel that it leaves, and its agent says on another way that it has ended: the order in
        which both arrive is not fixed. A channel that is closed holds nothing any more.
        """
        self._serve(now)
        for rank, (event, until) in list(self.ends.items()):
            is_open = now < until and not self.store.has_closed(rank, now)
            if event.status in _IN_ORDER and self._is_member(rank) and is_open:
                continue
            del self.ends[rank]
            self._do(
                self.supervisor.exited(
                    rank, event.status, now, joined=self._is_member(rank), beyond=event.beyond
                )
            )
            has_failed = rank in self.supervisor.causes and rank not in self.supervisor.stopped
            if not (is_server(rank) or has_failed or self.supervisor.will_restart(rank)):
                self.store.finished(rank, now)
            if self.options.ranks.servers:
                self.store.servers.ended(
                    rank, "" if event.status == 0 else exit_codes.describe_exit(event.status)
                )

    def _is_member(self, rank: int) -> bool:
        """Return whether a rank has joined and has not left."""
        return (
            rank in self.store.coordinator.roll.members and rank not in self.store.coordinator.left
        )

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, NotifyPeerLost):
                self._note_places(but=action.rank if action.has_ended else -1)
                self.workers.abort()  # before all else: who waits in shared memory looks at nothing else
                if is_server(action.rank):
                    self.store.servers.ended(action.rank, action.reason)
                tell = self.store.ended if action.has_ended else self.store.given_up
                tell(action.rank, action.reason, self.watch.now())
            elif isinstance(action, DropServer):
                self._do_without(action)
            elif isinstance(action, RestartServer):
                self._start_again(action)
            elif self.server is not None:
                self.server = None
                self._never_begin(
                    -signal.SIGTERM if isinstance(action, Terminate) else -signal.SIGKILL
                )
            elif isinstance(action, Terminate):
                self._note_places()
                self.workers.await_noted(_STACKS_S)
                self.workers.send(action.ranks, signal.SIGTERM)
            else:
                self.workers.kill(action.ranks)

    def _do_without(self, action: DropServer) -> None:
        server = action.rank - SERVER_0
        self.store.servers.ended(action.rank, action.reason)
        self.events.add("server_lost", server=server, why=action.reason)
        there = next(
            one for one in self.job.heirs(server) if one + SERVER_0 not in self.supervisor.lost
        )
        name, host = process_name(action.rank), self.job.host_name(action.rank)
        self.forwarder.say(
            f"syncvar: {name} on {host} is lost: {action.reason}; server {there} has copies of its variables and takes its place\n"
        )

    def _note_copy(self, server: int, of: int) -> None:
        self.supervisor.copied(server, of)
        self.events.add("server_copy", server=server, of=of)
        self.forwarder.say(
            f"syncvar: server {server} has a new copy of the variables of server {of}\n"
        )

    def _start_again(self, action: RestartServer) -> None:
        count = self.supervisor.restarted[action.rank]
        self.events.add("rank_restart", rank=action.rank, why=action.reason, number=count)
        name, host = process_name(action.rank), self.job.host_name(action.rank)
        self.forwarder.say(
            f"syncvar: {name} on {host} is started again alone ({count}): {action.reason}\n"
        )
        self.store.servers.begins_again(action.rank, count)
        if self.options.program.kind != "command":
            self.progress.expect(action.rank, self.watch.now())
        for event in self.workers.start_again(action.rank, count):
            self._handle(event)

    def _serve(self, now: float) -> None:
        self.store.serve(now)
        for server, of in self.store.servers.take_copies():
            self._note_copy(server, of)
        coordinator = self.store.coordinator
        if coordinator.roll.is_complete and coordinator.roll.generation != self.met:
            self.has_met, self.met = True, coordinator.roll.generation
            self.events.add("met", generation=self.met, after_s=now - self.began)
        if coordinator.broken_by is not None:  # a rank gave up; the others have just been told why
            self.workers.abort(coordinator.roll.generation)

    def _interrupt(self, number: int, now: float) -> None:
        self.events.add("signal", signal=number, name=exit_codes.signal_name(number))
        debugged = self.options.ranks.debug
        if debugged is not None and number == signal.SIGINT and debugged in self.supervisor.running:
            self.workers.send(
                [debugged], signal.SIGINT
            )  # Ctrl-C belongs to the rank that has the terminal
            return
        if self.supervisor.interrupted or self.supervisor.is_over:
            self.outlets.patience_s = 0.0  # at once means at once; and where no rank runs, only a reader is left to wait for
            self._do(self.supervisor.signalled(number, now))
            return
        actions = self.supervisor.signalled(number, now)
        grace_s = self.supervisor.grace_s(now)
        if grace_s is not None:  # before the signals go out, which may take a while
            self.forwarder.say(f"syncvar: {ending_sentence(number, grace_s)}\n")
            self.forwarder.flush()
        self._do(actions)

    def _pass_on(self) -> None:
        """Pass on signals to the ranks and to what they have started, as mpirun does; where there are no ranks yet, drop them."""
        if not self.workers.workers:
            drop_passing(self.forwarder, self.watch, "before the ranks began")
        while self.watch.passing:
            number = self.watch.passing.popleft()
            self.events.add("signal_forwarded", signal=number, name=exit_codes.signal_name(number))
            spared = self.workers.send_groups(number)
            if spared:
                self._spare(Spared(number, spared))
            elif self.options.output.verbose:
                self.forwarder.say(
                    f"syncvar: {exit_codes.signal_name(number) or number} passed on to all ranks\n"
                )

    def _spare(self, event: Spared) -> None:
        """Say which ranks got no signal because it would have ended them, and what they do."""
        places = [SecondaryFailure(rank, self._known(rank)) for rank in event.ranks]
        self.forwarder.say(spared_block(event.number, places, os.getpid()))

    def _stop(self) -> None:
        """Stop all ranks and this process, as Ctrl-Z asks, until somebody continues it, and then them.

        A signal that a terminal sends does not reach the ranks, each of which leads a session. No clock of the launcher
        goes on meanwhile. Those of the ranks do: a call that waits meets its own deadline (`timeout`,
        `collective_timeout_s`), and connections that were silent for longer than `lost_after_s` are closed. Ranks that
        share memory have none.
        """
        self.workers.stop()
        lasted = self.watch.stop()
        self.workers.resume()
        if (
            lasted >= self.config.lost_after_s
            and len(self.supervisor.running) > 1
            and not self.workers.is_complete
        ):
            self.forwarder.say(
                f"syncvar: the job was stopped for {lasted:.0f} s; connections between ranks count as lost after "
                f"{self.config.lost_after_s:g} s (lost_after_s)\n"
            )

    def _look(self, now: float) -> None:
        if now - self.looked < self.config.heartbeat_interval_s:
            return
        self.looked = now
        running = sorted(self.supervisor.running & self.workers.workers.keys())
        self.workers.look()
        asked = self.store.coordinator.stalls.asked
        self.busy = {
            rank: self.busy.get(rank) or (now, self.workers.busy_s(rank))
            for rank in running
            if rank in asked
        }
        for rank in running:
            stopped = self.workers.state(rank) == "T"
            opinion = self.health.observe(
                rank, "its process is stopped (state T)" if stopped else "", now
            )
            if opinion is None:
                continue
            if opinion.is_lost:
                self._do(self.supervisor.silent(rank, opinion.reason, now))
            else:
                self.forwarder.say(
                    f"syncvar: {process_name(rank)} on {self.job.host_name(rank)}: {opinion.reason}\n"
                )

    def _look_at_start(self, now: float) -> None:
        """Say that the start stands still, once that is due; give it up at its deadline."""
        overdue = None if self.supervisor.is_ending else self.progress.look(now)
        if overdue is None:
            return
        states = [f"{process_name(one)}: {self._process_words(one)}" for one in overdue.missing]
        if self.server is not None:
            states = [f"{self.server.describe()} has not imported NumPy and syncvar"]
        sentence = overdue.sentence(states, set(self.store.coordinator.roll.members))
        if not overdue.has_failed:
            self.has_said = True
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

    def _process_words(self, number: int) -> str:
        """Return in words whether the process of a rank or server runs, and its state."""
        pid = self.workers.pid(number)
        if number not in self.workers.workers or pid < 0:
            return "its process has not been started"
        letter = self.workers.state(number)
        stopped = " is stopped" if letter == "T" else ""
        return f"process {pid}{stopped} (state {letter})" if letter else f"process {pid} has ended"

    def _absent(self, ranks: Sequence[int]) -> str:
        """Return what each of the ranks does that others wait for; of many, only of the first."""
        return "; ".join(f"rank {rank}: {self._absence(rank)}" for rank in ranks[:_ABSENT_SHOWN])

    def _absence(self, rank: int) -> str:
        words = self._process_words(rank)
        if rank in self.progress.missing:
            return f"{words}, has not reached its script" if words.startswith("process") else words
        place = self.workers.place_now(rank) if rank in self.workers.workers else ""
        return f"{words}, {place}" if place else words

    def _activity(self, rank: int) -> str:
        """Return what a rank's process has done since it was asked whether it is there, in words."""
        known = self.busy.get(rank)
        if not self.workers.state(rank) or known is None:
            return ""
        since, before = known
        share = (self.workers.busy_s(rank) - before) / max(1e-3, self.watch.now() - since)
        state = self.workers.state(rank)  # R: it runs, or would if it were given a core
        return f", CPU {'busy' if share > _BUSY_SHARE or state == 'R' else 'idle'} (state {state})"

    def _about(self) -> dict[str, Any]:
        """Return what `syncvar stacks` says of the job."""
        return {
            "name": self.job.job_id[:8],
            "pid": os.getpid(),
            "workers": self.options.ranks.workers,
            "servers": self.options.ranks.servers,
            "lasted_s": self.watch.now() - self.job_began,
            "command": shlex.join(["syncvar-launch", *mask_arguments(self.job.arguments)]),
            "folder": str(self.options.program.cwd),
        }

    # -- the last word -----------------------------------------------------------------------------

    def _note_places(self, but: int = -1) -> None:
        """Remember, at the first failure or when the ranks are told to end, what every rank is doing, but for those that have failed."""
        have_told = {but, *self.supervisor.causes}
        self.workers.note(rank for rank in sorted(self.supervisor.running) if rank not in have_told)
        if not self.positions:
            self.positions = {number: self._known(number) for number in self._processes}

    def tell(self, outcome: JobOutcome, *, is_last: bool) -> None:
        """Say how it ended.

        Args:
            outcome: What `run` returned.
            is_last: The ranks are not started again.
        """
        cause = outcome.cause
        if outcome.exit_code == exit_codes.PREEMPTED and cause is None:
            told = (
                f" after {exit_codes.signal_name(outcome.interrupted)}"
                if outcome.interrupted
                else ""
            )
            advice = "; run it again to go on" if is_last else ""
            self.forwarder.say(
                f"syncvar: the ranks stopped as asked{told} (exit code {exit_codes.PREEMPTED}){advice}\n"
            )
        elif outcome.interrupted:
            name = exit_codes.signal_name(outcome.interrupted)
            reads = outcome.interrupted != signal.SIGPIPE
            places = [
                SecondaryFailure(number, self._position(number))
                for number in self._processes
                if self.positions and reads
            ]
            raised = self._raised(("PeerLost", "GroupBroken"))
            self.forwarder.say(
                interrupted_block(
                    name,
                    places,
                    [one for one in raised if one.is_own],
                    is_whole=self.options.output.verbose,
                )
            )
        records = self._records(outcome)
        if cause is None:
            if records:
                self.forwarder.say(f"syncvar: evidence: {escape(records)}\n")
            return
        log_dir = str(self.options.output.log_dir) if self.options.output.log_dir else ""
        others = [
            SecondaryFailure(number, self._position(number))
            for number in self._processes
            if number != cause.rank
        ]
        outcome_file = self.job.environ.get("SYNCVAR_OUTCOME_FILE")
        arguments = (
            self.job.arguments if is_last and not outcome_file else []
        )  # `sv.run` has no command line to try again
        text = failure_block(
            self._failure(cause),
            others,
            arguments=arguments,
            log_dir=log_dir,
            records=records,
            raised=self._raised(exit_codes.OF_OTHERS),
            remedies=self._remedies(cause),
            is_whole=self.options.output.verbose,
        )
        if outcome_file and is_last:
            told_file = {
                "rank": cause.rank,
                "host": self.job.host_name(max(cause.rank, 0)),
                "exit_code": outcome.exit_code,
                "text": text,
            }
            Path(outcome_file).write_bytes(pack_object(told_file))
        else:
            self.forwarder.say(text)

    def _remedies(self, cause: FailureCause) -> list[list[str]]:
        """Return options with which the job would have gone on without a server that failed."""
        chosen = self.options
        if not is_server(cause.rank):
            return []
        remedies = []
        if chosen.ranks.servers > 1 and not chosen.ranks.server_replicas:
            remedies.append(["--server-replicas", "1"])
        if not chosen.limits.max_restarts:
            remedies.append(["--max-restarts", "3"])
        return remedies

    def _failure(self, cause: FailureCause) -> FailureReport:
        return FailureReport(
            rank=cause.rank,
            status=cause.status,
            host=self.job.host_name(cause.rank) if cause.rank >= 0 else "",
            reason=cause.reason.split("\n", 1)[0]
            if cause.error not in ("", "SystemExit") or not cause.status
            else cause.beyond,
            call=self._call(cause),
            elapsed_s=(self.watch.now() if cause.at is None else cause.at) - self.began,
            traceback=self._traceback(cause),
            last_lines=self.forwarder.last_lines(cause.rank) if cause.rank >= 0 else (),
            stands_above="SYNCVAR_OUTCOME_FILE" not in self.job.environ
            and self.forwarder.stands_above(cause.rank),
        )

    def _traceback(self, cause: FailureCause) -> str:
        return cause.traceback if self.options.output.verbose else cause.brief

    def _raised(self, consequences: Container[str]) -> list[WorkerTraceback]:
        """Return the exceptions of the ranks; those of the given names are told by what others say."""
        causes = self.supervisor.causes.values()
        return [
            WorkerTraceback(cause.rank, self._traceback(cause), cause.error not in consequences)
            for cause in causes
        ]

    def _records(self, outcome: JobOutcome) -> str:
        """Return in words where the flight records are, or an empty text; who has no use for records is left none.

        Ranks write theirs when something goes wrong, which the program may have dealt with. After an interruption they
        are of use where something had been said, for instance that ranks wait for others. After a restart they are
        evidence of earlier failures, which have been reported.
        """
        is_of_use = outcome.interrupted and self.has_said
        if (
            outcome.cause is None
            and self.options.output.log_dir is None
            and not is_of_use
            and not self.restarts
        ):
            self.job.records.remove()
            return ""
        return self.job.records.told()

    def _call(self, cause: FailureCause) -> str:
        position = self.positions.get(cause.rank, "")
        return position.removeprefix("waiting in ") if position.startswith("waiting in ") else ""

    @property
    def _processes(self) -> list[int]:
        """The numbers of all ranks and servers."""
        return [*range(self.options.ranks.workers), *self.job.servers]

    def _known(self, number: int) -> str:
        """Return what a rank or server is known to do."""
        return (
            self.store.servers.position(number)
            if is_server(number)
            else self.store.coordinator.position(number)
        )

    def _position(self, rank: int) -> str:
        told = self.supervisor.causes.get(rank)
        if (
            told is not None and told.status is None and not told.error
        ):  # nothing more has been heard of it
            return told.reason.split(": ", 1)[0]
        position = self.positions.get(rank) or self._known(rank)
        place = self.workers.places.get(rank, "")
        did_not_answer = "; " in position  # then how we ended it says less
        did_as_told = (
            told is not None
            and told.error == "SystemExit"
            and told.exit_code == 128 + signal.SIGTERM
        )
        if told is not None and told.error and not did_not_answer and not did_as_told:
            is_hit = told.error in (
                "PeerLost",
                "GroupBroken",
            )  # then it matters where it was, else what it raised
            if not position.startswith("waiting") and not (place and is_hit):
                return told.reason.removeprefix("uncaught ").split("\n", 1)[0].split(". ", 1)[0]
            return f"{doing(position, place)}; then {told.error}"
        return doing(position, place)


def _event(what: str, number: int) -> dict[str, Any]:
    """Return the name of an event in the life of a process, and whose it is."""
    if is_server(number):
        return {"event": f"server_{what}", "server": number - SERVER_0}
    return {"event": f"rank_{what}", "rank": number}


def drop_passing(forwarder: OutputForwarder, watch: SignalWatch, when: str) -> None:
    """Drop the signals that were to be passed on, for there is no rank, and say so."""
    while watch.passing:
        number = watch.passing.popleft()
        forwarder.say(
            f"syncvar: {exit_codes.signal_name(number) or number} came {when}, and is dropped\n"
        )
