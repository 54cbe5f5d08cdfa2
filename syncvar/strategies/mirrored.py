"""Strategies with a copy of every variable on each replica, or with one copy on each host."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Never

from syncvar.bootstrap.process import current
from syncvar.collectives.groups import communicator_of
from syncvar.core.migration_hints import unexpected_keyword
from syncvar.runtime.collective_spec import fingerprint
from syncvar.strategies.base import Strategy
from syncvar.variables.policy import VariableSynchronization
from syncvar.variables.storage import shared_copy
from syncvar.variables.variable_owner import set_default

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.storage import Storage

_WARNED = "warned_local_replicas"
_log = logging.getLogger("syncvar")


class DefaultStrategy(Strategy):
    """The strategy of a program that enters no scope, over the world; see `sv.get_strategy()`."""

    def __init__(self) -> None:
        super().__init__(current().world, is_default=True)


class MirroredStrategy(Strategy):
    """A copy of every variable on each replica of one host.

    The constructor is collective over the group, but sends nothing.

    Args:
        group: Ranks that are the replicas; None means those of this host.
        strict: Whether initial values that differ between replicas are an error, not a warning.
        check_cross_writes: Whether to compare what the replicas write in cross context.
        reproducible: Whether to sum by the tree over replicas: the same bits for all sizes and
            transports.
        timeout: Seconds that a call waits; None means the job's default.

    Example:
        >>> import syncvar as sv
        >>> strategy = sv.MirroredStrategy()
        >>> with strategy.scope():
        ...     total = sv.Variable(0.0, aggregation=sv.VariableAggregation.SUM)
        >>> _ = strategy.run(lambda: total.assign_add(1.0))
        >>> float(total) == strategy.num_replicas_in_sync
        True
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        strict: bool = False,
        check_cross_writes: bool = True,
        reproducible: bool = False,
        timeout: float | None = None,
        **_foreign: Never,
    ) -> None:
        if _foreign:
            raise unexpected_keyword(type(self), _foreign)
        self._has_group = group is not None
        members = self._default_members() if group is None else communicator_of(group).members
        super().__init__(
            _own_communicator(members),
            strict=strict,
            check_cross_writes=check_cross_writes,
            reproducible=reproducible,
            timeout=timeout,
        )

    def _join(self, communicator: Communicator) -> None:
        super()._join(communicator)
        self._on_host = self._host_communicator()

    @property
    def _spans_world(self) -> bool:
        return not self._has_group

    def _communicator_here(self) -> Communicator:
        before = self.context.extras.get(_WARNED, False)
        current().extras.setdefault(_WARNED, before)
        return _own_communicator(self._default_members())

    def _host_communicator(self) -> Communicator | None:
        """Return the communicator of the replicas that share copies; None if each has its own."""
        return None

    def _default_members(self) -> tuple[int, ...]:
        context = current()
        is_first = context.host_count > 1 and context.local_rank == 0
        if is_first and not context.extras.get(_WARNED):
            context.extras[_WARNED] = True
            _log.warning(
                "MirroredStrategy spans the %d ranks of this host; the %d hosts have replicas of "
                "their own. sv.MultiWorkerMirroredStrategy spans all.",
                context.local_world_size,
                context.host_count,
            )
        return context.local_ranks


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """A copy of every variable on each replica of all hosts.

    Example:
        >>> import syncvar as sv
        >>> sv.MultiWorkerMirroredStrategy().num_replicas_in_sync
        1
    """

    def _default_members(self) -> tuple[int, ...]:
        return current().world.members


class CentralStorageStrategy(MirroredStrategy):
    """One copy of every variable on each host, in memory that the replicas of the host share.

    Replicas combine a write as under MirroredStrategy; then one replica of each host stores it.
    `read_value()` returns a copy. `read_value(copy=False)` returns a view of the shared copy, valid
    until the next write. ON_READ and NONE variables have a copy on each replica. The strategy
    defers no writes.

    Args:
        group: Ranks that are replicas; None means the world.
        strict: Whether initial values that differ between replicas are an error.
        check_cross_writes: Whether to compare what the replicas write in cross context.
        reproducible: Whether to sum by the tree over replicas, independent of algorithm and hosts.
        timeout: Seconds that a call waits; None means the job's default.

    Cost: memory for one copy on each host instead of one for each replica. A write takes two
        barriers more than under MirroredStrategy, and each replica holds the new value meanwhile.

    Example:
        >>> import syncvar as sv
        >>> strategy = sv.CentralStorageStrategy()
        >>> with strategy.scope():
        ...     total = sv.Variable(0.0, aggregation=sv.VariableAggregation.SUM)
        >>> _ = strategy.run(lambda: total.assign_add(1.0))
        >>> float(total) == strategy.num_replicas_in_sync
        True
    """

    _has_copies = False

    def _default_members(self) -> tuple[int, ...]:
        return current().world.members

    def _host_communicator(self) -> Communicator | None:
        """Return the communicator of the replicas of this host; None outside the group."""
        communicator, context = self._communicator, self.context
        if communicator.rank is None:
            return None
        host_of = context.hosts.host_of
        here = host_of(context.rank)
        members = tuple(rank for rank in communicator.members if host_of(rank) == here)
        return context.communicator(fingerprint("on host", communicator.identity, here), members)

    def _create_storage(
        self, value: NDArray[Any], synchronization: VariableSynchronization
    ) -> Storage:
        """Return the memory for a variable's copy; collective on the host for shared copies."""
        if synchronization is not VariableSynchronization.ON_WRITE or self._on_host is None:
            return super()._create_storage(value, synchronization)
        return shared_copy(self.context, self._on_host, value, self.timeout)


def _own_communicator(members: tuple[int, ...]) -> Communicator:
    """Return the strategy's own communicator.

    Its identity contains how many strategies this process has made over the same ranks.
    """
    context = current()
    context.refuse_in_block("making a strategy")
    counts: dict[Any, int] = context.extras.setdefault("strategy_counts", {})
    number = counts[members] = counts.get(members, 0) + 1
    return context.communicator(fingerprint("strategy", members, number), members)


set_default(DefaultStrategy)
