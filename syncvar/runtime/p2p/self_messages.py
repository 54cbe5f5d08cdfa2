"""Messages of a rank to itself.

They need no transport, and waiting for an unsent one would deadlock.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import SyncvarError, UsageError
from syncvar.runtime.flight_recorder.call_record import CallInfo, PendingRecord
from syncvar.runtime.request import Request, RequestState
from syncvar.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Finish = Callable[[int, NDArray[Any]], Any]  # of (kind, message)

_lock = threading.RLock()  # reentrant for signal handlers
_TO_ITSELF = CallInfo("a message to this rank itself", 0, (), 0, 0, "")


def done(result: Any = None) -> Work:
    """Return a completed work.

    Example:
        >>> done(5).wait()
        5
    """
    operation = Request(PendingRecord(_TO_ITSELF, 0, 0), None)
    operation.state, operation.result = RequestState.DONE, result
    return Work(None, operation)


def failed(error: SyncvarError) -> Work:
    """Return a failed work; `wait` raises its error."""
    operation = Request(PendingRecord(_TO_ITSELF, 0, 0), None)
    operation.state, operation.error = RequestState.FAILED, error
    return Work(None, operation)


class Mailbox:
    """Messages with one tag that this rank has sent to itself, or receives that wait for them.

    Args:
        boxes: Messages or receives of the group, by tag; tags without any are removed.
        rank: This process in the group.
        tag: The tag.
    """

    def __init__(self, boxes: dict[int, deque[Any]], rank: int, tag: int) -> None:
        self._boxes = boxes
        self._rank = rank
        self._tag = tag

    def put(self, kind: int, message: NDArray[Any]) -> None:
        """Pass a message to the oldest receive, or keep it."""
        with _lock:
            first = self._popped(_Expected)
            if first is None:
                self._append((kind, message))
                return
        first.take(kind, message)

    def take(self, name: str, finish: Finish) -> Any:
        """Return `finish` of the oldest message.

        Raises:
            UsageError: There is no message.
        """
        with _lock:
            first = self._popped(tuple)
        if first is None:
            raise self._refusal(
                name,
                f"start the receive before: work = sv.{name}({self._rank}, tag={self._tag}, "
                "async_op=True)",
            )
        return finish(*first)

    def start(self, name: str, finish: Finish) -> Work:
        """Return a receive of the oldest message, or of the next one."""
        with _lock:
            first = self._popped(tuple)
            if first is None:
                receive = _Expected(self._refusal(name, "wait after that"), finish)
                self._append(receive)
                return receive
        return done(finish(*first))

    def _popped(self, kind: type) -> Any:
        """Remove and return the oldest item if it has this type; else None."""
        queue = self._boxes.get(self._tag)
        if queue is None or not isinstance(queue[0], kind):
            return None
        if len(queue) == 1:
            del self._boxes[self._tag]
        return queue.popleft()

    def _append(self, item: Any) -> None:
        queue = self._boxes.get(self._tag)
        if queue is None:
            self._boxes[self._tag] = deque([item])
        else:
            queue.append(item)

    def _refusal(self, name: str, advice: str) -> UsageError:
        return UsageError(
            f"{name} from rank {self._rank}, which is this one: it has sent itself nothing with "
            f"tag {self._tag}, and nobody else would end this wait. Send first, or {advice}"
        )


class _Expected(Work):
    """A receive that was started before its message was sent."""

    def __init__(self, refusal: UsageError, finish: Finish) -> None:
        self._refusal = refusal
        self._finish_message = finish
        super().__init__(None, Request(PendingRecord(_TO_ITSELF, 0, 0), None))

    def take(self, kind: int, message: NDArray[Any]) -> None:
        """Complete with a message."""
        operation = self._operation
        try:
            operation.result = self._finish_message(kind, message)
            operation.state = RequestState.DONE
        except SyncvarError as error:  # the receive fails, not the send
            operation.error = error
            operation.state = RequestState.FAILED

    def wait(self, timeout: float | None = None) -> Any:
        """Return the message.

        Raises:
            UsageError: The message has not been sent. The receive stays, and may be waited for
                again.
        """
        if not self._operation.is_over:
            raise self._refusal
        return super().wait(timeout)
