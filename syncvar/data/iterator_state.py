"""Checks of saved iterator positions and of integer arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from syncvar.core.errors import ConfigError


def integer_of(name: str, value: Any, at_least: int) -> int:
    """Return an integer argument of at least `at_least`, or raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ConfigError(f"{name} must be an integer of at least {at_least}, not {value!r}")
    return int(value)


def read_state(state: Any, expected: Mapping[str, str]) -> tuple[int, int]:
    """Return (epoch, position) of a saved iterator state.

    Raises:
        ConfigError: It is no such state, or an entry of `expected`, such as the seed, differs.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"the state of an iterator is a dict, not {type(state).__name__}: pass the result of "
            f"state_dict()"
        )
    missing = sorted({"epoch", "position", *expected} - set(state))
    if missing:
        raise ConfigError(
            f"the state of the iterator has no {', '.join(missing)}: pass the result of "
            f"state_dict()"
        )
    for name, current in expected.items():
        if state[name] != current:
            raise ConfigError(
                f"the state was saved with {name} {state[name]!r}, this iterator has {current!r}: "
                f"the order of its elements would differ. Create the dataset as before, or begin a "
                f"new epoch"
            )
    return integer_of("epoch", state["epoch"], 0), integer_of("position", state["position"], 0)
