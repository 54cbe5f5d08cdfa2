"""The state of an optimizer: variables (slots) beside the variables that it steps.

A slot has the shape and mode of its variable, so it is saved, restored and compared in the same
way. Its aggregation is NONE, since only the optimizer writes it. Half types get float32 slots and a
float32 `master` of the weights, because an update is often smaller than the distance of two halves
(Micikevicius et al. 2018, section 3.1).

Each replica accumulates the gradients of several calls by itself, and a checkpoint keeps each
replica's sum. Restored on another number of replicas, each takes the mean of these sums, as the
mean over replicas needs. For sums over replicas the next call rescales them
(`accumulated_replicas`). The same holds for what compression has lost (`compression_error`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.compressors import PowerSGD
from syncvar.core.errors import ConfigError
from syncvar.optimizers.update_rules import compute_dtype, is_half
from syncvar.variables.create import VariableSpec
from syncvar.variables.grouped_writes import copy_of, create_for_strategy, replace_copy
from syncvar.variables.policy import VariableAggregation, VariableSynchronization
from syncvar.variables.variable import COPIED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.compressors import Codec
    from syncvar.variables.variable import Variable
    from syncvar.variables.variable_owner import VariableOwner

ITERATIONS, CALLS, MASTER, ACCUMULATED = "iterations", "calls", "master", "accumulated"
ERROR, FACTOR = "compression_error", "compression_factor"
_BESIDE_RULE = (ACCUMULATED, ERROR, FACTOR)  # slots that the rule does not see
_WEIGHT, _REPLICAS = "accumulated_weight", "accumulated_replicas"
_WITHIN_STEP = (CALLS, ACCUMULATED, _WEIGHT, _REPLICAS)  # of use only until the step is complete
_INDEPENDENT = VariableSynchronization.NONE
_NAME_MAX = 128


def is_replica_local(variable: Variable) -> bool:
    """Return whether each replica has its own independent copy (NONE)."""
    return variable.synchronization is _INDEPENDENT


class SlotState(NamedTuple):
    """The variables of one stepped variable."""

    # The variable, its master (half types), its slots, its step counter (if the rule has one).
    changed: tuple[Variable, ...]
    accumulator: Variable | None  # sum of the gradients of several calls; None if each is a step
    error: Variable | None = None  # what compression of this replica's gradients has lost
    factor: Variable | None = None  # directions of a matrix (PowerSGD)


class SlotSpec(NamedTuple):
    """The description of one slot; its aggregation is always NONE."""

    initial: float  # value of every element
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    synchronization: VariableSynchronization
    is_part: bool = False  # the copies are parts of a sum; see `create_for_strategy`


class WaitingValue(NamedTuple):
    """A restored value for a slot that does not exist yet."""

    variable: Variable | None  # of the slot, kept alive by this; None for the optimizer's own slots
    value: NDArray[Any]  # this replica's copy


class SavedSlot:
    """One slot as a checkpoint sees it, whether it exists yet or not.

    If a checkpoint is restored before the first step, the value waits, and the slot starts with it.
    """

    aggregation = VariableAggregation.NONE

    def __init__(
        self,
        slots: OptimizerSlots,
        name: str,
        spec: SlotSpec,
        beside: Variable | None,
        strategy: Any,
    ) -> None:
        self._spec, self._slots, self._slot, self._beside = spec, slots, name, beside
        self._key = _owner_id(beside), name
        self.is_own = beside is None
        self._variable = slots.built.get(self._key)
        self.name = slots.name_of(name, beside)
        self.strategy = strategy if self._variable is None else self._variable.strategy
        self.shape, self.dtype, self.synchronization = spec.shape, spec.dtype, spec.synchronization
        self.are_parts = spec.is_part
        self.is_replica_local = spec.synchronization is _INDEPENDENT

    @property
    def slot_name(self) -> str:
        """Name of the slot, such as "momentum"."""
        return self._slot

    @property
    def variable(self) -> Variable | None:
        """Its variable, if that exists."""
        return self._variable

    @property
    def is_built(self) -> bool:
        """Whether its variable exists."""
        return self._variable is not None

    @property
    def has_value(self) -> bool:
        """Whether its variable exists, or a checkpoint has restored a value for it."""
        return self.is_built or self._key in self._slots.waiting

    @property
    def is_present(self) -> bool:
        """Whether it has a value that a checkpoint must keep."""
        return self.has_value and (self._slot not in _WITHIN_STEP or self._slots.is_in_step)

    def local_value(self) -> NDArray[Any]:
        """Return this replica's copy, or the initial value if there is none yet."""
        if self._variable is not None:
            return self._variable.local_value()
        waiting = self._slots.waiting.get(self._key)
        return self._initial() if waiting is None else waiting.value

    read_value = local_value

    def replace(self, value: NDArray[Any] | None, *, is_replica_local: bool) -> None:
        """Replace this replica's copy; sends nothing."""
        self._slots.note_restored(self._key, has_value=value is not None)
        if self._variable is None:
            self._slots.waiting.pop(self._key, None)
            if self.is_own:
                self._slots.is_waiting_independent = is_replica_local
            if value is not None:
                copied = np.array(value, self.dtype).reshape(self.shape)
                self._slots.waiting[self._key] = WaitingValue(self._beside, copied)
        elif value is not None:
            replace_copy(self._variable, value)
        elif self._slot != MASTER:  # a step takes a master from its variable where they differ
            replace_copy(self._variable, self._initial())

    def _initial(self) -> NDArray[Any]:
        return np.full(self.shape, self._spec.initial, self.dtype)


