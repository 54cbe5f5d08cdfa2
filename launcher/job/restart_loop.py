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
from syncvar.core.errors import HostUnreachable
from syncvar.core.output_files import LostFile, write_error_text
from syncvar.core.process_ids import SERVER_0, is_server, server_number
from syncvar.core.restart_policy import Restarting
from syncvar.parameter_server.client.push_counter import put_tallies, take_tallies
from syncvar_launcher.io.nonblocking_writer import Outlets, await_readers, patience_s, wait
from syncvar_launcher.io.output import OutputForwarder, Sink
from syncvar_launcher.io.signal_watch import SignalWatch
from syncvar_launcher.job.attempt import Attempt, drop_passing
from syncvar_launcher.job.event_log import EventLog
from syncvar_launcher.job.failure_report import FailureReport, failure_block
from syncvar_launcher.job.job_stats import merged, read_totals, table
from syncvar_launcher.job.lost_files import check_requested_files
from syncvar_launcher.job.resource_limits import TimePassed
from syncvar_launcher.job.start_clock import clock
from syncvar_launcher.local.shm_service import shm_unavailable_reason
from syncvar_launcher.options.forwarded_signals import parse_signals
from syncvar_launcher.options.option_values import shown_ranks

if TYPE_CHECKING:
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.supervisor import JobOutcome
    from syncvar_launcher.local.fork_client import ForkServer
    from syncvar_launcher.options.launch_options import LaunchOptions


def run(job: Job, server: ForkServer | None) -> int:
    """Run the job, with restarts, and return the exit code.

    `server` is the fork server of the first attempt; None for fresh processes.
    """
    chosen = job.options
    clock.enter("looks at the files that it is to write")
    check_requested_files(chosen, is_local=job.host_group is None)
    for host, size in enumerate(job.hosts.sizes):
        shm_unavailable_reason(chosen, job.processor_of(host), size)  # raises for wrong settings
    with contextlib.closing(_outlets()) as outlets:
        return _run(job, server, outlets)


def _run(job: Job, server: ForkServer | None, outlets: Outlets) -> int:
    chosen = job.options
    forwarder = _forwarder(chosen, job.servers, outlets)
    events = EventLog(
        chosen.output.events, job.job_id, lambda text: forwarder.say(f"syncvar: {text}\n")
    )
    with contextlib.closing(events):
        return _started(job, server, outlets, forwarder, events)


