"""The state of `DiLoCo`: its own slots and those of the outer optimizer, beside the weights.

A checkpoint sees one list of slots: those of the inner optimizer, and these with "outer_" in front.
Anchors and slots of the outer optimizer are ON_WRITE, because all replicas keep the same. What
belongs to the inner steps of one replica is NONE.
"""

from __future__ import annotations

import copy
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.optimizers.slots import ITERATIONS, OptimizerSlots, SavedSlot, SlotSpec, SlotState
from syncvar.optimizers.update_rules import compute_dtype
from syncvar.runtime.collective_spec import names_text
from syncvar.variables.grouped_writes import change_copies, copy_of
from syncvar.variables.policy import VariableSynchronization

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.optimizers.base import Optimizer
    from syncvar.optimizers.gradient_buckets import BucketPlan
    from syncvar.optimizers.update_rules import UpdateRule
    from syncvar.variables.variable import Variable
    from syncvar.variables.variable_owner import VariableOwner

ANCHOR, SENT = "anchor", "sent"  # shared weights; this replica's weights when it sent a change
INNER_STEPS, SENT_AT, RUNNING, REPLICAS = "inner_steps", "sent_at", "running", "replicas"
_PREFIX = "outer_"
_SHARED, _OWN = VariableSynchronization.ON_WRITE, VariableSynchronization.NONE


class Fragment:
    """Variables whose change is sent together."""

    def __init__(self, number: int, offset: int, variables: list[Variable]) -> None:
        self.number, self.variables = number, variables
        self.offset = offset  # inner steps modulo `steps` after which it is sent
        self.names = names_text([one.name for one in variables])
        self.plan: BucketPlan | None = None  # gets the mean change; None if nothing is on the way
        self.work: Any = None  # the `Work` of an asynchronous exchange


