"""The report on one attempt: what each rank was doing, why the job failed, and what helps."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.core import exit_status
from syncvar.core.process_ids import is_server
from syncvar.core.restart_policy import Ending
from syncvar.core.stack_dump import activity_text
from syncvar.protocol.object_codec import pack_object
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.failure_report import (
    FailureReport,
    SecondaryFailure,
    WorkerTraceback,
    failure_block,
    failure_sentence,
    interrupted_block,
)

if TYPE_CHECKING:
    from collections.abc import Container

    from syncvar.bootstrap.rendezvous_server import RendezvousServer
    from syncvar_launcher.io.output import OutputForwarder
    from syncvar_launcher.io.signal_watch import SignalWatch
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.supervisor import FailureCause, JobOutcome, Supervisor
    from syncvar_launcher.job.workers import Workers

_OUTCOME_FILE = "SYNCVAR_OUTCOME_FILE"  # `sv.run` reads the failure from this file
_LOST_PEER = ("PeerLost", "GroupBroken")  # errors that follow from the failure of another rank


class AttemptReport:
    """Collects what the ranks were doing, and reports the outcome of an attempt.

    Attributes:
        is_restart: Whether an attempt went before.
        has_notice: Whether the launcher has shown a sentence about stalls or shared memory.
    """

    def __init__(
        self,
        job: Job,
        supervisor: Supervisor,
        workers: Workers,
        store: RendezvousServer,
        forwarder: OutputForwarder,
        watch: SignalWatch,
        *,
        began: float,
    ) -> None:
        self._job = job
        self._supervisor = supervisor
        self._workers = workers
        self._store = store
        self._forwarder = forwarder
        self._watch = watch
        self.is_restart = False
        self._began = began
        self._positions: dict[int, str] = {}
        self._is_whole = job.options.output.verbose
        self.processes = [*range(job.options.ranks.workers), *job.servers]
        self.has_notice = False

    def position(self, number: int) -> str:
        """Return what a rank or server is doing, as far as the rendezvous server knows."""
        if is_server(number):
            return self._store.servers.position(number)
        return self._store.coordinator.position(number)

    def note_positions(self, but: int = -1) -> None:
        """Keep what the ranks are doing now, and request stacks of those that have not failed.

        The attempt calls it at the first failure, and before it terminates the ranks.
        """
        failed = {but, *self._supervisor.causes}
        self._workers.note(rank for rank in sorted(self._supervisor.running) if rank not in failed)
        if not self._positions:
            self._positions = {number: self.position(number) for number in self.processes}

    def ending(self, outcome: JobOutcome, *, had_met: bool) -> Ending:
        """Return what decides about a restart."""
        cause = outcome.cause
        why = error = ""
        if cause is not None:
            why = failure_sentence(self._failure(cause)._replace(elapsed_s=None))
            error = cause.error
        return Ending(
            exit_code=outcome.exit_code,
            failure=why,
            error=error,
            was_end_requested=outcome.interrupted != 0 or bool(self._watch.pending),
            had_met=had_met,
            lasted_s=self._watch.now() - self._began,
        )

    def tell(self, outcome: JobOutcome, *, is_last: bool) -> None:
        """Show how the attempt ended; the last one also advises what to do."""
        cause = outcome.cause
        if outcome.exit_code == exit_status.PREEMPTED and cause is None:
            number = outcome.interrupted
            after = f" after {exit_status.signal_name(number)}" if number else ""
            advice = "; run it again to go on" if is_last else ""
            code = f"(exit code {exit_status.PREEMPTED})"
            self._forwarder.say(f"syncvar: the ranks stopped as asked{after} {code}{advice}\n")
        elif outcome.interrupted:
            self._tell_interruption(outcome.interrupted)
        records = self._records(outcome)
        if cause is not None:
            self._tell_failure(outcome, cause, records, is_last=is_last)
        elif records:
            self._forwarder.say(f"syncvar: evidence: {escape(records)}\n")

    def _tell_interruption(self, number: int) -> None:
        has_reader = number != signal.SIGPIPE
        places = self._others(-1) if self._positions and has_reader else []
        raised = [one for one in self._raised(_LOST_PEER) if one.is_own]
        name = exit_status.signal_name(number)
        self._forwarder.say(interrupted_block(name, places, raised, is_whole=self._is_whole))

    def _tell_failure(
        self, outcome: JobOutcome, cause: FailureCause, records: str, *, is_last: bool
    ) -> None:
        outcome_file = self._job.environ.get(_OUTCOME_FILE)
        log_dir = self._job.options.output.log_dir
        text = failure_block(
            self._failure(cause),
            self._others(cause.rank),
            # `sv.run` has no command line to try again.
            arguments=self._job.arguments if is_last and not outcome_file else [],
            log_dir=str(log_dir) if log_dir else "",
            records=records,
            raised=self._raised(exit_status.ERRORS_ABOUT_OTHERS),
            remedies=self._remedies(cause),
            is_whole=self._is_whole,
        )
        if not outcome_file or not is_last:
            self._forwarder.say(text)
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
            SecondaryFailure(number, self._last_position(number))
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
        return self._job.records.told()

    def _last_position(self, rank: int) -> str:
        """Return what a rank was doing at the failure, and what it raised afterwards."""
        cause = self._supervisor.causes.get(rank)
        if cause is not None and cause.status is None and not cause.error:
            return cause.reason.split(": ", 1)[0]  # the rank has sent nothing more
        position = self._positions.get(rank) or self.position(rank)
        place = self._workers.places.get(rank, "")
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
