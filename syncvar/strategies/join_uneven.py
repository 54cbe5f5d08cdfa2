"""`with sv.uneven():`, for loops with a different number of steps on each rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from syncvar.bootstrap.process import current
from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.groups import Group, communicator_of
from syncvar.collectives.object_collectives import broadcast_object
from syncvar.collectives.stage_builders import gather_objects
from syncvar.core.array_types import library_of
from syncvar.core.errors import ConfigError, MismatchError, SyncvarError, UsageError, error_line
from syncvar.strategies.active_group import LEFT, ActiveGroup, PeerExhausted
from syncvar.strategies.base import strategies_of
from syncvar.variables.policy import CallContext
from syncvar.variables.registry import resynchronize
from syncvar.variables.variable import Variable
from syncvar.variables.variable_owner import current_scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator
    from syncvar.strategies.base import Strategy
    from syncvar.variables.registry import VariableRegistry

_NAME = "sv.uneven"
_END = "end of sv.uneven"


def uneven(
    *modules: Any,
    group: Group | None = None,
    stop_at_first: bool = False,
    timeout: float | None = None,
) -> Uneven:
    """Return a context manager for a loop whose number of steps may differ between ranks.

    Collective over the group. A rank whose loop has ended waits at the end of the block until all
    loops have ended. Meanwhile the ranks that still work make every call as if the group had no
    others:

    * Sums and means are over the active ranks; `weight=` counts as usual.
    * `all_gather` and `gather` contain no part of the others.
    * `scatter`, `reduce_scatter` and `all_to_all` split an array among the active ranks.
    * Ranks keep their numbers: in `root=`, in the result of `minloc`, and in lists of one item for
      each rank. Items of ranks that have left are None (objects) or empty arrays (`all_to_all`).
    * A call whose root has left raises UsageError on all active ranks.

    The same holds for variables, `strategy.run`, optimizers and distributed datasets. Active
    replicas write ON_WRITE variables; the first of them replaces replica 0 (ONLY_FIRST_REPLICA).
    When all ranks have left, every replica takes the values of the replica that made most calls.
    Reading an ON_READ variable includes the copies of replicas that have left.

    Pass modules of other libraries to update them as well: every rank takes their state from the
    rank that made most calls. A module that you do not pass keeps its state on each rank.

    The block refuses send and recv, new groups and strategies, `v.pin` and a nested block. Once a
    rank has left, it also refuses calls that need every replica: making variables, checkpoints,
    assigning ON_READ variables in cross context, and shared copies of CentralStorageStrategy.
    Calls with `async_op=True` run at once. The block uses no persistent calls, defers no writes
    (AUTO) and compares no replicas (`check_every`).

    An exception that leaves `strategy.run` in the block ends the block on all ranks, even if the
    program catches it. Every further call in the block, and its end, then raises UsageError with
    the rank and the exception. Exceptions that the function catches itself have no effect. The
    program may catch an exception that leaves the block, on all ranks.

    Args:
        modules: Modules and optimizers of PyTorch, and models of Keras, in the same order on
            every rank.
        group: Ranks whose loops may differ; None means the world. Groups within it count too.
        stop_at_first: Whether the block ends on all ranks when the first rank leaves it. The
            others then skip the call that this rank does not make.
        timeout: Seconds that a rank waits for the others' loops to end; None means the job's
            default.

    Returns:
        The context manager; its `working` names the active ranks.

    Raises:
        UsageError: The block is inside `strategy.run` or another block, or this rank is not in
            the group. In the block: an exception has left `strategy.run` before.
        ConfigError: A module has no state that can be read and written.
        MismatchError: Other ranks pass other arguments; or an exception has left the block, or
            `strategy.run` in it, on another rank.

    Cost: one all-reduce of 8 bytes before each call. At the end, a broadcast of the variables and
        modules if the loops had different lengths.

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
    checked = _checked_modules(modules, _NAME)
    return Uneven(checked, group, stop_at_first=stop_at_first, timeout=timeout)


