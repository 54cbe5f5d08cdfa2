"""The membership of an elastic job: connects `ElasticMembership` with workers and rendezvous."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.protocol.control_messages import pack_message
from syncvar.protocol.elastic_membership import (
    Action,
    AnnounceChange,
    Assign,
    BreakUp,
    Dismiss,
    ElasticMembership,
    Expel,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncvar.bootstrap.rendezvous_server import RendezvousServer
    from syncvar.protocol.control_messages import Message
    from syncvar_launcher.job.attempt_report import JobConsole
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.supervisor import LoseWorker
    from syncvar_launcher.job.workers import Workers

_DISMISSAL = pack_message("dismissal")
_CHANGE = pack_message("membership_change")


class ElasticJob:
    """Carries out what the membership of a job decides.

    Messages of workers and news of their ends go in; assignments, and sentences for the user, go
    out. No worker can have joined a generation up to `generation`. `gives_up` is called with the
    reason if the job cannot go on.
    """

    def __init__(
        self,
        job: Job,
        console: JobConsole,
        store: RendezvousServer,
        workers: Workers,
        generation: int,
        gives_up: Callable[[str], None],
    ) -> None:
        ranks = job.options.ranks
        self._job, self._console, self._store, self._workers = job, console, store, workers
        self._gives_up = gives_up
        # Shared memory for the first number may exist already, for all workers.
        self._membership = ElasticMembership(
            ranks.fewest, ranks.most, job.config.rendezvous_timeout_s, generation + 1
        )
        self._membership.expect(job.first_workers)
        self._is_running = False
        self._is_ending = False
        self._is_enrolling = False  # at least one worker
        self._ended_before: list[int] = []  # workers that ended in order before the first enrolled
        # Enrollments that came on another path before the news that the process has started.
        self._early: dict[int, Message] = {}
        # Until when somebody should enroll; infinite after that, or after the user was informed.
        self._expected_at = console.watch.now() + job.config.rendezvous_timeout_s

    @property
    def next_generation(self) -> int:
        """The first generation that no worker can have joined."""
        return self._membership.generation + 1

    def due(self) -> float:
        """Return when `serve` must be called next, in seconds of the clock."""
        return self._membership.due()

    # -- events ------------------------------------------------------------------------------------

    def serve(self, now: float) -> None:
        """Handle messages of workers, and what is due."""
        store, membership = self._store, self._membership
        enrollments, store.enrollments = store.enrollments, []
        for worker, message in enrollments:
            kind = message["kind"]
            if self._is_ending:
                store.send_to_worker(worker, _DISMISSAL)
            elif kind == "enroll":
                self._enroll(worker, message, now)
            else:
                actions = membership.leaving(worker, now)
                is_leaving = membership.is_leaving(worker)
                answer = "it leaves at the next commit" if is_leaving else "too few would stay"
                self._console.show(f"{self._job.worker_name(worker)} asks to leave: {answer}")
                self._do(actions)
        if store.failure is not None:  # the members enroll again
            self._console.show(
                f"generation {membership.generation} could not begin: {store.failure.reason}"
            )
            store.failure = None
        self._do(membership.tick(now))
        if now >= self._expected_at:
            self._explain_absence("no worker has called a function of @sv.elastic.run yet")

    @property
    def last_members(self) -> tuple[int, ...] | None:
        """The workers on which the program's function has returned; None as long as it runs."""
        return self._membership.members if self._membership.is_finishing else None

    @property
    def newcomers(self) -> frozenset[int]:
        """The workers that belong to no generation, as long as there is one."""
        numbers = self._workers.workers if self._is_running else ()
        return frozenset(numbers).difference(self._membership.members)

    @property
    def needs_hosts(self) -> bool:
        """Whether more workers are of use."""
        return not (self._is_ending or self._membership.is_finishing)

    def expect(self, workers: Sequence[int]) -> None:
        """Note that these workers are to start."""
        self._forget_early(workers)
        self._membership.expect(workers)

    def started(self, worker: int, now: float) -> None:
        """Note that the process of a worker has been started."""
        self._membership.started(worker, self._job.host_of(worker))
        if worker in self._early:
            self._enroll(worker, self._early.pop(worker), now)

    def returned(self, worker: int) -> None:
        """Note that the program's function has returned on all members."""
        self._do(self._membership.finished(worker))

    def lose(self, lost: LoseWorker, now: float) -> None:
        """Go on without a worker."""
        # First: a rank that waits in shared memory sees nothing else. Abort only for a member, as
        # calls of an aborted generation no longer wait in shared memory.
        if self._membership.is_member(lost.rank):
            self._workers.abort(self._membership.generation)
        self._store.ended(lost.rank, lost.reason, now, lost.status, lost.kind)
        self._do(self._membership.left(lost.rank, lost.reason, now, returns=lost.returns))

    def restart(self, worker: int, count: str) -> None:
        """Show that the process of a lost worker is started again."""
        self._forget_early((worker,))
        self._console.show(f"{self._job.worker_name(worker)} is started again ({count})")

    def ended(self, worker: int, now: float) -> None:
        """Note that the process of a worker has ended in order."""
        if not self._is_enrolling:  # perhaps nobody will, and each worker does its work alone
            self._ended_before.append(worker)
            if self._expected_at < float("inf") and not self._is_ending:
                name = self._job.worker_name(worker)
                self._explain_absence(f"{name} has ended without a function of @sv.elastic.run")
            return
        actions = self._membership.left(worker, "its program has ended", now)
        if any(isinstance(action, BreakUp) for action in actions) and not self._is_ending:
            self._console.show(
                f"{self._job.worker_name(worker)} leaves the job: its program has ended"
            )
        self._do(actions)

    def fail(self, worker: int) -> None:
        """End the job because of a worker without which it cannot go on."""
        membership = self._membership
        numbers = self._workers.workers
        left = sum(one != worker and membership.is_running(one) for one in numbers)
        if left < membership.smallest and not self._is_ending:
            verb = "is" if left == 1 else "are"
            self._console.show(
                f"{left} of at least {membership.smallest} workers {verb} left, so the job ends"
            )
        self.dismiss()

    def dismiss(self) -> None:
        """Tell all workers that the launcher is about to end them."""
        self._is_ending = True
        self._send(self._workers.workers, _DISMISSAL)

    def _enroll(self, worker: int, message: Message, now: float) -> None:
        self._begin_enrollment(now)
        if self._membership.is_running(worker):
            self._do(self._membership.enroll(worker, message["heard"], now, message["holds"]))
        else:
            self._early[worker] = message

    def _forget_early(self, workers: Sequence[int]) -> None:
        """Drop enrollments of processes that others replace."""
        for worker in workers:
            self._early.pop(worker, None)

    def _begin_enrollment(self, now: float) -> None:
        """Count on the workers that have not ended yet."""
        self._is_enrolling, self._expected_at = True, float("inf")
        ended, self._ended_before = self._ended_before, []
        for worker in ended:
            self.ended(worker, now)

    def _explain_absence(self, fact: str) -> None:
        """Show once that the workers do not work together."""
        self._expected_at = float("inf")
        self._console.show(
            f"{fact}: outside of such a function each worker is alone, with sv.world_size() 1. "
            "Decorate the function that trains, or give one number of workers: --workers "
            f"{self._membership.largest}"
        )

    # -- actions -----------------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in () if self._is_ending else actions:
            if isinstance(action, Assign):
                self._assign(action)
            elif isinstance(action, BreakUp):
                self._break_up(action)
            elif isinstance(action, AnnounceChange):
                self._send(action.members, _CHANGE)
            elif isinstance(action, Dismiss):
                self._send(action.workers, _DISMISSAL)
            elif isinstance(action, Expel):
                self._expel(action)
            else:
                self._gives_up(action.reason)

    def _send(self, workers: Iterable[int], data: bytes) -> None:
        for worker in workers:
            self._store.send_to_worker(worker, data)

    def _assign(self, action: Assign) -> None:
        """Form a generation; hosts without members are left out of it."""
        generation, members = action
        job, console = self._job, self._console
        hosts = list(dict.fromkeys(job.host_of(worker) for worker in members))
        places = [hosts.index(job.host_of(worker)) for worker in members]
        seats = {host: (index, places.count(index)) for index, host in enumerate(hosts)}
        self._store.begin_generation(members, generation)
        self._workers.begin_generation(generation, seats)
        names = ", ".join(map(str, members))
        console.events.add("generation", generation=generation, members=list(members))
        if self._is_running:
            console.show(f"generation {generation} has {len(members)} workers: {names}")
        self._is_running = True
        for rank, worker in enumerate(members):
            host = places[rank]
            message = pack_message(
                "assignment",
                generation=generation,
                rank=rank,
                world_size=len(members),
                local_rank=rank - places.index(host),
                local_world_size=places.count(host),
                host_index=host,
                host_count=len(hosts),
            )
            self._store.send_to_worker(worker, message)

    def _break_up(self, action: BreakUp) -> None:
        """Let the calls of the other members fail."""
        self._workers.abort(action.generation)
        self._store.ended(action.worker, action.reason, self._console.watch.now())

    def _expel(self, action: Expel) -> None:
        self._console.show(f"{self._job.worker_name(action.worker)} is ended: {action.reason}")
        self._workers.kill((action.worker,))
