"""The answer to the question "status": what the ranks and servers of a job do now."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

from syncvar.core.process_ids import SERVER_0, is_server
from syncvar.protocol.observer import Observer, RankObservation, straggler_text
from syncvar_launcher.job.failure_report import mask_arguments

if TYPE_CHECKING:
    from syncvar_launcher.job.attempt_workers import WorkerSet

FORMAT = "syncvar status 1"
_CPU_S = 0.5  # shortest time over which a share of a core is measured


class JobStatus:
    """Describes the current attempt of a job.

    The last answers of the ranks give calls, rates and shares of time. The launcher itself sees
    the processes. So a rank that does not answer has a row too.
    """

    def __init__(self, workers: WorkerSet, job_began: float, restarts: int) -> None:
        self._set = workers
        self._job = workers.job
        self._began = job_began
        self._restarts = restarts
        self._busy: dict[int, tuple[float, float, float]] = {}  # time, processor time, share

    @property
    def _observer(self) -> Observer:
        observer = self._set.store.coordinator.observer
        assert observer is not None
        return observer

    def about(self) -> dict[str, Any]:
        """Return the identity of the job."""
        job, options = self._job, self._job.options
        group = job.host_group
        return {
            "name": job.job_id[:8],
            "pid": os.getpid(),
            "workers": options.ranks.workers,
            "process_word": job.names.word,
            "servers": options.ranks.servers,
            "lasted_s": self._set.watch.now() - self._began,
            "command": shlex.join(["syncvar-launch", *mask_arguments(job.arguments)]),
            "folder": str(options.program.cwd),
            "programs": [[one.label, one.workers] for one in job.programs],
            "restarts": self._restarts,
            "hosts": sorted({*map(job.host_name, self._set.report.processes)})
            if group is None
            else [one.name for one in group.sites],
            "records": str(job.records.folder or ""),
            "log_dir": str(options.output.log_dir or ""),
        }

    def position(self, number: int) -> str:
        """Return what a rank or server is doing."""
        return self._set.report.position(number)

    def want(self, now: float) -> int:
        """Ask the ranks for their calls; return the round that has the answers."""
        return self._observer.want(now)

    def has_round(self, number: int) -> bool:
        """Return whether a round has ended."""
        return self._observer.rounds >= number

    def status(self, now: float, *, has_log: bool) -> dict[str, Any]:
        """Return the answer; with the last lines of the output if `has_log`."""
        observer = self._observer
        known = self._set.workers.workers.keys() | self._set.supervisor.running
        ranks = [one for one in range(self._job.options.ranks.workers) if one in known]
        answer: dict[str, Any] = {
            "format": FORMAT,
            "job": self.about(),
            "window_s": observer.window_s,
            "ranks": [self._rank(rank, observer, now) for rank in ranks],
            "servers": [self._server(number, now) for number in self._job.servers],
            "calls": [
                {
                    **dict(zip(("call", "variable", "path"), kind, strict=True)),
                    "calls_per_s": calls,
                    "bytes_per_s": nbytes,
                    "share": share,
                }
                for kind, (calls, nbytes, share) in observer.kinds().items()
            ],
            "links": [
                {
                    "rank": self._worker(rank),
                    "peer": self._worker(peer),
                    "path": self._link_path(self._worker(rank), self._worker(peer)),
                    "bytes_per_s": rate,
                }
                for (rank, peer), rate in sorted(observer.links().items())
            ],
            "stragglers": self._stragglers(observer),
        }
        if has_log:
            answer["log"] = self._set.console.forwarder.log_lines()
        return answer

    def _link_path(self, rank: int, peer: int) -> str:
        """Return what joins two ranks of this launcher: "ipc" (a unix socket) or "tcp"."""
        return "ipc" if self._job.host_name(rank) == self._job.host_name(peer) else "tcp"

    def _stragglers(self, observer: Observer) -> list[dict[str, Any]]:
        found = observer.straggler
        if found is None:
            return []
        worker = self._worker(found.rank)
        text = straggler_text(
            found._replace(rank=worker), self._job.host_name(worker), self._job.names
        )
        return [{**found._asdict(), "rank": worker, "text": text}]

    def _worker(self, rank: int) -> int:
        """Return the number of the worker that has a rank now; they differ in elastic jobs."""
        return self._set.store.workers[rank]

    def _rank(self, worker: int, observer: Observer, now: float) -> dict[str, Any]:
        found = self._set.store.rank_of(worker)
        rank = -1 if found is None else found  # it waits for its first generation, or is lost
        seen = observer.latest.get(rank, RankObservation())
        offset = observer.offsets.get(rank)
        wait = self._set.store.coordinator.wait_of(rank)
        rates, waits = observer.rates(rank), observer.shares().get(rank, {})
        age_s = seen.age_s + (now - seen.received_at if seen.received_at else 0.0)
        process = self._process(worker, now)
        if process["state"] in ("running", "waiting"):
            process["state"] = "running" if wait is None else "waiting"
        return {
            "rank": worker,
            "program": self._job.program_label(worker),
            **process,
            # A wait may be newer than the last answer of the rank.
            "call": seen.last_call if wait is None else f"{wait.description} (call {wait.ordinal})",
            "is_in_call": seen.is_in_call or wait is not None,
            "age_s": age_s if wait is None else now - wait.since,
            "site": "" if wait is None else wait.site,
            "waits_for": [] if wait is None else [*map(self._worker, wait.awaiting)],
            "call_share": rates.call_share,
            "wait_share": sum(waits.values()),
            "waits": {self._worker(late): share for late, share in waits.items()},
            "calls": seen.calls,
            "calls_per_s": rates.calls_per_s,
            "bytes_per_s": rates.bytes_per_s,
            "steps": seen.steps,
            "steps_per_s": rates.steps_per_s,
            "clock_offset_ns": 0 if offset is None else offset.offset_ns,
            "clock_error_ns": -1 if offset is None else offset.error_ns,
        }

    def _server(self, number: int, now: float) -> dict[str, Any]:
        return {
            "server": number - SERVER_0,
            **self._process(number, now),
            "position": self.position(number),
        }

    def _process(self, number: int, now: float) -> dict[str, Any]:
        """Return what the launcher sees of a process itself."""
        workers = self._set.workers
        is_started = number in workers.workers
        return {
            "host": self._job.host_name(number),
            "pid": workers.pid(number) if is_started else -1,
            "state": self._state(number, is_started=is_started),
            "rss_bytes": workers.resident_nbytes(number) if is_started else 0,
            "cpu_share": self._cpu_share(number, now) if is_started else 0.0,
        }

    def _state(self, number: int, *, is_started: bool) -> str:
        letter = self._set.workers.state(number) if is_started else ""
        supervisor = self._set.supervisor
        if number in supervisor.causes:
            return "failed"
        if number in supervisor.lost_workers:
            return "lost"
        if is_started and not letter and number not in supervisor.running:
            return "finished"
        if letter == "T":
            return "stopped"
        if not is_started or number in self._set.progress.missing:
            return "starting"
        return "running" if is_server(number) else self._state_of_running(number)

    def _state_of_running(self, worker: int) -> str:
        elastic = self._set.elastic
        if elastic is not None and worker in elastic.newcomers:
            return "spare"
        rank = self._set.store.rank_of(worker)
        is_silent = rank is not None and self._set.store.coordinator.stalls.silence(rank)
        return "silent" if is_silent else "running"

    def _cpu_share(self, number: int, now: float) -> float:
        """Return the share of a core that a process has used since the last question."""
        spent = self._set.workers.busy_s(number)
        at, before, share = self._busy.get(number, (self._set.began, 0.0, 0.0))
        if now - at < _CPU_S:
            return share
        share = max(0.0, spent - before) / (now - at)
        self._busy[number] = now, spent, share
        return share
