"""Whose turn it is to drive: one thread at a time, which holds the lock; the others wait, or leave it an errand."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.engine.one_sided import Question
    from syncvar.engine.operation import Operation
    from syncvar.engine.recorder import Recorder

__all__ = ["Turns"]

_FOLLOW_S = 1.0


class Turns:
    """The turns of a process's threads.

    Whoever holds `lock` drives: the transport and the launcher's channel are its own. Whoever has released it calls
    `hand_over`.

    Args:
        wake: Ends a driver's wait for arrivals.
        recorder: Is asked for what it puts off to a driver's end.
    """

    def __init__(self, wake: Callable[[], None], recorder: Recorder) -> None:
        self.lock = threading.Lock()
        self._wake = wake
        self._recorder = recorder
        self._followers: list[threading.Event] = []
        self._errands: collections.deque[Callable[[], None]] = collections.deque()  # of threads that do not drive

    def leave_errand(self, errand: Callable[[], None]) -> None:
        """Let the driver do something, from any thread; do it now where nobody drives."""
        self._errands.append(errand)
        self._wake()
        self.hand_over()

    def run_errands(self) -> None:
        """Do what was left for the driver, as the driver."""
        while self._errands:
            self._errands.popleft()()

    def follow(self, operation: Operation | Question) -> None:
        """Wait until the driver leaves, or has ended this operation."""
        event = threading.Event()
        self._followers.append(event)
        try:
            if not operation.is_over and self.lock.locked():
                event.wait(_FOLLOW_S)
        finally:
            self._followers.remove(event)

    def hand_over(self) -> None:
        """Let others go on, after the lock has been released: waiting threads, and errands that came meanwhile."""
        while self._errands and self.lock.acquire(blocking=False):
            try:
                self.run_errands()
            finally:
                self.lock.release()
        for event in list(self._followers):
            event.set()
        if self._recorder.is_due:
            self._recorder.ended()
