"""Collects signals that end, stop or continue the launcher, or that it forwards.

It also notices the end of the program that called `sv.run`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
_NEVER_IGNORED = (signal.SIGINT, signal.SIGTERM)


class SignalWatch:
    """Collects signals inside its `with` block.

    Its handlers only note them; the owner polls and acts.

    Args:
        environ: SYNCVAR_PARENT_FD in it is the read end of a pipe. `sv.run` holds the other end,
            and its end means that the calling program is gone.
        forwarded: The numbers of the signals to forward to the ranks.

    Attributes:
        pending: The signals to end that no code has handled yet, oldest first.
        passing: The signals that still have to be forwarded, oldest first.
        is_orphan: Whether the program that called `sv.run` is gone.
        is_to_stop: Whether Ctrl-Z was pressed (SIGTSTP), so that the owner should call `stop`.
    """

    def __init__(self, environ: Mapping[str, str], forwarded: Sequence[int] = ()) -> None:
        self.pending: deque[int] = deque()
        self.passing: deque[int] = deque()
        self._forwarded = forwarded
        self.is_to_stop = self.is_orphan = False
        self._stopped_s = 0.0
        self._parent = int(environ.get("SYNCVAR_PARENT_FD", "-1"))
        if self._parent >= 0:
            os.set_inheritable(self._parent, False)
        self._before: dict[int, Any] = {}
        self._read = self._write = self._previous = -1

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # A hangup that was ignored at the start, as under nohup, stays ignored, and so
        # does all but the plain request to end.
        wanted = (*_SIGNALS, *self._forwarded)
        chosen = [
            one
            for one in wanted
            if one in _NEVER_IGNORED or signal.getsignal(one) != signal.SIG_IGN
        ]
        self._before = {number: signal.signal(number, self._signalled) for number in chosen}
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._previous)
        for number, handler in self._before.items():
            # Who got here without an error knows how the job ended, and nothing is
            # left to be interrupted.
            signal.signal(number, signal.SIG_IGN if error[0] is None else handler)
        os.close(self._read)
        os.close(self._write)

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return [self._read, self._parent] if self._parent >= 0 else [self._read]

    def readable(self, descriptor: int) -> None:
        """Handle a descriptor that poll reported; ignore others."""
        if descriptor == self._read:
            os.read(self._read, 4096)
        elif descriptor == self._parent:
            self._parent = -1
            self.is_orphan = True
            self.pending.append(signal.SIGHUP)

    def now(self) -> float:
        """Return the seconds of a clock that stands during `stop`, which counts for no limit."""
        return time.monotonic() - self._stopped_s

    def stop(self) -> float:
        """Stop this process as Ctrl-Z does; return, after it continues, how many seconds it stood.

        In an orphaned process group no shell could continue it, and the system does not stop it.
        """
        self.is_to_stop = False
        began = time.monotonic()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._signalled)
        lasted = time.monotonic() - began
        self._stopped_s += lasted
        while (
            signal.SIGCONT in self.passing
        ):  # it was for us, and who stopped the ranks lets them go on
            self.passing.remove(signal.SIGCONT)
        return lasted

    def _signalled(self, number: int, _frame: object) -> None:
        if number == signal.SIGTSTP:
            self.is_to_stop = True
        elif number in self._forwarded:
            self.passing.append(number)
        else:
            self.pending.append(number)
