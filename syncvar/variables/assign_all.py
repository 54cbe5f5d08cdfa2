"""Writing many variables in one call: what has to travel travels together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from syncvar.collectives.buckets import owns_itself
from syncvar.core.errors import ConfigError, UsageError
from syncvar.variables.collective_requests import together_request
from syncvar.variables.flat_bucket import FlatBucket
from syncvar.variables.policy import AccessKind, Action, Effect, Travel
from syncvar.variables.shared_copy import written_once
from syncvar.variables.storage import being_written
from syncvar.variables.variable import UFUNCS, Variable

if TYPE_CHECKING:
    from syncvar.runtime.communicator import CollectiveSpec
    from syncvar.variables.scope import Owner

__all__ = ["assign_add_all", "assign_all", "assign_sub_all"]


def assign_all(pairs: Iterable[tuple[Variable, Any]]) -> None:
    """Set several variables, each as `variable.assign(x)`, with as few transfers as possible.

    Args:
        pairs: (variable, value); variables of one strategy, each at most once, the same on every replica.

    Raises:
        ConfigError: A wrong value, or a variable twice; nothing is written anywhere, the other replicas raise
            MismatchError.
        UsageError: Variables of different strategies.
        NoAggregation: As `assign`.
        MismatchError: The replicas write different variables.

    Cost: one all-reduce for all variables of one dtype and aggregation that are combined on writing; variables of
        other kinds are written one after another.

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
    chosen = (
        pairs if type(pairs) is list else list(pairs) if isinstance(pairs, Iterable) else [pairs]
    )  # which is refused as a pair
    if not chosen:
        return
    if type(chosen[0]) is tuple and chosen[0] and type(chosen[0][0]) is Variable:
        prepared = chosen[0][0]._groups.get((operation, len(chosen)))  # noqa: SLF001  (variables are of this room)
        if prepared is not None and prepared.write(chosen):
            return
    variables = _checked_variables(name, chosen)
    owner = variables[0]._owner  # noqa: SLF001
    strangers = [variable for variable in variables if variable._owner is not owner]  # noqa: SLF001
    if strangers:
        raise UsageError(
            f"{name}: {strangers[0].name!r} belongs to another strategy than {variables[0].name!r}; call it for each"
        )
    if (elsewhere := variables[0].stepper) is not None:
        with elsewhere.transaction():
            for variable, x in chosen:
                getattr(variable, operation.value)(x)
        return
    kinds = [variable._kind for variable in variables]  # noqa: SLF001
    op_of = {
        kind: _op(variables[kinds.index(kind)]._decide(operation))  # noqa: SLF001
        for kind in dict.fromkeys(kinds)
    }
    ops = [op_of[kind] for kind in kinds]
    together, apart = chosen, []
    if not all(op_of.values()):
        apart = [pair for pair, op in zip(chosen, ops, strict=True) if not op]
        together = [pair for pair, op in zip(chosen, ops, strict=True) if op]
        variables = [pair[0] for pair in together]
        ops = [op for op in ops if op]
    if together:
        first, roster = variables[0], owner.roster
        if roster is not None and not roster.is_free and roster.is_due(first._tally):  # noqa: SLF001
            roster.before_write(variables)
        if not apart and FlatBucket.takes(owner, variables, ops):
            group = _group(owner, operation, name, variables, ops[0])
            group.perform(
                name,
                lambda number: variables[number]._operand(  # noqa: SLF001
                    operation, together[number][1], reduced=True
                ),
            )
            first._count_step()  # noqa: SLF001
            return
        storages = [variable._storage for variable in variables]  # noqa: SLF001

        def check() -> CollectiveSpec:
            arrays = [variable._operand(operation, x, reduced=True) for variable, x in together]  # noqa: SLF001
            for variable, x in apart:
                variable._operand(operation, x, reduced=False)  # noqa: SLF001
            targets = [storage.writable() for storage in storages]
            names = tuple([variable._name for variable in variables])  # noqa: SLF001
            # Nothing but a view lies where a copy does, whose memory is its own.
            are_apart = all(map(owns_itself, arrays))
            return together_request(
                owner.communicator,
                name,
                names,
                arrays,
                ops,
                targets,
                UFUNCS[operation],
                reproducible=owner.reproducible,
                are_apart=are_apart,
            )

        with being_written(owner.communicator, name, storages), written_once(owner, storages):
            owner.communicator.perform(name, check, owner.timeout)
        first._count_step()  # noqa: SLF001
        for variable in variables:
            variable._count_write()  # noqa: SLF001
    for variable, x in apart:
        getattr(variable, operation.value)(x)


def _group(
    owner: Owner, operation: AccessKind, name: str, variables: list[Variable], op: str
) -> FlatBucket:
    """Return the prepared group of variables; it is made when they are first written together."""
    groups = variables[0]._groups  # noqa: SLF001
    key = operation, len(variables)
    found = groups.get(key)
    if found is None or not found.is_of(variables):
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
                f"{name} takes pairs of a variable and a value, for instance [(v, 1.0), (w, x)], not {pair!r:.100}"
            )
        if id(pair[0]) in seen:
            raise ConfigError(
                f"{name}: the variable {pair[0].name!r} is named twice; combine its values first"
            )
        seen.add(id(pair[0]))
    return [variable for variable, _ in pairs]