def _started(
    job: Job,
    server: ForkServer | None,
    outlets: Outlets,
    forwarder: OutputForwarder,
    events: EventLog,
) -> int:
    chosen = job.options
    events.add(
        "job_start",
        version=syncvar.__version__,
        host=job.host,
        hosts=len(job.hosts.sizes),
        workers=chosen.ranks.workers,
        servers=chosen.ranks.servers,
        kind=chosen.program.kind,
        target=chosen.program.target,
        start_method=chosen.ranks.start_method,
        max_restarts=chosen.limits.max_restarts,
        options=_digest(chosen),
        pid=os.getpid(),
    )
    job.records.remove()  # of an earlier job with the same folder for its output
    restarting = Restarting(chosen.limits.max_restarts, job.config.restart_delay_s)
    number, had_met, code = 0, False, exit_status.RENDEZVOUS
    culprit: dict[str, Any] = {"rank": None, "why": "the ranks could not be started"}
    totals: dict[int, list[dict[str, Any]]] = {}
    tallies: dict[str, bytes] = {}
    with SignalWatch(job.environ, parse_signals(chosen.limits.forward_signals)) as watch:
        began = watch.now() if job.host_group is None else job.host_group.began  # before the logins
        while True:
            with contextlib.ExitStack() as stack:
                if restarting.number:
                    clock.enter("starts the process that workers are forked from")
                    server = job.fork_server()
                if server is not None:
                    stack.enter_context(server)
                clock.enter("makes the private directory of the job")
                try:
                    directory = JobDirectory(job.environ, waits=lambda: _raise_if_signalled(watch))
                except _StartInterrupted:
                    number_of_signal = watch.pending[0]
                    code = 128 + number_of_signal
                    name = exit_status.signal_name(number_of_signal)
                    why = f"{name} while the launcher waited for the lock of the runtime directory"
                    culprit = {"rank": None, "why": why}
                    forwarder.say(f"syncvar: interrupted by {why}\n")
                    break
                stack.callback(directory.remove)
                put_tallies(tallies, directory.path)
                clock.stop()
                try:
                    if job.host_group is not None:
                        job.host_group.renew(began + chosen.limits.timeout_s - watch.now())
                except HostUnreachable as error:
                    code = exit_status.TIMEOUT if isinstance(error, TimePassed) else code
                    forwarder.say(f"syncvar: the ranks cannot be started again: {error}\n")
                    break
                clock.enter("prepares sockets and shared memory")
                attempt = Attempt(
                    job,
                    forwarder,
                    events,
                    outlets,
                    directory,
                    watch,
                    number=number,
                    restarts=restarting.number,
                    began=began,
                    server=server,
                    had_met=had_met,
                )
                outcome = attempt.run()
                tallies = take_tallies(directory.path)
                if chosen.output.stats:
                    totals = read_totals(directory.path)
            code, had_met, number = outcome.exit_code, attempt.has_met, attempt.next_number
            ending = attempt.report.ending(outcome, had_met=had_met)
            decision = restarting.after(ending)
            attempt.report.tell(outcome, is_last=not decision.restarts)
            culprit = _culprit(outcome, ending.failure)
            if code == exit_status.PREEMPTED and outcome.cause is None:
                events.add("preempted", signal=outcome.interrupted or None)
            if not decision.restarts:
                if decision.reason and not outcome.interrupted:
                    forwarder.say(f"syncvar: not started again: {decision.reason}\n")
                break
            forwarder.say(
                f"syncvar: {decision.reason}, in {decision.pause_s:g} s, as generation {number}\n"
            )
            events.add(
                "restart",
                number=restarting.number,
                reason=decision.reason,
                pause_s=decision.pause_s,
                generation=number,
                **culprit,
            )
            ended = _pause(
                forwarder, outlets, watch, decision.pause_s, began, chosen.limits.timeout_s
            )
            if ended is not None:
                code = code if code == exit_status.PREEMPTED else ended[0]
                culprit = {"rank": None, "why": ended[1].split("\n", 1)[0]}
                forwarder.say(ended[1])
                break
            dropped = outlets.renew()
            if dropped:
                forwarder.say(
                    f"syncvar: {dropped} bytes of output were dropped, for nobody read them\n"
                )
            forwarder.begin(f"syncvar: {decision.reason}, generation {number}")
        for line in restarting.summary():
            forwarder.say(f"syncvar: {line}\n" if not line.startswith(" ") else f"{line}\n")
        forwarder.finish()
        if chosen.output.stats:
            job.lost_files.add(_tell_totals(chosen, totals, forwarder))
        code = _name_lost_files(job, forwarder, events, code)
        if code:
            outlets.patience_s = min(outlets.patience_s, patience_s(job.config))
        await_readers(forwarder, outlets, watch, outlets.are_empty, began + chosen.limits.timeout_s)
        if watch.is_orphan:  # the caller of `sv.run` cannot remove its folder for results
            shutil.rmtree(job.environ.get("SYNCVAR_RESULT_DIR", ""), ignore_errors=True)
        if outlets.dropped and not code:  # the ranks succeeded, and some of their output is lost
            code = 128 + watch.pending[0] if watch.pending else exit_status.TIMEOUT
        events.add("job_end", exit_code=code, elapsed_s=watch.now() - began, **culprit)
        events.close(0.0 if watch.pending else patience_s(job.config))
        if not code and events.lost_files() and not _has_caller(job):
            # The last event was the first one that did not fit.
            code = exit_status.LOST_FILE
    return code


class _StartInterrupted(Exception):  # noqa: N818  (nothing has gone wrong)
    """A signal asks the launcher to end while it waits to start."""


def _raise_if_signalled(watch: SignalWatch) -> None:
    clock.enter("waits for the lock of the runtime directory")  # it reports and ends by itself
    if watch.pending:
        clock.stop()
        raise _StartInterrupted


