"""Beside busy Python threads: keeping the interpreter's lock (GIL) through a call.

NumPy lets go of the lock while it works on more than 500 elements. Beside a thread that computes in Python, getting it back
takes a switch interval and a turn of the system's scheduler, about 5 ms (measured; a shorter switch interval did not help),
for each of some ten operations of a call: an all-reduce of 1 MiB took 200 times as long. When that is seen, calls work for
a while in pieces of 500 elements, which keep the lock; idle threads cost nothing.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.core.reduce_ops import Combiner

    Copier = Callable[[NDArray[Any], NDArray[Any]], Any]  # of (target, value)

__all__ = ["PIECE", "Copier", "GilMonitor", "copier", "crowd", "ufunc_holding"]

PIECE = 500  # elements up to which NumPy keeps the lock
_SLOW_S = 0.002
_SLOW_S_PER_BYTE = 2e-9
_HOLD_S = 2.0


class GilMonitor:
    """What this process knows about its other threads."""

    def __init__(self) -> None:
        self.usual_threads = 1  # the caller
        self.is_alert = False  # calls may have to keep the lock
        self._until = 0.0

    def is_there(self) -> bool:
        """Return whether there are threads beside the caller and syncvar's own; they may be idle."""
        return (
            sum(not thread.name.startswith("syncvar-") for thread in threading.enumerate())
            > self.usual_threads
        )

    def holds(self) -> bool:
        """Return whether calls shall keep the lock now."""
        if self.is_alert and time.perf_counter() >= self._until:
            self.is_alert = False
        return self.is_alert and self.is_there()

    def note(self, seconds: float, nbytes: int) -> None:
        """Take in how long a call took; a late peer looks the same, but then there is time to lose."""
        if seconds > _SLOW_S + _SLOW_S_PER_BYTE * nbytes and self.is_there():
            self._until = time.perf_counter() + _HOLD_S
            self.is_alert = True


crowd = GilMonitor()


def ufunc_holding(
    ufunc: Combiner, one: NDArray[Any], other: NDArray[Any], out: NDArray[Any]
) -> None:
    """Do `ufunc(one, other, out)` on flat arrays without letting go of the lock."""
    for start in range(0, out.size, PIECE):
        stop = start + PIECE
        ufunc(one[start:stop], other[start:stop], out=out[start:stop])


def _copy_holding(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Do `target[...] = source` on flat arrays without letting go of the lock."""
    if (
        target.dtype == source.dtype
        and target.size
        and target.flags.c_contiguous
        and source.flags.c_contiguous
    ):
        target.view(np.uint8).data[:] = source.view(np.uint8).data
        return
    for start in range(0, target.size, PIECE):
        target[start : start + PIECE] = source[start : start + PIECE]


def copier() -> Copier:
    """Return what copies flat arrays now: without letting go of the lock where that is better."""
    return _copy_holding if crowd.holds() else np.copyto
