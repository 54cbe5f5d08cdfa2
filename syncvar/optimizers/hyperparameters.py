"""Checks of the arguments of optimizers."""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from syncvar.core.array_arguments import matching_word
from syncvar.core.errors import ConfigError
from syncvar.core.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    Rate = float | Callable[[int], float]


class Options(TypedDict, total=False):
    """The options of every optimizer besides its own hyperparameters; see `Optimizer`."""

    weight_decay: float
    clip_norm: float | None
    clip_value: float | None
    accumulate: int
    nonfinite: str
    name: str | None


def checked_number(
    name: str, given: Any, low: float = 0.0, high: float = float("inf"), *, open_low: bool = False
) -> float:
    """Return a finite number in [low, high); in (low, high) with `open_low`."""
    is_number = isinstance(given, int | float | np.integer | np.floating) and not isinstance(
        given, bool
    )
    if isinstance(given, np.ndarray) and given.ndim == 0 and given.dtype.kind in "iuf":
        is_number = True
    if is_number:
        number = float(given)
        if isfinite(number) and low <= number < high and not (open_low and number == low):
            return number
    sign = "<" if open_low else "<="
    limits = f"{low:g} {sign} {name}" + ("" if high == float("inf") else f" < {high:g}")
    raise ConfigError(f"{name} must be a finite number, {limits}, not {given!r:.80}")


def checked_rate(given: Any) -> Rate:
    """Return a learning rate: a number, or a function of the step."""
    if callable(given):
        return given  # type: ignore[no-any-return]
    return checked_number("learning_rate", given)


def checked_count(name: str, given: Any) -> int:
    """Return an integer of at least one."""
    if isinstance(given, int | np.integer) and not isinstance(given, bool) and given >= 1:
        return int(given)
    raise ConfigError(f"{name} must be an integer of at least 1, not {given!r:.80}")


def checked_choice(name: str, given: Any, choices: tuple[str, ...]) -> str:
    """Return one of some words, given as text or as a member of an enumeration."""
    if type(given) is str and given in choices:  # of each step: faster than to look at each word
        return given
    if (word := matching_word(given, choices)) is not None:
        return word
    hint = nearest(given, choices) if isinstance(given, str) else ""
    raise ConfigError(
        f"{name} must be one of {', '.join(map(repr, choices))}, not {given!r:.80}{hint}"
    )


def checked_name(given: Any, default: str) -> str:
    """Return the name of an optimizer, which is a part of its slots' names."""
    if given is None:
        return default
    if isinstance(given, str) and re.fullmatch(r"[A-Za-z0-9_./-]{1,64}", given):
        return given
    raise ConfigError(
        f"the name of an optimizer must be 1 to 64 of A-Z a-z 0-9 _ . / -, not {given!r:.80}"
    )
