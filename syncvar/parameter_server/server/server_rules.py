"""Steps of optimizers on a server: the arithmetic of workers, on a shard or on rows of it."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import ConfigError, SyncvarError
from syncvar.core.reduce_ops import quiet
from syncvar.optimizers.custom_rules import CustomRule
from syncvar.optimizers.update_rules import (
    BLOCK,
    AdagradRule,
    AdamRule,
    AdamWRule,
    MomentumRule,
    RMSPropRule,
    SGDRule,
    checked_number,
    compute_dtype,
    is_half,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from syncvar.optimizers.update_rules import UpdateRule

_REASON_MAX = 4000  # characters of a traceback

_ELEMENTWISE: dict[str, Callable[..., UpdateRule]] = {
    "SGD": SGDRule,
    "Momentum": MomentumRule,
    "Nesterov": MomentumRule,
    "Adagrad": AdagradRule,
    "RMSProp": RMSPropRule,
    "Adam": AdamRule,
    "AdamW": AdamWRule,
    "Custom": CustomRule,
}


class RuleValidator(NamedTuple):
    """The result of a trial step: array or rows, slots and number of steps."""

    touched: NDArray[Any]
    slots: list[NDArray[Any]]
    steps: NDArray[Any]


class _Part(NamedTuple):
    """The attributes of a variable that an update rule reads."""

    is_half: bool
    gradient: NDArray[Any]
    scratch: NDArray[Any]


class _Room(NamedTuple):
    room: NDArray[Any]


class ServerRule:
    """The steps of one optimizer on one shard, with its slots."""

    def __init__(self, rule: UpdateRule, array: NDArray[Any]) -> None:
        self._rule = rule
        self._compute = compute_dtype(array.dtype)
        self._is_half = is_half(array.dtype)
        self._names = slot_names(rule, array.dtype)
        initials = rule.initials()
        self._slots = [
            np.full(array.shape, initial, self._compute) for initial in initials.values()
        ]
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
    ) -> RuleValidator:
        """Make one step on a copy; raise ConfigError with the traceback of a custom rule."""
        which = ... if rows is None else rows
        trial = RuleValidator(
            np.array(array[which]),
            [np.array(slot[which]) for slot in self._slots],
            self._steps.copy(),
        )
        self._make(trial.touched, trial.slots, trial.steps, gradient, rate)
        return trial

    def put(self, array: NDArray[Any], rows: NDArray[Any] | None, trial: RuleValidator) -> None:
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
                    [array, *slots, *counter], part, _Room(np.empty(0)), rate, int(steps), {}
                )
        except SyncvarError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(_error_text(error)) from error
        if not counter:
            steps += 1


def is_users(name: str) -> bool:
    """Return whether a rule, by its class name, is code of the program."""
    return name == "Custom"


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
    if name not in _ELEMENTWISE or not all(re.fullmatch("[a-z_0-9]+", key) for key in settings):
        raise ConfigError(
            f"servers make the steps of {', '.join(_ELEMENTWISE)}, not of {name!r:.60}"
        )
    numbers = dict(settings)
    decay = numbers.pop("weight_decay", None)
    try:
        rule = _ELEMENTWISE[name](**numbers)
    except TypeError as error:  # an unknown or missing setting
        raise ConfigError(
            f"settings {sorted(settings)} do not fit optimizer {name}: {error}"
        ) from None
    if decay is not None:
        rule.decay = checked_number("weight_decay", decay)
    return rule
