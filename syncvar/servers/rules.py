"""The steps of optimizers on a server: the same arithmetic as in a worker, on a shard or on the rows of it that were named."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.errors import ConfigError
from syncvar.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, RMSProp
from syncvar.optimizers.arithmetic import BLOCK
from syncvar.optimizers.slots import compute_dtype, is_half
from syncvar.runtime.kernels import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from syncvar.optimizers.rule import Rule

__all__ = ["ServerRule", "rule_of", "slot_names"]

_ELEMENTWISE: dict[str, Callable[..., Rule]] = {
    "SGD": SGD, "Momentum": Momentum, "Nesterov": Momentum, "Adagrad": Adagrad, "RMSProp": RMSProp, "Adam": Adam, "AdamW": AdamW,
}  # fmt: skip


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

    def __init__(self, rule: Rule, array: NDArray[Any]) -> None:
        self._rule = rule
        self._compute = compute_dtype(array.dtype)
        self._is_half = is_half(array.dtype)
        self._names = slot_names(rule, array.dtype)
        initials = rule._initials()  # noqa: SLF001  (a rule as its variables see it)
        self._slots = [np.full(array.shape, initial, self._compute) for initial in initials.values()]
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

    def step(self, array: NDArray[Any], gradient: NDArray[Any], rows: NDArray[Any] | None, rate: float) -> None:
        """Make one step in place.

        Args:
            array: The shard's.
            gradient: Of its shape, or of the named rows, each of them once.
            rows: int64, which they are; None for all.
            rate: Learning rate.
        """
        given = np.array(gradient, self._compute)
        scratch = np.empty(given.shape if given.size <= BLOCK else BLOCK, self._compute)
        part = _Part(self._is_half, given, scratch)
        slots = self._slots
        if rows is not None:
            touched, slots = array[rows], [slot[rows] for slot in slots]
        else:
            touched = array
        counter = [self._steps] if self._rule._counts_steps else []  # noqa: SLF001
        with quiet():
            self._rule._change([touched, *slots, *counter], part, _Room(np.empty(0)), rate, int(self._steps), {})  # noqa: SLF001
        if not counter:
            self._steps += 1
        if rows is not None:
            array[rows] = touched
            for slot, changed in zip(self._slots, slots, strict=True):
                slot[rows] = changed


def slot_names(rule: Rule, dtype: np.dtype[Any]) -> list[str]:
    """Return the names of the slots that a rule has of a variable, in their order; those that a checkpoint knows too.

    Example:
        >>> slot_names(rule_of("Adam", {}), np.dtype("float16"))
        ['master', 'm', 'v']
    """
    return [*(["master"] if is_half(dtype) else []), *rule._initials()]  # noqa: SLF001  (a rule as its variables see it)


def rule_of(name: str, settings: dict[str, Any]) -> Rule:
    """Return the rule of an optimizer by its class name and its settings.

    Raises:
        ConfigError: Servers do not know it.

    Example:
        >>> type(rule_of("Adam", {"beta_1": 0.8})).__name__
        'Adam'
    """
    if name not in _ELEMENTWISE or not all(re.fullmatch("[a-z_0-9]+", key) for key in settings):
        raise ConfigError(f"servers make the steps of {', '.join(_ELEMENTWISE)}, not of {name!r:.60}")
    return _ELEMENTWISE[name](0.0, **settings)
