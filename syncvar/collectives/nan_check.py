"""Whether what a rank brings to a call is finite: who looks at the input can name the rank and the variable.

A NaN is in every rank's result after a reduction, and nobody can tell from there where it came from. With the setting
`check_finite` each rank looks at what it brings: "warn" says so, "raise" refuses the call, "off" looks at nothing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.process import joined
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["is_on", "look"]

_log = logging.getLogger("syncvar")
_REPEAT_S = 30.0
_said: dict[tuple[int, str], float] = {}


def is_on() -> bool:
    """Return whether the settings of this rank's job ask to look."""
    context = joined()
    return context is not None and context.config.check_finite != "off"


def look(value: Any, what: str) -> None:
    """Look at what this rank brings, if the settings of its job ask for that.

    Args:
        value: An array, or what becomes one; only floats and complex numbers can fail to be finite.
        what: The call, and the variable's name where there is one.

    Raises:
        ConfigError: It holds NaN or infinity, and `check_finite` is "raise".

    Cost: nothing when off; else one pass over the array, about 30 GB/s.
    """
    context = joined()
    if context is None or context.config.check_finite == "off":
        return
    import numpy as np

    try:
        array: NDArray[Any] = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # the call refuses it
        return
    if array.dtype.kind not in "fcV":
        return
    finite: NDArray[np.bool_] = np.isfinite(array)
    if finite.all():
        return
    bad = np.flatnonzero(~finite.reshape(-1))
    place = ", ".join(str(int(index)) for index in np.unravel_index(bad[0], array.shape))
    text = (
        f"rank {context.rank} brings {bad.size} of {array.size} elements that are not finite to {what}; the first one, "
        f"at [{place}], is {array.reshape(-1)[bad[0]]}"
    )
    if context.config.check_finite == "raise":
        raise ConfigError(text)
    now = time.monotonic()
    if now - _said.get((context.rank, what), float("-inf")) >= _REPEAT_S:
        _said[context.rank, what] = now
        _log.warning("%s", text)
