"""The clock that the processes of a host share, CLOCK_MONOTONIC, and its identity."""

from __future__ import annotations

import contextlib
import os

_FIRST_TIME_NAMESPACE = "time:[4026531834]"


def boot_identity() -> str:
    """Return the identity of this machine's boot: processes with an equal one share a clock.

    A time namespace of its own has another clock, so its name is a part. Empty if unknown.
    """
    boot = namespace = ""
    with (
        contextlib.suppress(OSError),
        open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file,
    ):
        boot = file.read().strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/time")
    is_own = namespace not in ("", _FIRST_TIME_NAMESPACE)
    return f"{boot}/{namespace}" if boot and is_own else boot
