"""The steps of optimizers on a server: the same arithmetic as in a worker, on a shard or on the rows of it that were named."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import ConfigError, SyncvarError
from syncvar.core.reduce_ops import quiet
from syncvar.optimizers.hyperparameters import checked_number
from syncvar.optimizers.rules.builtin_rules import (
    AdagradRule,
    AdamRule,
    AdamWRule,
    MomentumRule,
    RMSPropRule,
    SGDRule,
)
from syncvar.optimizers.rules.custom_rules import CustomRule
from syncvar.optimizers.rules.exact_math import BLOCK
from syncvar.optimizers.rules.update_rule import compute_dtype, is_half

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from syncvar.optimizers.rules.update_rule import UpdateRule

__all__ = ["RuleValidator", "ServerRule", "is_users", "rule_of", "slot_names"]

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
    """What a step would make: of the shard's array, or of the rows of it, and of the slots."""

    touched: NDArray[Any]
    slots: list[NDArray[Any]]
    steps: NDArray[Any]


class _Part(NamedTuple):
    """What a rule wants to know of the variable that it steps."""

    is_half: bool
    gradient: NDArray[Any]
    scratch: NDArray[Any]


class _Room(NamedTuple):
    room: NDArray[Any]


class ServerRule:
    """The step of one optimizer on one shard, and the slots that belong to it.

    Args:
        rule: The optimizer.
        array: The shard's.
    """

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
        """How many it has made."""
        return int(self._steps)

    def slots(self) -> dict[str, NDArray[Any]]:
        """Return copies of the slots, by their names."""
        return {name: slot.copy() for name, slot in zip(self._names, self._slots, strict=True)}

    def restore(self, steps: int, slots: Mapping[str, NDArray[Any]]) -> None:
        """Make the slots that are named what they were once.

        Args:
            steps: How many it had made.
            slots: By name; of the shard's shape.
        """
        self._steps[...] = steps
        for name, slot in zip(self._names, self._slots, strict=True):
            if name in slots:
                slot[...] = slots[name]

    def step(
        self, array: NDArray[Any], gradient: NDArray[Any], rows: NDArray[Any] | None, rate: float
    ) -> None:
        """Make one step in place.

        Args:
            array: The shard's.
            gradient: Of its shape, or of the named rows, each of them once.
            rows: int64, which they are; None for all.
            rate: Learning rate.
        """
        if rows is None:
            self._make(array, self._slots, self._steps, gradient, rate)
        else:
            self.put(array, rows, self.tried(array, gradient, rows, rate))

    def tried(
        self, array: NDArray[Any], gradient: NDArray[Any], rows: NDArray[Any] | None, rate: float
    ) -> RuleValidator:
        """Make one step beside the array, which stays as it is; see `step`.

        Raises:
            ConfigError: The rule of a program has raised something; with its traceback.
        """
        which = ... if rows is None else rows
        made = RuleValidator(
            np.array(array[which]),
            [np.array(slot[which]) for slot in self._slots],
            self._steps.copy(),
        )
        self._make(made.touched, made.slots, made.steps, gradient, rate)
        return made

    def put(self, array: NDArray[Any], rows: NDArray[Any] | None, made: RuleValidator) -> None:
        """Take over what a trial has made."""
        which = ... if rows is None else rows
        array[which] = made.touched
        for slot, changed in zip(self._slots, made.slots, strict=True):
            slot[which] = changed
        self._steps[...] = made.steps

    def _make(
        self,
        array: NDArray[Any],
        slots: list[NDArray[Any]],
        steps: NDArray[Any],
        gradient: NDArray[Any],
        rate: float,
    ) -> None:
        given = np.array(gradient, self._compute)
        part = _Part(
            self._is_half,
            given,
            np.empty(given.shape if given.size <= BLOCK else BLOCK, self._compute),
        )
        counter = [steps] if self._rule.counts_steps else []
        try:
            with quiet():
                self._rule.change(
                    [array, *slots, *counter], part, _Room(np.empty(0)), rate, int(steps), {}
                )
        except SyncvarError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(_told(error)) from error
        if not counter:
            steps += 1


def is_users(name: str) -> bool:
    """Return whether a rule, by its class name, is code of a program, which may raise anything."""
    return name == "Custom"


def _told(error: BaseException) -> str:
    where = error.__traceback__
    for _ in range(3):  # what is below the rule is of no use to who has written it
        where = where.tb_next if where is not None and where.tb_next is not None else where
    text = "".join(traceback.format_exception(type(error), error, where))
    return f"an update rule raised {type(error).__name__} on a server, which goes on without that push:\n{text[-_REASON_MAX:]}"


def slot_names(rule: UpdateRule, dtype: np.dtype[Any]) -> list[str]:
    """Return the names of the slots that a rule has of a variable, in their order; those that a checkpoint knows too.

    Example:
        >>> slot_names(rule_of("Adam", {}), np.dtype("float16"))
        ['master', 'm', 'v']
    """
    return [*(["master"] if is_half(dtype) else []), *rule.initials()]


def rule_of(name: str, settings: dict[str, Any]) -> UpdateRule:
    """Return the rule of an optimizer by its class name and its settings.

    Raises:
        ConfigError: Servers do not know it.

    Example:
        >>> type(rule_of("Adam", {"beta_1": 0.8})).__name__
        'AdamRule'
    """
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
