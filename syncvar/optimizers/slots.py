"""The state of an optimizer: variables beside the variables that it steps.

A slot has its variable's shape and synchronization mode, so that it is saved, restored and compared as its variable is; its
aggregation is NONE, since nobody but the optimizer writes it. Half types get float32 slots, and a float32 `master` of the
weights themselves: an update is often smaller than the distance of two neighbouring halves, and would be lost each time
(Micikevicius et al. 2018, section 3.1).

Gradients of several calls are added up on each replica, and a checkpoint keeps each replica's sum. Restored on another number
of replicas each takes the mean of these sums: what the mean over replicas needs. Sums over replicas are scaled to the new
number at the next call (`accumulated_replicas`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.errors import ConfigError
from syncvar.variables.creation import Wish
from syncvar.variables.policy import VariableAggregation, VariableSynchronization
from syncvar.variables.stepping import copy_of, make_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncvar.variables import Variable
    from syncvar.variables.places import Owner

__all__ = ["Slots", "State", "compute_dtype", "is_apart", "is_half"]

_APART = VariableSynchronization.NONE
_NAME_MAX = 128


def is_apart(variable: Variable) -> bool:
    """Return whether a variable is each replica's own."""
    return variable.synchronization is _APART


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is float16 or bfloat16."""
    return dtype.itemsize == 2


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a variable of `dtype` is stepped: float32 for half types.

    Example:
        >>> compute_dtype(np.dtype("float16")), compute_dtype(np.dtype("float64"))
        (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float32) if is_half(dtype) else dtype


class State(NamedTuple):
    """What belongs to one variable.

    Args:
        changed: The variable, its master (half types), its slots, its counter of steps (where the rule has one).
        accumulator: The sum of the gradients of several calls; None where each call is a step.
    """

    changed: tuple[Variable, ...]
    accumulator: Variable | None


class Slots:
    """All variables of one optimizer.

    Args:
        name: Of the optimizer, part of their names.
        initials: Name -> what it is filled with, for each slot of the rule.
        counts: The rule needs the number of steps that each variable has made.
        accumulates: Several calls are one step.
    """

    def __init__(self, name: str, initials: dict[str, float], *, counts: bool, accumulates: bool) -> None:
        self._name = name
        self._initials = initials
        self._counts = counts
        self._accumulates = accumulates
        self._states: dict[int, State] = {}  # by the identity of the variable, which the state keeps alive
        self.tracked: dict[str, Variable] = {}
        self.listeners: list[Callable[[dict[str, Variable]], None]] = []
        self.apart = False
        self.owner: Owner | None = None
        self.iterations: Variable | None = None
        self.calls: Variable | None = None
        self.weight: Variable | None = None
        self.replicas: Variable | None = None  # on how many the gradients of this step have been added up so far

    def state(self, variable: Variable) -> State | None:
        """Return what belongs to a variable, or None before it is made."""
        return self._states.get(id(variable))

    def missing(self, variables: Sequence[Variable]) -> list[Variable]:
        """Return the variables that have no slots yet.

        Raises:
            ConfigError: Two variables would have slots of the same name.
        """
        found = [variable for variable in variables if id(variable) not in self._states]
        names = {self._key(state.changed[0]) for state in self._states.values()}
        for variable in found:
            if self._key(variable) in names:
                raise ConfigError(
                    f"two variables of one optimizer are named {variable.name!r}, so that a checkpoint could not tell "
                    f"their slots apart: give one of them another name, or make an optimizer for each"
                )
            names.add(self._key(variable))
        return found

    @staticmethod
    def _key(variable: Variable) -> str:
        """Return the name by which a checkpoint knows a variable's slots; NONE variables have a namespace of their own."""
        return f"NONE:{variable.name}" if is_apart(variable) else variable.name

    def build(self, owner: Owner, variables: Sequence[Variable], *, apart: bool) -> None:
        """Make the slots of variables that have none. Collective, except where all variables are NONE.

        Args:
            owner: The variables' strategy.
            variables: In the same order on every replica.
            apart: All variables of this optimizer are each replica's own.
        """
        before = set(self.tracked)
        self.apart, self.owner = apart, owner
        if self.iterations is None:
            mode = _APART if apart else VariableSynchronization.ON_WRITE
            self.iterations = self._make(owner, "iterations", np.int64(0), mode)
            if self._accumulates:
                own = _APART if apart else VariableSynchronization.ON_READ
                self.calls = self._make(owner, "calls", np.int64(0), mode)
                self.weight = self._make(owner, "accumulated_weight", np.float64(0), own, parts=not apart)
                self.replicas = self._make(owner, "accumulated_replicas", np.float64(0), own, parts=not apart)
        for variable in variables:
            if id(variable) not in self._states:
                self._states[id(variable)] = self._build(owner, variable)
        made = {key: variable for key, variable in self.tracked.items() if key not in before}
        if made:
            for listener in list(self.listeners):
                listener(made)

    def _build(self, owner: Owner, variable: Variable) -> State:
        mode = variable.synchronization
        shape, dtype = variable.shape, compute_dtype(variable.dtype)
        changed = [variable]

        def slot(name: str, value: Any) -> None:
            changed.append(self._make(owner, name, value, mode, variable))

        if is_half(variable.dtype):
            slot("master", copy_of(variable).astype(dtype))
        for name, initial in self._initials.items():
            slot(name, np.full(shape, initial, dtype))
        if self._counts:
            slot("steps", np.int64(0))
        accumulator = None
        if self._accumulates:
            own = _APART if is_apart(variable) else VariableSynchronization.ON_READ
            zeros = np.zeros(shape, dtype)
            accumulator = self._make(owner, "accumulated", zeros, own, variable, parts=not is_apart(variable))
        return State(tuple(changed), accumulator)

    def _make(
        self,
        owner: Owner,
        slot: str,
        value: Any,
        mode: VariableSynchronization,
        beside: Variable | None = None,
        *,
        parts: bool = False,
    ) -> Variable:
        key = slot if beside is None else f"{self._key(beside)}/{slot}"
        ending = f"{self._name}/{slot}"
        name = ending if beside is None else f"{beside.name[: _NAME_MAX - 1 - len(ending)]}/{ending}"
        made = make_beside(owner, Wish(value, False, name, None, mode, VariableAggregation.NONE), parts=parts)
        self.tracked[key] = made
        return made
