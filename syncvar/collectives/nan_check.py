"""Check of inputs for NaN and infinity (setting `check_finite`: "off", "warn" or "raise").

After a reduction every rank's result contains the NaN. Only a check of the inputs can name the rank
and the variable from which it came.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.process import joined
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("syncvar")
_REPEAT_S = 30.0
_said: dict[tuple[int, str], float] = {}


def is_on() -> bool:
    """Return whether the settings of this rank's job ask for the check."""
    context = joined()
    return context is not None and context.config.check_finite != "off"


def look(value: Any, what: str) -> None:
    """Check the input of this rank if the setting `check_finite` asks for it.

    `what` names the call, and the variable if there is one. Raises ConfigError if the setting is
    "raise" and the array holds NaN or infinity. Cost: nothing when off, else one pass over the
    array.
    """
    context = joined()
    if context is None or context.config.check_finite == "off":
        return
    import numpy as np

    try:
        array: NDArray[Any] = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # the call raises a better error
        return
    if array.dtype.kind not in "fcV":
        return
    finite: NDArray[np.bool_] = np.isfinite(array)
    if finite.all():
        return
    bad = np.flatnonzero(~finite.reshape(-1))
    place = ", ".join(str(int(index)) for index in np.unravel_index(bad[0], array.shape))
    text = (
        f"{bad.size} of {array.size} elements of rank {context.rank}'s input are not finite in "
        f"{what}; the first one, at [{place}], is {array.reshape(-1)[bad[0]]}"
    )
    if context.config.check_finite == "raise":
        raise ConfigError(text)
    now = time.monotonic()
    if now - _said.get((context.rank, what), float("-inf")) >= _REPEAT_S:
        _said[context.rank, what] = now
        _log.warning("%s", text)
