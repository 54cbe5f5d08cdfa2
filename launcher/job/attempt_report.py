"""Reports on an attempt: to the user, to the waiting ranks, and to other programs.

`JobConsole` shows sentences of the launcher. `AttemptReport` shows why the job failed and what
helps. `RankStates` describes processes that others wait for.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core import exit_status
from syncvar.core.process_ids import RANKS, ProcessNames, is_server, process_name
from syncvar.core.restart_policy import Ending
from syncvar.core.stack_dump import activity_text
from syncvar.protocol.object_codec import pack_object
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.failure_report import (
    EvidenceFiles,
    FailureReport,
    SecondaryFailure,
    WorkerTraceback,
    failure_block,
    failure_sentence,
    interrupted_block,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from syncvar.bootstrap.rendezvous_server import RendezvousServer
    from syncvar_launcher.io.output import OutputForwarder
    from syncvar_launcher.io.standard_streams import Outlets, SignalWatch
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.job_files import EventLog
    from syncvar_launcher.job.supervisor import FailureCause, JobOutcome, Supervisor
    from syncvar_launcher.job.workers import Workers

_OUTCOME_FILE = "SYNCVAR_OUTCOME_FILE"  # `sv.run` reads the failure from this file
_LOST_PEER = ("PeerLost", "GroupBroken")  # errors that follow from the failure of another rank
_BUSY_SHARE = 0.2  # of a core
_SHOWN_RANKS = 4  # ranks that a sentence names


class JobConsole(NamedTuple):
    """What the launcher reads and writes while it runs a job."""

    outlets: Outlets  # standard streams of the launcher
    forwarder: OutputForwarder  # shows the output of the ranks
    events: EventLog  # log of events
    watch: SignalWatch  # signals that the launcher has received

    def show(self, sentence: str) -> None:
        """Show a sentence of the launcher."""
        self.forwarder.write_text(f"syncvar: {sentence}\n")

    def log_signal(self, event: str, number: int) -> None:
        """Add an event about a signal."""
        self.events.add(event, signal=number, name=exit_status.signal_name(number))

    def drop_passing(self, reason: str) -> None:
        """Drop signals to forward, because no rank runs, and show that."""
        while self.watch.passing:
            number = self.watch.passing.popleft()
            name = exit_status.signal_name(number) or number
            self.show(f"{name} was dropped: {reason}")


class AttemptReport:
    """Collects what the ranks were doing, and reports the outcome of an attempt.

    Attributes:
        is_restart: Whether this is not the first attempt.
        has_notice: Whether the launcher has shown a sentence about stalls or shared memory.
    """

    def __init__(
        self,
        job: Job,
        supervisor: Supervisor,
        workers: Workers,
        store: RendezvousServer,
        console: JobConsole,
        *,
        is_restart: bool,
    ) -> None:
        self._job = job
        self._supervisor = supervisor
        self.workers = workers
        self._store = store
        self._console = console
        self._forwarder, self._watch = console.forwarder, console.watch
        self.is_restart = is_restart
        self._began = console.watch.now()
        self._positions: dict[int, str] = {}
        self._is_whole = job.options.output.verbose
        self.processes = [*range(job.options.ranks.workers), *job.servers]
        self.has_notice = False

    def position(self, number: int) -> str:
        """Return what a rank or server is doing, as far as the rendezvous server knows."""
        if is_server(number):
            return self._store.servers.position(number)
        return self._store.position(number)

    def note_positions(self, but: int = -1) -> None:
        """Keep what the ranks are doing now, and request stacks of those that have not failed.

        The attempt calls it at the first failure, and before it terminates the ranks.
        """
        failed = {but, *self._supervisor.causes}
        self.workers.note(rank for rank in sorted(self._supervisor.running) if rank not in failed)
        if not self._positions:
            self._positions = {number: self.position(number) for number in self.processes}

    def ending(self, outcome: JobOutcome, *, had_met: bool) -> Ending:
        """Return what decides about a restart."""
        cause = outcome.cause
        sentence = error = ""
        if cause is not None:
            sentence = failure_sentence(self._failure(cause)._replace(elapsed_s=None))
            error = cause.error
        return Ending(
            exit_code=outcome.exit_code,
            failure=sentence,
            error=error,
            was_end_requested=outcome.interrupted != 0 or bool(self._watch.pending),
            had_met=had_met,
            lasted_s=self._watch.now() - self._began,
        )

    def show(self, outcome: JobOutcome, *, is_last: bool) -> None:
        """Show how the attempt ended; the last one also advises what to do."""
        cause = outcome.cause
        if outcome.exit_code == exit_status.PREEMPTED and cause is None:
            number = outcome.interrupted
            after = f" after {exit_status.signal_name(number)}" if number else ""
            advice = "; run it again to go on" if is_last else ""
            code = f"(exit code {exit_status.PREEMPTED})"
            self._console.show(
                f"the {self._job.names.word}s stopped as asked{after} {code}{advice}"
            )
        elif outcome.interrupted:
            self._show_interruption(outcome.interrupted)
        records = self._records(outcome)
        if cause is not None:
            self._show_failure(outcome, cause, records, is_last=is_last)
        elif records:
            self._console.show(f"evidence: {escape(records)}")

    def _show_interruption(self, number: int) -> None:
        has_reader = number != signal.SIGPIPE
        places = self._others(-1) if self._positions and has_reader else []
        raised = [one for one in self._raised(_LOST_PEER) if one.is_own]
        name = exit_status.signal_name(number)
        self._forwarder.write_text(
            interrupted_block(name, places, raised, self._job.names, is_whole=self._is_whole)
        )

    def _show_failure(
        self, outcome: JobOutcome, cause: FailureCause, records: str, *, is_last: bool
    ) -> None:
        outcome_file = self._job.environ.get(_OUTCOME_FILE)
        log_dir = self._job.options.output.log_dir
        text = failure_block(
            self._failure(cause),
            self._others(cause.rank),
            # `sv.run` has no command line to try again.
            arguments=self._job.arguments if is_last and not outcome_file else [],
            remedies=self._remedies(cause),
            files=EvidenceFiles(str(log_dir) if log_dir else "", records),
            raised=self._raised(exit_status.ERRORS_ABOUT_OTHERS),
            is_whole=self._is_whole,
        )
        if not outcome_file or not is_last:
            self._forwarder.write_text(text)
            return
        failure = {
            "rank": cause.rank,
            "host": self._job.host_name(max(cause.rank, 0)),
            "exit_code": outcome.exit_code,
            "text": text,
        }
        Path(outcome_file).write_bytes(pack_object(failure))

    def _others(self, but: int) -> list[SecondaryFailure]:
        return [
            SecondaryFailure(number, self._last_position(number), self._job.program_label(number))
            for number in self.processes
            if number != but
        ]

    def _remedies(self, cause: FailureCause) -> list[list[str]]:
        """Return options with which the job would have survived the failure of a server."""
        if not is_server(cause.rank):
            return []
        chosen = self._job.options
        remedies = []
        if chosen.ranks.servers > 1 and not chosen.ranks.server_replicas:
            remedies.append(["--server-replicas", "1"])
        if not chosen.limits.max_restarts:
            remedies.append(["--max-restarts", "3"])
        return remedies

    def _failure(self, cause: FailureCause) -> FailureReport:
        is_process = cause.rank >= 0
        has_error = cause.error not in ("", "SystemExit") or not cause.status
        is_shown = _OUTCOME_FILE not in self._job.environ
        position = self._positions.get(cause.rank, "")
        call = position.removeprefix("waiting in ")
        return FailureReport(
            rank=cause.rank,
            status=cause.status,
            host=self._job.host_name(cause.rank) if is_process else "",
            reason=cause.reason.split("\n", 1)[0] if has_error else cause.beyond,
            call=call if call != position else "",
            elapsed_s=(self._watch.now() if cause.at is None else cause.at) - self._began,
            traceback=self._traceback(cause),
            last_lines=self._forwarder.last_lines(cause.rank) if is_process else (),
            stands_above=is_shown and self._forwarder.stands_above(cause.rank),
            code=cause.code,
            program=self._job.program_label(cause.rank),
            is_elastic=self._supervisor.fewest > 0,
        )

    def _traceback(self, cause: FailureCause) -> str:
        return cause.traceback if self._is_whole else cause.brief

    def _raised(self, consequences: Container[str]) -> list[WorkerTraceback]:
        """Return the exceptions of the ranks; those of the given names follow from others."""
        return [
            WorkerTraceback(cause.rank, self._traceback(cause), cause.error not in consequences)
            for cause in self._supervisor.causes.values()
        ]

    def _records(self, outcome: JobOutcome) -> str:
        """Return the text that names the flight records, or remove records without use.

        A rank writes a record when something goes wrong, and its program may have handled that.
        After an interruption records help if the launcher had shown a notice, for instance of a
        stall. After a restart they are evidence of earlier failures.
        """
        has_notice = bool(outcome.interrupted) and self.has_notice
        has_folder = self._job.options.output.log_dir is not None
        if outcome.cause is None and not (has_folder or has_notice or self.is_restart):
            self._job.records.remove()
            return ""
        return self._job.records.sentence()

    def _last_position(self, rank: int) -> str:
        """Return what a rank was doing at the failure, and what it raised afterwards."""
        lost = self._supervisor.lost_workers.get(rank)
        if lost is not None:
            return f"lost: {lost.reason}".split("\n", 1)[0]
        cause = self._supervisor.causes.get(rank)
        if cause is not None and cause.status is None and not cause.error:
            return cause.reason.split(": ", 1)[0]  # the rank has sent nothing more
        position = self._positions.get(rank) or self.position(rank)
        place = self.workers.places.get(rank, "")
        if cause is None or not cause.error:
            return activity_text(position, place)
        # "; " marks a rank that did not answer. How we terminated it says less than that.
        was_terminated = cause.error == "SystemExit" and cause.exit_code == 128 + signal.SIGTERM
        if "; " in position or was_terminated:
            return activity_text(position, place)
        # For a lost peer the place of the call matters, for other errors the error.
        if position.startswith("waiting") or (place and cause.error in _LOST_PEER):
            return f"{activity_text(position, place)}; then {cause.error}"
        return cause.reason.removeprefix("uncaught ").split("\n", 1)[0].split(". ", 1)[0]


class RankStates:
    """Describes the processes of an attempt; `starting` ranks have not reached their script."""

    def __init__(
        self, workers: Workers, starting: Container[int], names: ProcessNames = RANKS
    ) -> None:
        self._workers, self._names = workers, names
        self._starting = starting
        self._busy: dict[int, tuple[float, float]] = {}  # time and processor time of the question

    def watch(self, ranks: Iterable[int], now: float) -> None:
        """Measure processor time of ranks that the rendezvous server asks for a sign of life."""
        self._busy = {
            rank: self._busy.get(rank) or (now, self._workers.busy_s(rank)) for rank in ranks
        }

    def process(self, number: int) -> str:
        """Return whether the process of a rank or server runs, and its state."""
        pid = self._workers.pid(number)
        if number not in self._workers.workers or pid < 0:
            return "its process has not been started"
        letter = self._workers.state(number)
        stopped = " is stopped" if letter == "T" else ""
        return f"process {pid}{stopped} (state {letter})" if letter else f"process {pid} has ended"

    def absent(self, ranks: Sequence[int]) -> str:
        """Return what the first of the ranks do that others wait for."""
        shown = ranks[:_SHOWN_RANKS]
        return "; ".join(f"{process_name(one, self._names)}: {self._absence(one)}" for one in shown)

    def _absence(self, rank: int) -> str:
        text = self.process(rank)
        if rank in self._starting:
            return f"{text}, has not reached its script" if text.startswith("process") else text
        place = self._workers.place_now(rank) if rank in self._workers.workers else ""
        return f"{text}, {place}" if place else text

    def activity(self, rank: int, now: float) -> str:
        """Return whether a rank has used its core since `watch` began to measure it."""
        letter, known = self._workers.state(rank), self._busy.get(rank)
        if not letter or known is None:
            return ""
        since, before = known
        share = (self._workers.busy_s(rank) - before) / max(1e-3, now - since)
        is_busy = share > _BUSY_SHARE or letter == "R"  # R: runnable, even without a free core
        return f", CPU {'busy' if is_busy else 'idle'} (state {letter})"
