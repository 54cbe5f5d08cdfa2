"""Loops of different lengths: `with sv.uneven():`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from syncvar.bootstrap.process import current
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.sync_points import gather_objects
from syncvar.core.errors import ConfigError, MismatchError, SyncvarError, UsageError
from syncvar.strategies.active_group import LEFT, ActiveGroup, PeerExhausted
from syncvar.strategies.base import strategies_of
from syncvar.strategies.library_state import checked_modules, update_modules
from syncvar.variables.policy import CallContext
from syncvar.variables.resync import catch_up
from syncvar.variables.scope import current_place

if TYPE_CHECKING:
    from syncvar.bootstrap.context import ProcessContext
    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.strategies.base import Strategy
    from syncvar.variables.registry import VariableRegistry

_WHAT = "sv.uneven"
_END = "end of sv.uneven"


def uneven(
    *modules: Any,
    group: Group | None = None,
    stop_at_first: bool = False,
    timeout: float | None = None,
) -> Uneven:
    """Return a context manager for a loop that may have another number of steps on each rank. Collective over the group.

    A rank whose loop has ended waits at the end of the block until those of all have. Meanwhile every call of the others is
    made by the ranks that still work, as if the group had no others: sums and means are theirs alone (the mean is over
    those who work, by `weight=` where it is given), `all_gather` and `gather` have no part of the others, `scatter`,
    `reduce_scatter` and `all_to_all` cut an array among those who work. Ranks keep their numbers, in `root=`, in what
    `minloc` tells, and in lists of one item for each rank, which hold None (objects) or an empty array (`all_to_all`) for
    ranks that have left. A call whose root has left raises UsageError on all that work.

    So it is with variables, `strategy.run`, optimizers and distributed datasets: ON_WRITE variables are written by the
    replicas that work, the first of them in place of replica 0 (ONLY_FIRST_REPLICA), and when all have left, every replica
    takes the values of the one that has gone furthest. Reading an ON_READ variable counts the copies of all replicas,
    also of those that have left.

    Pass modules of other libraries to bring them up to date as well. When all ranks have left, every rank takes the state
    that they have on the rank that has made most calls. A module that you do not pass stays as this rank has left it.

    Refused inside: send and recv, new groups and strategies, `v.pin`, another such block. Refused once a rank has left: what
    needs every replica (making variables, checkpoints, assigning ON_READ variables in cross context, shared copies of
    CentralStorageStrategy). Started calls (`async_op=True`) are made at once, persistent calls are not used, nothing is deferred
    (AUTO) or compared (`check_every`).

    An exception that leaves `strategy.run` in the block ends the block on all ranks, also where the program catches it: every
    further call there, and the end of the block, raises UsageError that names the rank and the exception. What the function
    catches itself does not; and one that leaves the block may be caught around it, on all ranks.

    Args:
        modules: Modules and optimizers of PyTorch, and models of Keras, in the same order on every rank.
        group: The ranks whose loops may differ; None means the world. Their groups within it are meant as well.
        stop_at_first: The block ends on all ranks when the first has left it: at the call which that one does not make, which
            is not made by anybody.
        timeout: Seconds that a rank waits for the others' loops to end; None means the job's default.

    Raises:
        UsageError: Inside `strategy.run` or another such block; or this rank is not in the group. In the block: an exception has
            left `strategy.run` there before.
        ConfigError: A module has no state that can be read and written.
        MismatchError: Other ranks enter it otherwise; or an exception has left the block, or `strategy.run` there, on another
            rank.

    Cost: one more all-reduce of 8 bytes before each call. When all have left, a broadcast of the variables and modules if
        their loops were of different lengths.

    Example:
        >>> import syncvar as sv
        >>> with sv.uneven() as block:
        ...     for step in range(3 + sv.rank()):
        ...         mean = sv.all_reduce(float(step), "mean")
        >>> float(mean), block.working
        (2.0, (0,))
    """
    if not isinstance(stop_at_first, bool):
        raise ConfigError(f"stop_at_first must be True or False, not {stop_at_first!r}")
    return Uneven(checked_modules(modules, _WHAT), group, stop_at_first, timeout)


class Uneven:
    """A block of `sv.uneven`; its attribute `working` names the ranks that still work.

    Args:
        modules: Brought up to date at the end.
        group: The ranks; None means the world.
        stop_at_first: It ends with the first that leaves.
        timeout: Seconds, or None.
    """

    def __init__(
        self,
        modules: tuple[Any, ...],
        group: Group | None,
        stop_at_first: bool,
        timeout: float | None,
    ) -> None:
        self._modules = modules
        self._group = group
        self._timeout = timeout
        self.stops_at_first = stop_at_first
        self.number = self._main = 0
        self.is_over = ""
        self._communicator: Communicator | None = None
        self._enrolled: dict[int, ActiveGroup] = {}
        self._rosters: dict[
            VariableRegistry, Strategy
        ] = {}  # these live as long as the block goes on

    @property
    def working(self) -> tuple[int, ...]:
        """Ranks of the group that still work, as far as was known at the last call in it."""
        communicator = self._communicator
        if communicator is None:
            return ()
        mine = self._enrolled.get(self._main)
        working = communicator.whole if mine is None else mine.working
        return tuple(rank for rank, member in enumerate(communicator.whole) if member in working)

    def __enter__(self) -> Self:
        communicator = communicator_of(self._group)
        context = self.context = current()
        found = context.groups_within(communicator.members)

        def bring() -> list[Any]:
            _refuse_inside(context)
            return [self.stops_at_first, [one.identity for one in found], len(self._modules)]

        everyone = gather_objects(communicator, _WHAT, bring, self._timeout)
        if any((one[0], one[2]) != (everyone[0][0], everyone[0][2]) for one in everyone):
            table = {
                rank: f"stop_at_first={one[0]}, {one[2]} modules"
                for rank, one in zip(communicator.members, everyone, strict=True)
            }
            raise MismatchError("the ranks do not enter the same block of sv.uneven", table)
        self._communicator, self._main, self.number = (
            communicator,
            communicator.identity,
            communicator.next_call,
        )
        # A group that a member has let go of already makes no calls any more.
        held = {rank: set(one[1]) for rank, one in zip(communicator.members, everyone, strict=True)}
        found = [one for one in found if all(one.identity in held[rank] for rank in one.members)]
        self._enrolled = {one.identity: ActiveGroup(self, one) for one in found}
        try:
            self._begin()
        except (
            BaseException
        ) as error:  # the others are in the block already, and nobody calls __exit__
            self.__exit__(type(error), error, None)
            raise
        return self

    def _begin(self) -> None:
        engine = self.context.engine
        if engine is not None:
            for identity in self._enrolled:
                engine.settle(identity)
        for roster in self._all_rosters():
            roster.pause()
        self.context.uneven = self
        for one in self._enrolled.values():
            one.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        del trace
        context = self.context
        is_caught_up = False
        try:
            if error is not None and not isinstance(error, PeerExhausted):
                self.end(f"{LEFT}{type(error).__name__}: {error}")
                self._abandon()
                return False
            if self.is_over:
                self._abandon()
                raise UsageError(
                    f"{self.is_over}. The program has gone on, but the block of sv.uneven had no more calls from there"
                )
            self._leave()
            is_caught_up = True
        finally:
            context.uneven = None
            for one in self._enrolled.values():
                one.let_go()
            for roster in self._all_rosters():
                roster.resume(is_caught_up=is_caught_up)
            self._rosters.clear()
        self._update_modules()
        return error is not None

    def _update_modules(self) -> None:
        """Give every rank the modules of the rank that has made most calls."""
        communicator = self._communicator
        if not self._modules or communicator is None or communicator.size == 1:
            return
        counts = {identity: one.calls for identity, one in self._enrolled.items()}
        mine = [counts.get(self._main, 0), sum(counts.values())]
        everyone = gather_objects(communicator, "modules of sv.uneven", lambda: mine, self._timeout)
        if any(one != everyone[0] for one in everyone):
            newest = everyone.index(max(everyone))
            update_modules(
                self._modules, newest, self._group, communicator.member_rank, self._timeout
            )

    def end(self, reason: str, why: str = "") -> None:
        """Make no more calls in the block, and tell the others; waits for nobody.

        Args:
            reason: For them; what this rank did.
            why: What another rank did, where it began there.
        """
        if not self.is_over:
            self.is_over = why or f"rank {self.context.rank} {reason}"
            for one in self._enrolled.values():
                one.tell(reason)

    def _abandon(self) -> None:
        """Leave the block that is over, and tell those that wait at its end; waits for nobody."""
        communicator = self._communicator
        assert communicator is not None
        for one in self._enrolled.values():
            one.give_back()

        def refuse() -> None:
            raise UsageError(self.is_over)

        with contextlib.suppress(SyncvarError):  # it is told to the others, who wait there
            gather_objects(communicator, _END, refuse, self._timeout)

    def _leave(self) -> None:
        """Let the others go on alone, and wait until all have left; then take the newest values."""
        communicator = self._communicator
        assert communicator is not None
        started = [one.leave(self._timeout) for one in self._enrolled.values()]
        self.context.uneven = None
        rosters = {one.owner.communicator.identity: one for one in self._all_rosters()}
        everyone = gather_objects(communicator, _END, lambda: list(rosters), self._timeout)
        held = dict(zip(communicator.members, everyone, strict=True))
        for work in started:
            if work is not None:
                work.wait()
        for identity in sorted(rosters):  # the same order everywhere
            owner = rosters[identity].owner
            mine = self._enrolled.get(identity)
            if mine is not None and all(identity in held[rank] for rank in mine.whole):
                catch_up(owner, rosters[identity], mine.calls)

    def _all_rosters(self) -> list[VariableRegistry]:
        """Return the rosters of the strategies whose replicas are within the group, those made inside the block too."""
        communicator = self._communicator
        assert communicator is not None
        members = set(communicator.whole)
        for one in strategies_of(self.context):
            if (
                one.roster is not None
                and one.roster not in self._rosters
                and set(one.communicator.whole) <= members
            ):
                self._rosters[one.roster] = one
        return list(self._rosters)


def _refuse_inside(context: ProcessContext) -> None:
    """Raise UsageError where no block can begin."""
    if context.uneven is not None:
        raise UsageError(
            "`with sv.uneven():` is inside another one; one block around the loops is enough, for all groups within its group"
        )
    place = current_place()
    if place is not None and place.context is not CallContext.CROSS:
        raise UsageError(
            "`with sv.uneven():` is inside strategy.run; put it around the loop that calls strategy.run"
        )
