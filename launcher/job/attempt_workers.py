"""The set of workers of one attempt: starts them, handles their events, obeys the supervisor."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import syncvar
from syncvar.bootstrap.rendezvous_server import RendezvousServer
from syncvar.core import exit_status
from syncvar.core.exit_status import STARTED
from syncvar.core.output_files import LOST_FILE_EVENT
from syncvar.core.process_ids import SERVER_0, is_server, process_name
from syncvar.transports.zeromq_sockets import tcp_endpoint
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.attempt_report import AttemptReport, RankStates
from syncvar_launcher.job.elastic_job import ElasticJob
from syncvar_launcher.job.failure_report import SecondaryFailure, spared_block
from syncvar_launcher.job.start_progress import StartProgress, clock
from syncvar_launcher.job.supervisor import (
    Action,
    DropServer,
    LoseWorker,
    NotifyPeerLost,
    RestartWorker,
    Supervisor,
    Terminate,
)
from syncvar_launcher.local.local_workers import (
    Event,
    HostArrived,
    LocalWorkers,
    Spared,
    WorkerExited,
    WorkerOutput,
    WorkerStarted,
    WorkerStatus,
    WorkerUnreachable,
)
from syncvar_launcher.local.worker_start import ForkUnsupported, ServerEnded, StartMethod

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncvar.bootstrap.job_private import JobDirectory
    from syncvar_launcher.job.attempt_report import JobConsole
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.workers import WorkersFactory
    from syncvar_launcher.local.worker_start import ForkServer

_CLEAN_STATUSES = (0, exit_status.PREEMPTED)
_LAST_MESSAGE_S = 5.0  # a rank's last messages may arrive this long after the news of its end
_STACKS_S = 0.25  # for ranks to show their stacks before SIGTERM; most need microseconds


class _Interrupted(Exception):  # noqa: N818  (no error)
    """A signal asks the launcher to end while it starts ranks."""


class AttemptStart(NamedTuple):
    """What an attempt needs at its start."""

    generation: int  # first generation of the membership that ranks may join
    restarts: int  # how often the launcher has started all ranks again before
    job_began: float  # when the job began, in seconds of the clock
    has_met: bool  # whether all ranks met in an earlier attempt
    make_workers: WorkersFactory  # makes the workers


class WorkerSet:
    """The workers of one attempt, with their rendezvous server and supervisor."""

    def __init__(
        self,
        job: Job,
        console: JobConsole,
        directory: JobDirectory,
        start: AttemptStart,
        server: ForkServer | None,
    ) -> None:
        self.job, self.options, self.config = job, job.options, job.config
        self.console, self.watch = console, console.watch
        self.restarts, self.began = start.restarts, console.watch.now()
        self.has_met = start.has_met
        self._met: int | None = None  # the last generation of which all ranks have met
        self.server = server
        self._open(directory, start)
        ranks, limits = self.options.ranks, self.options.limits
        self.supervisor = Supervisor(
            ranks.workers,
            self.config,
            job.command_ranks,
            start.job_began,
            limits.timeout_s,
            job.mirrors(),
            limits.max_restarts - start.restarts,
            ranks.fewest,
            len(job.first_workers),
        )
        self.elastic: ElasticJob | None = None
        if ranks.forms_generations:
            self.elastic = ElasticJob(
                job, console, self.store, self.workers, start.generation, self._give_up
            )
        self.report = AttemptReport(
            job, self.supervisor, self.workers, self.store, console, is_restart=start.restarts > 0
        )
        # A program that our bootstrap does not start cannot report that it has begun.
        started = {*job.first_workers, *job.servers} - job.command_ranks
        reporting = [one for one in self.report.processes if one in started]
        self.progress = StartProgress(
            reporting, self.config.missing_report_s, self.config.rendezvous_timeout_s, self.began
        )
        self.states = RankStates(self.workers, self.progress.missing, job.names)
        self.store.seen = lambda rank: self.states.activity(rank, self.watch.now())
        self.store.place = self.workers.place_now
        self.store.absent = self.states.absent
        # Ends that are not judged yet, with the time until which more messages may arrive.
        self.ends: dict[int, tuple[WorkerExited, float]] = {}

    def _open(self, directory: JobDirectory, start: AttemptStart) -> None:
        """Make the rendezvous and the workers, and start no process yet."""
        job, group = self.job, self.job.host_group
        # First of all: if this process is killed, the cleanup process removes the directory.
        here = LocalWorkers(directory.path, directory.lock, self.server)
        endpoint, keys = f"ipc://{directory.path}/store", None
        if group is not None:
            endpoint = tcp_endpoint(group.address, "*")
            if job.config.encryption != "off":
                from syncvar.transports.curve import link_keys

                keys = link_keys(group.secret, job.job_id)
        workers, generation = self.options.ranks.workers, start.generation
        umask = os.umask(0o077)
        try:
            self.store = RendezvousServer(
                endpoint, workers, job.job_id, job.config, generation, keys
            )
            self.workers = start.make_workers(
                job,
                here,
                directory.path,
                self.store.endpoint,
                generation=generation,
                restarts=start.restarts,
            )
        finally:
            os.umask(umask)

    @property
    def next_generation(self) -> int:
        """The first generation that no rank of this attempt can have joined."""
        if self.elastic is not None:
            return self.elastic.next_generation
        coming = self.store.coordinator.next_handshake
        return coming.generation + 1 if coming.members else coming.generation

    # -- starting ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers and servers."""
        job, is_verbose = self.job, self.options.output.verbose
        is_local = job.host_group is None
        if (sys.stderr.isatty() or is_verbose) and not self.restarts:
            bound = f" | {job.binding.reason}" if is_local else ""
            transport, _ = self.workers.describe()
            text = f"syncvar {syncvar.__version__} | {job.summary()} | {transport}{bound}\n"
            self.console.forwarder.write_text(text)
        if is_local and is_verbose:
            self.console.show(f"workers are {job.start_method}")
        if not is_local and is_verbose and self.config.algorithm_choice == "rules":
            from syncvar.transports.lane_transport import path_between_hosts

            self.console.show(f"data between hosts: {path_between_hosts(self.config)}")
        self.handle_all(self.workers.start())

    def handle_fork_server(self) -> None:
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
            self.console.log_signal("signal", number)
            self.do(self.supervisor.signalled(number, self.watch.now()))
            return
        if refusal is not None:
            self.supervisor.never_began(
                f"{refusal.reason}; --start-method spawn does without it",
                exit_status.exit_code_of(refusal.status or exit_status.INTERNAL),
            )

    def _fork_from(self, server: ForkServer) -> ForkUnsupported | None:
        """Start the workers from their server; return the reason if that was not possible."""
        job = self.job
        try:
            refusal = server.refusal()
            if refusal is not None and job.start_method.may_change:
                server.close()
                job.start_method = StartMethod(is_forked=False, reason=refusal.reason)
                self.console.events.add("notice", text=f"workers are {job.start_method}")
                refusal = None
            if refusal is None or not refusal.is_certain:
                refusal = None
                self.start()
                clock.enter(f"releases the ranks that {server.describe()} has forked")
                server.release()
        except ServerEnded as ended:
            refusal = ForkUnsupported(ended.sentence, is_certain=True, status=ended.status)
        finally:
            clock.stop()
        return refusal

    def _raise_if_signalled(self) -> None:
        if self.watch.pending:
            raise _Interrupted

    # -- events ------------------------------------------------------------------------------------

    def serve(self, now: float) -> None:
        """Handle messages of the ranks to the rendezvous server."""
        self.store.serve(now)
        for server, of in self.store.servers.take_copies():
            self.supervisor.copied(server, of)
            self.console.events.add("server_copy", server=server, of=of)
            self.console.show(f"server {server} has a new copy of the variables of server {of}")
        coordinator = self.store.coordinator
        handshake = coordinator.handshake
        if handshake.is_complete and handshake.generation != self._met:
            self.has_met, self._met = True, handshake.generation
            self.console.events.add("met", generation=self._met, after_s=now - self.began)
        if coordinator.broken_by is not None:  # a rank gave up; the server has sent that to all
            self.workers.abort(handshake.generation)
        if self.elastic is not None:
            self.elastic.serve(now)

    def handle_all(self, events: Iterable[Event]) -> None:
        """Handle events of workers."""
        for event in events:
            self.handle(event)

    def handle(self, event: Event) -> None:
        """Handle an event of a worker."""
        now = self.watch.now()
        if isinstance(event, WorkerOutput):
            self._handle_output(event, now)
        elif isinstance(event, WorkerStatus):
            self._handle_status(event, now)
        elif isinstance(event, Spared):
            self.show_spared(event)
        elif isinstance(event, HostArrived):
            self._add_host(event.slot)
        elif isinstance(event, WorkerStarted):
            self.progress.advance(now)
            if self.elastic is not None:
                self.elastic.started(event.rank, now)
            host = self.job.host_name(event.rank)
            self.console.events.add(
                **_event("start", event.rank), host=host, pid=event.pid, restarts=self.restarts
            )
        elif isinstance(event, WorkerUnreachable):
            self._log_end(event.rank, None, None)
            self.do(self.supervisor.unreachable(event.rank, event.reason, now, event.code))
        else:
            code, number = (event.status, None) if event.status >= 0 else (None, -event.status)
            self._log_end(event.rank, code, number)
            self.ends[event.rank] = event, now + _LAST_MESSAGE_S
            self.judge_ends(now)

    def _handle_output(self, event: WorkerOutput, now: float) -> None:
        forwarder = self.console.forwarder
        if event.rank == self.options.ranks.debug:
            forwarder.pass_raw(event.stream, event.data)
        elif event.data:
            forwarder.feed(event.rank, event.stream, event.data, now)
        else:
            forwarder.close(event.rank, event.stream)

    def _handle_status(self, event: WorkerStatus, now: float) -> None:
        rank, record = event.rank, event.record
        kind = record.get("event")
        if kind == STARTED:
            self.progress.reached(rank, now)
        elif kind == "goodbye":
            self.supervisor.left(rank)
        elif kind == "takes_notice":
            self.supervisor.takes_notice(rank, is_on=bool(record.get("on")))
        elif kind == exit_status.RUN_ENDED and self.elastic is not None:
            self.elastic.returned(rank)
            if self.elastic.last_members is not None:
                self.supervisor.finish(self.elastic.last_members)
        elif kind == LOST_FILE_EVENT:
            self.job.lost_files.add_record(rank, record)
        elif kind == "failed":
            error, message = record["error"], record["message"]
            self.console.events.add(**_event("failed", rank), error=error, message=message)
            self._note_newcomers()
            actions = self.supervisor.failed(rank, record, now, joined=self.store.is_member(rank))
            if rank in self.supervisor.causes:  # the report shows the traceback, once for all
                self.console.forwarder.conceal(rank, "err", str(record.get("written", "")))
            self.do(actions)

    def _note_newcomers(self) -> None:
        if self.elastic is not None:
            self.supervisor.newcomers = self.elastic.newcomers

    def show_spared(self, event: Spared) -> None:
        """Show which ranks got no signal because it would have ended them, and what they do."""
        places = [
            SecondaryFailure(rank, self.report.position(rank), self.job.program_label(rank))
            for rank in event.ranks
        ]
        self.console.forwarder.write_text(
            spared_block(event.number, places, os.getpid(), self.job.names)
        )

    def _log_end(self, rank: int, code: int | None, number: int | None) -> None:
        self.progress.reached(rank, self.watch.now())
        pid = self.workers.pid(rank)
        self.console.events.add(**_event("end", rank), pid=pid, exit_code=code, signal=number)

    def judge_ends(self, now: float) -> None:
        """Pass the ends of processes to the supervisor.

        A member that left cleanly, or that has reported its failure to the other ranks, may have
        sent messages that arrive after the news of its end, on another path. Its end waits for
        them. A channel that is closed carries no more messages.
        """
        self.serve(now)
        for rank, (event, until) in list(self.ends.items()):
            is_open = now < until and not self.store.has_closed(rank, now)
            is_clean = event.status in _CLEAN_STATUSES
            may_send_more = is_clean or self.supervisor.is_reported_by_engine(rank)
            if may_send_more and self.store.is_member(rank) and is_open:
                continue
            del self.ends[rank]
            joined = self.store.is_member(rank)
            self._note_newcomers()
            self.do(
                self.supervisor.exited(rank, event.status, now, joined=joined, beyond=event.beyond)
            )
            has_failed = rank in self.supervisor.causes and rank not in self.supervisor.stopped
            if self.elastic is not None:
                if rank not in self.supervisor.lost_workers:
                    self.elastic.ended(rank, now)
            elif not (is_server(rank) or has_failed or self.supervisor.will_restart(rank)):
                self.store.finished(rank, now)
            if self.options.ranks.servers:
                reason = exit_status.describe_exit(event.status) if event.status else ""
                self.store.servers.ended(rank, reason)

    # -- actions of the supervisor -----------------------------------------------------------------

    def do(self, actions: Sequence[Action]) -> None:
        """Carry out actions of the supervisor."""
        for action in actions:
            if isinstance(action, NotifyPeerLost):
                self._notify_peer_lost(action)
            elif isinstance(action, DropServer):
                self._drop_server(action)
            elif isinstance(action, RestartWorker):
                self._restart_rank(action)
            elif isinstance(action, LoseWorker):
                self._lose_worker(action)
            elif self.server is not None:  # no rank has begun
                self.server = None
                is_soft = isinstance(action, Terminate)
                for number in sorted(self.supervisor.running):
                    status = -signal.SIGTERM if is_soft else -signal.SIGKILL
                    self.handle(WorkerExited(number, status))
            elif isinstance(action, Terminate):
                self.report.note_positions()
                self.workers.await_noted(_STACKS_S)
                if self.elastic is not None:
                    self.elastic.dismiss()
                self.workers.send(action.ranks, signal.SIGTERM)
            else:
                self.workers.kill(action.ranks)

    def drop_late(self, missing: Sequence[int], sentence: str, now: float) -> None:
        """Go on without workers that do not reach their script."""
        self.console.show(sentence)
        for number in missing:
            self.progress.reached(number, now)
            self.workers.kill((number,))
            self.do(self.supervisor.unreachable(number, "it does not reach its script", now))

    # -- hosts of an elastic job -------------------------------------------------------------------

    def look_for_hosts(self) -> None:
        """Look for more hosts while the job has room for workers."""
        if self.options.ranks.fewest and not self.supervisor.is_ending:
            room = len(self.supervisor.vacant()) if self._needs_workers else None
            self.workers.look_for_hosts(room, self.supervisor.returning)

    @property
    def _needs_workers(self) -> bool:
        """Whether more workers of an elastic job are of use."""
        if self.elastic is not None:
            return self.elastic.needs_hosts
        return not self.supervisor.has_finished_worker

    def _add_host(self, slot: Any) -> None:
        """Start workers on a host that has come, as far as numbers are vacant."""
        is_open = self._needs_workers and not self.supervisor.is_ending
        numbers = self.supervisor.vacant()[: slot.workers] if is_open else []
        if numbers:
            names = ", ".join(map(str, numbers))
            self.console.show(f"{escape(slot.name)} joins the job: workers {names}")
            self.console.events.add("host_joined", host=slot.name, workers=numbers)
        for number in numbers:
            self.supervisor.add_worker(number)
            self.progress.expect(number, self.watch.now())
        if self.elastic is not None:
            self.elastic.expect(numbers)
        counts = {number: self.supervisor.incarnation(number) for number in numbers}
        for number, count in counts.items():
            self.store.restarted(number, count)
        self.handle_all(self.workers.start_host(slot, counts))

    def _give_up(self, reason: str) -> None:
        self.do(self.supervisor.did_not_meet(reason, self.watch.now()))

    def _lose_worker(self, lost: LoseWorker) -> None:
        """Go on without a worker of an elastic job."""
        after = "; it will be started again" if lost.returns else ""
        self.console.events.add(
            "worker_lost", rank=lost.rank, why=lost.reason, returns=lost.returns
        )
        self.console.show(f"{self.job.worker_name(lost.rank)} is lost: {lost.reason}{after}")
        if self.elastic is not None:
            self.elastic.lose(lost, self.watch.now())
        else:
            self.store.ended(lost.rank, lost.reason, self.watch.now(), lost.status, lost.kind)

    def _notify_peer_lost(self, action: NotifyPeerLost) -> None:
        self.report.note_positions(but=action.rank if action.has_ended else -1)
        if self.elastic is not None:
            self.elastic.fail(action.rank)
        self.workers.abort()  # first: a rank that waits in shared memory sees nothing else
        if is_server(action.rank):
            self.store.servers.ended(action.rank, action.reason)
        if action.has_ended:
            now = self.watch.now()
            self.store.ended(action.rank, action.reason, now, action.status, action.kind)
        else:
            self.store.fence_rank(action.rank, action.reason, self.watch.now())

    def _drop_server(self, action: DropServer) -> None:
        """Continue without a server, whose variables another one has copied."""
        server, lost = action.rank - SERVER_0, self.supervisor.lost
        self.store.servers.ended(action.rank, action.reason)
        self.console.events.add("server_lost", server=server, why=action.reason)
        heir = next(one for one in self.job.heirs(server) if one + SERVER_0 not in lost)
        self.console.show(
            f"{self.describe(action.rank)} is lost: {action.reason}; server {heir} has copies of "
            "its variables and takes its place"
        )

    def _restart_rank(self, action: RestartWorker) -> None:
        rank, reason = action.rank, action.reason
        count = self.supervisor.incarnation(rank)
        self.console.events.add("rank_restart", rank=rank, why=reason, number=count)
        if self.elastic is None:
            self.console.show(f"{self.describe(rank)} is started again alone ({count}): {reason}")
        else:
            limit = self.options.limits.max_restarts  # earlier attempts have used some
            left = self.supervisor.restarts - sum(self.supervisor.restarted.values())
            self.elastic.restart(rank, f"restart {limit - left} of {limit}")
        self.store.restarted(rank, count)
        if rank not in self.job.command_ranks:
            self.progress.expect(rank, self.watch.now())
        self.handle_all(self.workers.restart_rank(rank, count))

    def describe(self, number: int) -> str:
        """Return a rank or server with its program and host, for messages."""
        label = self.job.program_label(number)
        program = f" ({escape(label)})" if label else ""
        return f"{process_name(number, self.job.names)}{program} on {self.job.host_name(number)}"


def _event(name: str, number: int) -> dict[str, Any]:
    """Return the name of an event in the life of a process, and the rank or server."""
    if is_server(number):
        return {"event": f"server_{name}", "server": number - SERVER_0}
    return {"event": f"rank_{name}", "rank": number}
