"""Detects that other Python threads compete for the GIL, and then keeps it through NumPy calls.

NumPy releases the GIL for operations on more than 500 elements. If another thread computes in
Python, getting it back takes about 5 ms each time. Then calls work for a while in pieces of 500
elements, which keep the GIL. Idle threads cost nothing.
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

PIECE = 500  # elements up to which NumPy keeps the GIL
_SLOW_S = 0.002
_SLOW_S_PER_BYTE = 2e-9
_HOLD_S = 2.0


class GilMonitor:
    """Whether other threads of this process compete for the GIL."""

    def __init__(self) -> None:
        self.usual_threads = 1  # the caller
        self.is_alert = False  # calls may have to keep the GIL
        self._until = 0.0

    def is_there(self) -> bool:
        """Return whether there are threads besides the caller and syncvar's own.

        They may be idle.
        """
        return (
            sum(not thread.name.startswith("syncvar-") for thread in threading.enumerate())
            > self.usual_threads
        )

    def holds(self) -> bool:
        """Return whether calls should keep the GIL now."""
        if self.is_alert and time.perf_counter() >= self._until:
            self.is_alert = False
        return self.is_alert and self.is_there()

    def note(self, seconds: float, nbytes: int) -> None:
        """Record the duration of a call. A late peer looks like contention, which does no harm."""
        if seconds > _SLOW_S + _SLOW_S_PER_BYTE * nbytes and self.is_there():
            self._until = time.perf_counter() + _HOLD_S
            self.is_alert = True


gil_monitor = GilMonitor()


def ufunc_holding(
    ufunc: Combiner, one: NDArray[Any], other: NDArray[Any], out: NDArray[Any]
) -> None:
    """Execute `ufunc(one, other, out)` on flat arrays without releasing the GIL."""
    for start in range(0, out.size, PIECE):
        stop = start + PIECE
        ufunc(one[start:stop], other[start:stop], out=out[start:stop])


def _copy_holding(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Execute `target[...] = source` on flat arrays without releasing the GIL."""
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
    """Return the function that copies flat arrays now: one that keeps the GIL under contention."""
    return _copy_holding if gil_monitor.holds() else np.copyto
