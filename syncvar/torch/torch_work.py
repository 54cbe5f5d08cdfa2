"""Work and Future of torch.distributed for calls of syncvar."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch.futures import Future

from syncvar.core.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from syncvar.runtime.work import Work

_DRIVE_S = 200e-6
_DRIVE_BYTES_PER_S = 4e9
NO_TURN: AbstractContextManager[Any] = contextlib.nullcontext()
_TIMEOUT_TEXT = "; the timeout is that of the call, or of the process group"


class GroupTurn:
    """A lock for the threads that use a group; errors of timeouts that pass it say so."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._lock.release()
        name_timeout(error)


def name_timeout(error: BaseException | None) -> None:
    """Add the word to the text of a timeout that torch's programs look for."""
    if isinstance(error, DeadlineExceeded) and not error.args[0].endswith(_TIMEOUT_TEXT):
        error.args = (error.args[0] + _TIMEOUT_TEXT,)


class ResultDelivery(Protocol):
    """What remains to be done with the results of calls, to make them those of torch's call."""

    def deliver(self, results: list[Any]) -> None:
        """Write the results of the calls to the tensors of the caller."""


class CallFuture(Future):  # type: ignore[misc]
    """Future of a call: `wait` and `then` wait for the call itself, in the thread that calls them.

    So functions added by `then` run in the order of the program. If they make calls, these have the
    same order on all ranks.
    """

    def __init__(self, work: CallWork) -> None:
        super().__init__()
        self._work: CallWork | None = work

    def _end(self) -> None:
        work = self._work
        if work is not None:
            work.end_future()

    def complete(self, tensors: list[Any], error: BaseException | None) -> None:
        """Set the result of the call, which has ended."""
        self._work = None  # else the tensors would stay until the next garbage collection
        if error is None:
            self.set_result(tensors)
        else:
            self.set_exception(error)

    def wait(self) -> Any:
        """Wait for the call, and return its tensors."""
        self._end()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Wait for the call, call the function with this future, and return a future of that."""
        self._end()
        with contextlib.suppress(Exception):  # the function gets the error from the future
            super().wait()  # another thread may be completing it
        return super().then(callback)


class CallWork(dist.Work):  # type: ignore[misc]
    """Calls of syncvar that make one call of torch.distributed.

    Args:
        calls: The calls that have been started; none if the call has ended.
        tensors: The result.
        delivery: What remains to be done when the calls have ended, or None.
        turn: Held while a thread waits, so that other threads take turns with the group. Messages
            have NO_TURN: while one thread waits for a message, another one may make the call
            that lets the sender go on.
    """

    def __init__(
        self,
        calls: Sequence[Work],
        tensors: list[Any],
        delivery: ResultDelivery | None,
        turn: AbstractContextManager[Any],
    ) -> None:
        super().__init__()
        self._calls = calls
        self._tensors = tensors
        self._delivery = delivery
        self._turn = turn
        self._lock = threading.Lock()
        self._is_over = False
        self._error: BaseException | None = None
        self._future: CallFuture | None = None
        self._has_ended_future = False
        self._open_calls = 0
        self.source = -1

    @classmethod
    def joined(cls, works: Sequence[CallWork]) -> CallWork:
        """Return one work for several; it ends with the last one."""
        turns = (work._turn for work in works)  # noqa: SLF001  (its own class)
        turn = next((one for one in turns if one is not NO_TURN), NO_TURN)
        calls = [call for work in works for call in work._calls]  # noqa: SLF001
        tensors = [tensor for work in works for tensor in work._tensors]  # noqa: SLF001
        return cls(calls, tensors, DeliverWorks(works), turn)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; return True, or raise the error of the call."""
        seconds = None if timeout is None else timeout.total_seconds()
        self._end(seconds if seconds is not None and seconds > 0 else None)
        if self._error is not None:
            raise self._error
        return True

    def _end(self, seconds: float | None = None) -> None:
        """Wait for the calls, and deliver their results once."""
        if self._is_over:
            return
        with NO_TURN if all(call.done() for call in self._calls) else self._turn:
            results, error = self._results(seconds)
        with self._lock:
            self._deliver(results, error)

    def _deliver(self, results: list[Any], error: BaseException | None) -> None:
        """Deliver the results, unless another thread has done so; the caller holds the lock."""
        if self._is_over:
            return
        try:
            if error is None and self._delivery is not None:
                self._delivery.deliver(results)
        except Exception as failed:  # noqa: BLE001  (the waiter raises it)
            error = failed
        self._error = error
        self._is_over = True
        self._calls, self._delivery = (), None

    def _results(self, seconds: float | None) -> tuple[list[Any], BaseException | None]:
        results, first = [], None
        for call in self._calls:
            try:
                results.append(call.wait(seconds))
            except Exception as error:  # noqa: BLE001  (the others are waited for first)
                name_timeout(error)
                first = first or error
        return results, first

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without error."""
        if not self._is_over and all(call.done() for call in self._calls):
            self._end()
        return self._is_over

    def is_success(self) -> bool:
        """Return whether the call has ended without error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of a call that has ended."""
        return self._error

    def result(self) -> list[Any]:
        """Wait, and return the tensors."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait for the end: results are in the tensor, or on its stream."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank whose message a receive from any rank got."""
        return self.source

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> CallFuture:
        """Return the future of the call; a thread of syncvar completes it."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = CallFuture(self)
            calls = self._calls
            self._open_calls = len(calls)
        if self._ends_soon():
            self.end_future()
        else:
            for call in calls:
                call.add_done_callback(self._call_ended)
        return future

    def _ends_soon(self) -> bool:
        """Return whether the call ends while this thread drives it, for about its usual time.

        So no other thread has to take it over. A call whose peers are late goes on by itself.
        """
        nbytes = sum(one.nbytes for one in self._tensors if not one.is_sparse)
        until = time.monotonic() + _DRIVE_S + nbytes / _DRIVE_BYTES_PER_S
        while not self.is_completed():
            if time.monotonic() > until:
                return False
        return True

    def _call_ended(self, call: Work) -> None:
        """Complete the future after the last call, in a thread of syncvar."""
        del call
        with self._lock:
            self._open_calls -= 1
            if self._open_calls:
                return
        self.end_future()

    def end_future(self) -> None:
        """Wait for the end, and complete the future once."""
        self._end()
        with self._lock:
            future, is_first = self._future, not self._has_ended_future
            self._has_ended_future = True
        if future is not None and is_first:
            future.complete(self._tensors, self._error)


class DeliverWorks:
    """Ends works whose calls have ended."""

    def __init__(self, works: Sequence[CallWork]) -> None:
        self._works = works

    def deliver(self, results: list[Any]) -> None:
        """End the works; raise the error of the first that has failed."""
        for work in self._works:
            work.wait()
