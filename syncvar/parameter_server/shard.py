"""A shard: a part of a variable on one server, with its pushes and reads.

With `staleness` None or above 0, a push changes the array at once. With 0, the pushes of a step
wait for those of all workers, and the shard combines them like a synchronous collective, to the
same bytes in every run. A *round* is the j-th push of each worker in its present step. A round ends
when each worker has made that push or has advanced to a later step.

`ServerRule` makes the steps of an optimizer with the arithmetic of workers.
"""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.sharded_sums import tree_combined
from syncvar.core.errors import ConfigError, SyncvarError, error_message
from syncvar.core.reduce_ops import quiet
from syncvar.optimizers.custom_rules import CustomRule
from syncvar.optimizers.update_rules import (
    BLOCK,
    SERVER_RULES,
    checked_number,
    compute_dtype,
    is_half,
)
from syncvar.variables.policy import AccessKind
from syncvar.variables.values import RowSelection, apply_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from syncvar.optimizers.update_rules import UpdateRule

    Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]

Position = tuple[int, int]  # of a worker: number of its ticks, and of its barriers since the last
RuleKey = tuple[str, tuple[tuple[str, Any], ...]]  # class name and settings of an optimizer

_REASON_MAX = 4000  # characters of a traceback

_RULES: dict[str, Callable[..., UpdateRule]] = {**SERVER_RULES, "Custom": CustomRule}
_PLAIN = {
    AccessKind.ASSIGN.value: None,
    AccessKind.ASSIGN_ADD.value: np.add,
    AccessKind.ASSIGN_SUB.value: np.subtract,
}
_SCATTERS = {one.value: one for one in AccessKind if one.value.startswith("scatter_")}
_STEP = "step"


class TrialStep(NamedTuple):
    """The result of a trial step: array or rows, slots and number of steps."""

    touched: NDArray[Any]
    slots: list[NDArray[Any]]
    steps: NDArray[Any]


class _Part(NamedTuple):
    """The attributes of a variable that an update rule reads."""

    is_half: bool
    gradient: NDArray[Any]
    scratch: NDArray[Any]


class _Workspace(NamedTuple):
    room: NDArray[Any]


class ServerRule:
    """The steps of one optimizer on one shard, with its slots."""

    def __init__(self, rule: UpdateRule, array: NDArray[Any]) -> None:
        self._rule = rule
        self._compute = compute_dtype(array.dtype)
        self._is_half = is_half(array.dtype)
        self._names = slot_names(rule, array.dtype)
        initials = rule.initials()
        self._slots = [np.full(array.shape, one, self._compute) for one in initials.values()]
        if self._is_half:
            self._slots.insert(0, array.astype(self._compute))
        self._steps = np.zeros((), np.int64)

    @property
    def steps(self) -> int:
        """Number of steps made."""
        return int(self._steps)

    def slots(self) -> dict[str, NDArray[Any]]:
        """Return copies of the slots by name."""
        return {name: slot.copy() for name, slot in zip(self._names, self._slots, strict=True)}

    def restore(self, steps: int, slots: Mapping[str, NDArray[Any]]) -> None:
        """Set the number of steps, and the slots that are in `slots`."""
        self._steps[...] = steps
        for name, slot in zip(self._names, self._slots, strict=True):
            if name in slots:
                slot[...] = slots[name]

    def step(
        self, array: NDArray[Any], gradient: NDArray[Any], rows: NDArray[Any] | None, rate: float
    ) -> None:
        """Make one step in place, on the whole array or on distinct rows of it."""
        if rows is None:
            self._make(array, self._slots, self._steps, gradient, rate)
        else:
            self.put(array, rows, self.trial_step(array, gradient, rows, rate))

    def trial_step(
        self, array: NDArray[Any], gradient: NDArray[Any], rows: NDArray[Any] | None, rate: float
    ) -> TrialStep:
        """Make one step on a copy; raise ConfigError with the traceback of a custom rule."""
        which = ... if rows is None else rows
        trial = TrialStep(
            np.array(array[which]),
            [np.array(slot[which]) for slot in self._slots],
            self._steps.copy(),
        )
        self._make(trial.touched, trial.slots, trial.steps, gradient, rate)
        return trial

    def put(self, array: NDArray[Any], rows: NDArray[Any] | None, trial: TrialStep) -> None:
        """Copy the result of a trial step to the array and the slots."""
        which = ... if rows is None else rows
        array[which] = trial.touched
        for slot, changed in zip(self._slots, trial.slots, strict=True):
            slot[which] = changed
        self._steps[...] = trial.steps

    def _make(
        self,
        array: NDArray[Any],
        slots: list[NDArray[Any]],
        steps: NDArray[Any],
        gradient: NDArray[Any],
        rate: float,
    ) -> None:
        copy = np.array(gradient, self._compute)
        scratch = np.empty(copy.shape if copy.size <= BLOCK else BLOCK, self._compute)
        part = _Part(self._is_half, copy, scratch)
        counter = [steps] if self._rule.counts_steps else []
        try:
            with quiet():
                self._rule.change(
                    [array, *slots, *counter], part, _Workspace(np.empty(0)), rate, int(steps), {}
                )
        except SyncvarError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(_error_text(error)) from error
        if not counter:
            steps += 1


