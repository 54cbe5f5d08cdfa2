"""Where the program is: the functions that ask, and the replica context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncvar.collectives.sync_points import meet
from syncvar.core.errors import UsageError
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.core.pytree import is_structure, parts_of, rebuilt
from syncvar.runtime.flight_recorder.call_record import CallFields, CallLabel
from syncvar.strategies.value_reduction import gather_values, own_part, reduce_values
from syncvar.variables.policy import CallContext
from syncvar.variables.scope import ScopeEntry, context_of, current_owner, current_place, places
from syncvar.variables.values import DistributedValues, PerReplica
from syncvar.variables.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.strategies.base import Strategy

__all__ = [
    "ReplicaContext",
    "ValueContext",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


@dataclass(frozen=True, slots=True)
class ValueContext:
    """For which replica a value is made.

    Example:
        >>> import syncvar as sv
        >>> sv.ValueContext().num_replicas_in_sync
        1
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class ReplicaContext(MigrationHintsMixin):
    """This replica among the others; got by `sv.get_replica_context()` inside `run`, or outside every scope.

    Example:
        >>> import syncvar as sv
        >>> context = sv.get_replica_context()
        >>> context.replica_id_in_sync_group, context.num_replicas_in_sync
        (0, 1)
        >>> context.all_reduce("SUM", 2.0)
        array(2.)
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica, 0 to `num_replicas_in_sync` - 1."""
        return self._strategy.replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of the strategy."""
        return self._strategy.num_replicas_in_sync

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Combine a value or structure elementwise over all replicas. Collective.

        Args:
            reduce_op: A ReduceOp or its name.
            value: Array, or a structure of arrays; the same shapes and dtypes on every replica.

        Raises:
            UsageError: In merge or cross context.
        """
        return reduce_values(self._inside("all_reduce"), reduce_op, value, None)

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate a value or structure over all replicas, along `axis`. Collective.

        Args:
            value: Array, or a structure of arrays; lengths along `axis` may differ.
            axis: Where to concatenate; may be negative.

        Raises:
            UsageError: In merge or cross context.
            ConfigError: A scalar, or an axis that the value does not have.
        """
        strategy = self._inside("all_gather")
        return gather_values(strategy.communicator, value, axis, strategy.timeout, "all_gather")

    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Stop all replicas and run `merge_fn(strategy, *args, **kwargs)` in every process in merge context.

        Args:
            merge_fn: Sees each argument as a PerReplica; what it captures must be the same on all replicas.
            args: This replica's arguments.
            kwargs: Likewise, by name.

        Returns:
            Its result in this process.

        Raises:
            UsageError: Inside another merge_call.
            MismatchError: Another replica does not call it.
        """
        strategy = self._inside("merge_call")
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        label = CallLabel(f"merge_call({name})", CallFields("merge_call"))
        meet(strategy.communicator, label, ("merge_call", name), strategy.timeout)
        stack = places()
        stack.append(ScopeEntry(strategy, CallContext.MERGE))
        try:
            result = merge_fn(
                strategy,
                *map(_grouped, args),
                **{key: _grouped(one) for key, one in (kwargs or {}).items()},
            )
        finally:
            stack.pop()
        return own_part(result)

    def _inside(self, what: str) -> Strategy:
        context = context_of(self._strategy, what)
        if context in (CallContext.MERGE, CallContext.CROSS):
            raise UsageError(
                f"{what} belongs into replica context; in {context.value} context write "
                f"strategy.reduce(op, x, axis=None) or strategy.gather(x, axis=0)"
            )
        return self._strategy


def get_strategy() -> Strategy:
    """Return the strategy in force; outside every scope the default strategy, which spans the world.

    Example:
        >>> import syncvar as sv
        >>> sv.get_strategy().num_replicas_in_sync
        1
    """
    strategy: Any = current_owner()
    return strategy  # type: ignore[no-any-return]


def has_strategy() -> bool:
    """Return whether the program is inside a scope or `run`.

    Example:
        >>> import syncvar as sv
        >>> sv.has_strategy()
        False
    """
    return current_place() is not None


def get_replica_context() -> ReplicaContext | None:
    """Return this replica's context; None in cross and merge context; outside every scope the default strategy's."""
    return None if in_cross_replica_context() else ReplicaContext(get_strategy())


def in_cross_replica_context() -> bool:
    """Return whether the program is in cross or merge context.

    Example:
        >>> import syncvar as sv
        >>> with sv.MirroredStrategy().scope():
        ...     sv.in_cross_replica_context()
        True
    """
    place = current_place()
    return place is not None and place.context in (CallContext.CROSS, CallContext.MERGE)


def _grouped(value: Any) -> Any:
    """Return an argument of merge_call as the merge function sees it."""
    if value is None or isinstance(value, Variable | DistributedValues):
        return value
    if is_structure(value):
        return rebuilt(value, [_grouped(part) for part in parts_of(value)])
    return PerReplica(value)
