"""Writing many variables in one call: what has to travel travels together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.errors import ConfigError, UsageError
from syncvar.variables.policy import Action, Effect, Operation, Travel
from syncvar.variables.requests import together_request
from syncvar.variables.shared_copy import written_once
from syncvar.variables.variable import UFUNCS, Variable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncvar.runtime.group import Request

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
    _write(Operation.ASSIGN, "assign_all", pairs)


def assign_add_all(pairs: Iterable[tuple[Variable, Any]]) -> None:
    """Add to several variables, each as `variable.assign_add(x)`; see `assign_all`.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable(1.0)
        >>> sv.assign_add_all([(v, 2.0)])
        >>> float(v)
        3.0
    """
    _write(Operation.ASSIGN_ADD, "assign_add_all", pairs)


def assign_sub_all(pairs: Iterable[tuple[Variable, Any]]) -> None:
    """Subtract from several variables, each as `variable.assign_sub(x)`; see `assign_all`.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable(1.0)
        >>> sv.assign_sub_all([(v, 2.0)])
        >>> float(v)
        -1.0
    """
    _write(Operation.ASSIGN_SUB, "assign_sub_all", pairs)


def _write(operation: Operation, name: str, pairs: Iterable[tuple[Variable, Any]]) -> None:
    chosen = list(pairs)
    _check_pairs(name, chosen)
    if not chosen:
        return
    owner = chosen[0][0]._owner  # noqa: SLF001  (variables are of this room)
    actions: dict[str, tuple[Action, str]] = {}
    together: list[tuple[Variable, Any]] = []
    ops: list[str] = []
    apart: list[tuple[Variable, Any]] = []
    for pair in chosen:
        variable = pair[0]
        if variable._owner is not owner:  # noqa: SLF001
            raise UsageError(f"{name}: {variable.name!r} belongs to another strategy than {chosen[0][0].name!r}; call it for each")
        kind = variable._kind  # noqa: SLF001
        if kind not in actions:
            action = variable._decide(operation)  # noqa: SLF001
            is_combined = action.travel in (Travel.SUM, Travel.MEAN) and action.effect is not Effect.SHARE
            actions[kind] = action, ("sum" if action.travel is Travel.SUM else "mean") if is_combined else ""
        op = actions[kind][1]
        if op:
            together.append(pair)
            ops.append(op)
        else:
            apart.append(pair)
    if together:

        def check() -> Request:
            arrays = [variable._operand(operation, x, reduced=True) for variable, x in together]  # noqa: SLF001
            for variable, x in apart:
                variable._operand(operation, x, reduced=False)  # noqa: SLF001
            targets = [variable._storage.writable() for variable, _ in together]  # noqa: SLF001
            names = tuple([variable._name for variable, _ in together])  # noqa: SLF001
            return together_request(
                owner.communicator, name, names, arrays, ops, targets, UFUNCS[operation], reproducible=owner.reproducible
            )

        with written_once(owner, [variable._storage for variable, _ in together]):  # noqa: SLF001
            owner.communicator.perform(name, check, owner.timeout)
        for variable, _ in together:
            variable._count_write()  # noqa: SLF001
    for variable, x in apart:
        getattr(variable, operation.value)(x)


def _check_pairs(name: str, pairs: list[Any]) -> None:
    seen: set[int] = set()
    for pair in pairs:
        is_pair = (type(pair) is tuple or isinstance(pair, list | tuple)) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], Variable):
            raise ConfigError(f"{name} takes pairs of a variable and a value, for instance [(v, 1.0), (w, x)], not {pair!r:.100}")
        if id(pair[0]) in seen:
            raise ConfigError(f"{name}: the variable {pair[0].name!r} is named twice; combine its values first")
        seen.add(id(pair[0]))
