"""Checks of the `timeout` argument of calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from syncvar.core.errors import ConfigError


def checked_timeout(timeout: Any) -> float:
    """Return a timeout in seconds.

    Raises:
        ConfigError: The timeout is not a positive number.
    """
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float | np.integer | np.floating)
        or not timeout > 0
    ):
        raise ConfigError(f"timeout must be a positive number of seconds or None, not {timeout!r}")
    try:
        return float(timeout)
    except OverflowError:  # an int above every float
        return math.inf


def is_seconds(timeout: Any) -> bool:
    """Return whether `checked_timeout` surely accepts a timeout; in doubt the slow path decides.

    Example:
        >>> is_seconds(5), is_seconds(0.5), is_seconds(0), is_seconds(True), is_seconds("5")
        (True, True, False, False, False)
    """
    return type(timeout) in (float, int) and timeout > 0
