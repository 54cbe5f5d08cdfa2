"""Writing many variables in one call: what has to travel travels together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from syncvar.collectives.buckets import owns_itself
from syncvar.core.errors import ConfigError, UsageError
from syncvar.variables.collective_requests import grouped_request
from syncvar.variables.flat_bucket import FlatBucket
from syncvar.variables.policy import AccessKind, Action, Effect, Travel
from syncvar.variables.shared_copy import write_once
from syncvar.variables.storage import marked_as_written
from syncvar.variables.variable import Variable
from syncvar.variables.variable_state import UFUNCS, state_of
from syncvar.variables.variable_writes import checked_operand

if TYPE_CHECKING:
    from syncvar.runtime.communicator import CollectiveSpec
    from syncvar.variables.variable_owner import VariableOwner


def assign_all(pairs: Iterable[tuple[Variable, Any]]) -> None:
    """Set several variables, each as `variable.assign(x)`, with as few transfers as possible.

    Args:
        pairs: (variable, value); variables of one strategy, each at most once, the same on every
            replica.

    Raises:
        ConfigError: A wrong value, or a variable twice; nothing is written anywhere, the other
            replicas raise MismatchError.
        UsageError: Variables of different strategies.
        NoAggregation: As `assign`.
        MismatchError: The replicas write different variables.

    Cost: one all-reduce for all variables of one dtype and aggregation that are combined on
        writing; variables of other kinds are written one after another.

    Example:
        >>> import syncvar as sv
        >>> v, w = sv.Variable(1.0), sv.Variable([2.0, 3.0])
        >>> sv.assign_all([(v, 5.0), (w, [6.0, 7.0])])
        >>> float(v), w.numpy()
        (5.0, array([6., 7.], dtype=float32))
    """
    _write(AccessKind.ASSIGN, "assign_all", pairs)


def assign_add_all(pairs: Iterable[tuple[Variable, Any]]) -> None:
    """Add to several variables, each as `variable.assign_add(x)`; see `assign_all`.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable(1.0)
        >>> sv.assign_add_all([(v, 2.0)])
        >>> float(v)
        3.0
    """
    _write(AccessKind.ASSIGN_ADD, "assign_add_all", pairs)


def assign_sub_all(pairs: Iterable[tuple[Variable, Any]]) -> None:
    """Subtract from several variables, each as `variable.assign_sub(x)`; see `assign_all`.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable(1.0)
        >>> sv.assign_sub_all([(v, 2.0)])
        >>> float(v)
        -1.0
    """
    _write(AccessKind.ASSIGN_SUB, "assign_sub_all", pairs)


def _write(operation: AccessKind, name: str, pairs: Iterable[tuple[Variable, Any]]) -> None:
    # Anything else is rejected below as an invalid pair.
    chosen = (
        pairs if type(pairs) is list else list(pairs) if isinstance(pairs, Iterable) else [pairs]
    )
    if not chosen:
        return
    if type(chosen[0]) is tuple and chosen[0] and type(chosen[0][0]) is Variable:
        prepared = state_of(chosen[0][0]).groups.get((operation, len(chosen)))
        if prepared is not None and prepared.write(chosen):
            return
    variables = _checked_variables(name, chosen)
    owner: VariableOwner = variables[0].strategy
    strangers = [variable for variable in variables if variable.strategy is not owner]
    if strangers:
        raise UsageError(
            f"{name}: {strangers[0].name!r} belongs to another strategy than "
            f"{variables[0].name!r}; call it for each"
        )
    if (elsewhere := variables[0].stepper) is not None:
        with elsewhere.transaction():
            for variable, x in chosen:
                getattr(variable, operation.value)(x)
        return
    states = [state_of(variable) for variable in variables]
    kinds = [state.kind for state in states]
    op_of = {
        kind: _op(states[kinds.index(kind)].decide(operation)) for kind in dict.fromkeys(kinds)
    }
    ops = [op_of[kind] for kind in kinds]
    together, apart = chosen, []
    if not all(op_of.values()):
        apart = [pair for pair, op in zip(chosen, ops, strict=True) if not op]
        together = [pair for pair, op in zip(chosen, ops, strict=True) if op]
        variables = [pair[0] for pair in together]
        states = [state_of(variable) for variable in variables]
        ops = [op for op in ops if op]
    if together:
        first, registry = states[0], owner.registry
        if registry is not None and not registry.is_free and registry.is_due(first.tally):
            registry.before_write(states)

        def operand(number: int) -> Any:
            return checked_operand(states[number], operation, together[number][1], is_reduced=True)

        if not apart and FlatBucket.takes(owner, states, ops):
            group = _group(owner, operation, name, variables, ops[0])
            group.perform(name, operand)
            first.count_step()
            return
        storages = [state.storage for state in states]

        def check() -> CollectiveSpec:
            arrays = [operand(number) for number in range(len(states))]
            for variable, x in apart:
                checked_operand(variable, operation, x, is_reduced=False)
            targets = [storage.writable() for storage in storages]
            names = tuple([state.name for state in states])
            # An array that owns its memory cannot overlap a copy.
            no_overlap = all(map(owns_itself, arrays))
            return grouped_request(
                owner.communicator,
                name,
                names,
                arrays,
                ops,
                targets,
                UFUNCS[operation],
                reproducible=owner.reproducible,
                no_overlap=no_overlap,
            )

        with marked_as_written(owner.communicator, name, storages), write_once(owner, storages):
            owner.communicator.perform(name, check, owner.timeout)
        first.count_step()
        for state in states:
            state.count_write()
    for variable, x in apart:
        getattr(variable, operation.value)(x)


def _group(
    owner: VariableOwner, operation: AccessKind, name: str, variables: list[Variable], op: str
) -> FlatBucket:
    """Return the flat bucket of these variables; create it at their first grouped write."""
    groups = state_of(variables[0]).groups
    key = operation, len(variables)
    found: FlatBucket | None = groups.get(key)
    if found is None or not found.is_of([state_of(one) for one in variables]):
        found = groups[key] = FlatBucket(owner, variables, name, op, UFUNCS[operation])
    return found


def _op(action: Action) -> str:
    """Return by which op a write is combined, or "" where it is not."""
    if action.travel not in (Travel.SUM, Travel.MEAN) or action.effect is Effect.SHARE:
        return ""
    return "sum" if action.travel is Travel.SUM else "mean"


def _checked_variables(name: str, pairs: list[Any]) -> list[Variable]:
    """Return the variables of pairs.

    Raises:
        ConfigError: These are no pairs of a variable and a value, or a variable is named twice.
    """
    if set(map(type, pairs)) == {tuple} and set(map(len, pairs)) == {2}:
        variables = [variable for variable, _ in pairs]
        if set(map(type, variables)) == {Variable} and len(set(map(id, variables))) == len(
            variables
        ):
            return variables
    seen: set[int] = set()
    for pair in pairs:
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not isinstance(pair[0], Variable)
        ):
            raise ConfigError(
                f"{name} takes pairs of a variable and a value, for instance [(v, 1.0), (w, x)], "
                f"not {pair!r:.100}"
            )
        if id(pair[0]) in seen:
            raise ConfigError(
                f"{name}: the variable {pair[0].name!r} is named twice; combine its values first"
            )
        seen.add(id(pair[0]))
    return [variable for variable, _ in pairs]
