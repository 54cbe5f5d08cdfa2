"""Update rules that programs write: functions of arrays, registered in a module.

The same function steps copies on ranks and shards on servers. Rules travel by name: a server
imports the module, and runs nothing but what is registered there.
"""

from __future__ import annotations

import importlib
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from syncvar.core.errors import ConfigError
from syncvar.optimizers.update_rules import UpdateRule, checked_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncvar.optimizers.update_rules import Array, Arrays, Factors, SteppedVariable

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_WORD = re.compile("[a-z_][a-z_0-9]*")
_OWN_SLOTS = ("master", "steps", "iterations")
_RESERVED = ("learning_rate", "step", "rule")


class _RegisteredRule(NamedTuple):
    function: Callable[..., Any]
    slots: dict[str, float]


_rules: dict[str, _RegisteredRule] = {}  # by "module:name"


def update_rule(
    function: Callable[..., Any] | None = None, *, slots: Mapping[str, float] | None = None
) -> Any:
    """Register a function as an update rule for `sv.optimizers.Custom`; a decorator.

    The function stands at the top level of a module. It is called as `rule(value, slots, gradient,
    numbers)` and returns the new value, or the new value and a dict of the slots that change. Its
    arguments are read-only arrays:

    * value: Array of the variable, of its part on one server, or of the rows that a gradient names.
      Half types as float32.
    * slots: Name -> array of the same shape.
    * gradient: Array of the same shape, combined over the replicas; for a row that is named twice
      the sum.
    * numbers: Name -> number: "learning_rate", "step" (1 for the first of a variable), and those of
      the `Custom`.

    Args:
        function: The rule.
        slots: Initial values of its slots, by name.

    Raises:
        ConfigError: Not a function that can be found by its name, or invalid slots.

    Example:
        >>> import syncvar as sv
        >>> @sv.optimizers.update_rule(slots={"last": 0.0})
        ... def difference(value, slots, gradient, numbers):
        ...     change = numbers["learning_rate"] * (gradient - slots["last"])
        ...     return value - change, {"last": gradient}
        >>> w = sv.Variable([1.0, 2.0])
        >>> optimizer = sv.optimizers.Custom(difference, 0.5)
        >>> for _ in range(2):
        ...     optimizer.apply_gradients([([1.0, 1.0], w)])
        >>> w.numpy()
        array([0.5, 1.5], dtype=float32)
    """
    if function is None:
        return lambda value: update_rule(value, slots=slots)
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    if not callable(function) or not _NAME.fullmatch(name):
        raise ConfigError(
            "update_rule takes a function at the top level of a module, where it is found by its "
            f"name, not {function!r:.80}"
        )
    result = {
        one: checked_number(f"slot {one!r}", first, float("-inf"))
        for one, first in dict(slots or {}).items()
    }
    for one in result:
        if not _WORD.fullmatch(one) or one in _OWN_SLOTS:
            raise ConfigError(
                f"update rule {name}: a slot is named by small letters, digits and _, and not "
                f"{', '.join(_OWN_SLOTS)}; not {one!r:.40}"
            )
    _rules[name] = _RegisteredRule(function, result)
    return function


class CustomRule(UpdateRule):
    """A registered rule with its numbers."""

    counts_steps: ClassVar[bool] = True

    def __init__(self, rule: Callable[..., Any] | str, **numbers: Any) -> None:
        self._name, self._registered = _find_rule(rule)
        self._own_numbers = {
            one: checked_number(one, value, float("-inf")) for one, value in numbers.items()
        }
        for one in self._own_numbers:
            if one in _RESERVED or not _WORD.fullmatch(one):
                raise ConfigError(
                    f"{one!r:.40} cannot be a number of an update rule: these are named by small "
                    f"letters, digits and _, not {', '.join(_RESERVED)}"
                )
        super().__init__(rule=self._name, **self._own_numbers)

    def initials(self) -> dict[str, float]:
        """Return the initial values of the slots, by name."""
        return self._registered.slots

    def _factors(self, rate: float, step: int) -> Factors:
        return rate, step

    def _advance(
        self, weight: Array, part: SteppedVariable, slots: Arrays, factors: Factors, room: Array
    ) -> None:
        del room
        gradient = part.gradient.reshape(weight.shape)
        if self.decay:
            gradient = gradient + weight * weight.dtype.type(self.decay)
        by_name = dict(zip(self._registered.slots, slots, strict=True))
        rate, step = factors
        found = self._registered.function(
            _read_only(weight),
            {name: _read_only(slot) for name, slot in by_name.items()},
            _read_only(gradient),
            MappingProxyType({**self._own_numbers, "learning_rate": rate, "step": int(step)}),
        )
        value, changed = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        unknown = (
            sorted(set(changed) - set(by_name))
            if isinstance(changed, dict)
            else [type(changed).__name__]
        )
        if unknown:
            raise ConfigError(
                f"update rule {self._name} returned slots that it has not: "
                f"{', '.join(map(str, unknown))}; write update_rule(slots={{…}})"
            )
        news = [(weight, self._checked_result(value, weight, "value"))]
        news += [
            (by_name[name], self._checked_result(slot, by_name[name], f"slot {name!r}"))
            for name, slot in changed.items()
        ]
        for array, new in news:
            array[...] = new

    def _checked_result(self, value: Any, array: Array, label: str) -> Array:
        """Return an array that a rule has returned, checked so that it can be stored."""
        result: Array = np.array(value) if value is not None else np.empty(0, object)
        if result.shape != array.shape or result.dtype.kind not in "fiub":
            raise ConfigError(
                f"update rule {self._name} returned a {label} of {result.dtype.name}"
                f"{list(result.shape)} where {array.dtype.name}{list(array.shape)} is to be "
                "changed: return the new value, or the new value and a dict of new slots"
            )
        return result


def _find_rule(rule: Callable[..., Any] | str) -> tuple[str, _RegisteredRule]:
    if not isinstance(rule, str):
        name = next((name for name, one in _rules.items() if one.function is rule), "")
        if not name:
            raise ConfigError(
                f"{rule!r:.80} is no update rule: write @sv.optimizers.update_rule before its def"
            )
        return name, _rules[name]
    if not _NAME.fullmatch(rule):
        raise ConfigError(f"an update rule is named 'module:function', not {rule!r:.80}")
    module, _, function = rule.partition(":")
    if rule not in _rules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"update rule {rule}: module {module!r} cannot be imported "
                f"({type(error).__name__}: {error}); put it beside the script, or install it, on "
                "every host that has a server"
            ) from error
    if rule not in _rules:
        raise ConfigError(
            f"module {module!r} registers no update rule {function!r}: write "
            "@sv.optimizers.update_rule before its def, at the top level"
        )
    return rule, _rules[rule]


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
