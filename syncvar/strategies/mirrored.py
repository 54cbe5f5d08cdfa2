"""The strategies whose variables have a copy on every replica."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Never

from syncvar.bootstrap.process import current
from syncvar.collectives.groups import communicator_of
from syncvar.core.lazy_import import unexpected
from syncvar.runtime.communicator import fingerprint
from syncvar.strategies.base import Strategy
from syncvar.variables.scope import set_default

if TYPE_CHECKING:
    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator

_log = logging.getLogger("syncvar")


class DefaultStrategy(Strategy):
    """The strategy of a program that enters no scope; spans the world. Got by `sv.get_strategy()`."""

    def __init__(self) -> None:
        super().__init__(current().world, is_default=True)


class MirroredStrategy(Strategy):
    """A copy of every variable on each replica of one host.

    Constructing is collective over the group, but sends nothing.

    Args:
        group: Ranks that are the replicas; None means those of this host.
        strict: Initial values that differ between replicas are an error, not a warning.
        check_cross_writes: Compare what the replicas write in cross context.
        reproducible: Sum by the tree over replicas: the same bits whatever the sizes and transports.
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
            raise unexpected(type(self), _foreign)
        members = self._default_members() if group is None else communicator_of(group).members
        super().__init__(
            _own_communicator(members),
            strict=strict,
            check_cross_writes=check_cross_writes,
            reproducible=reproducible,
            timeout=timeout,
        )

    def _default_members(self) -> tuple[int, ...]:
        context = current()
        if (
            context.host_count > 1
            and context.local_rank == 0
            and not context.extras.get("said_local_replicas")
        ):
            context.extras["said_local_replicas"] = True
            _log.warning(
                "MirroredStrategy spans the %d ranks of this host; the %d hosts have replicas of their own. "
                "sv.MultiWorkerMirroredStrategy spans all.",
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


def _own_communicator(members: tuple[int, ...]) -> Communicator:
    """Return a group of the strategy's own; its identity counts the strategies made over the same ranks."""
    context = current()
    context.refuse_in_block("making a strategy")
    made: dict[Any, int] = context.extras.setdefault("strategies_made", {})
    number = made[members] = made.get(members, 0) + 1
    return context.communicator(fingerprint("strategy", members, number), members)


set_default(DefaultStrategy)
