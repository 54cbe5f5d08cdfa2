"""SIGTERM as a stop request: noted at once, acted on when all ranks have agreed (`should_stop`)."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.process import current, is_initialized
from syncvar.core.errors import UsageError
from syncvar.core.exit_status import send_status
from syncvar.core.fork_cleanup import handle_signal, release_signal

if TYPE_CHECKING:
    from types import FrameType


EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: "run me again"
_ECHO_S = 1.0


class StopNotice:
    """Whether this rank has received a stop request.

    The first SIGTERM is the request. A later one, or one in a job with a failed rank, runs the
    previous handler. Two within a second count as one: a scheduler that signals every process also
    signals the launcher, which passes the signal on.

    Args:
        listens: Whether to handle SIGTERM.
    """

    def __init__(self, *, listens: bool) -> None:
        self.is_requested = False
        self._signalled_at: float | None = None
        self._before: Any = None
        self._listens = listens
        if listens:
            if threading.current_thread() is not threading.main_thread():
                raise UsageError(
                    "on_preemption=True handles SIGTERM, which only the main thread can: make the "
                    "manager there, or call manager.request_stop() when you learn of the stop"
                )
            self._before = handle_signal(signal.SIGTERM, self._signalled)
            send_status("takes_notice", on=1)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        engine = current().engine if is_initialized() else None
        now = time.monotonic()
        is_echo = self._signalled_at is not None and now - self._signalled_at < _ECHO_S
        is_broken = engine is not None and engine.failure is not None
        if (self._signalled_at is not None and not is_echo) or is_broken:
            before = self._before
            self.close()
            if callable(before):
                before(number, frame)
            elif before != signal.SIG_IGN:
                raise SystemExit(128 + number)
        self._signalled_at = now if self._signalled_at is None else self._signalled_at
        self.is_requested = True

    def close(self) -> None:
        """Restore the previous SIGTERM handler, in the main thread. Idempotent."""
        if self._listens and threading.current_thread() is threading.main_thread():
            self._listens = False
            if signal.getsignal(signal.SIGTERM) == self._signalled:
                release_signal(signal.SIGTERM, self._signalled)
                outer = getattr(self._before, "__self__", None)
                send_status("takes_notice", on=int(isinstance(outer, StopNotice)))

    def end(self) -> None:
        """Ignore SIGTERM from now on: the process is about to exit with the agreed code."""
        listened = self._listens
        self.close()
        if listened and not self._listens:
            handle_signal(signal.SIGTERM, signal.SIG_IGN)
