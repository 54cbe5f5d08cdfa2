"""Messages of a rank to itself: they need no wire, and whoever waits for one that has not been sent would wait for ever."""

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

__all__ = ["Mailbox", "done", "failed"]

_lock = threading.RLock()  # a thread may come again, in a signal's handler
_TO_ITSELF = CallInfo("a message to this rank itself", 0, (), 0, 0, "")


def done(result: Any = None) -> Work:
    """Return a work that has ended with a result.

    Example:
        >>> done(5).wait()
        5
    """
    operation = Request(PendingRecord(_TO_ITSELF, 0, 0), None)
    operation.state, operation.result = RequestState.DONE, result
    return Work(None, operation)


def failed(error: SyncvarError) -> Work:
    """Return a work that has failed; `wait` raises its error."""
    operation = Request(PendingRecord(_TO_ITSELF, 0, 0), None)
    operation.state, operation.error = RequestState.FAILED, error
    return Work(None, operation)


class Mailbox:
    """What this rank has sent to itself with one tag and not received, or the receives that were started before: one of the two.

    Args:
        boxes: By tag, of the group: messages, or receives; nothing is kept of a tag for which nothing waits.
        rank: This process in the group.
        tag: The tag.
    """

    def __init__(self, boxes: dict[int, deque[Any]], rank: int, tag: int) -> None:
        self._boxes = boxes
        self._rank = rank
        self._tag = tag

    def put(self, kind: int, message: NDArray[Any]) -> None:
        """Take a message, for the receive that was started first if there is one."""
        with _lock:
            first = self._popped(_Expected)
            if first is None:
                self._append((kind, message))
                return
        first.take(kind, message)

    def take(self, name: str, finish: Finish) -> Any:
        """Return what `finish` makes of the oldest message.

        Raises:
            UsageError: There is none.
        """
        with _lock:
            first = self._popped(tuple)
        if first is None:
            raise self._refusal(
                name,
                f"start the receive before: work = sv.{name}({self._rank}, tag={self._tag}, async_op=True)",
            )
        return finish(*first)

    def start(self, name: str, finish: Finish) -> Work:
        """Return a receive of the oldest message, or of the next one that is sent."""
        with _lock:
            first = self._popped(tuple)
            if first is None:
                made = _Expected(self._refusal(name, "wait after that"), finish)
                self._append(made)
                return made
        return done(finish(*first))

    def _popped(self, kind: type) -> Any:
        """Return what has waited longest, if it is of this kind; else None."""
        box = self._boxes.get(self._tag)
        if box is None or not isinstance(box[0], kind):
            return None
        if len(box) == 1:
            del self._boxes[self._tag]
        return box.popleft()

    def _append(self, item: Any) -> None:
        box = self._boxes.get(self._tag)
        if box is None:
            self._boxes[self._tag] = deque([item])
        else:
            box.append(item)

    def _refusal(self, name: str, advice: str) -> UsageError:
        return UsageError(
            f"{name} from rank {self._rank}, which is this one: it has sent itself nothing with tag {self._tag}, and nobody else would "
            f"end this wait. Send first, or {advice}"
        )


class _Expected(Work):
    """A receive whose message has not been sent when it was started."""

    def __init__(self, refusal: UsageError, finish: Finish) -> None:
        self._refusal = refusal
        self._taken_by = finish
        super().__init__(None, Request(PendingRecord(_TO_ITSELF, 0, 0), None))

    def take(self, kind: int, message: NDArray[Any]) -> None:
        """End with a message."""
        operation = self._operation
        try:
            operation.result = self._taken_by(kind, message)
            operation.state = RequestState.DONE
        except SyncvarError as error:  # a matter of the receive, not of the send
            operation.error = error
            operation.state = RequestState.FAILED

    def wait(self, timeout: float | None = None) -> Any:
        """Return the message.

        Raises:
            UsageError: It has not been sent; the receive goes on, and may be waited for again.
        """
        if not self._operation.is_over:
            raise self._refusal
        return super().wait(timeout)
