"""Which workers form the next generation of an elastic job; a pure state machine.

An elastic job has between MIN and MAX workers in its present *generation*. A worker that belongs to
none *enrolls*, and waits until it is assigned to one. The machine forms a generation when the job
starts, when a member is lost, and when a newcomer waits and the job has fewer than MAX members. It
waits for the members of the last generation that still run, because they hold the state.

`common_commit` is the rule by which the members of a new generation find the state to go on with.

`now` is seconds of any monotonic clock. Workers are numbered; the numbers stay for the whole job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Assign(NamedTuple):
    """Form a generation: its members in the order of their ranks."""

    generation: int
    members: tuple[int, ...]


class BreakUp(NamedTuple):
    """Tell the other members of a generation that it has ended, so that their calls fail."""

    generation: int
    worker: int  # the member that is missing
    reason: str


class AnnounceChange(NamedTuple):
    """Tell the members that the membership is to change at their next commit."""

    members: tuple[int, ...]


class Expel(NamedTuple):
    """End a worker that did not enroll in time; others go on without it."""

    worker: int
    reason: str


class Dismiss(NamedTuple):
    """Tell waiting workers that the job is finished, or does not need them any more."""

    workers: tuple[int, ...]


class GiveUp(NamedTuple):
    """The job cannot go on."""

    reason: str


Action = Assign | BreakUp | AnnounceChange | Expel | Dismiss | GiveUp


class Tag(NamedTuple):
    """What state a worker holds.

    Attributes:
        generation: The generation in which the state was made or synchronized; -1 for none.
        newest: The number of its newest snapshot, complete or not; -1 for none.
    """

    generation: int
    newest: int


class CommonCommit(NamedTuple):
    """The state with which a new generation goes on."""

    holders: tuple[int, ...]  # ranks that have it; none if the job begins, or all copies are lost
    number: int  # its snapshot; -1 without holders


def common_commit(tags: Sequence[Tag]) -> CommonCommit:
    """Return the newest snapshot that every holder has, from the tag of each rank.

    A commit is complete when all members have taken its snapshot. So if it was complete on any
    member, all holders of that generation have it, and the smallest newest number is at least that
    of the last complete commit. A worker with an older generation was absent meanwhile, and takes
    the state from a holder.

    Example:
        >>> common_commit([Tag(2, 7), Tag(-1, -1), Tag(2, 6), Tag(1, 9)])
        CommonCommit(holders=(0, 2), number=6)
    """
    generation = max(tag.generation for tag in tags)
    holders = tuple(rank for rank, tag in enumerate(tags) if tag.generation == generation >= 0)
    return CommonCommit(holders, min((tags[rank].newest for rank in holders), default=-1))


@dataclass(slots=True)
class _Worker:
    """A worker process that runs."""

    host: int
    assigned: int = -1  # the last generation to which this process was assigned
    holds: int | None = None  # the generation of the tag with which it enrolled, if known
    is_waiting: bool = False  # it has enrolled, and has no assignment
    is_leaving: bool = False  # it takes part in no further generation that can do without it
    is_due: bool = False  # it ran already when the present wait began


class ElasticMembership:
    """The membership of one elastic job.

    A process that was a member once stays a member of all later generations while it lives, and
    does not leave. Therefore one of the members has each complete commit.

    Args:
        smallest: Fewest members of a generation.
        largest: Most members of a generation.
        patience_s: How long a new generation waits for workers that it needs and that still run.
        generation: The number of the first generation.
    """

    def __init__(self, smallest: int, largest: int, patience_s: float, generation: int = 0) -> None:
        if not 1 <= smallest <= largest:
            raise ConfigError(
                f"an elastic job of {smallest} to {largest} workers is impossible: write MIN:MAX "
                "with 1 <= MIN <= MAX"
            )
        self.smallest, self.largest, self.patience_s = smallest, largest, patience_s
        self.generation = generation - 1  # the last one that was formed
        self.members: tuple[int, ...] = ()
        self.is_forming = True
        self.is_finishing = False
        self.is_hopeless = False
        self._workers: dict[int, _Worker] = {}
        # Will be started (again), or have been expelled: their ends say whether they return.
        self._coming: set[int] = set()
        self._first: set[int] = set()  # of these, the first generation waits for
        self._deadline: float | None = None  # when the wait for `_awaited` ends
        self._has_announced = False

    # -- events ------------------------------------------------------------------------------------

    def expect(self, workers: Collection[int]) -> None:
        """Note that these workers will be started; the first generation waits for them."""
        self._first.update(workers)
        self._coming.update(workers)

    def started(self, worker: int, host: int) -> None:
        """Note that the process of a worker runs on this host."""
        self._first.discard(worker)
        self._coming.discard(worker)
        self._workers[worker] = _Worker(host)

    def enroll(self, worker: int, heard: int, now: float, holds: int | None = None) -> list[Action]:
        """Note that a worker waits for an assignment.

        Args:
            worker: The worker.
            heard: The last generation to which it was assigned, as far as it knows.
            now: The time in seconds.
            holds: The generation of its tag; None if unknown.
        """
        found = self._workers.get(worker)
        if found is None or self.is_hopeless or heard > found.assigned:
            return []  # the process has ended, or counts as lost
        is_member = self.is_member(worker)
        if -1 < heard < found.assigned:
            return []  # sent before its present assignment arrived
        if heard < found.assigned:  # the first message of a process, perhaps of an older one
            holds = None
        if found.is_waiting and found.holds is not None:  # a second message, perhaps an old one
            holds = found.holds if holds is None else max(holds, found.holds)
        found.is_waiting, found.holds = True, holds
        if self.is_finishing:
            return [Dismiss((worker,))]
        actions: list[Action] = []
        if is_member and not self.is_forming:
            reason = f"it has left generation {self.generation}"
            # After an announced change all members leave by themselves.
            actions = [] if self._has_announced else [BreakUp(self.generation, worker, reason)]
            self._begin_forming(now)
        return [*actions, *self._proceed(now)]

    def left(self, worker: int, reason: str, now: float, *, returns: bool = False) -> list[Action]:
        """Note the end of a worker's process, or of its host; it `returns` if it is restarted."""
        is_member = self.is_member(worker)
        self._first.discard(worker)
        found = self._workers.pop(worker, None)
        if returns:
            self._coming.add(worker)
        else:
            self._coming.discard(worker)
        actions: list[Action] = []
        if is_member and not (self.is_forming or self.is_finishing or self.is_hopeless):
            # After an announced change all members leave by themselves.
            is_known = found is not None and found.is_leaving and self._has_announced
            actions = [] if is_known else [BreakUp(self.generation, worker, reason)]
            self._begin_forming(now)
        return [*actions, *self._proceed(now)]

    def finished(self, worker: int) -> list[Action]:
        """Note that the program's function has returned on a member: the job needs no more."""
        if worker not in self.members or self.is_finishing or self.is_hopeless:
            return []
        self.is_finishing, self.is_forming, self._deadline = True, False, None
        waiting = self._waiting()
        return [Dismiss(waiting)] if waiting else []

    def leaving(self, worker: int, now: float) -> list[Action]:
        """Note that a worker is to leave at the next commit, if enough others stay.

        If it alone holds the newest state, it takes part in the next generation too, and leaves at
        the first commit of that.
        """
        found = self._workers.get(worker)
        if found is None or found.is_leaving or self.is_finishing or self.is_hopeless:
            return []
        others = [one for one, state in self._workers.items() if not state.is_leaving]
        if len(others) - 1 < self.smallest:
            return []
        found.is_leaving = True
        return self._proceed(now)

    def tick(self, now: float) -> list[Action]:
        """Return what is due now."""
        if self._deadline is None or now < self._deadline:
            return []
        self._deadline = None
        late = self._late()
        self._first.clear()
        actions: list[Action] = []
        for worker in late:
            del self._workers[worker]
            self._coming.add(worker)
            reason = f"it did not enroll within {self.patience_s:g} s"
            actions.append(Expel(worker, reason))
        return [*actions, *self._proceed(now)]

    # -- answers -----------------------------------------------------------------------------------

    def due(self) -> float:
        """Return when `tick` must be called next, in seconds of the clock."""
        return float("inf") if self._deadline is None else self._deadline

    def is_running(self, worker: int) -> bool:
        """Return whether the process of a worker has started, and is neither ended nor lost."""
        return worker in self._workers

    def is_member(self, worker: int) -> bool:
        """Return whether the process of a worker belongs to the last generation."""
        found = self._workers.get(worker)
        return found is not None and worker in self.members and found.assigned == self.generation

    def is_leaving(self, worker: int) -> bool:
        """Return whether a worker leaves at the next commit."""
        return worker in self._workers and self._workers[worker].is_leaving

    # -- inside ------------------------------------------------------------------------------------

    def _waiting(self) -> tuple[int, ...]:
        return tuple(one for one, state in sorted(self._workers.items()) if state.is_waiting)

    def _awaited(self) -> list[int]:
        """Return the workers without which no generation is formed, as long as they run."""
        if self.members:
            return [one for one in self.members if self.is_member(one) and self._may_hold(one)]
        # At the start; spares need not have come.
        chosen = sorted(self._workers.keys() | self._first)[: self.largest]
        return [one for one in chosen if one in self._first or not self._workers[one].is_leaving]

    def _may_hold(self, worker: int) -> bool:
        """Return whether a worker stays, or may hold a state that no waiting worker has."""
        found = self._workers[worker]
        if not found.is_leaving:
            return True
        newest = self.generation
        if found.is_waiting and found.holds is not None:
            newest = found.holds
        return not any(
            other.holds is not None and other.holds >= newest
            for other in self._workers.values()
            if other.is_waiting and not other.is_leaving
        )

    def _late(self) -> list[int]:
        """Return the workers for which the job has waited in vain."""
        awaited = set(self._awaited())
        silent = [one for one, state in self._workers.items() if not state.is_waiting]
        if not awaited.isdisjoint(silent):
            silent = [one for one in silent if one in awaited]
        else:  # too few wait
            silent = [one for one in silent if not self._workers[one].is_leaving]
        return [one for one in silent if self._workers[one].is_due]

    def _begin_forming(self, now: float) -> None:
        self.is_forming, self._has_announced = True, False
        self._begin_wait(now)

    def _begin_wait(self, now: float) -> None:
        """Give all that run now some time to enroll; a process that starts later gets more."""
        self._deadline = now + self.patience_s
        for state in self._workers.values():
            state.is_due = True

    def _proceed(self, now: float) -> list[Action]:
        """Form a generation, or take the next step towards one."""
        if self.is_finishing or self.is_hopeless:
            return []
        if not self.is_forming:
            return self._look_for_change()
        possible = {one for one, state in self._workers.items() if not state.is_leaving}
        if len(possible | self._coming) < self.smallest:
            self.is_hopeless, self._deadline = True, None
            left = len(possible)
            verb = "is" if left == 1 else "are"
            return [GiveUp(f"{left} of at least {self.smallest} workers {verb} left")]
        waiting = self._waiting()
        if waiting and self._deadline is None:
            self._begin_wait(now)
        awaited = self._awaited()
        ready = [one for one in waiting if one in awaited or not self._workers[one].is_leaving]
        if len(ready) < self.smallest or not set(awaited) <= set(waiting):
            return []
        return [self._assign(ready), *self._look_for_change()]

    def _look_for_change(self) -> list[Action]:
        """Announce a change if one is due; dismiss workers that leave and are not needed."""
        waiting = self._waiting()
        outgoing = tuple(one for one in waiting if self._workers[one].is_leaving)
        for one in outgoing:
            self._workers[one].is_waiting = False
        actions: list[Action] = [Dismiss(outgoing)] if outgoing else []
        has_room = len(self.members) < self.largest and len(outgoing) < len(waiting)
        is_due = has_room or any(
            self.is_member(one) and self._workers[one].is_leaving for one in self.members
        )
        if is_due and not self._has_announced:
            self._has_announced = True
            actions.append(AnnounceChange(self.members))
        return actions

    def _assign(self, ready: Sequence[int]) -> Assign:
        """Form a generation of waiting workers, first of all of those that hold the state."""
        # Workers that leave are ready only if no other one has their state: they give it to those
        # that stay, for which there must be room.
        outgoing = [one for one in ready if self._workers[one].is_leaving]
        staying = [one for one in ready if not self._workers[one].is_leaving]
        staying.sort(key=lambda one: not self.is_member(one))
        if staying:
            outgoing = outgoing[: max(1, self.largest - 1)]
        chosen = [*outgoing, *staying[: max(bool(outgoing), self.largest - len(outgoing))]]
        self.members = tuple(sorted(chosen, key=lambda one: (self._workers[one].host, one)))
        self.generation += 1
        for one in self.members:
            self._workers[one].is_waiting = False
            self._workers[one].assigned = self.generation
        self.is_forming, self._has_announced, self._deadline = False, False, None
        return Assign(self.generation, self.members)