def _error_text(error: BaseException) -> str:
    frame = error.__traceback__
    for _ in range(3):  # skip our own frames
        frame = frame.tb_next if frame is not None and frame.tb_next is not None else frame
    text = "".join(traceback.format_exception(type(error), error, frame))
    return (
        f"an update rule raised {type(error).__name__} on a server, which goes on without that "
        f"push:\n{text[-_REASON_MAX:]}"
    )


def slot_names(rule: UpdateRule, dtype: np.dtype[Any]) -> list[str]:
    """Return the names of a rule's slots of a variable, in the order of checkpoints."""
    initials = rule.initials()
    return [*(["master"] if is_half(dtype) else []), *initials]


def rule_of(name: str, settings: dict[str, Any]) -> UpdateRule:
    """Return an optimizer's update rule; raise ConfigError for an unknown class name."""
    if name not in _RULES or not all(re.fullmatch("[a-z_0-9]+", key) for key in settings):
        raise ConfigError(f"servers make the steps of {', '.join(_RULES)}, not of {name!r:.60}")
    numbers = dict(settings)
    decay = numbers.pop("weight_decay", None)
    try:
        rule = _RULES[name](**numbers)
    except TypeError as error:  # an unknown or missing setting
        raise ConfigError(
            f"settings {sorted(settings)} do not fit optimizer {name}: {error}"
        ) from None
    if decay is not None:
        rule.decay = checked_number("weight_decay", decay)
    return rule


class Spec(NamedTuple):
    """The shape, dtype and position of a shard."""

    shape: tuple[int, ...]  # shape of this part
    dtype: str  # name of the dtype
    aggregation: str  # name of the VariableAggregation that combines the pushes of a round
    whole: tuple[int, ...]  # shape of the variable
    start: int  # first row of the variable in this part
    shards: int = 1  # number of parts of the variable


class Push(NamedTuple):
    """One change."""

    method: str  # "assign", "assign_add", "assign_sub", a scatter, or "step" (of an optimizer)
    value: NDArray[Any]  # array of the shard's shape, or of its rows
    # int64 indices, from the first row of this shard; None for all rows
    rows: NDArray[Any] | None = None
    rule: RuleKey = ("", ())  # for "step": key of the optimizer
    rate: float = 0.0  # for "step": learning rate
    combine: str = "mean"  # for "step" in a round: "mean" or "sum" of the workers' gradients

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that pushes must share to be combined."""
        return self.method, self.rows is None, self.rule, self.combine


class ShardSlots(NamedTuple):
    """An optimizer's slots of a shard, by name; with 0 steps there are none."""

    steps: int
    slots: dict[str, NDArray[Any]]


