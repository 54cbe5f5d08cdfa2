"""Messages of a rank to itself, and what probes and receives from any source return.

A rank that sends to itself needs no other rank. So its messages wait in a `Mailbox` of its group.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.errors import SyncvarError, UsageError
from syncvar.protocol.fixed_records import BYTES
from syncvar.runtime.call_record import PendingRecord
from syncvar.runtime.p2p_channel import RECV_NAMES, TO_ITSELF, ended
from syncvar.runtime.p2p_endpoints import MessageForm
from syncvar.runtime.request import Request
from syncvar.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from syncvar.runtime.p2p_channel import ReceiveArgs

_lock = threading.RLock()  # reentrant for signal handlers
_serials = itertools.count()  # order of messages and receives of this rank itself
ANY_TAG = None  # key of receives of any tag in a mailbox


class MessageInfo(NamedTuple):
    """A message that has come and that nobody has received.

    Attributes:
        source: Rank of the group that sent it.
        tag: Its tag.
        is_object: Whether it is an object, for `recv_object`, and not an array.
        dtype: NumPy dtype of the array; None for an object.
        shape: Shape of the array; None for an object.
        nbytes: Bytes of the array, or of the packed object.

    Example:
        >>> import syncvar as sv
        >>> sv.send_object("text", 0, tag=3)
        >>> info = sv.probe(tag=3)
        >>> info.is_object, sv.recv_object(info.source, tag=info.tag)
        (True, 'text')
    """

    source: int
    tag: int
    is_object: bool
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None
    nbytes: int


class AnyMessage(NamedTuple):
    """A message that `recv_any` has received.

    Attributes:
        source: Rank of the group that sent it.
        value: The array or the object.
        tag: Its tag.
        is_object: Whether it is an object.

    Example:
        >>> import syncvar as sv
        >>> sv.send(2.5, 0)
        >>> sv.recv_any()
        AnyMessage(source=0, value=array(2.5), tag=0, is_object=False)
    """

    source: int
    value: Any
    tag: int
    is_object: bool


def info_of(source: int, tag: int, form: MessageForm) -> MessageInfo:
    """Return the description of a message with this form."""
    kind, dtype, shape = form
    nbytes = math.prod(shape) * dtype.itemsize
    if kind == BYTES:
        return MessageInfo(source, tag, is_object=True, dtype=None, shape=None, nbytes=nbytes)
    return MessageInfo(source, tag, is_object=False, dtype=dtype, shape=shape, nbytes=nbytes)


class _OwnMessage(NamedTuple):
    """A message that waits for its receive."""

    serial: int
    tag: int
    kind: int
    message: NDArray[Any]
    receipt: Request | None  # of a synchronous send


class Mailbox:
    """Messages that this rank has sent to itself, or receives that wait for them, by tag.

    No other rank takes part and nobody waits, so they need no engine, ring or link, and a send of
    any size ends at once. A world of one rank has only these messages.
    """

    def __init__(self, queues: dict[int | None, deque[Any]], rank: int) -> None:
        self._queues = queues
        self._rank = rank

    def put(self, tag: int, kind: int, message: NDArray[Any], *, synchronous: bool = False) -> Work:
        """Pass a message to the oldest receive, or keep it; return the work of the send."""
        receipt = Request(PendingRecord(TO_ITSELF, 0, 0), None) if synchronous else None
        one = _OwnMessage(next(_serials), tag, kind, message, receipt)
        with _lock:
            first = self._popped(_OwnReceive, tag, ANY_TAG)
            if first is None:
                self._queues.setdefault(tag, deque()).append(one)
                return ended() if receipt is None else _OwnSend(self.unreceived(), receipt)
        first.accept(one)
        return ended()

    def has_receive(self, tag: int) -> bool:
        """Return whether a receive waits for a message with this tag."""
        return any(isinstance(one, _OwnReceive) for one in self._heads((tag, ANY_TAG)))

    def find(self, tag: int | None) -> MessageInfo | None:
        """Return the oldest message with a tag, or (None) any, without receiving it."""
        with _lock:
            heads = self._heads(list(self._queues) if tag is None else (tag,))
        messages = [one for one in heads if isinstance(one, _OwnMessage)]
        if not messages:
            return None
        first = min(messages, key=lambda one: one.serial)
        form = MessageForm(first.kind, first.message.dtype, first.message.shape)
        return info_of(self._rank, first.tag, form)

    def receive(
        self, tag: int | None, args: ReceiveArgs, *, async_op: bool, is_any: bool = False
    ) -> Any:
        """Receive the oldest message, or start a receive of the next one; raise UsageError.

        With `is_any` the result is an `AnyMessage`.
        """
        name = RECV_NAMES[args.kind]
        with _lock:
            tags = list(self._queues) if tag is None else (tag,)
            first = self._popped(_OwnMessage, *tags)
            if first is None and async_op:
                refusal = self.refusal(name, tag, "wait after that")
                receive = _OwnReceive(refusal, args, rank=self._rank if is_any else None)
                self._queues.setdefault(tag, deque()).append(receive)
                return receive
        if first is None:
            shown = f"tag={tag}" if is_any else f"{self._rank}, tag={tag}"
            advice = f"start the receive before: work = sv.{name}({shown}, async_op=True)"
            raise self.refusal(name, tag, advice)
        receive = _OwnReceive(None, args, rank=self._rank if is_any else None)
        receive.accept(first)
        return receive if async_op else receive.wait()

    def take(self, found: MessageInfo, args: ReceiveArgs) -> Request | None:
        """Return the ended receive of a message; None if another thread has taken it before."""
        with _lock:
            if self.find(found.tag) != found:
                return None
            first = self._popped(_OwnMessage, found.tag)
        receive = _OwnReceive(None, args, rank=None)
        receive.accept(first)
        return receive.request

    def _heads(self, tags: Sequence[int | None]) -> list[Any]:
        return [self._queues[tag][0] for tag in tags if tag in self._queues]

    def _popped(self, kind: type[_OwnMessage | _OwnReceive], *tags: int | None) -> Any:
        """Remove and return the oldest of the first items that have this type; else None."""
        heads = [(tag, self._queues[tag][0]) for tag in tags if tag in self._queues]
        found = [(tag, head) for tag, head in heads if isinstance(head, kind)]
        if not found:
            return None
        tag, _ = min(found, key=lambda one: one[1].serial)
        queue = self._queues[tag]
        if len(queue) == 1:
            del self._queues[tag]
        return queue.popleft()

    def refusal(self, name: str, tag: int | None, advice: str) -> UsageError:
        """Return the error of a wait for a message that nobody else could send."""
        which = "any tag" if tag is None else f"tag {tag}"
        return UsageError(
            f"{name} from rank {self._rank}, which is this one: it has sent itself nothing with "
            f"{which}, and nobody else would end this wait. Send first, or {advice}"
        )

    def unreceived(self) -> UsageError:
        """Return the error of a synchronous send whose receive has not begun."""
        return UsageError(
            f"a synchronous send from rank {self._rank} to itself waits for its receive, and "
            "nobody else would end this wait. Start the receive before the send: "
            f"work = sv.recv({self._rank}, async_op=True)"
        )


class _OwnReceive(Work):
    """A receive from this rank itself; with a `refusal` it was started before its message."""

    def __init__(self, refusal: UsageError | None, args: ReceiveArgs, *, rank: int | None) -> None:
        self.serial = next(_serials)
        self._refusal = refusal
        self._args = args
        self._rank = rank  # None, or this rank for a receive from any source
        super().__init__(None, Request(PendingRecord(TO_ITSELF, 0, 0), None))

    @property
    def request(self) -> Request:
        """The request that this work waits for."""
        return self._request

    def accept(self, one: _OwnMessage) -> None:
        """Complete with a message, and a synchronous send of it."""
        try:
            result = self._args.finish(one.kind, one.message)
        except SyncvarError as error:  # the receive fails, not the send
            self._request.fail(error)
        else:
            if self._rank is not None:
                result = AnyMessage(self._rank, result, one.tag, one.kind == BYTES)
            self._request.complete(result)
        if one.receipt is not None:
            one.receipt.complete(None)

    def wait(self, timeout: float | None = None) -> Any:
        """Return the message; raise UsageError, now or again later, if it has not been sent."""
        if not self._request.is_over and self._refusal is not None:
            raise self._refusal
        return super().wait(timeout)


class _OwnSend(Work):
    """A synchronous send to this rank itself that waits for its receive."""

    def __init__(self, refusal: UsageError, receipt: Request) -> None:
        self._refusal = refusal
        super().__init__(None, receipt)

    def wait(self, timeout: float | None = None) -> Any:
        """Return; raise UsageError, now or again later, if nobody has received the message."""
        if not self._request.is_over:
            raise self._refusal
        return super().wait(timeout)
