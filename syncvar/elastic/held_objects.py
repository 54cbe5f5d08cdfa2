"""The commits of a state, which each member keeps, and gives to those that lack them.

A member keeps the last complete commit and the one in progress. `synchronize` follows these rules
when members meet in a new generation:

* A snapshot bears its generation and number, and a worker the generation in which its state was
  last made or synchronized, its *tag*. Holders are the workers with the newest tag.
* A commit that is complete on one member is in memory on all members of its generation. So the
  common commit is the smallest of the holders' newest numbers, and every holder has it.
* A worker that has the common commit takes its own snapshot. The others take the shared values
  from the holder with the lowest rank, and keep their own values.
* Without a holder the newest checkpoint serves, else the objects as rank 0 has made them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.checkpoint.trackables import outside_scopes
from syncvar.collectives.all_reduce import agree
from syncvar.core.errors import MismatchError, UsageError
from syncvar.elastic.snapshot import (
    LeafCache,
    StateSnapshot,
    described,
    mean_parts,
    staged,
    take,
    take_here,
)
from syncvar.elastic.state_transfer import (
    NEVER,
    broadcast_values,
    choose_commit,
    exchange_contents,
    exchange_holdings,
)
from syncvar.elastic.world_move import WorldMove, variables_by_key
from syncvar.optimizers.outer_slots import OuterSlots
from syncvar.runtime.collective_spec import fingerprint
from syncvar.variables.policy import CallContext
from syncvar.variables.variable_owner import current_scope
from syncvar.variables.variable_state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.checkpoint.checkpoint import CheckpointCore
    from syncvar.checkpoint.manager import CheckpointManager
    from syncvar.checkpoint.save_plan import LeafHeader
    from syncvar.checkpoint.trackables import Leaf
    from syncvar.elastic.state_transfer import TakeOver
    from syncvar.runtime.communicator import Communicator

_COMMIT = "commit of sv.elastic.State"
_DIGITS = 15  # hexadecimal digits of a digest that fit into a positive int64


class MembershipChange(BaseException):
    """A commit is complete, and the job changes its members now; `sv.elastic.run` catches it.

    It is no Exception, as CancelledError of asyncio is none. A program that catches Exception
    around its steps must not go on alone, while the others form the next generation.
    """


class Membership(Protocol):
    """What a commit asks about the elastic job."""

    @property
    def generation(self) -> int:
        """Number of the present generation."""

    def change_is_pending(self) -> bool:
        """Return whether the job wants to change its members at the next commit."""


class HeldObjects:
    """The objects of a `State`, and their commits in memory. `sv.elastic.run` drives it.

    Args:
        core: The objects.
        manager: Where to look for a checkpoint if no worker holds the state.
    """

    def __init__(self, core: CheckpointCore, manager: CheckpointManager | None) -> None:
        self._core, self._manager, self._cache = core, manager, LeafCache(core)
        self.membership: Membership | None = None  # None outside of elastic jobs
        self.reset_functions: list[Callable[[], None]] = []
        self._snapshots: list[StateSnapshot] = []  # at most two, the newest last
        self._complete: StateSnapshot | None = None  # the last complete one
        self._tag = NEVER
        self._context = current()
        self._move: WorldMove | None = None

    # -- commits -----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Take a snapshot and complete it together with all ranks of the world. Collective.

        Raises:
            MembershipChange: The commit is complete, and the members change.
        """
        context = self._require_here("state.commit()")
        number = 0 if self._complete is None else self._complete.number + 1
        before = [one for one in self._snapshots if one is not self._complete]
        with outside_scopes():
            found = self._described(context.world)
            values = take(found, before[-1].values if before else {})
            snapshot = StateSnapshot(self.generation, number, context.world_size, values)
            self._snapshots = [*([self._complete] if self._complete else []), snapshot]
            is_changing = self._agree(context.world, snapshot)
        self._complete, self._tag = snapshot, snapshot.generation
        if is_changing:
            raise MembershipChange(f"the members of the job change after commit {number}")

    def _described(self, world: Communicator) -> list[tuple[Leaf, LeafHeader | None]]:
        """Return all objects that have a value; the other ranks learn of an error."""
        try:
            return described(self._leaves())
        except Exception as error:
            world.perform(_COMMIT, partial(_raise, error))
            raise

    def _agree(self, world: Communicator, snapshot: StateSnapshot) -> bool:
        """Complete a commit; return whether the members are to change."""
        pending = self.membership is not None and self.membership.change_is_pending()
        plain = sorted(snapshot.plain().items())
        keys = fingerprint(*[key for key, one in snapshot.values.items() if not one.is_own]) >> 2
        digests = [int(digest[:_DIGITS], 16) for _, digest in plain]
        pairs = np.array([snapshot.number, keys, *digests], np.int64)
        flags = np.concatenate([[int(pending)], pairs, -pairs])
        largest = agree(world, _COMMIT, "max", flags, None)
        differ = largest[1 : pairs.size + 1] != -largest[pairs.size + 1 :]
        if differ[:2].any():
            raise MismatchError(
                "the ranks do not commit the same: every rank must have the same objects in its "
                "sv.elastic.State, and make the same commits",
                {current().rank: f"commit {snapshot.number} of {', '.join(snapshot.values)}"[:200]},
            )
        pairs_of_plain = zip(plain, differ[2:], strict=True)
        snapshot.own = frozenset(key for (key, _), is_own in pairs_of_plain if is_own)
        return bool(largest[0])

    def restore(self) -> None:
        """Put the values of the last complete commit into the objects."""
        self._require_here("state.restore()")
        if self._complete is None:
            raise UsageError(
                "there is no commit to restore: call state.commit() on every rank before, or run "
                "the function by sv.elastic.run, which commits the state at its start"
            )
        self._put(self._complete)

    def _put(self, snapshot: StateSnapshot) -> None:
        leaves = self._leaves()
        with outside_scopes():
            for variable in variables_by_key(leaves).values():
                state_of(variable).flush()  # else the next read would add what waits
            found = list(staged(leaves, snapshot, current().world))
            for leaf, value in found:
                leaf.put(value)

    def _leaves(self) -> list[Leaf]:
        return self._cache.leaves()

    def _require_here(self, call: str) -> ProcessContext:
        """Return the current context; raise UsageError where this call is not possible."""
        context = current()
        context.refuse_in_block(call)
        place = current_scope()
        if place is not None and place.context in (CallContext.REPLICA, CallContext.MERGE):
            raise UsageError(
                f"{call} is called inside strategy.run, where a step is under way; call it after "
                "strategy.run has returned"
            )
        if context is not self._context:
            raise UsageError(
                f"{call}: the objects of this state belong to a job that this process has left. "
                "In an elastic job sv.elastic.run moves them; else make them again after sv.init()"
            )
        return context

    # -- another generation ------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of the present generation."""
        return current().generation if self.membership is None else self.membership.generation

    def holds(self) -> tuple[int, int]:
        """Return the tag of this worker's state, and the number of its newest snapshot, or -1."""
        return self._tag, self._snapshots[-1].number if self._snapshots else NEVER

    def moves_to_current_world(self) -> None:
        """Move all objects to the world that this process has joined; sends nothing.

        Only shared copies (CentralStorageStrategy) need a meeting of the replicas of each host.
        """
        context = current()
        if context is self._context:
            return
        leaves = self._core.objects_here().leaves
        if not self._snapshots:  # values as the program has made them
            size = self._context.world_size
            self._snapshots = [StateSnapshot(NEVER, 0, size, take_here(leaves, is_whole=size == 1))]
        self._move = self._move or WorldMove(self._core, self._context)
        with outside_scopes():
            self._move.run(leaves)
        self._context = context

    def synchronize(self) -> None:
        """Give all members the same commit, and call the reset functions. Collective.

        All members have moved their objects before.
        """
        world = self._require_here("synchronize").world
        if not self._snapshots:
            with outside_scopes():
                values = take(described(self._leaves()), {})
            self._snapshots = [StateSnapshot(NEVER, 0, world.size, values)]
        with outside_scopes():
            everyone = exchange_holdings(world, self._tag, self._snapshots)
            is_new = all(one.tag == NEVER for one in everyone)
            if not (is_new and self._restore_checkpoint(world)):
                plan = choose_commit(everyone)
                if is_new:  # modules begin alike, as variables do, whatever each rank has drawn
                    values = self._snapshots[-1].values
                    own = frozenset(key for key in plan.own if values[key].kind != "state")
                    plan = plan._replace(own=own)
                self._take_over(world, plan)
        for function in self.reset_functions:
            function()

    def _restore_checkpoint(self, world: Communicator) -> bool:
        """Restore the newest checkpoint as the common commit, if there is one. Collective."""
        if self._manager is None or self._manager.restore_latest() is None:
            return False
        restored = StateSnapshot(
            self.generation, 0, world.size, take(described(self._leaves()), {})
        )
        self._agree(world, restored)
        self._adopt(restored)
        return True

    def _take_over(self, world: Communicator, plan: TakeOver) -> None:
        """Take the common commit, from this rank's snapshots or from another rank."""
        rank = world.member_rank
        has_it = rank in plan.having
        base = self._snapshots[-1]
        if has_it:
            base = next(one for one in self._snapshots if one.identity == plan.common)
            base.own = plan.own
        mine = base if rank == plan.source else None
        contents = exchange_contents(world, plan.source, mine, self._pins())
        if len(plan.having) < world.size:
            broadcast_values(world, plan.source, contents, mine)
        values = dict(base.values)
        if not has_it:
            own = {key: one for key, one in values.items() if one.is_own or key in plan.own}
            values = {**own, **contents.values}
        is_same = len(plan.having) == plan.ranks == world.size
        if not is_same:
            for key in [key for key, one in contents.values.items() if one.is_part]:
                value = values[key] if has_it else contents.values[key]
                values[key] = mean_parts(world, value, len(plan.having), has_part=has_it)
        # Not the identity of the commit: who has not adopted it has other parts, or first values.
        snapshot = StateSnapshot(self.generation, plan.common[1], world.size, values, plan.own)
        self._add_plain(snapshot)
        self._put(snapshot)
        self._pin(contents.pins)
        for optimizer in () if is_same else self._core.optimizers():
            if isinstance(optimizer.slots, OuterSlots):
                optimizer.slots.join_others()
        self._adopt(snapshot)

    def _adopt(self, snapshot: StateSnapshot) -> None:
        self._snapshots, self._complete, self._tag = [snapshot], snapshot, self.generation

    def _add_plain(self, snapshot: StateSnapshot) -> None:
        """Add plain data that the program of the source has added since its start."""
        for key, one in snapshot.values.items():
            if one.kind == "value" and "/" not in key:
                self._core.objects.setdefault(key, None)

    def _pins(self) -> dict[str, str | None]:
        variables = variables_by_key(self._leaves()).items()
        return {key: state_of(one).pin for key, one in variables if state_of(one).pin is not None}

    def _pin(self, pins: dict[str, str | None]) -> None:
        """Fix the paces of AUTO variables as the source has fixed them."""
        for key, variable in variables_by_key(self._leaves()).items():
            state = state_of(variable)
            if state.pin != pins.get(key):
                state.set_pin(pins.get(key), 0)


def _raise(error: Exception) -> NoReturn:
    raise error