class OptimizerSlots:
    """All variables of one optimizer."""

    def __init__(
        self,
        name: str,
        initials: dict[str, float],
        *,
        counts: bool,
        accumulates: bool,
        compressor: Codec | PowerSGD | None = None,
    ) -> None:
        self._name = name
        self._initials = initials
        self._counts = counts
        self._accumulates = accumulates
        self._compressor = compressor
        # By the id of the variable, which the state keeps alive.
        self._states: dict[int, SlotState] = {}
        # By the id of the variable and the slot's name.
        self.built: dict[tuple[int, str], Variable] = {}
        self.waiting: dict[tuple[int, str], WaitingValue] = {}  # likewise
        self.is_waiting_independent = False  # what waits is of an optimizer of NONE variables alone
        self.tracked: dict[str, Variable] = {}
        self.is_independent = False
        self.owner: VariableOwner | None = None
        self.iterations: Variable | None = None
        self.calls: Variable | None = None
        self.weight: Variable | None = None
        # On how many the gradients of this step have been added up so far.
        self.replicas: Variable | None = None

    def state(self, variable: Variable) -> SlotState | None:
        """Return the slots of a variable, or None before they exist."""
        return self._states.get(id(variable))

    def missing(self, variables: Sequence[Variable]) -> list[Variable]:
        """Return the variables that have no slots yet."""
        found = [variable for variable in variables if id(variable) not in self._states]
        names = {self._key(state.changed[0]) for state in self._states.values()}
        for variable in found:
            if self._key(variable) in names:
                raise ConfigError(
                    f"two variables of one optimizer are named {variable.name!r}, so that a "
                    "checkpoint could not tell their slots apart: give one of them another name, "
                    "or make an optimizer for each"
                )
            names.add(self._key(variable))
        return found

    @staticmethod
    def _key(variable: Variable) -> str:
        """Return the name by which a checkpoint knows a variable's slots."""
        return f"NONE:{variable.name}" if is_replica_local(variable) else variable.name

    def build(
        self, owner: VariableOwner, variables: Sequence[Variable], *, is_independent: bool
    ) -> None:
        """Create missing slots, with restored values if any. Collective, except if all are NONE."""
        self.is_independent, self.owner = is_independent, owner
        if self.iterations is None:
            result = {
                slot: self._make(owner, slot, spec, np.full(spec.shape, spec.initial, spec.dtype))
                for slot, spec in self.own_specs(is_independent=is_independent).items()
            }
            self.calls, self.weight = result.get(CALLS), result.get(_WEIGHT)
            self.replicas, self.iterations = result.get(_REPLICAS), result[ITERATIONS]
        for variable in variables:
            if id(variable) not in self._states:
                self._states[id(variable)] = self._build(owner, variable)

    def _build(self, owner: VariableOwner, variable: Variable) -> SlotState:
        result = {}
        for slot, spec in self.specs_of(variable).items():
            value = np.full(spec.shape, spec.initial, spec.dtype)
            if slot == MASTER:
                value = copy_of(variable).astype(spec.dtype)
            result[slot] = self._make(owner, slot, spec, value, variable)
        changed = [one for slot, one in result.items() if slot not in _BESIDE_RULE]
        return SlotState((variable, *changed), *map(result.get, _BESIDE_RULE))

    def _make(
        self,
        owner: VariableOwner,
        slot: str,
        spec: SlotSpec,
        value: NDArray[Any],
        beside: Variable | None = None,
    ) -> Variable:
        mode = spec.synchronization, VariableAggregation.NONE
        is_trainable = False
        arguments = VariableSpec(value, is_trainable, self.name_of(slot, beside), None, *mode)
        result = create_for_strategy(owner, arguments, parts=spec.is_part)
        self.tracked[self._tracked_key(slot, beside)] = result
        self.built[_owner_id(beside), slot] = result
        waiting = self.waiting.pop((_owner_id(beside), slot), None)
        if waiting is not None:
            replace_copy(result, waiting.value)
        return result

    def name_of(self, slot: str, beside: Variable | None) -> str:
        """Return the name of a slot's variable."""
        ending = f"{self._name}/{slot}"
        if beside is None:
            return ending
        return f"{beside.name[: _NAME_MAX - 1 - len(ending)]}/{ending}"

    def _tracked_key(self, slot: str, beside: Variable | None) -> str:
        return slot if beside is None else f"{self._key(beside)}/{slot}"

    # -- what each slot is, and what a checkpoint sees of it ---------------------------------------

    @property
    def rule_slots(self) -> list[str]:
        """Names of the rule's slots; a checkpoint compares them before it restores."""
        return sorted([*self._initials, *(["steps"] if self._counts else [])])

    def own_specs(self, *, is_independent: bool) -> dict[str, SlotSpec]:
        """Return the descriptions of the optimizer's own variables, by name."""
        mode = _INDEPENDENT if is_independent else VariableSynchronization.ON_WRITE
        result = {ITERATIONS: SlotSpec(0, (), np.dtype(np.int64), mode)}
        if self._accumulates:
            own = _INDEPENDENT if is_independent else VariableSynchronization.ON_READ
            result[CALLS] = SlotSpec(0, (), np.dtype(np.int64), mode)
            result[_WEIGHT] = SlotSpec(0.0, (), np.dtype(np.float64), own, not is_independent)
            result[_REPLICAS] = SlotSpec(0.0, (), np.dtype(np.float64), own, not is_independent)
        return result

    def specs_of(self, variable: Variable) -> dict[str, SlotSpec]:
        """Return the descriptions of a variable's slots, by name, in the order of `SlotState`."""
        mode, dtype, shape = variable.synchronization, compute_dtype(variable.dtype), variable.shape
        result = {MASTER: SlotSpec(0.0, shape, dtype, mode)} if is_half(variable.dtype) else {}
        for name, initial in self._initials.items():
            result[name] = SlotSpec(initial, shape, dtype, mode)
        if self._counts:
            result["steps"] = SlotSpec(0, (), np.dtype(np.int64), mode)
        if self._accumulates:
            own = _INDEPENDENT if is_replica_local(variable) else VariableSynchronization.ON_READ
            result[ACCUMULATED] = SlotSpec(0.0, shape, dtype, own, not is_replica_local(variable))
        compressor = self._compressor
        if compressor is not None and compressor.keeps_error and not is_replica_local(variable):
            single, own = np.dtype(np.float32), VariableSynchronization.ON_READ
            is_rounded = True
            if isinstance(compressor, PowerSGD):
                factor_shape = compressor.factor_shape(shape)
                is_rounded = factor_shape is not None
                if factor_shape is not None:
                    result[FACTOR] = SlotSpec(0.0, factor_shape, single, mode)
            if is_rounded:
                result[ERROR] = SlotSpec(0.0, shape, single, own, is_part=True)
        return result

    def note_restored(self, key: tuple[int, str], *, has_value: bool) -> None:
        """Note that a checkpoint replaces a slot; for subclasses."""

    @property
    def is_in_step(self) -> bool:
        """Whether gradients of an incomplete step are kept."""
        waiting = self.waiting.get((_owner_id(None), CALLS))
        if self.calls is not None:
            return int(copy_of(self.calls)) > 0
        return waiting is not None and int(waiting.value) > 0

    def expect_iterations(self, steps: int) -> None:
        """Start the step counter with a restored number, unless it exists already."""
        if self.iterations is None:
            value = np.array(steps, np.int64)
            self.waiting[_owner_id(None), ITERATIONS] = WaitingValue(None, value)

    @property
    def restored_iterations(self) -> int:
        """The step counter that waits for the slots; 0 if there is none."""
        waiting = self.waiting.get((_owner_id(None), ITERATIONS))
        return 0 if waiting is None else int(waiting.value)

    @property
    def stepped(self) -> list[Variable]:
        """The variables for which this optimizer keeps state."""
        built = {key: state.changed[0] for key, state in self._states.items()}
        owners = [one.variable for one in self.waiting.values() if one.variable is not None]
        return list((built | {id(one): one for one in owners}).values())

    def saved_slots(self, variable: Variable) -> dict[str, SavedSlot]:
        """Return the slots of a variable as a checkpoint sees them, by name."""
        return {
            slot: SavedSlot(self, slot, spec, variable, variable.strategy)
            for slot, spec in self.specs_of(variable).items()
        }

    def saved_own(self, strategy: Any) -> dict[str, SavedSlot]:
        """Return the optimizer's own variables as a checkpoint sees them, by name."""
        return {
            slot: SavedSlot(self, slot, spec, None, strategy)
            for slot, spec in self.own_specs(is_independent=self._waits_independent).items()
        }

    # -- deep copies -------------------------------------------------------------------------------

    def copied(self, memo: dict[Any, Any]) -> OptimizerSlots:
        """Return slots for a deep copy of the optimizer; sends nothing.

        They wait for its first step with the values of these. If the same deep copy copies the
        variables, before or after, the slots belong to the copies; else to the same variables.
        """
        result = self._without_state()
        result.is_waiting_independent = self._waits_independent
        variables = {id(one): one for one in self.stepped}
        values = {key: one.value for key, one in self.waiting.items()}
        values |= {key: copy_of(one) for key, one in self.built.items()}
        for (owner, slot), value in values.items():
            variable = memo.get(owner, variables[owner]) if owner else None
            result.waiting[_owner_id(variable), slot] = WaitingValue(variable, np.array(value))
        memo.setdefault(COPIED, []).append(result.follow)
        return result

    def release(self) -> None:
        """Keep the values of all slots for the next step, which makes the slots again.

        Sends nothing. The strategy of the variables moves to another world, whose ranks make the
        slots together.
        """
        self.is_waiting_independent = self._waits_independent
        variables = {id(one): one for one in self.stepped}
        for (owner, slot), one in self.built.items():
            value = np.array(copy_of(one))
            self.waiting[owner, slot] = WaitingValue(variables.get(owner), value)
        self._states.clear()
        self.built.clear()
        self.tracked.clear()
        self.owner = self.iterations = self.calls = self.weight = self.replicas = None

    @property
    def _waits_independent(self) -> bool:
        return self.is_waiting_independent if self.iterations is None else self.is_independent

    def _without_state(self) -> OptimizerSlots:
        """Return slots of the same description that do not exist yet."""
        return OptimizerSlots(
            self._name,
            self._initials,
            counts=self._counts,
            accumulates=self._accumulates,
            compressor=self._compressor,
        )

    def follow(self, variable: Variable, copied: Variable) -> None:
        """Move the values that wait for a variable to its copy."""
        for owner, slot in [key for key in self.waiting if key[0] == id(variable)]:
            value = self.waiting.pop((owner, slot)).value
            self.waiting[id(copied), slot] = WaitingValue(copied, value)

    def waiting_by_name(self) -> dict[str, NDArray[Any]]:
        """Return the waiting values, by their future keys of `tracked`."""
        return {
            self._tracked_key(slot, one.variable): one.value
            for (_, slot), one in self.waiting.items()
        }


def _owner_id(variable: Variable | None) -> int:
    """Return the key of a variable's slots; 0 for those of the optimizer itself."""
    return 0 if variable is None else id(variable)
