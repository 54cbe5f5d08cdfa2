"""The handle of an asynchronous call."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from syncvar._native import AsyncCall
from syncvar.core.errors import SyncvarError
from syncvar.core.migration_hints import MigrationHintsMixin
from syncvar.runtime.deferred_queues import send_queued
from syncvar.runtime.timeouts import checked_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.runtime.progress import ProgressEngine
    from syncvar.runtime.request import Request


class Work(MigrationHintsMixin):
    """An asynchronous collective or message.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> work = sv.all_reduce(np.ones(2), async_op=True)
        >>> work.wait()
        array([1., 1.])
    """

    _begun: AsyncCall | None = None  # while the engine does not know the call
    _finish: Callable[[Any], Any] | None = None
    _operation: Request

    def __init__(
        self, engine: ProgressEngine | None, operation: Request | AsyncCall, *, sends: bool = False
    ) -> None:
        self._engine = engine
        self._sends = sends  # this call sends deferred writes
        if isinstance(operation, AsyncCall):
            self._begun = operation
        else:
            self._operation = operation

    def then(self, finish: Callable[[Any], Any]) -> Work:
        """Apply `finish` to the result; return this work."""
        self._finish = finish
        return self

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result.

        Args:
            timeout: Seconds from now; None keeps the deadline of the call. If the time passes, the
                call has failed as one that misses its deadline, and the group is broken. To poll,
                use `done`.

        Raises:
            SyncvarError: The error of the collective.
        """
        begun = self._begun
        if begun is not None:
            result = self._take_result(begun, waits=True)
            if result is not None:
                return result if self._finish is None else self._finish(result)
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

    def _take_result(self, begun: AsyncCall, *, waits: bool) -> Any:
        """Return the result of a call unknown to the engine.

        None if the engine continues it now.
        """
        result = begun.end(waits)
        if result is None:
            assert self._engine is not None
            operation = self._engine.adopted(begun)
            if operation is None:
                return begun.end(False)  # the call has ended meanwhile
            # set before `_begun`: another thread may wait for the same call
            self._operation = operation
            self._begun = None
        return result

    def done(self) -> bool:
        """Return whether the collective has ended, with or without error.

        Makes a little progress.
        """
        begun = self._begun
        if begun is not None and self._take_result(begun, waits=False) is not None:
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
        except Exception as error:  # returned, as asked
            return error
        return None
