"""How many cores the launcher may give to its workers."""

from __future__ import annotations

import os
import sys

from syncvar.shm.host_limits import core_quota


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may use, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def core_count() -> int:
    """Return the number of usable cores, or the smaller quota of CPU time of the container.

    A quota limits time and names no cores, so the launcher binds nothing because of it.
    """
    return min(len(usable_cores()), core_quota() or sys.maxsize)