def check_slots(rule: RuleKey, slots: ShardSlots, value: NDArray[Any]) -> None:
    """Raise ConfigError unless the slots fit an optimizer and a shard with this value."""
    names = slot_names(rule_of(rule[0], dict(rule[1])), value.dtype)
    dtype = compute_dtype(value.dtype)
    for name, slot in slots.slots.items():
        if name not in names or slot.shape != value.shape or slot.dtype != dtype:
            raise ConfigError(
                f"slot {name!r:.40} of {rule[0]}, {slot.dtype.name}{list(slot.shape)}, does not "
                f"fit a shard {value.dtype.name}{list(value.shape)}"
            )


class Shard:
    """A part of a variable."""

    def __init__(
        self, spec: Spec, value: NDArray[Any], staleness: int | None, allocate: Allocate = np.empty
    ) -> None:
        self.spec = spec
        self.array = allocate(value.shape, value.dtype)
        self.array[...] = value
        self._allocate = allocate
        self._is_exported = False  # a reader may keep the array: the next push changes a copy
        self.staleness = staleness
        self._rules: dict[RuleKey, ServerRule] = {}
        # A step that `check` has tried on a copy of the present array.
        self._trial: tuple[Push, NDArray[Any] | None, TrialStep] | None = None
        # Failed pushes that servers have acknowledged: ranks, error, reason.
        self.failures: list[tuple[list[int], str, str]] = []
        self._rounds: dict[tuple[int, int, int], dict[int, Push]] = {}
        self._counts: dict[int, tuple[Position, int]] = {}  # rank -> position, pushes there
        self._settled: tuple[int, int, int] = (0, 0, -1)  # the last applied round

    def state(self) -> dict[str, Any]:
        """Return the whole shard as plain data and arrays that do not change."""
        return {
            "spec": tuple(self.spec),
            "array": self.rows(None),
            "staleness": self.staleness,
            "counts": dict(self._counts),
            "settled": self._settled,
            "rules": {rule: (one.steps, one.slots()) for rule, one in self._rules.items()},
            "rounds": {
                round_: {rank: tuple(push) for rank, push in pushes.items()}
                for round_, pushes in self._rounds.items()
            },
        }

    @classmethod
    def of_state(cls, state: dict[str, Any], allocate: Allocate) -> Shard:
        """Return the shard with this state."""
        shard = cls(Spec(*state["spec"]), state["array"], state["staleness"], allocate)
        shard._counts, shard._settled = state["counts"], state["settled"]
        for rule, (steps, slots) in state["rules"].items():
            shard._rules[rule] = ServerRule(rule_of(rule[0], dict(rule[1])), shard.array)
            shard._rules[rule].restore(steps, slots)
        shard._rounds = {
            round_: {rank: Push(*push) for rank, push in pushes.items()}
            for round_, pushes in state["rounds"].items()
        }
        return shard

    @property
    def waits(self) -> bool:
        """Whether pushes wait for other workers."""
        return bool(self._rounds)

    # -- writing -----------------------------------------------------------------------------------

    def check(self, push: Push) -> None:
        """Raise ConfigError unless a push fits; try a custom rule on a copy."""
        shape, dtype = self.array.shape, self.array.dtype
        if push.value.dtype != dtype and push.method != _STEP:
            raise ConfigError(f"a push of {push.value.dtype.name} to a shard of {dtype.name}")
        if push.rows is None:
            if push.method not in _PLAIN and push.method != _STEP:
                raise ConfigError(f"servers know no push {push.method!r:.40} of whole variables")
            if push.value.shape != shape:
                raise ConfigError(f"a push of shape {push.value.shape} to a shard of shape {shape}")
        else:
            if push.method not in _SCATTERS and push.method != _STEP:
                raise ConfigError(f"servers know no push {push.method!r:.40} of rows")
            rows = push.rows
            fits = shape and rows.ndim == 1 and rows.dtype == np.int64
            if not fits or push.value.shape != (rows.size, *shape[1:]):
                raise ConfigError(
                    f"rows of shape {push.value.shape} do not fit a shard of shape {shape}"
                )
            if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < shape[0]:
                raise ConfigError(f"a push names rows outside 0 to {shape[0] - 1}")
        if push.method == _STEP:
            rule_of(push.rule[0], dict(push.rule[1]))
            if self.staleness != 0 and push.rule[0] == "Custom":  # code of the program
                self._try(push)

    def _try(self, push: Push) -> None:
        # An error of the rule must be known before the server executes any of the request.
        value, rows = (push.value, None) if push.rows is None else _gradient([push])
        if rows is None or rows.size:
            trial = self._rule(push).trial_step(self.array, value, rows, push.rate)
            self._trial = push, rows, trial

    def push(self, rank: int, place: Position | None, push: Push) -> None:
        """Apply or keep a push that fits; `place` is None for a worker outside rounds."""
        if self.staleness != 0 or place is None:
            self._apply([push])
            return
        number = self._count(rank, place)
        self._rounds.setdefault((*place, number), {})[rank] = push
        self._counts[rank] = place, number + 1

    def settle(self, places: Mapping[int, Position]) -> bool:
        """Apply complete rounds in order, for these positions; return whether none is left."""
        while self._rounds:
            first = min(self._rounds)
            pushes = self._rounds[first]
            if any(rank not in pushes and place <= first[:2] for rank, place in places.items()):
                return False
            self._settled = max(self._settled, first)
            self._end_round(self._rounds.pop(first))
        return True

    def set_staleness(self, staleness: int | None) -> None:
        """Change the bound, after the pushes that wait."""
        if staleness == self.staleness:
            return
        for _, pushes in sorted(self._rounds.items()):
            self._end_round(pushes)
        self._rounds.clear()
        self.staleness = staleness

    def slots(self, rule: RuleKey) -> ShardSlots:
        """Return the present slots of an optimizer."""
        found = self._rules.get(rule)
        return ShardSlots(0, {}) if found is None else ShardSlots(found.steps, found.slots())

    def restore(self, value: NDArray[Any], slots: Mapping[RuleKey, ShardSlots]) -> None:
        """Set value and slots; drops the pushes that wait for other workers."""
        self._rounds.clear()
        self._apply([Push(AccessKind.ASSIGN.value, value)])
        for rule, one in slots.items():
            self._rules.pop(rule, None)
            if one.steps or one.slots:
                self._rules[rule] = ServerRule(rule_of(rule[0], dict(rule[1])), self.array)
                self._rules[rule].restore(one.steps, one.slots)

    def _count(self, rank: int, place: Position) -> int:
        """Return the number of a worker's next round in its present step.

        Rounds that ended while the worker was away do not count.
        """
        where, count = self._counts.get(rank, (place, 0))
        least = self._settled[2] + 1 if self._settled[:2] == place else 0
        return max(least, count if where == place else 0)

    def _end_round(self, pushes: dict[int, Push]) -> None:
        try:
            self._combine([push for _, push in sorted(pushes.items())])
        except SyncvarError as error:  # from a custom rule; the server has acknowledged the pushes
            self.failures.append((sorted(pushes), type(error).__name__, error_message(error)))

    def _combine(self, pushes: list[Push]) -> None:
        """Apply a round: as one push if all have equal kinds, else one after another by rank."""
        first = pushes[0]
        aggregation = self.spec.aggregation
        is_plain = first.rows is None and first.method != _STEP
        is_assign = first.method == AccessKind.ASSIGN.value and aggregation == "NONE"
        if any(push.kind != first.kind for push in pushes):
            for push in pushes:
                self._apply([push])
        elif first.rows is not None:
            self._apply(pushes)
        elif is_plain and aggregation == "ONLY_FIRST_REPLICA":
            self._apply([first])
        elif is_plain and aggregation != "MEAN" and (is_assign or self.array.dtype.kind == "b"):
            self._apply([pushes[-1]])
        else:
            combine = first.combine
            if is_plain:
                combine = "mean" if aggregation == "MEAN" else "sum"
            values = [push.value for push in pushes]
            self._apply([first._replace(value=tree_combined(values, combine))])

    def _apply(self, pushes: list[Push]) -> None:
        """Apply pushes of one kind, in place unless a reader has the array; several have rows."""
        first = pushes[0]
        array, target = self.array, self.array
        trial, self._trial = self._trial, None
        if self._is_exported:
            self._is_exported = False
            self.array = target = self._allocate(array.shape, array.dtype)
            if first.rows is not None or first.method == _STEP:
                np.copyto(target, array)
        with quiet():
            if trial is not None and _is_same_step(first, trial[0]):
                self._rule(first).put(target, *trial[1:])
            elif first.rows is not None:
                self._apply_rows(pushes)
            elif first.method == _STEP:
                self._rule(first).step(target, first.value, None, first.rate)
            elif (ufunc := _PLAIN[first.method]) is None:
                target[...] = first.value
            else:
                ufunc(array, first.value, out=target, casting="same_kind")

    def _apply_rows(self, pushes: list[Push]) -> None:
        first = pushes[0]
        if first.method == _STEP:
            gradient, touched = _gradient(pushes)
            if touched.size:
                self._rule(first).step(self.array, gradient, touched, first.rate)
            return
        rows, values = _rows_of(pushes)
        if rows.size:
            touched, which = np.unique(rows, return_inverse=True)
            chosen = RowSelection(which.reshape(-1), values)
            self.array[touched] = apply_rows(_SCATTERS[first.method], self.array[touched], chosen)

    def _rule(self, push: Push) -> ServerRule:
        if push.rule not in self._rules:
            rule = rule_of(push.rule[0], dict(push.rule[1]))
            self._rules[push.rule] = ServerRule(rule, self.array)
        return self._rules[push.rule]

    # -- reading -----------------------------------------------------------------------------------

    def may_read(self, rank: int, places: Mapping[int, Position]) -> bool:
        """Return whether the bound lets a worker read now; ranks outside `places` always may."""
        here = places.get(rank)
        if here is None or self.staleness is None:
            return True
        if self.staleness:
            return min(place[0] for place in places.values()) >= here[0] - self.staleness
        if min(places.values()) < here:
            return False
        own = (*here, self._count(rank, here))
        return all(round_ >= own for round_ in self._rounds)

    def rows(self, rows: NDArray[Any] | None) -> NDArray[Any]:
        """Return the present array, or rows of it in their order; neither changes any more.

        The array itself is returned without a copy, and the next push changes another one.
        """
        if rows is None:
            self._is_exported = True
            view = self.array.view()
            view.flags.writeable = False
            return view
        result = self._allocate((*rows.shape, *self.array.shape[1:]), self.array.dtype)
        # "clip" avoids a second check of the rows and a buffered copy.
        np.take(self.array, rows, axis=0, out=result, mode="clip")
        return result


def _is_same_step(push: Push, trial_step: Push) -> bool:
    has_same_value = push.value is trial_step.value
    return has_same_value and push.kind == trial_step.kind and push.rate == trial_step.rate


def _rows_of(pushes: list[Push]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows of pushes of one kind, and the value of each row."""
    rows = [push.rows for push in pushes if push.rows is not None]
    return np.concatenate(rows), np.concatenate([push.value for push in pushes])


def _gradient(pushes: list[Push]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the combined gradient of the rows of some steps, and these rows, each once."""
    rows, values = _rows_of(pushes)
    touched, which = np.unique(rows, return_inverse=True)
    gradient = np.zeros((touched.size, *values.shape[1:]), values.dtype)
    np.add.at(gradient, which.reshape(-1), values)
    if pushes[0].combine == "mean" and len(pushes) > 1:
        gradient /= len(pushes)
    return gradient, touched
