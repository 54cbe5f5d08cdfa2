"""The clock of a start: it names the step in which the launcher hangs.

At the deadline it ends the launcher.

The clock is a timer of the process (SIGALRM), so its handler also runs while the launcher waits in
a system call. A thread would do, but the launcher forks, and a forked child must not inherit a lock
that a thread held. While the loop of an attempt runs, the clock is off and `start_progress` does
this.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

_TICK_S = 1.0
_NOTICE_S, _LIMIT_S = 5.0, 300.0  # the defaults of missing_report_s and rendezvous_timeout_s
_EXIT_CODE = 69  # exits.RENDEZVOUS; this module imports nothing of the package


class StartClock:
    """Counts the seconds since the last step of a start began.

    It counts ticks of the timer, so it stands still while the launcher itself is stopped.
    """

    def __init__(self) -> None:
        self._notice_s, self._limit_s = _NOTICE_S, _LIMIT_S
        self._step = ""
        self._waited_s = self._next_s = 0.0
        self._before: Any = None
        self._runs = self._is_off = False

    def read_limits(self, environ: Mapping[str, str]) -> None:
        """Read the limits from the environment, until the launcher has read its options."""
        notice_s = _seconds(environ, "SYNCVAR_MISSING_REPORT_S", _NOTICE_S)
        self.set_limits(notice_s, _seconds(environ, "SYNCVAR_RENDEZVOUS_TIMEOUT_S", _LIMIT_S))

    def set_limits(self, notice_s: float, limit_s: float) -> None:
        """Set the seconds of one step until the clock names it, and until it ends the launcher."""
        self._notice_s, self._limit_s = notice_s, limit_s

    def enter(self, step: str) -> None:
        """Begin a step, and count from 0; `step` continues the words "the launcher"."""
        self._step, self._waited_s, self._next_s = step, 0.0, self._notice_s
        if self._is_off:
            return
        if not self._runs:
            self._before = signal.signal(signal.SIGALRM, self._tick)
            self._runs = True
        first_s = min(self._notice_s, self._limit_s, _TICK_S)
        signal.setitimer(signal.ITIMER_REAL, first_s, first_s)

    def stop(self) -> None:
        """Stop until the next step. Idempotent."""
        if self._runs:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._before)
            self._runs = False

    def turn_off(self) -> None:
        """Stop for good, because the user forwards SIGALRM."""
        self.stop()
        self._is_off = True

    def _tick(self, _number: int, frame: FrameType | None) -> None:
        self._waited_s += min(self._notice_s, self._limit_s, _TICK_S)
        is_over = self._waited_s >= self._limit_s
        if not is_over and self._waited_s < self._next_s:
            return
        self._next_s = 2 * self._waited_s
        place = (
            ""
            if frame is None
            else f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        )
        stands = f"the launcher {self._step}{place}"
        waited = f"the start has made no progress for {self._waited_s:.0f} s"
        if is_over:
            write_error(f"{waited}, and is given up: {stands}")
            # The cleanup process ends what has started, and removes the private directory.
            os._exit(_EXIT_CODE)
        write_error(f"{waited}: {stands}")


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(environ.get(name, ""))
    except ValueError:
        return default
    return value if value > 0 else default


def write_error(sentence: str) -> None:
    """Write to standard error in a signal handler, if that neither blocks nor fails."""
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):  # the terminal is gone, or nothing reads the pipe
        if poller.poll(0):
            os.write(2, f"syncvar-launch: {sentence}\n".encode(errors="backslashreplace"))


clock = StartClock()
"""The clock of this process, which has only one such timer."""