class OuterSlots(OptimizerSlots):
    """The slots; with `keeps_sent` each weight has a copy of what this replica sent."""

    def __init__(
        self, name: str, rule: UpdateRule, inner: Optimizer, fragments: int, *, keeps_sent: bool
    ) -> None:
        super().__init__(name, rule.initials(), counts=rule.counts_steps, accumulates=False)
        self._rule, self._inner = rule, inner
        self._count, self._keeps_sent = fragments, keeps_sent
        self.tracked = inner.slots.tracked  # one dict for both
        self.fragments: list[Fragment] = []  # once the slots exist
        self.known: dict[int, Variable] = {}  # the weights by id
        self.has_changed = True  # built or restored since `DiLoCo` looked last
        self._anchored: set[int] = set()  # ids of weights whose anchor has a value

    def _without_state(self) -> OptimizerSlots:
        inner, keeps_sent = self._inner, self._keeps_sent
        return OuterSlots(self._name, self._rule, inner, self._count, keeps_sent=keeps_sent)

    def copied(self, memo: dict[Any, Any]) -> OptimizerSlots:
        """Return slots for a deep copy of the optimizer; sends nothing."""
        result = super().copied(memo)
        assert isinstance(result, OuterSlots)
        result._inner = copy.deepcopy(self._inner, memo)  # noqa: SLF001  (its own class)
        result.tracked = result._inner.slots.tracked  # noqa: SLF001
        return result

    def release(self) -> None:
        """Keep the values of all slots for the next step, which makes the slots again."""
        super().release()
        self.fragments = []
        self.known.clear()
        self._anchored.clear()
        self.has_changed = True

    def join_others(self) -> None:
        """Let all replicas continue with the shared weights: other replicas belong to them now."""
        waiting = self.waiting.get((0, REPLICAS))
        if waiting is not None and int(waiting.value):
            self.waiting[0, REPLICAS] = waiting._replace(value=np.array(-1, waiting.value.dtype))

    def note_restored(self, key: tuple[int, str], *, has_value: bool) -> None:
        """Note that a checkpoint replaces a slot."""
        self.has_changed = True
        if key[1] == ANCHOR:
            (self._anchored.add if has_value else self._anchored.discard)(key[0])

    def without_anchor(self) -> list[Variable]:
        """Return the weights whose anchor has no value yet; from now on all have one."""
        found = [one for key, one in self.known.items() if key not in self._anchored]
        self._anchored.update(self.known)
        return found

    def _build(self, owner: VariableOwner, variable: Variable) -> SlotState:
        if (id(variable), ANCHOR) in self.waiting:
            self._anchored.add(id(variable))
        changed = super()._build(owner, variable).changed[1:]
        found = SlotState(changed[:-1] if self._keeps_sent else changed, None)
        self._states[id(changed[0])] = found  # a bucket finds the slots by the anchor
        return found

    def __getitem__(self, key: tuple[Variable, str]) -> Variable:
        """Return the slot of a weight."""
        return self.built[id(key[0]), key[1]]

    def numbers(self, name: str) -> NDArray[Any]:
        """Return a number, or one for each fragment, to read now and not to keep."""
        return copy_of(self.built[0, name])

    def set_number(self, name: str, value: int, index: Any = ...) -> None:
        """Set a number, or that of a fragment."""
        change_copies([self.built[0, name]], _store, index, value)

    @property
    def rule_slots(self) -> list[str]:
        """Names of the slots; a checkpoint compares them before it restores."""
        own = [ANCHOR, *([SENT] if self._keeps_sent else []), *super().rule_slots]
        return sorted([*self._inner.slots.rule_slots, *(_PREFIX + name for name in own)])

    def own_specs(self, *, is_independent: bool) -> dict[str, SlotSpec]:
        """Return the descriptions of the numbers, by name."""
        del is_independent
        kind, each = np.dtype(np.int64), (self._count,)
        shared = {one: SlotSpec(0, (), kind, _SHARED) for one in (ITERATIONS, REPLICAS)}
        own = {INNER_STEPS: SlotSpec(0, (), kind, _OWN)}
        return {
            **shared,
            **own,
            **{one: SlotSpec(0, each, kind, _OWN) for one in (SENT_AT, RUNNING)},
        }

    def specs_of(self, variable: Variable) -> dict[str, SlotSpec]:
        """Return the descriptions of a weight's slots, by name: anchor, those of the rule, sent."""
        shape, dtype = variable.shape, compute_dtype(variable.dtype)
        initials = {ANCHOR: 0.0, **self._initials}
        result = {name: SlotSpec(one, shape, dtype, _SHARED) for name, one in initials.items()}
        if self._counts:
            result["steps"] = SlotSpec(0, (), np.dtype(np.int64), _SHARED)
        if self._keeps_sent:
            result[SENT] = SlotSpec(0.0, shape, dtype, _OWN)
        return result

    @property
    def stepped(self) -> list[Variable]:
        """The variables for which there is state."""
        waiting = [one.variable for one in self.waiting.values() if one.variable is not None]
        found = {id(one): one for one in (*self._inner.slots.stepped, *waiting)}
        return list({**found, **self.known}.values())

    def saved_slots(self, variable: Variable) -> dict[str, SavedSlot]:
        """Return the slots of a variable as a checkpoint sees them, by name."""
        outer = {_PREFIX + name: slot for name, slot in super().saved_slots(variable).items()}
        return {**self._inner.slots.saved_slots(variable), **outer}

    def saved_own(self, strategy: Any) -> dict[str, SavedSlot]:
        """Return the numbers as a checkpoint sees them, by name."""
        outer = {_PREFIX + name: slot for name, slot in super().saved_own(strategy).items()}
        return {**self._inner.slots.saved_own(strategy), **outer}

    def _tracked_key(self, slot: str, beside: Variable | None) -> str:
        return super()._tracked_key(_PREFIX + slot, beside)

    def waiting_by_name(self) -> dict[str, NDArray[Any]]:
        """Return the waiting values, by their future keys of `tracked`."""
        return {**self._inner.slots.waiting_by_name(), **super().waiting_by_name()}


def divided(variables: Sequence[Variable], count: int) -> list[list[Variable]]:
    """Divide variables into `count` parts of about equal bytes, in their order; none is empty."""
    sizes = [max(1, prod(one.shape) * one.dtype.itemsize) for one in variables]
    total, before = sum(sizes), 0
    result: list[list[Variable]] = [[]]
    for place, (variable, size) in enumerate(zip(variables, sizes, strict=True)):
        missing = count - len(result)
        is_full = before + size / 2 > total * len(result) / count
        if result[-1] and missing and (is_full or len(variables) - place == missing):
            result.append([])
        result[-1].append(variable)
        before += size
    return result


def _store(arrays: list[NDArray[Any]], index: Any, value: int) -> None:
    arrays[0][index] = value
