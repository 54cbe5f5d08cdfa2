"""The supervisor of a job: events of workers and signals in, actions out.

Time is an argument, and the module touches no process, so tests can run every order of events.
Servers are processes with numbers of their own (`syncvar.core.process_ids`). They serve until all
workers have ended; then the launcher terminates them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import LaunchError, RendezvousError, loss_code
from syncvar.core.exit_status import (
    INTERNAL,
    LIMITS,
    PREEMPTED,
    RENDEZVOUS,
    TIMEOUT,
    Severity,
    describe_exit,
    exit_code_of,
    severity_of,
)
from syncvar.core.process_ids import is_server, server_number
from syncvar.core.restart_policy import HOPELESS_CODES, HOPELESS_ERRORS
from syncvar_launcher.job.failure_report import TIME_LIMIT
from syncvar_launcher.local.host_resources import OUT_OF_MEMORY, LimitTooLow

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping, Sequence

    from syncvar.core.settings import RuntimeConfig

_TERM, _KILL = 15, 9
# The statuses of a process that has obeyed a signal of the launcher; 0: it handles SIGTERM.
_TERMINATED = (0, -_TERM, -_KILL, 128 + _TERM, 128 + _KILL)

# The engine reports these errors to the other ranks with more detail than the launcher knows. Both
# messages travel on different paths, and ours must not arrive first: it follows when the process
# has ended and its control channel is closed. A rank that has lost another one, for instance, must
# not be the first that the others lose.
_REPORTED_BY_ENGINE = ("DeadlineExceeded", "PeerLost", "GroupBroken")


class FailureCause(NamedTuple):
    """Why a rank counts as failed."""

    rank: int  # rank, or -1 for the job as a whole
    weight: Severity  # how likely it is the cause of other failures
    status: int | None  # exit status, None before the process ends
    exit_code: int  # exit code of the launcher if this is the first cause
    reason: str  # sentence for the other ranks
    error: str = ""  # name of the exception, or an empty text
    traceback: str = ""  # traceback, or an empty text
    brief: str = ""  # traceback without frames that do not help the script's author
    beyond: str = ""  # what the launcher knows beyond the status, or an empty text
    error_code: str = ""  # code of an exception of syncvar, or an empty text
    at: float | None = None  # when the launcher first learned it, in seconds of the clock
    is_host_lost: bool = False  # no process of this rank can be started there again

    @property
    def kind(self) -> str:
        """The kind of the failure, as in `PeerLost`."""
        if self.error not in ("", "SystemExit"):
            return "raised"
        return "memory" if self.beyond == OUT_OF_MEMORY else "lost"

    @property
    def code(self) -> str:
        """The code of the failure, which `syncvar explain` describes."""
        if self.error_code:
            return self.error_code
        status = self.exit_code if self.error == "SystemExit" else self.status
        return loss_code(self.rank, status, self.kind)


@dataclass(frozen=True, slots=True)
class NotifyPeerLost:
    """Tell the other ranks that this one has failed, and itself too if its process still runs.

    Args:
        rank: The rank.
        reason: Why, in words.
        status: Exit code of its process, or minus the signal; None if it raised, or if unknown.
        has_ended: Whether its process has ended.
        kind: The kind of the failure, as in `PeerLost`.
    """

    rank: int
    reason: str
    status: int | None = None
    has_ended: bool = True
    kind: str = "lost"


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the sessions of these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropServer:
    """Tell the others that a server has failed, and that servers with copies replace it."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """Start a worker again, alone; the others do not wait for it."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoseWorker:
    """Go on without a worker of an elastic job.

    Args:
        rank: The worker.
        reason: Why, in words.
        status: Exit code of its process, or minus the signal; None if it raised, or if unknown.
        kind: The kind of the failure, as in `PeerLost`.
        returns: Whether it will be started again.
    """

    rank: int
    reason: str
    status: int | None
    kind: str
    returns: bool


