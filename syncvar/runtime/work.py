"""The handle of a started call."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from syncvar._native import AsyncCall
from syncvar.core.errors import SyncvarError
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.runtime.deferred_queues import send_queued
from syncvar.runtime.timeouts import checked_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.runtime.progress import ProgressEngine
    from syncvar.runtime.request import Request

__all__ = ["Work"]


class Work(MigrationHintsMixin):
    """A started collective.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> work = sv.all_reduce(np.ones(2), async_op=True)
        >>> work.wait()
        array([1., 1.])
    """

    _begun: AsyncCall | None = None  # as long as only this object knows of the call
    _finish: Callable[[Any], Any] | None = None
    _operation: Request

    def __init__(
        self, engine: ProgressEngine | None, operation: Request | AsyncCall, *, sends: bool = False
    ) -> None:
        self._engine = engine
        self._sends = sends  # queued writes: others need not go before
        if isinstance(operation, AsyncCall):
            self._begun = operation
        else:
            self._operation = operation

    def then(self, finish: Callable[[Any], Any]) -> Work:
        """Make what `finish` makes of the result the result; returns this work."""
        self._finish = finish
        return self

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result.

        Args:
            timeout: Seconds from now; None leaves the deadline that the call was given. When they have passed the call has failed, as
                one that meets its deadline, and the group is broken: to look without ending it, ask `done`.

        Raises:
            SyncvarError: What the collective itself would have raised.
        """
        begun = self._begun
        if begun is not None:
            made = self._taken(begun, waits=True)
            if made is not None:
                return made if self._finish is None else self._finish(made)
        operation = self._operation
        if self._engine is None:
            if operation.error is not None:
                raise operation.error
            return operation.result if self._finish is None else self._finish(operation.result)
        try:
            result = self._wait(operation, self._engine, timeout)
        except SyncvarError as error:
            note = f"the call was started at {operation.site}"
            if operation.site and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise
        return result if self._finish is None else self._finish(result)

    def _wait(self, operation: Request, engine: ProgressEngine, timeout: float | None) -> Any:
        if engine.queues and not self._sends:
            send_queued(engine.queues)
        if timeout is not None and not operation.is_over:
            allowed = checked_timeout(timeout)
            until = time.monotonic() + allowed
            if until < operation.deadline:
                operation.deadline, operation.timeout_s = until, allowed
        return engine.wait(operation)

    def _taken(self, begun: AsyncCall, *, waits: bool) -> Any:
        """Return the result of a call that only this object has known of; None where the engine goes on with it now."""
        made = begun.end(waits)
        if made is None:
            assert self._engine is not None
            operation = self._engine.adopted(begun)
            if operation is None:
                return begun.end(False)  # it has ended meanwhile
            self._operation = operation  # first: another thread may wait for the same
            self._begun = None
        return made

    def done(self) -> bool:
        """Return whether the collective has ended, well or badly; drives it a little."""
        begun = self._begun
        if begun is not None and self._taken(begun, waits=False) is not None:
            return True
        operation = self._operation
        if self._engine is not None and not operation.is_over:
            if self._engine.queues and not self._sends:
                for queue in list(self._engine.queues):
                    queue.begin_beside()
            self._engine.poll()
        return operation.is_over

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return the error, or None."""
        try:
            self.wait(timeout)
        except Exception as error:  # the caller asked for it as a value
            return error
        return None
