"""Runs a job from its first attempt to its last: `--max-restarts` allows several."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import syncvar
from syncvar.bootstrap.job_private import JobDirectory
from syncvar.core import exit_status
from syncvar.core.errors import HostUnreachable, with_code
from syncvar.core.output_files import LostFile, write_error_text
from syncvar.core.process_ids import SERVER_0, is_server, server_number
from syncvar.core.progress_line import can_move_cursor
from syncvar.core.restart_policy import Restarting
from syncvar.parameter_server.discovery import put_tallies, take_tallies
from syncvar_launcher.io.output import OutputForwarder, Sink
from syncvar_launcher.io.standard_streams import (
    Outlets,
    SignalWatch,
    await_readers,
    patience_s,
    wait,
)
from syncvar_launcher.job.attempt import Attempt
from syncvar_launcher.job.attempt_report import JobConsole
from syncvar_launcher.job.attempt_workers import AttemptStart
from syncvar_launcher.job.failure_report import LOST_FILES, TIME_LIMIT, FailureReport, failure_block
from syncvar_launcher.job.job_files import (
    EventLog,
    check_requested_files,
    merge_totals,
    read_totals,
    totals_table,
)
from syncvar_launcher.job.start_progress import clock
from syncvar_launcher.job.workers import DirectWorkers
from syncvar_launcher.local.host_resources import TimePassed
from syncvar_launcher.local.shm_service import shm_unavailable_reason
from syncvar_launcher.options.option_table import parse_signals, shown_ranks

if TYPE_CHECKING:
    from syncvar_launcher.job.dashboard_process import DashboardProcess
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.supervisor import JobOutcome
    from syncvar_launcher.job.workers import WorkersFactory
    from syncvar_launcher.local.worker_start import ForkServer
    from syncvar_launcher.options.launch_options import LaunchOptions


def run(job: Job, server: ForkServer | None, make_workers: WorkersFactory = DirectWorkers) -> int:
    """Run the job, with restarts, and return the exit code.

    `server` is the fork server of the first attempt; None for fresh processes.
    """
    chosen = job.options
    clock.enter("looks at the files that it is to write")
    check_requested_files(chosen, is_local=job.host_group is None)
    for host, size in enumerate(job.hosts.sizes):
        shm_unavailable_reason(chosen, job.processor_of(host), size)  # raises for wrong settings
    sys.stdout.flush()
    sys.stderr.flush()
    outlets = Outlets(sys.stdout.fileno(), sys.stderr.fileno())
    with contextlib.ExitStack() as stack:
        stack.callback(outlets.close)
        forwarder = _make_forwarder(chosen, job.servers, outlets)
        events = EventLog(
            chosen.output.events,
            job.job_id,
            lambda text: forwarder.write_text(f"syncvar: {text}\n"),
        )
        stack.callback(events.close)
        signals = parse_signals(chosen.limits.forward_signals)
        watch = stack.enter_context(SignalWatch(job.environ, signals))
        console = JobConsole(outlets, forwarder, events, watch)
        loop = _RestartLoop(job, console, make_workers)
        if chosen.output.dashboard:
            from syncvar_launcher.job.dashboard_process import DashboardProcess

            loop.dashboard = DashboardProcess(chosen.output.dashboard)
            stack.callback(loop.dashboard.close)
        return loop.run(server)


class _StartInterrupted(Exception):  # noqa: N818  (nothing has gone wrong)
    """A signal asks the launcher to end while it waits to start."""


class _RestartLoop:
    """Runs attempts until one of them is the last; see `run`."""

    def __init__(self, job: Job, console: JobConsole, make_workers: WorkersFactory) -> None:
        self.job, self.options, self.config = job, job.options, job.config
        self.console, self.watch = console, console.watch
        # With hosts the job has begun before the logins.
        self.began = self.watch.now() if job.host_group is None else job.host_group.began
        self.limit = self.began + self.options.limits.timeout_s
        self.restarting = Restarting(self.options.limits.max_restarts, self.config.restart_delay_s)
        self.start = AttemptStart(0, 0, self.began, has_met=False, make_workers=make_workers)
        self.code = exit_status.RENDEZVOUS
        self.culprit: dict[str, Any] = {"rank": None, "why": "the ranks could not be started"}
        self.totals: dict[int, list[dict[str, Any]]] = {}
        self.tallies: dict[str, bytes] = {}
        self.dashboard: DashboardProcess | None = None

    def run(self, server: ForkServer | None) -> int:
        """Run the job, and return the exit code."""
        ranks, program = self.options.ranks, self.options.program
        self.console.events.add(
            "job_start",
            version=syncvar.__version__,
            host=self.job.host,
            hosts=len(self.job.hosts.sizes),
            workers=ranks.workers,
            servers=ranks.servers,
            kind=program.kind,
            target=program.target,
            programs=[
                {"kind": one.kind, "target": one.target, "workers": one.workers}
                for one in self.job.programs
            ],
            start_method=ranks.start_method,
            max_restarts=self.options.limits.max_restarts,
            options=_digest(self.options),
            pid=os.getpid(),
        )
        self.job.records.remove()  # of an earlier job with the same folder for its output
        while self._run_attempt(server):
            pass
        return self._finish()

    def _run_attempt(self, server: ForkServer | None) -> bool:
        """Run one attempt; return whether another one follows."""
        with contextlib.ExitStack() as stack:
            if self.restarting.number:
                clock.enter("starts the process that workers are forked from")
                server = self.job.fork_server()
            if server is not None:
                stack.enter_context(server)
            directory = self._make_directory()
            if directory is None:
                return False
            stack.callback(directory.remove)
            put_tallies(self.tallies, directory.path)
            clock.stop()
            if not self._renew_hosts():
                return False
            clock.enter("prepares sockets and shared memory")
            attempt = Attempt(self.job, self.console, directory, self.start, server)
            if self.dashboard is not None:
                self.dashboard.start(self.console.show)
            outcome = attempt.run()
            self.tallies = take_tallies(directory.path)
            if self.options.output.stats:
                self.totals = read_totals(directory.path)
        return self._may_go_on(attempt, outcome)

    def _make_directory(self) -> JobDirectory | None:
        """Make the private directory of an attempt; return None if a signal ends the job."""
        clock.enter("makes the private directory of the job")
        try:
            return JobDirectory(self.job.environ, waits=self._raise_if_signalled)
        except _StartInterrupted:
            number = self.watch.pending[0]
            name = exit_status.signal_name(number)
            reason = f"{name} while the launcher waited for the lock of the runtime directory"
            self.code, self.culprit = 128 + number, {"rank": None, "why": reason}
            self.console.show(f"interrupted by {reason}")
            return None

    def _raise_if_signalled(self) -> None:
        clock.enter("waits for the lock of the runtime directory")  # it reports and ends by itself
        if self.watch.pending:
            clock.stop()
            raise _StartInterrupted

    def _renew_hosts(self) -> bool:
        """Replace agents that have ended; return whether the ranks can start."""
        try:
            if self.job.host_group is not None:
                self.job.host_group.renew(self.limit - self.watch.now())
                self.job.place_hosts()
        except HostUnreachable as error:
            self.code = exit_status.TIMEOUT if isinstance(error, TimePassed) else self.code
            self.console.show(f"the ranks cannot be started again: {error}")
            return False
        return True

    def _may_go_on(self, attempt: Attempt, outcome: JobOutcome) -> bool:
        """Report on an attempt; return whether another one follows, after the pause before it."""
        console, has_met = self.console, attempt.set.has_met
        generation = attempt.set.next_generation
        self.code = outcome.exit_code
        ending = attempt.report.ending(outcome, had_met=has_met)
        decision = self.restarting.after(ending)
        attempt.report.show(outcome, is_last=not decision.restarts)
        self.culprit = _culprit(outcome, ending.failure)
        if self.code == exit_status.PREEMPTED and outcome.cause is None:
            console.events.add("preempted", signal=outcome.interrupted or None)
        if not decision.restarts:
            if decision.reason and not outcome.interrupted:
                console.show(f"not started again: {decision.reason}")
            return False
        attempt_name = f"attempt {self.restarting.number + 1}"
        console.show(f"{decision.reason}, in {decision.pause_s:g} s, as {attempt_name}")
        console.events.add(
            "restart",
            number=self.restarting.number,
            reason=decision.reason,
            pause_s=decision.pause_s,
            generation=generation,
            **self.culprit,
        )
        if not self._pause(decision.pause_s):
            return False
        dropped = console.outlets.renew()
        if dropped:
            console.show(f"{dropped} bytes of output were dropped, because nobody read them")
        console.forwarder.begin(f"syncvar: {decision.reason}, {attempt_name}")
        self.start = self.start._replace(
            generation=generation, restarts=self.restarting.number, has_met=has_met
        )
        return True

    def _pause(self, pause_s: float) -> bool:
        """Wait before a restart; return False if the job ends meanwhile."""
        until = self.watch.now() + pause_s
        while True:
            if self.watch.pending:
                number = self.watch.pending.popleft()
                name = exit_status.signal_name(number)
                self._end_in_pause(
                    128 + number, f"syncvar: interrupted by {name} before the restart\n"
                )
                return False
            self.console.drop_passing("no rank runs between two attempts")
            now = self.watch.now()
            if now >= self.limit:
                limit_s = self.options.limits.timeout_s
                reason = f"the time limit of {limit_s:g} s passed before the restart"
                failure = FailureReport(
                    -1, None, elapsed_s=now - self.began, reason=reason, code=TIME_LIMIT
                )
                self._end_in_pause(exit_status.TIMEOUT, failure_block(failure))
                return False
            if now >= until:
                return True
            wait(
                self.console.forwarder,
                self.console.outlets,
                self.watch,
                min(until, self.limit) - now,
            )

    def _end_in_pause(self, code: int, text: str) -> None:
        self.code = self.code if self.code == exit_status.PREEMPTED else code
        self.culprit = {"rank": None, "why": text.split("\n", 1)[0]}
        self.console.forwarder.write_text(text)

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self) -> int:
        """Show what the last attempt leaves, wait for readers, and return the exit code."""
        job, watch = self.job, self.watch
        outlets, forwarder, events, _ = self.console
        for line in self.restarting.summary():
            forwarder.write_text(f"syncvar: {line}\n" if not line.startswith(" ") else f"{line}\n")
        forwarder.finish()
        if self.options.output.stats:
            job.lost_files.add(self._show_totals())
        code = self._show_lost_files()
        if code:
            outlets.patience_s = min(outlets.patience_s, patience_s(self.config))
        await_readers(forwarder, outlets, watch, outlets.are_empty, self.limit)
        if watch.is_orphan:  # the caller of `sv.run` cannot remove its folder for results
            shutil.rmtree(job.environ.get("SYNCVAR_RESULT_DIR", ""), ignore_errors=True)
        if outlets.dropped and not code:  # the ranks succeeded, and some of their output is lost
            code = 128 + watch.pending[0] if watch.pending else exit_status.TIMEOUT
        elapsed_s = watch.now() - self.began
        events.add("job_end", exit_code=code, elapsed_s=elapsed_s, **self.culprit)
        events.close(0.0 if watch.pending else patience_s(self.config))
        if not code and events.lost_files() and not self._has_caller:
            # The last event was the first one that did not fit.
            code = exit_status.LOST_FILE
        return code

    @property
    def _has_caller(self) -> bool:
        """Whether `sv.run` waits for this job; lost files do not change its results."""
        return "SYNCVAR_OUTCOME_FILE" in self.job.environ

    def _show_lost_files(self) -> int:
        """Show the files that could not be written; return the exit code, which is then not 0."""
        lost, code = self.job.lost_files, self.code
        lost.add([*self.console.forwarder.lost_files(), *self.console.events.lost_files()])
        for line in lost.lines(has_failed=code != 0):
            self.console.show(line)
        if code or not lost.has_result or self._has_caller:
            return code
        code = exit_status.LOST_FILE
        self.console.show(
            with_code(f"all ranks succeeded, and files are lost: exit code {code}", LOST_FILES)
        )
        return code

    def _show_totals(self) -> list[LostFile]:
        """Show the totals of the last attempt, or write them to a file; return a lost file."""
        ranks, file = self.options.ranks, self.options.output.stats
        everybody = (*range(ranks.workers), *map(server_number, range(ranks.servers)))
        rows = merge_totals(self.totals)
        missing = [number for number in everybody if number not in self.totals]
        if not isinstance(file, Path):
            self.console.forwarder.write_text(totals_table(rows, missing))
            return []
        import json

        document: dict[str, Any] = {
            "workers": ranks.workers,
            "missing": [number for number in missing if not is_server(number)],
            "rows": rows,
        }
        if ranks.servers:
            servers = [number - SERVER_0 for number in missing if is_server(number)]
            document |= {"servers": ranks.servers, "missing_servers": servers}
        try:
            file.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            return [LostFile(str(file), "--stats", write_error_text(error))]
        return []


def _culprit(outcome: JobOutcome, reason: str) -> dict[str, object]:
    """Return the rank or server that failed first, and how, for events."""
    cause = outcome.cause
    culprit: dict[str, object] = {"rank": None}
    if cause is not None and cause.rank >= 0:
        is_worker = not is_server(cause.rank)
        culprit |= {"rank": cause.rank} if is_worker else {"server": cause.rank - SERVER_0}
    return {**culprit, "why": reason}


def _digest(chosen: LaunchOptions) -> str:
    """Return a digest of all settings, to compare starts of a job."""
    import hashlib

    from syncvar_launcher.job.settings_table import settings_rows

    rows = [row[:2] for row in settings_rows(chosen) if not row[0].startswith("env.")]
    names = [sorted(one.env) for one in chosen.programs]  # values of variables may be secrets
    text = repr((rows, names))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _make_forwarder(chosen: LaunchOptions, servers: range, outlets: Outlets) -> OutputForwarder:
    sinks = [
        Sink(
            writer,
            stream.isatty(),
            chosen.output.has_color(is_terminal=stream.isatty()),
            is_dumb=not can_move_cursor(stream, os.environ),
            descriptor=stream.fileno(),
        )
        for stream, writer in ((sys.stdout, outlets.out), (sys.stderr, outlets.err))
    ]
    return OutputForwarder(
        sinks[0],
        sinks[1],
        shown=shown_ranks(chosen.output.selection, chosen.ranks.workers),
        clock=time.time if chosen.output.timestamps else None,
        log_dir=chosen.output.log_dir,
        ranks=(*range(chosen.ranks.workers), *servers),
        is_one=os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())),
    )
