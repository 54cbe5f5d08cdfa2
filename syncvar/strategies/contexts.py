"""The replica context, and functions that return the strategy and the context in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.collectives.stage_builders import meet
from syncvar.core.errors import UsageError
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.core.pytree import children_of, is_structure, rebuild
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.strategies.value_reduction import gather_values, own_part, reduce_values
from syncvar.variables.policy import CallContext
from syncvar.variables.values import DistributedValues, PerReplica
from syncvar.variables.variable import Variable
from syncvar.variables.variable_owner import (
    ScopeEntry,
    context_of,
    current_owner,
    current_scope,
    scope_stack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.strategies.base import Strategy


class ReplicaContext(MigrationHintsMixin):
    """This replica and its collectives; from `sv.get_replica_context()` inside `run`.

    The default strategy has one outside every scope.

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
        """Number of this replica, 0 to `num_replicas_in_sync` - 1."""
        return self._strategy.replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of the strategy."""
        return self._strategy.num_replicas_in_sync

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Combine a value or pytree elementwise over all replicas. Collective.

        Args:
            reduce_op: A ReduceOp or its name.
            value: Array or pytree of arrays; the same shapes and dtypes on every replica.

        Returns:
            The combined value, the same on all replicas.

        Raises:
            UsageError: The call is in merge or cross context.
        """
        return reduce_values(self._inside("all_reduce"), reduce_op, value, None)

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate a value or pytree over all replicas, along `axis`. Collective.

        Args:
            value: Array or pytree of arrays; lengths along `axis` may differ.
            axis: Axis to concatenate along; may be negative.

        Returns:
            The concatenated value, the same on all replicas.

        Raises:
            UsageError: The call is in merge or cross context.
            ConfigError: The value is a scalar or has no such axis.
        """
        strategy = self._inside("all_gather")
        return gather_values(strategy.communicator, value, axis, strategy.timeout, "all_gather")

    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Run `merge_fn(strategy, *args, **kwargs)` in every process in merge context. Collective.

        Args:
            merge_fn: Function that gets each argument as a PerReplica. What it captures must be
                the same on all replicas.
            args: This replica's positional arguments.
            kwargs: This replica's keyword arguments; None for none.

        Returns:
            The result of `merge_fn` in this process.

        Raises:
            UsageError: The call is inside another merge_call.
            MismatchError: Another replica makes a different call.
        """
        strategy = self._inside("merge_call")
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        spec = CollectiveSpec("merge_call", options=(name,), shown=(name,))
        meet(strategy.communicator, spec, strategy.timeout)
        stack = scope_stack()
        stack.append(ScopeEntry(strategy, CallContext.MERGE))
        try:
            named = {key: _grouped(one) for key, one in (kwargs or {}).items()}
            result = merge_fn(strategy, *map(_grouped, args), **named)
        finally:
            stack.pop()
        return own_part(result)

    def _inside(self, method: str) -> Strategy:
        context = context_of(self._strategy, method)
        if context in (CallContext.MERGE, CallContext.CROSS):
            raise UsageError(
                f"{method} belongs into replica context; in {context.value} context write "
                f"strategy.reduce(op, x, axis=None) or strategy.gather(x, axis=0)"
            )
        return self._strategy


def get_strategy() -> Strategy:
    """Return the strategy in force; outside every scope, the default strategy of the world.

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
    return current_scope() is not None


def get_replica_context() -> ReplicaContext | None:
    """Return this replica's context; None in cross and merge context.

    Outside every scope it is the context of the default strategy.

    Example:
        >>> import syncvar as sv
        >>> strategy = sv.MirroredStrategy()
        >>> strategy.run(lambda: sv.get_replica_context().replica_id_in_sync_group)
        0
    """
    return None if in_cross_replica_context() else ReplicaContext(get_strategy())


def in_cross_replica_context() -> bool:
    """Return whether the program is in cross or merge context.

    Example:
        >>> import syncvar as sv
        >>> with sv.MirroredStrategy().scope():
        ...     sv.in_cross_replica_context()
        True
    """
    place = current_scope()
    return place is not None and place.context in (CallContext.CROSS, CallContext.MERGE)


def _grouped(value: Any) -> Any:
    if value is None or isinstance(value, Variable | DistributedValues):
        return value
    if is_structure(value):
        return rebuild(value, [_grouped(part) for part in children_of(value)])
    return PerReplica(value)
