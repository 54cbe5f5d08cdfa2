"""Where an iterator is, as plain data: the checks of what is restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from syncvar.core.errors import ConfigError


def integer_of(name: str, value: Any, at_least: int) -> int:
    """Return an integer argument.

    Raises:
        ConfigError: It is none, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ConfigError(f"{name} must be an integer of at least {at_least}, not {value!r}")
    return int(value)


def read_state(state: Any, expected: Mapping[str, str]) -> tuple[int, int]:
    """Return (epoch, position) of an iterator's state.

    Args:
        state: What `state_dict` returned.
        expected: Entries that must be what they are here, for instance the seed.

    Raises:
        ConfigError: It is no such state, or one of another dataset.

    Example:
        >>> read_state({"epoch": 1, "position": 5, "seed": "3"}, {"seed": "3"})
        (1, 5)
    """
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"the state of an iterator is a dict, not {type(state).__name__}: pass what state_dict() returned"
        )
    missing = sorted({"epoch", "position", *expected} - set(state))
    if missing:
        raise ConfigError(
            f"the state of the iterator has no {', '.join(missing)}: pass what state_dict() returned"
        )
    for name, here in expected.items():
        if state[name] != here:
            raise ConfigError(
                f"the state was saved with {name} {state[name]!r} and this iterator has {here!r}: the order of its elements "
                f"would be another one. Make the dataset as it was, or begin a new epoch"
            )
    return integer_of("epoch", state["epoch"], 0), integer_of("position", state["position"], 0)