def _has_caller(job: Job) -> bool:
    """Return whether `sv.run` waits for this job; lost files do not change its results."""
    return "SYNCVAR_OUTCOME_FILE" in job.environ


def _name_lost_files(job: Job, forwarder: OutputForwarder, events: EventLog, code: int) -> int:
    """Show the files that could not be written; return the exit code, which is then not 0."""
    lost = job.lost_files
    lost.add([*forwarder.lost_files(), *events.lost_files()])
    for line in lost.lines(has_failed=code != 0):
        forwarder.say(f"syncvar: {line}\n")
    if code or not lost.has_result or _has_caller(job):
        return code
    forwarder.say(
        f"syncvar: all ranks succeeded, and files are lost: exit code {exit_status.LOST_FILE}\n"
    )
    return exit_status.LOST_FILE


def _tell_totals(
    chosen: LaunchOptions, totals: dict[int, list[dict[str, Any]]], forwarder: OutputForwarder
) -> list[LostFile]:
    """Show the totals of the last attempt, or write them to a file; return a file that is lost."""
    everybody = (*range(chosen.ranks.workers), *map(server_number, range(chosen.ranks.servers)))
    rows, missing = merged(totals), [number for number in everybody if number not in totals]
    if not isinstance(chosen.output.stats, Path):
        forwarder.say(table(rows, missing))
        return []
    import json

    told: dict[str, Any] = {
        "workers": chosen.ranks.workers,
        "missing": [number for number in missing if not is_server(number)],
        "rows": rows,
    }
    if chosen.ranks.servers:
        told |= {
            "servers": chosen.ranks.servers,
            "missing_servers": [number - SERVER_0 for number in missing if is_server(number)],
        }
    try:
        chosen.output.stats.write_text(json.dumps(told, indent=1) + "\n")
    except OSError as error:
        return [LostFile(str(chosen.output.stats), "--stats", write_error_text(error))]
    return []


def _culprit(outcome: JobOutcome, why: str) -> dict[str, object]:
    """Return the rank or server that failed first, and how, for events."""
    cause = outcome.cause
    who: dict[str, object] = {"rank": None}
    if cause is not None and cause.rank >= 0:
        who = {"server": cause.rank - SERVER_0} if is_server(cause.rank) else {"rank": cause.rank}
    return {"rank": None, **who, "why": why}


def _digest(chosen: LaunchOptions) -> str:
    """Return a digest of all settings, to compare starts of a job."""
    import hashlib

    from syncvar_launcher.job.dry_run import settings_rows

    rows = [row[:2] for row in settings_rows(chosen) if not row[0].startswith("env.")]
    told = repr((rows, sorted(chosen.program.env)))  # values of variables may be secrets
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def _pause(
    forwarder: OutputForwarder,
    outlets: Outlets,
    watch: SignalWatch,
    pause_s: float,
    began: float,
    timeout_s: float,
) -> tuple[int, str] | None:
    """Wait before a restart; return exit code and text if the job ends meanwhile."""
    until = watch.now() + pause_s
    limit = began + timeout_s
    while True:
        if watch.pending:
            number = watch.pending.popleft()
            return (
                128 + number,
                f"syncvar: interrupted by {exit_status.signal_name(number)} before the restart\n",
            )
        drop_passing(forwarder, watch, "between two starts of the ranks")
        now = watch.now()
        if now >= limit:
            failure = FailureReport(
                rank=-1,
                status=None,
                elapsed_s=now - began,
                reason=f"the time limit of {timeout_s:g} s passed before the restart",
            )
            return exit_status.TIMEOUT, failure_block(failure)
        if now >= until:
            return None
        wait(forwarder, outlets, watch, min(until, limit) - now)


def _outlets() -> Outlets:
    sys.stdout.flush()
    sys.stderr.flush()
    return Outlets(sys.stdout.fileno(), sys.stderr.fileno())


def _forwarder(chosen: LaunchOptions, servers: range, outlets: Outlets) -> OutputForwarder:
    sinks = [
        Sink(outlet, stream.isatty(), chosen.output.has_color(is_terminal=stream.isatty()))
        for stream, outlet in ((sys.stdout, outlets.out), (sys.stderr, outlets.err))
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
