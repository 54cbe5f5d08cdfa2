"""End a process when its parent ends, by Linux's PR_SET_PDEATHSIG."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, or exit now if that has happened."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call above took effect
        os._exit(1)
