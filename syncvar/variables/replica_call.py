"""One collective of the replicas for one access of a variable; reads and writes both use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.core.reduce_ops import quiet
from syncvar.variables.collective_requests import (
    are_equal,
    equality_request,
    is_compared_first,
    rows_request,
)
from syncvar.variables.policy import Action, Travel, VariableAggregation
from syncvar.variables.scope import scope_stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.variables.variable_state import VariableState


def combine(
    state: VariableState, action: Action, what: str, operand: Callable[[], Any], request: Any
) -> Any:
    """Make one collective of the replicas, and return its result.

    If `operand` raises on a rank, that rank informs the others and no copy changes.
    """
    owner = state.owner
    communicator = owner.communicator

    def check() -> Any:
        return request(
            action,
            communicator,
            operand(),
            what,
            _difference_hint(state),
            reproducible=owner.reproducible,
        )

    state.tally.collectives += 1
    is_same = action.travel is Travel.SAME and request is not rows_request
    if is_same and is_compared_first(communicator):
        together = _same_everywhere(state, what, operand)
        if together is not None:
            return together
        state.tally.collectives += 1
    return communicator.perform(what, check, owner.timeout)


def _difference_hint(state: VariableState) -> str:
    """Return what to write instead when replicas assign different values outside `run`."""
    owner, aggregation = state.owner, state.aggregation
    same = "x = strategy.reduce('MEAN', x, axis=None)"
    hint = f"Write the same on every replica, for instance {same}; or "
    if aggregation is VariableAggregation.NONE:
        return hint + (
            "give the variable an aggregation that combines (it has NONE): "
            "aggregation=sv.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
        )
    if owner.is_default and scope_stack(owner.context):
        return hint + (
            "make the variable under `with strategy.scope():`. It belongs to the default "
            "strategy, and is written in another strategy's run as outside of it"
        )
    is_first = aggregation is VariableAggregation.ONLY_FIRST_REPLICA
    taken = "replica 0's" if is_first else "each replica's own"
    return hint + (
        f"write inside strategy.run, where aggregation {aggregation.name} takes {taken} value"
    )


def _same_everywhere(
    state: VariableState, what: str, operand: Callable[[], NDArray[Any]]
) -> NDArray[Any] | None:
    """Return the common input of all replicas; None, on all of them, if the inputs differ."""
    communicator, timeout = state.owner.communicator, state.owner.timeout
    inputs: list[NDArray[Any]] = []
    are_same: bool | None = None
    try:
        with quiet():
            inputs.append(operand())
    except Exception:  # noqa: S110  (the slow path raises it again, and informs the others)
        pass
    else:
        are_same = are_equal(communicator, inputs[0], what, timeout)

    def check() -> Any:
        if not inputs:
            inputs.append(operand())
        return equality_request(communicator, inputs[0], what)

    if are_same is None:
        are_same = communicator.perform(what, check, timeout)
    return inputs[0] if are_same else None