Action = NotifyPeerLost | Terminate | Kill | DropServer | RestartWorker | LoseWorker


class JobOutcome(NamedTuple):
    """How the job ended."""

    # exit code of the launcher; 75 without a cause: the ranks stopped and ask for another run
    exit_code: int
    cause: FailureCause | None  # first failure by cause, or None
    interrupted: int  # number of the signal that ended the job, or 0


@dataclass(slots=True)
class Supervisor:
    """The state of a job's workers."""

    workers: int  # number of workers
    config: RuntimeConfig  # settings, of which this uses the graces
    commands: Container[int]  # workers that are arbitrary commands, which need not report their end
    now: float  # time in seconds of a monotonic clock
    timeout_s: float = float("inf")  # time limit of the job in seconds; infinite for none
    # for each server the servers that hold copies of its variables; empty without servers
    mirrors: Sequence[Sequence[int]] = ()
    restarts: int = 0  # how often workers may start again alone
    fewest: int = 0  # fewest members of an elastic job, which goes on without others; else 0
    initial: int = -1  # workers that have a place at the start; -1 for all
    running: set[int] = field(default_factory=set)
    causes: dict[int, FailureCause] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    job_cause: FailureCause | None = None
    interrupted: int = 0
    lost: set[int] = field(default_factory=set)  # failed servers that others replace, by number
    lost_workers: dict[int, FailureCause] = field(default_factory=dict)  # of an elastic job
    newcomers: Container[int] = ()  # workers of an elastic job that were not members yet
    # For each server the servers that have copied its variables since a loss.
    copies: dict[int, set[int]] = field(default_factory=dict)
    # How often each worker has started again alone.
    restarted: dict[int, int] = field(default_factory=dict)
    _last_members: Collection[int] | None = None  # of an elastic job whose function has returned
    # The workers that will start again, with time and reason.
    _awaited: dict[int, tuple[float, str]] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)  # workers that have had a process
    _arrived: dict[int, int] = field(default_factory=dict)  # how often each came on another host
    _may_go: bool = False  # the launcher has terminated the servers
    _left_cleanly: set[int] = field(default_factory=set)
    _save_first: set[int] = field(default_factory=set)
    _term_at: float | None = None
    _kill_at: float | None = None
    _terminated: bool = False
    _killed: bool = False
    _began: float = 0.0

    def __post_init__(self) -> None:
        first = self.workers if self.initial < 0 else self.initial
        self.running = {*range(first), *map(server_number, range(len(self.mirrors)))}
        self._started = set(self.running)
        self._began = self.now

    # -- events ------------------------------------------------------------------------------------

    def left(self, rank: int) -> None:
        """Note that a worker's script has ended cleanly; its process is about to end."""
        self._left_cleanly.add(rank)

    def vacant(self) -> list[int]:
        """Return the numbers of workers that do not run, and will not start again by themselves."""
        used = self.running | self._awaited.keys()
        return [number for number in range(self.workers) if number not in used]

    def add_worker(self, rank: int) -> None:
        """Note that a worker of an elastic job starts on a host that has come."""
        if rank in self._started:
            self._arrived[rank] = self._arrived.get(rank, 0) + 1
        self._started.add(rank)
        self.running.add(rank)
        self.lost_workers.pop(rank, None)
        self._left_cleanly.discard(rank)
        self._save_first.discard(rank)

    def incarnation(self, rank: int) -> int:
        """Return how many earlier processes a worker has had in this attempt."""
        return self.restarted.get(rank, 0) + self._arrived.get(rank, 0)

    @property
    def has_finished_worker(self) -> bool:
        """Whether the program of a worker has ended in order."""
        return any(not is_server(one) for one in self._left_cleanly)

    def finish(self, members: Collection[int]) -> None:
        """Note that the function of an elastic job has returned: only its last members matter."""
        self._last_members = members
        self._awaited.clear()

    def copied(self, server: int, of: int) -> None:
        """Note that a server has a new copy of another server's variables, after a loss."""
        self.copies.setdefault(of, set()).add(server)

    def takes_notice(self, rank: int, *, is_on: bool) -> None:
        """Note whether a worker saves before it ends on SIGTERM, and needs more time for that."""
        if is_on:
            self._save_first.add(rank)
        else:
            self._save_first.discard(rank)

    def failed(
        self, rank: int, record: Mapping[str, str | int], now: float, *, joined: bool = True
    ) -> list[Action]:
        """Note the failure that a worker reports before its process ends.

        Args:
            rank: The worker.
            record: "error" (name of the exception), "message", "traceback", "exit_code", and
                "brief".
            now: The time in seconds.
            joined: Whether it is a member that has not left; others can start again alone.
        """
        error = str(record["error"])
        reason = (
            f"uncaught {error}: {record['message']}"
            if error != "SystemExit"
            else f"exited with status {record['exit_code']}"
        )
        exit_code = int(record["exit_code"])
        if error == "SystemExit" and exit_code == PREEMPTED:
            self._end_at(now + self.config.preempt_grace_s)
            return []  # its end shows whether it has left cleanly, so that no rank misses it
        if is_server(rank) and error == "SystemExit" and (self._may_go or self._terminated):
            return []  # the launcher terminated it before it began to serve
        if self._can_do_without(rank):
            return [DropServer(rank, reason)]
        weight = max(severity_of(error), self._weight_of_end(exit_code))
        may_restart = weight is Severity.OWN and not joined and error not in HOPELESS_ERRORS
        if may_restart and self._may_restart(rank):
            self._awaited[rank] = now, reason  # its process has not ended yet, see `exited`
            return []
        text = str(record["traceback"])
        brief = str(record.get("brief", text))
        cause = FailureCause(
            rank,
            weight,
            None,
            exit_code,
            reason,
            error,
            text,
            brief,
            error_code=str(record.get("code", "")),
        )
        actions = self._fail(cause, now)
        return [] if self.is_reported_by_engine(rank) else [*actions]

    def exited(
        self, rank: int, status: int, now: float, *, joined: bool, beyond: str = ""
    ) -> list[Action]:
        """Note the end of a process.

        Args:
            rank: The rank or server.
            status: The exit code, or minus the signal.
            now: The time in seconds.
            joined: Whether it is a member that has not left.
            beyond: What the launcher knows beyond the status, for instance "out of memory
                (kernel)".
        """
        self.running.discard(rank)
        actions: list[Action] = []
        has_left = rank in self._left_cleanly or (rank in self.commands and not joined)
        if self._is_dismissed(rank, status):
            pass
        elif rank in self.lost_workers:
            self._note_end_of_lost(rank, now)
        elif rank in self.causes:
            actions = self._end_of_failed(self.causes[rank], status)
        elif status != 0 or not has_left:
            actions = self._end_of_running(rank, status, now, joined=joined, beyond=beyond)
        return [*actions, *self._let_servers_go(now)]

    def _is_dismissed(self, rank: int, status: int) -> bool:
        """Return whether a process is a server that the job no longer needs."""
        may_end = is_server(rank) and (self._may_go or self._terminated)
        return rank in self.lost or (may_end and status in _TERMINATED)

    def _end_of_failed(self, cause: FailureCause, status: int) -> list[Action]:
        """Note the end of a process that has reported its failure, or was silent."""
        if not cause.error:
            return []  # the launcher ended it because it was silent: the status is ours
        if self._terminated and status in _TERMINATED:
            status = cause.exit_code  # SIGTERM came while it ended: the status is ours
        code = exit_code_of(status) if status < 0 else cause.exit_code
        self.causes[cause.rank] = cause._replace(status=status, exit_code=code)
        return [_notice(cause)] if self.is_reported_by_engine(cause.rank) else []

    def _end_of_running(
        self, rank: int, status: int, now: float, *, joined: bool, beyond: str
    ) -> list[Action]:
        """Note the end of a process that has not reported a failure."""
        weight = self._weight_of_end(status)
        if status == PREEMPTED and not joined:
            # It left cleanly and asks for another run. The others should do the same.
            weight = Severity.CONSEQUENCE if self._terminated else Severity.DISAGREEMENT
            self.stopped.add(rank)
            reason = describe_exit(status)
            self.causes[rank] = FailureCause(rank, weight, status, status, reason, at=now)
            self._end_at(now + self.config.preempt_grace_s)
            return []
        if status == 0:
            reason, code = "left with status 0 before shutdown", INTERNAL
        elif status < 0:
            reason = f"signal {-status}" + (f": {beyond}" if beyond else "")
            code = exit_code_of(status)
        else:
            reason, code = describe_exit(status), status
        if self._can_do_without(rank):
            return [DropServer(rank, reason)]
        may_restart = weight is Severity.OWN and not joined and code not in HOPELESS_CODES
        if rank in self._awaited or (may_restart and self._may_restart(rank)):
            _, reason = self._awaited.get(rank, (now, reason))
            self._awaited[rank] = now + self.config.restart_delay_s, reason
            return []
        return [*self._fail(FailureCause(rank, weight, status, code, reason, beyond=beyond), now)]

    def unreachable(self, rank: int, reason: str, now: float, code: int = INTERNAL) -> list[Action]:
        """Note that a rank's host is lost, so that nothing more will arrive from the rank."""
        self.running.discard(rank)
        if rank in self.lost:
            return self._let_servers_go(now)
        serves_nobody = bool(self.causes) and all(map(is_server, self.running))
        if not serves_nobody and self._can_do_without(rank):
            return [DropServer(rank, reason)]
        return [
            *self._fail(
                FailureCause(rank, Severity.OWN, None, code, reason, is_host_lost=True), now
            ),
            *self._let_servers_go(now),
        ]

    def silent(self, rank: int, reason: str, now: float) -> list[Action]:
        """Note that a rank does not run on, although its process lives.

        Kill a server that others replace, and a worker without which the job goes on: it must not
        wake.
        """
        if rank in self.lost:
            return []
        if self._can_do_without(rank):
            return [DropServer(rank, reason), Kill((rank,))]
        actions = self._fail(FailureCause(rank, Severity.OWN, None, INTERNAL, reason), now)
        if any(isinstance(one, LoseWorker) for one in actions):
            return [*actions, Kill((rank,))]
        return [
            replace(one, has_ended=False) if isinstance(one, NotifyPeerLost) else one
            for one in actions
        ]

    def did_not_meet(self, reason: str, now: float) -> list[Action]:
        """Note that the ranks did not all meet."""
        self.job_cause = self.job_cause or FailureCause(
            -1,
            Severity.DISAGREEMENT,
            None,
            RENDEZVOUS,
            reason,
            error_code=RendezvousError.code,
            at=now,
        )
        self._end_at(now + self.config.abort_grace_s)
        return []

    def never_began(self, reason: str, exit_code: int) -> None:
        """Note that no worker has begun or will begin."""
        codes = {LIMITS: LimitTooLow.code, RENDEZVOUS: RendezvousError.code}
        code = codes.get(exit_code, LaunchError.code)
        self.job_cause = self.job_cause or FailureCause(
            -1, Severity.OWN, None, exit_code, reason, error_code=code
        )
        self.running.clear()

    def signalled(self, number: int, now: float) -> list[Action]:
        """Handle a signal to the launcher: the first ends gracefully, the second at once."""
        if self.interrupted or self._killed:
            return self._kill()
        self.interrupted = number
        actions = self._terminate(now)
        if self._save_first & self.running:
            self._kill_at = now + self.config.preempt_grace_s
        return actions

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due."""
        if (
            now - self._began >= self.timeout_s
            and self.job_cause is None
            and self.running
            and self._term_at is None
        ):
            limit = f"the time limit of {self.timeout_s:g} s passed"
            self.job_cause = FailureCause(
                -1, Severity.OWN, None, TIMEOUT, limit, error_code=TIME_LIMIT, at=now
            )
            return self._terminate(now)
        if self._kill_at is not None and now >= self._kill_at:
            return self._kill()
        if self._term_at is not None and not self._terminated and now >= self._term_at:
            return self._terminate(now)
        return self._start_again(now)

    # -- answers -----------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether every process has ended, and none will start again."""
        return not self.running and not self._awaited

    @property
    def is_ending(self) -> bool:
        """Whether the launcher will terminate all ranks soon, after a failure or a signal."""
        return self._term_at is not None

    def next_due(self) -> float:
        """Return when `tick` must be called next, in seconds of the clock."""
        due = [at for rank, (at, _) in self._awaited.items() if rank not in self.running]
        if self.job_cause is None and self._term_at is None:
            due.append(self._began + self.timeout_s)
        if not self._killed:
            planned = (self._kill_at, None if self._terminated else self._term_at)
            due += [at for at in planned if at is not None]
        return min(due, default=float("inf"))

    def grace_s(self, now: float) -> float | None:
        """Return in how many seconds the launcher kills what still runs, or None."""
        return None if self._kill_at is None or not self.running else max(0.0, self._kill_at - now)

    def outcome(self) -> JobOutcome:
        """Return how the job ended: the failure with the lowest weight, not the earliest one."""
        causes = list(self.causes.values())
        have_stopped = bool(causes) and all(cause.exit_code == PREEMPTED for cause in causes)
        if self.interrupted:  # workers that have saved on the signal ask for another run
            code = PREEMPTED if have_stopped else 128 + self.interrupted
            return JobOutcome(code, None, self.interrupted)
        if have_stopped and self.job_cause is None:
            return JobOutcome(PREEMPTED, None, 0)
        if self.job_cause is not None:
            causes.insert(0, self.job_cause)
        if not causes:
            return JobOutcome(0, None, 0)
        first = min(causes, key=lambda cause: cause.weight)  # the earliest one of these
        return JobOutcome(first.exit_code or INTERNAL, first, 0)

    def is_reported_by_engine(self, rank: int) -> bool:
        """Return whether a rank's own messages say more about its failure than its end does."""
        return rank in self.causes and self.causes[rank].error in _REPORTED_BY_ENGINE

    @property
    def returning(self) -> Collection[int]:
        """The workers that have ended, or are about to, and will start again alone."""
        return self._awaited.keys()

    def will_restart(self, rank: int) -> bool:
        """Return whether a worker has ended and will start again alone."""
        return rank in self._awaited

    # -- inside ------------------------------------------------------------------------------------

    def _let_servers_go(self, now: float) -> list[Action]:
        has_workers = self._awaited or any(not is_server(rank) for rank in self.running)
        if self._may_go or not self.running or has_workers:
            return []
        self._may_go = True
        if self._kill_at is None:
            self._kill_at = now + self.config.term_grace_s
        return [Terminate(tuple(sorted(self.running)))]

    def _can_do_without(self, rank: int) -> bool:
        """Note the loss of a server, and return whether others have copies of its variables."""
        if not is_server(rank) or rank in self.causes or rank in self.lost or self._terminated:
            return False
        missing = {one - server_number(0) for one in {*self.lost, rank}}
        if any(
            {server, *mirrors, *self.copies.get(server, ())} <= missing
            for server, mirrors in enumerate(self.mirrors)
        ):
            return False
        self.lost.add(rank)
        return True

    def _may_restart(self, rank: int) -> bool:
        is_ending = self._term_at is not None or self._terminated
        count = len(self._awaited) + sum(self.restarted.values())
        # A worker of an elastic job is lost first, see `_lose_worker`.
        is_worker = bool(self.mirrors) and not is_server(rank)
        return is_worker and not is_ending and count < self.restarts

    def _lose_worker(self, cause: FailureCause, now: float) -> LoseWorker | None:
        """Note that an elastic job goes on without a worker; None if too few are left."""
        rank = cause.rank
        is_ending = self._term_at is not None or self._terminated
        if not self.fewest or is_server(rank) or is_ending:
            return None
        if self._last_members is not None:  # the others do not do again what a member does now
            if rank in self._last_members:
                return None
            self.lost_workers[rank] = cause._replace(at=now)
            return LoseWorker(rank, cause.reason, cause.status, cause.kind, returns=False)
        is_hopeless = cause.error in HOPELESS_ERRORS or cause.exit_code in HOPELESS_CODES
        if is_hopeless and rank not in self.newcomers:
            return None  # the others would fail in the same way
        used = len(self._awaited) + sum(self.restarted.values())
        returns = not cause.is_host_lost and used < self.restarts
        others = (self.running - self.lost_workers.keys() | self._awaited.keys()) - {rank}
        if len(others) + returns < self.fewest:
            return None
        self.lost_workers[rank] = cause._replace(at=now)
        if returns:
            self._awaited[rank] = now + self.config.restart_delay_s, cause.reason
        return LoseWorker(rank, cause.reason, cause.status, cause.kind, returns)

    def _note_end_of_lost(self, rank: int, now: float) -> None:
        if rank in self._awaited:
            _, reason = self._awaited[rank]
            self._awaited[rank] = now + self.config.restart_delay_s, reason

    def _start_again(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for rank, (at, reason) in list(self._awaited.items()):
            if rank not in self.running and now >= at:
                del self._awaited[rank]
                self.lost_workers.pop(rank, None)
                self.restarted[rank] = self.restarted.get(rank, 0) + 1
                self.running.add(rank)
                self._left_cleanly.discard(rank)
                self._save_first.discard(rank)
                actions.append(RestartWorker(rank, reason))
        return actions

    def _fail(self, cause: FailureCause, now: float) -> list[NotifyPeerLost | LoseWorker]:
        if cause.rank in self.causes or cause.rank in self.lost_workers:
            return []
        lost = self._lose_worker(cause, now)
        if lost is not None:
            return [lost]
        self.causes[cause.rank] = cause._replace(at=now)
        self._end_at(now + self.config.abort_grace_s)
        return [_notice(cause)]

    def _weight_of_end(self, status: int) -> Severity:
        """Return how likely it is that an end, by exit code or minus the signal, caused others.

        A rank may answer SIGTERM with any status, and that never outweighs the reason for SIGTERM.
        """
        if not self._terminated:
            return Severity.OWN
        return Severity.CONSEQUENCE if status in _TERMINATED else Severity.DISAGREEMENT

    def _end_at(self, at: float) -> None:
        """Terminate the ranks that still run at this time, or earlier if already decided."""
        self._awaited.clear()
        if not self._terminated and (self._term_at is None or at < self._term_at):
            self._term_at = at
            self._kill_at = at + self.config.term_grace_s

    def _terminate(self, now: float) -> list[Action]:
        self._terminated = True
        self._term_at = now
        self._kill_at = now + self.config.term_grace_s
        self._awaited.clear()
        # Workers first: they may save something on the servers.
        workers = tuple(sorted(rank for rank in self.running if not is_server(rank)))
        first = [Terminate(workers)] if workers or not self.mirrors else []
        return [*first, *self._let_servers_go(now)]

    def _kill(self) -> list[Action]:
        self._terminated = self._killed = True
        self._awaited.clear()
        self._kill_at = None
        return [Kill(tuple(sorted(self.running)))]


def _notice(cause: FailureCause) -> NotifyPeerLost:
    """Return the action for a failure; an uncaught exception explains more than a later status."""
    if cause.error:
        status = cause.exit_code if cause.error == "SystemExit" else None
    else:
        status = cause.status
    return NotifyPeerLost(cause.rank, cause.reason, status, kind=cause.kind)
