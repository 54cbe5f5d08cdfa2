"""The loop of one attempt: it starts all ranks of a job, and runs until the last one has ended.

With `--max-restarts` a job may need several attempts. Each has its own private directory with its
own rendezvous and shared memory. Messages of ranks of an earlier attempt get lost, or the
rendezvous server rejects them because of their generation.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import zmq

from syncvar.core import exit_status
from syncvar.core.process_ids import process_name
from syncvar.core.progress_line import ProgressLine, missing_text
from syncvar.protocol.membership import Health
from syncvar_launcher.io.standard_streams import await_readers, patience_s
from syncvar_launcher.job.attempt_workers import WorkerSet
from syncvar_launcher.job.failure_report import ending_sentence
from syncvar_launcher.job.job_status import JobStatus
from syncvar_launcher.job.start_progress import clock
from syncvar_launcher.job.status_socket import StatusSocket
from syncvar_launcher.local.local_workers import Spared

if TYPE_CHECKING:
    from syncvar.bootstrap.job_private import JobDirectory
    from syncvar_launcher.io.output import Stream
    from syncvar_launcher.job.attempt_report import JobConsole
    from syncvar_launcher.job.attempt_workers import AttemptStart
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.supervisor import JobOutcome
    from syncvar_launcher.local.worker_start import ForkServer

_PAUSE_S = 0.01


class Attempt:
    """One start of all ranks; workers are forked from `server`, or fresh processes without one."""

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
        self.job_began = start.job_began
        self.set = WorkerSet(job, console, directory, start, server)
        self.supervisor, self.workers = self.set.supervisor, self.set.workers
        self.store, self.report = self.set.store, self.set.report
        self.progress = self.set.progress
        self.health = Health(job.config.suspect_after_s, job.config.lost_after_s)
        self.status_socket = StatusSocket(
            directory.path,
            JobStatus(self.set, start.job_began, start.restarts),
            self.workers,
            self.report.processes,
        )
        self.looked = 0.0
        is_shown = job.config.progress != "off"  # the forwarder shows it on a terminal only
        self.start_line = ProgressLine(console.forwarder.show_status if is_shown else None)

    def run(self) -> JobOutcome:
        """Start the ranks, and return when all have ended."""
        self.console.drop_passing("no rank has begun")
        try:
            if self.set.server is None:
                self.set.start()
            clock.stop()
            self._loop()
        finally:
            clock.stop()
            forwarder, outlets = self.console.forwarder, self.console.outlets
            limit = self.supervisor.now + self.supervisor.timeout_s
            for event in self.workers.close():
                self.set.handle(event)
                await_readers(forwarder, outlets, self.watch, outlets.has_room, limit)
            self.status_socket.close()
            self.store.close()
        return self.supervisor.outcome()

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
            fork_server = None if self.set.server is None else self.set.server.descriptor()
            ready = self._poll(max(0.0, due - now), fork_server)
            now = self.watch.now()
            self.console.forwarder.flush()
            # Messages of workers come before news of their ends.
            self.set.serve(now)
            self.set.judge_ends(now)
            for descriptor in ready:
                if descriptor == fork_server:
                    self.set.handle_fork_server()
                self.watch.readable(descriptor)
                self.set.handle_all(self.workers.readable(descriptor))
                self.status_socket.readable(descriptor, now)
            self.status_socket.tick(now)
            self._handle_signals(now, is_due=is_signalled)
            self._look(now)
            self._look_at_start(now)
            self.set.do(self.supervisor.tick(now))
            self._show_notices()
            # An elastic job goes on, see `ElasticJob.serve`.
            failure = self.store.failure if self.set.elastic is None else None
            if failure is not None and self.supervisor.job_cause is None:
                self.set.do(self.supervisor.did_not_meet(failure.reason, now))
            idle = self.console.forwarder.tick(now)
            self.console.events.flush()
            if self.console.forwarder.broken and not self.supervisor.interrupted:
                self.set.do(self.supervisor.signalled(signal.SIGPIPE, now))

    def _due(self, now: float, idle: float | None) -> float:
        """Return when the next poll must end, in seconds of the clock."""
        outlets = self.console.outlets
        times = [
            self.supervisor.next_due(),
            self.looked + self.config.heartbeat_interval_s,
            now + (_PAUSE_S if self.set.ends else 1.0),
            outlets.give_up_late(now),
            self.status_socket.due(now),
        ]
        if self.set.elastic is not None:
            times.append(self.set.elastic.due())
        if idle is not None:
            times.append(idle)
        if self.supervisor.is_ending:
            outlets.patience_s = min(outlets.patience_s, patience_s(self.config))
        else:
            times.append(self.progress.due())
        return min(times)

    def _poll(self, timeout_s: float, fork_server: int | None) -> list[int]:
        """Return the descriptors that are ready, after at most the timeout."""
        poller = zmq.Poller()
        poller.register(self.store.socket, zmq.POLLIN)
        for descriptor in (
            *([] if fork_server is None else [fork_server]),
            *self.watch.descriptors(),
            *self.workers.descriptors(self._takes),
            *self.status_socket.descriptors(),
        ):
            poller.register(descriptor, zmq.POLLIN)
        for descriptor in (*self.console.outlets.descriptors(), *self.workers.unsent()):
            poller.register(descriptor, zmq.POLLOUT)
        ready: list[Any] = [item for item, _ in poller.poll(int(timeout_s * 1000) + 1)]
        return [item for item in ready if isinstance(item, int)]

    def _takes(self, rank: int, stream: Stream) -> bool:
        """Return whether the launcher can use more output of a rank."""
        if not self.console.outlets.is_full(stream):
            return True
        return rank != self.options.ranks.debug and not self.console.forwarder.is_forwarded(rank)

    def _show_network(self) -> None:
        """Show which path data between hosts take, what was measured, and what follows."""
        from syncvar.algorithms.cost_model import network_lines, rates_by_pair

        network = self.store.coordinator.network
        network.is_new = False
        self.console.show(f"data between hosts: {'; '.join(sorted(network.paths)) or 'unknown'}")
        known = rates_by_pair(network.rates())
        for line in network_lines(network.hosts, known, self.config.algorithm_choice):
            self.console.show(f"between hosts: {line}")

    def _show_notices(self) -> None:
        if self.options.output.verbose and self.store.coordinator.network.is_new:
            self._show_network()
        for sentence in (*self.store.take_messages(), *self.workers.take_messages()):
            self.report.has_notice = True
            kind = self.store.kinds.get(sentence, "notice")
            self.console.events.add(kind, text=sentence)
            self.console.show(sentence)

    # -- signals -----------------------------------------------------------------------------------

    def _handle_signals(self, now: float, *, is_due: bool) -> None:
        if self.watch.is_to_stop:
            self._stop()
        if self.watch.passing:
            self._forward_signals()
        while self.watch.pending and (is_due or self.supervisor.is_over):
            self._interrupt(self.watch.pending.popleft(), now)

    def _interrupt(self, number: int, now: float) -> None:
        self.console.log_signal("signal", number)
        debugged = self.options.ranks.debug
        if debugged is not None and number == signal.SIGINT and debugged in self.supervisor.running:
            # Ctrl-C belongs to the rank that has the terminal.
            self.workers.send([debugged], signal.SIGINT)
            return
        if self.supervisor.interrupted or self.supervisor.is_over:
            self.console.outlets.patience_s = 0.0  # a second signal also ends the wait for readers
            self.set.do(self.supervisor.signalled(number, now))
            return
        actions = self.supervisor.signalled(number, now)
        grace_s = self.supervisor.grace_s(now)
        if grace_s is not None:  # before the launcher sends signals, which may take a while
            self.console.show(ending_sentence(number, grace_s, self.job.names))
            self.console.forwarder.flush()
        self.set.do(actions)

    def _forward_signals(self) -> None:
        """Forward signals to the ranks and their children, as mpirun does."""
        if not self.workers.workers:
            self.console.drop_passing("no rank has begun")
        while self.watch.passing:
            number = self.watch.passing.popleft()
            self.console.log_signal("signal_forwarded", number)
            spared = self.workers.send_groups(number)
            if spared:
                self.set.show_spared(Spared(number, spared))
            elif self.options.output.verbose:
                name = exit_status.signal_name(number) or number
                self.console.show(f"{name} forwarded to all {self.job.names.word}s")

    def _stop(self) -> None:
        """Stop all ranks and this process, as Ctrl-Z asks; continue them after SIGCONT.

        A signal of the terminal does not reach the ranks, because each leads a session. The clocks
        of the launcher stand meanwhile, those of the ranks run: a waiting call meets its own
        deadline, and connections close that were silent for longer than `lost_after_s`.
        """
        self.workers.stop()
        self.console.forwarder.clear_live_lines()
        lasted_s = self.watch.stop()
        self.workers.resume()
        has_links = len(self.supervisor.running) > 1 and not self.workers.is_complete
        if lasted_s >= self.config.lost_after_s and has_links:
            self.console.show(
                f"the job was stopped for {lasted_s:.0f} s; connections between ranks count as "
                f"lost after {self.config.lost_after_s:g} s (lost_after_s)"
            )

    # -- watching ----------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Watch the processes of the ranks, once in each heartbeat interval."""
        if now - self.looked < self.config.heartbeat_interval_s:
            return
        self.looked = now
        running = sorted(self.supervisor.running & self.workers.workers.keys())
        self.workers.look()
        self.set.look_for_hosts()
        pinged = {self.store.workers[rank] for rank in self.store.coordinator.stalls.pinged}
        self.set.states.watch([rank for rank in running if rank in pinged], now)
        for rank in running:
            stopped = self.workers.state(rank) == "T"
            reason = "its process is stopped (state T)" if stopped else ""
            opinion = self.health.observe(rank, reason, now)
            if opinion is None:
                continue
            if opinion.is_lost:
                self.set.do(self.supervisor.silent(rank, opinion.reason, now))
            else:
                self.console.show(f"{self.set.describe(rank)}: {opinion.reason}")

    def _look_at_start(self, now: float) -> None:
        """Show that the start makes no progress; give up at its deadline."""
        self._show_start()
        overdue = None if self.supervisor.is_ending else self.progress.look(now)
        if overdue is None:
            return
        server = self.set.server
        if server is None:
            states = [
                f"{process_name(one, self.job.names)}: {self.set.states.process(one)}"
                for one in overdue.missing
            ]
        else:
            states = [f"{server.describe()} has not imported NumPy and syncvar"]
        joined = {self.store.workers[rank] for rank in self.store.coordinator.handshake.members}
        sentence = overdue.sentence(states, joined, self.job.names)
        if overdue.has_failed and self.set.elastic is not None:
            self.set.drop_late(overdue.missing, sentence, now)
            return
        if not overdue.has_failed:
            self.report.has_notice = True
            self.console.events.add("stall", text=sentence)
            self.console.show(sentence)
            return
        self.progress.missing.clear()
        if server is None:
            self.set.do(self.supervisor.did_not_meet(sentence, now))
            return
        self.set.server = None
        server.close()
        self.supervisor.never_began(sentence, exit_status.RENDEZVOUS)

    def _show_start(self) -> None:
        """Show on a terminal how many processes have reached their script, after a second."""
        missing = self.progress.missing
        if not missing or self.supervisor.is_ending:
            self.start_line.close()
        elif self.start_line.is_due():
            count = len(self.set.report.processes)
            names = missing_text(process_name(one, self.job.names) for one in sorted(missing))
            self.start_line.show(
                f"{count - len(missing)} of {count} processes have reached their script; {names}"
            )
