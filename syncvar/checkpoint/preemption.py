"""SIGTERM as a notice that this process will be ended: noted, and acted on where all ranks are."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.process import current, is_initialized
from syncvar.core.errors import UsageError
from syncvar.core.fork_cleanup import handle_signal, release_signal
from syncvar.core.status_pipe import tell

if TYPE_CHECKING:
    from types import FrameType


EXIT_CODE = 75  # of the sysexits: temporary failure, run me again
_ECHO_S = 1.0


class Notice:
    """Whether this rank has been asked to stop.

    Args:
        listens: Take SIGTERM for it. The second SIGTERM, and one that comes when the job is broken, does what it did before;
            but two within a second are one notice: a scheduler that signals every process also signals the launcher, which
            passes it on.

    Raises:
        UsageError: Signals can be taken in the main thread only.
    """

    def __init__(self, *, listens: bool) -> None:
        self.is_given = False
        self._told_at: float | None = None
        self._before: Any = None
        self._listens = listens
        if listens:
            if threading.current_thread() is not threading.main_thread():
                raise UsageError(
                    "on_preemption=True takes SIGTERM, which only the main thread can: make the manager there, or call "
                    "manager.request_stop() where you learn of it"
                )
            self._before = handle_signal(signal.SIGTERM, self._signalled)
            tell("takes_notice", on=1)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        engine = current().engine if is_initialized() else None
        now = time.monotonic()
        is_echo = self._told_at is not None and now - self._told_at < _ECHO_S
        is_broken = engine is not None and engine.failure is not None
        if (self._told_at is not None and not is_echo) or is_broken:
            before = self._before
            self.close()
            if callable(before):
                before(number, frame)
            elif before != signal.SIG_IGN:
                raise SystemExit(128 + number)
        self._told_at = now if self._told_at is None else self._told_at
        self.is_given = True

    def close(self) -> None:
        """Give SIGTERM back, in the main thread. Idempotent."""
        if self._listens and threading.current_thread() is threading.main_thread():
            self._listens = False
            if signal.getsignal(signal.SIGTERM) == self._signalled:
                release_signal(signal.SIGTERM, self._signalled)
                tell(
                    "takes_notice",
                    on=int(isinstance(getattr(self._before, "__self__", None), Notice)),
                )

    def end(self) -> None:
        """Give SIGTERM back for good: what it asks for is done, and the process is about to end with that exit code."""
        listened = self._listens
        self.close()
        if listened and not self._listens:
            handle_signal(signal.SIGTERM, signal.SIG_IGN)