class Uneven:
    """A block of `sv.uneven`; its attribute `working` names the ranks that still work.

    Args:
        modules: Modules to update at the end.
        group: Ranks of the block; None means the world.
        stop_at_first: Whether the block ends with the first rank that leaves.
        timeout: Seconds, or None for the job's default.

    Example:
        >>> import syncvar as sv
        >>> with sv.uneven() as block:
        ...     working = block.working
        >>> working
        (0,)
    """

    def __init__(
        self,
        modules: tuple[Any, ...],
        group: Group | None,
        *,
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
        self._groups: dict[int, ActiveGroup] = {}
        # The strategies here keep their registries alive until the block ends.
        self._registries: dict[VariableRegistry, Strategy] = {}

    @property
    def working(self) -> tuple[int, ...]:
        """Ranks of the group that still work, as of the last call in it."""
        communicator = self._communicator
        if communicator is None:
            return ()
        mine = self._groups.get(self._main)
        working = communicator.whole if mine is None else mine.working
        return tuple(rank for rank, member in enumerate(communicator.whole) if member in working)

    def __enter__(self) -> Self:
        communicator = communicator_of(self._group)
        context = self.context = current()
        found = context.groups_within(communicator.members)

        def entry() -> list[Any]:
            _refuse_inside(context)
            return [self.stops_at_first, [one.identity for one in found], len(self._modules)]

        entries = gather_objects(communicator, _NAME, entry, self._timeout)
        by_rank = dict(zip(communicator.members, entries, strict=True))
        table = {rank: f"stop_at_first={one[0]}, {one[2]} modules" for rank, one in by_rank.items()}
        if len(set(table.values())) > 1:
            raise MismatchError("the ranks do not enter the same block of sv.uneven", table)
        self._communicator = communicator
        self._main, self.number = communicator.identity, communicator.next_call
        # A group that one of its members has released makes no more calls.
        held = {rank: set(one[1]) for rank, one in by_rank.items()}
        found = [one for one in found if all(one.identity in held[rank] for rank in one.members)]
        self._groups = {one.identity: ActiveGroup(self, one) for one in found}
        try:
            self._begin()
        except BaseException as error:
            # The others are in the block already, and Python does not call __exit__.
            self.__exit__(type(error), error, None)
            raise
        return self

    def _begin(self) -> None:
        engine = self.context.engine
        if engine is not None:
            for identity in self._groups:
                engine.settle(identity)
        for registry in self._all_registries():
            registry.pause()
        self.context.uneven = self
        for one in self._groups.values():
            one.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        del trace
        context = self.context
        is_caught_up = False
        try:
            if error is not None and not isinstance(error, PeerExhausted):
                self.end(f"{LEFT}{error_line(error)}")
                self._abandon()
                return False
            if self.is_over:
                self._abandon()
                raise UsageError(
                    f"{self.is_over}. The program continued, but the block of sv.uneven made no "
                    f"more calls after that"
                )
            self._leave()
            is_caught_up = True
        finally:
            context.uneven = None
            for one in self._groups.values():
                one.destroy()
            for registry in self._all_registries():
                registry.resume(is_caught_up=is_caught_up)
            self._registries.clear()
        self._update_modules()
        return error is not None

    def _update_modules(self) -> None:
        """Broadcast the modules of the rank that made most calls."""
        communicator = self._communicator
        if not self._modules or communicator is None or communicator.size == 1:
            return
        counts = {identity: one.calls for identity, one in self._groups.items()}
        mine = [counts.get(self._main, 0), sum(counts.values())]
        everyone = gather_objects(communicator, "modules of sv.uneven", lambda: mine, self._timeout)
        if any(one != everyone[0] for one in everyone):
            newest, rank = everyone.index(max(everyone)), communicator.member_rank
            _broadcast_modules(self._modules, newest, self._group, rank, self._timeout)

    def end(self, reason: str, cause: str = "") -> None:
        """End the block and send `reason` to the others; `cause` if another rank ended it first."""
        if not self.is_over:
            self.is_over = cause or f"rank {self.context.rank} {reason}"
            for one in self._groups.values():
                one.announce(reason)

    def _abandon(self) -> None:
        """Leave the block that is over; ranks that wait at its end fail. Does not wait."""
        communicator = self._communicator
        assert communicator is not None
        for one in self._groups.values():
            one.restore()

        def refuse() -> None:
            raise UsageError(self.is_over)

        with contextlib.suppress(SyncvarError):  # the ranks at the end of the block get the error
            gather_objects(communicator, _END, refuse, self._timeout)

    def _leave(self) -> None:
        """Leave the groups, wait until all ranks have left, and take the newest values."""
        communicator = self._communicator
        assert communicator is not None
        requests = [one.leave(self._timeout) for one in self._groups.values()]
        self.context.uneven = None
        registries = {one.owner.communicator.identity: one for one in self._all_registries()}
        everyone = gather_objects(communicator, _END, lambda: list(registries), self._timeout)
        held = dict(zip(communicator.members, everyone, strict=True))
        for work in requests:
            if work is not None:
                work.wait()
        for identity in sorted(registries):  # the same order on all ranks
            registry = registries[identity]
            mine = self._groups.get(identity)
            if mine is not None and all(identity in held[rank] for rank in mine.whole):
                resynchronize(registry.owner, registry, mine.calls)

    def _all_registries(self) -> list[VariableRegistry]:
        """Return the registries of all strategies over ranks of the group, also of new ones."""
        communicator = self._communicator
        assert communicator is not None
        members = set(communicator.whole)
        for one in strategies_of(self.context):
            registry = one.registry
            is_inside = set(one.communicator.whole) <= members
            if registry is not None and registry not in self._registries and is_inside:
                self._registries[registry] = one
        return list(self._registries)


def _refuse_inside(context: ProcessContext) -> None:
    """Raise UsageError if no block can begin here."""
    if context.uneven is not None:
        raise UsageError(
            "`with sv.uneven():` is inside another one; one block around the loops is enough, for "
            "all groups within its group"
        )
    place = current_scope()
    if place is not None and place.context is not CallContext.CROSS:
        raise UsageError(
            "`with sv.uneven():` is inside strategy.run; put it around the loop that calls "
            "strategy.run"
        )


def _checked_modules(modules: Sequence[Any], call: str) -> tuple[Any, ...]:
    """Return the modules as a tuple; raise ConfigError for one whose state has no accessors."""
    for one in modules:
        if isinstance(one, Group):
            raise ConfigError(
                f"{call} takes modules by position, and a group by its keyword: "
                f"write {call}(group=group)"
            )
        if isinstance(one, Variable):
            raise ConfigError(
                f"{call} got the variable {one.name!r}: leave it out, {call} updates all "
                f"variables by itself"
            )
        is_torch = _has_methods(one, "state_dict", "load_state_dict")
        is_module = is_torch or _has_methods(one, "get_weights", "set_weights")
        if isinstance(one, type) or not is_module:
            raise ConfigError(
                f"{call} takes modules and optimizers of PyTorch and models of Keras (with "
                f"state_dict and load_state_dict, or get_weights and set_weights), not "
                f"{one!r:.80}: pass the module itself, or broadcast arrays yourself after the block"
            )
    return tuple(modules)


def _has_methods(module: Any, read: str, write: str) -> bool:
    return callable(getattr(module, read, None)) and callable(getattr(module, write, None))


def _broadcast_modules(
    modules: Sequence[Any], root: int, group: Group | None, rank: int, timeout: float | None
) -> None:
    """Broadcast the modules' state from `root` to all ranks of a group. Collective."""
    arguments: dict[str, Any] = {"root": root, "group": group, "timeout": timeout}
    for module in modules:
        if not _has_methods(module, "state_dict", "load_state_dict"):
            weights = broadcast(module.get_weights(), **arguments)
            if rank != root:
                module.set_weights(weights)
            continue
        state = module.state_dict()
        has_only_arrays = not hasattr(module, "param_groups") and all(
            library_of(one) is not None for one in state.values()
        )
        send: Any = broadcast if has_only_arrays else broadcast_object
        newest = send(state, **arguments)
        if rank != root:
            module.load_state_dict(newest)
