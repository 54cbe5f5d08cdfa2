"""What every call looks at before it begins: what refuses it, which writes go before it, which calls have begun already.

The engine is one. Prepared calls and the C runners read `is_quiet`, `queues` and `begun` at every call, so that these are
attributes of the very object that they have; everything else of the room is told of the engine no more than this.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from syncvar.errors import GroupBroken, InternalError, UsageError
from syncvar.kernel import AdmissionState

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.engine.call_ledger import CallLedger
    from syncvar.engine.operation import Operation
    from syncvar.engine.queued import Queued
    from syncvar.errors import TransportError
    from syncvar.kernel import Begun

__all__ = ["Admission"]


class Admission(AdmissionState):
    """Whether calls may begin in this process.

    Args:
        book: Knows which calls cannot succeed.
    """

    def __init__(self, book: CallLedger) -> None:
        self.failure: TransportError | UsageError | None = None  # what broke this generation
        self.is_quiet = True  # nothing is known that would refuse a call, and no writes are queued
        self.queues: list[Queued] = []  # queues that hold writes: calls that may wait send them first
        self.before_calls: list[Callable[[int, str], None]] = []  # each is told of a call, its group and its name, first
        self.begun: list[Begun] = []  # calls that only their callers know of, and wait for later
        self._book = book
        self._adopting = threading.RLock()  # before a call that is queued after one of them, and by the progress thread
        self._failure_raised = False

    def check(self) -> None:
        """Raise what broke this generation, if anything did.

        Raises:
            TransportError: The first call after the break raises the failure itself; later ones GroupBroken.
            UsageError: This process was forked from the one that joined.
        """
        failure = self.failure
        if failure is None:
            return
        if not self._failure_raised or isinstance(failure, UsageError):
            self._failure_raised = True
            raise failure
        raise GroupBroken(f"this group broke earlier: {failure}", failure)

    def refuse(self, failure: TransportError) -> TransportError | UsageError:
        """Refuse every call from now on; return what broke the generation first."""
        self.is_quiet = False
        if self.failure is None:
            self.failure = failure
        return self.failure

    def allows(self, group: int, call: int) -> bool:
        """Return whether nothing is known that would refuse a call: it may run without the lock."""
        is_good = self.failure is None and not self._book.has_refusals
        self.is_quiet = is_good and not self.queues and not self.before_calls
        return is_good or (self.failure is None and not self._book.may_refuse(group, call))

    def before_each_call(self, listener: Callable[[int, str], None]) -> None:
        """Call `listener(group, name)` before each call that may wait, from now on; none takes a prepared way any more."""
        self.before_calls.append(listener)
        self.is_quiet = False

    def adopt(self, after_s: float = 0.0) -> None:
        """Go on with the calls that have begun without the engine, so long ago: somebody else than their callers has to know of them."""
        with self._adopting:
            for begun in list(self.begun):
                if after_s == 0.0 or time.monotonic_ns() - begun.begin > after_s * 1e9:
                    begun.adopt()

    def adopted(self, begun: Begun) -> Operation | None:
        """Go on with a call that has begun without the engine, and return its operation; None if it is over.

        Raises:
            TransportError: An exception has struck while the engine was about to go on with it.
        """
        with self._adopting:
            begun.adopt()
        operation: Operation | None = begun.operation
        if operation is None and not begun.is_over:
            self.check()
            raise InternalError("nobody goes on with a call that has begun")
        return operation
