"""Messages without the engine: between ranks of one host, and from a rank to itself.

A send succeeds if the message ring has space, a receive if the message arrives while spinning.
After one message, arrays of the same dtype and shape are handled in C, if the extension is there.
Unusual cases (known refusals, deferred writes, another thread in the same call, a full ring) take
the slow path. Long waits continue in the engine with the same call number.
"""

from __future__ import annotations

import threading
from collections import deque
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from syncvar.core.array_types import dtype_index
from syncvar.core.errors import SyncvarError, UsageError
from syncvar.runtime.call_record import CallInfo, PendingRecord
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.p2p_endpoints import RecvEndpoint, SendEndpoint
from syncvar.runtime.p2p_requests import WAY, Sending
from syncvar.runtime.request import Request
from syncvar.runtime.work import Work
from syncvar.shm.message_ring import array_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.core.settings import RuntimeConfig
    from syncvar.runtime.communicator import CheckedCall, Communicator
    from syncvar.runtime.p2p_endpoints import Landing

    Finish = Callable[[int, NDArray[Any]], Any]  # of (kind, message)

NOT_YET = object()
_TYPES_MAX = 64  # message types cached per pair and tag
_EXPORTED = "biufc"  # dtype kinds whose arrays are buffers
_lock = threading.RLock()  # reentrant for signal handlers
_TO_ITSELF = CallInfo(CollectiveSpec("a message to this rank itself"), 0)


class P2PContext(Protocol):
    """The process context, as channels see it."""

    @property
    def config(self) -> RuntimeConfig:
        """The settings."""


class MessageType(NamedTuple):
    """Properties shared by messages of one dtype and shape."""

    type_code: int  # packed type, see `RingWriter.put`
    info: CallInfo  # shared part of the flight records
    is_buffer: bool  # the array can be copied as it is


class P2PChannel:
    """The messages of a pair and tag, as seen by one of the two ranks.

    Args:
        context: Process context.
        stream: Sequence of the pair's calls.
        end: This rank's end of the message ring; None without shared memory.
        array: Message kind of arrays.
        request: Builds the call of an array's message, if the engine continues what C has begun.
    """

    __slots__ = (
        "_array",
        "_context",
        "_request",
        "_types",
        "end",
        "is_remembered",
        "native",
        "stream",
    )

    def __init__(
        self,
        context: P2PContext,
        stream: Communicator,
        end: RecvEndpoint | SendEndpoint | None,
        array: int,
        request: Callable[[P2PChannel, NDArray[Any]], CheckedCall],
    ) -> None:
        self.stream = stream
        self.end = end
        self.native: Any = None  # C endpoint, once it has something to do
        self.is_remembered = False  # `send` or `recv` finds the C endpoint without Python
        self._array = array
        self._context = context
        self._request = request
        self._types: dict[tuple[np.dtype[Any], tuple[int, ...], int], MessageType] = {}

    def retire(self) -> None:
        """Stop using this channel: another one now counts messages of the pair and tag."""
        native, self.native, self.is_remembered = self.native, None, False
        if native is not None:
            native.retire()

    def send(
        self,
        array: NDArray[Any],
        kind: int,
        words: Callable[[], tuple[CollectiveSpec, int]],
        request: Callable[[], CheckedCall],
        timeout: float | None,
        *,
        waits: bool,
    ) -> bool:
        """Send a message if the ring has space; a long one waits until the receiver has read it.

        Args:
            array: The message.
            kind: Message kind.
            words: Returns the description of the call and the index of the dtype.
            request: Builds the call if the engine has to continue.
            timeout: Seconds; None for the job's default.
            waits: The message is long.

        Returns:
            False if nothing has been done.
        """
        stream, outward = self.stream, self.end
        engine, count = stream.engine, stream.count
        if engine is None or count is None or not isinstance(outward, SendEndpoint):
            return False
        if not engine.is_quiet or (waits and engine.under_way):
            return False
        if not array.flags.c_contiguous or not stream.busy.acquire(blocking=False):
            return False
        try:
            message_type, number = self._type_of(array, kind, words), 0
            call, begin = self.number(), monotonic_ns()
            try:
                if waits:
                    number = outward.announce(message_type.type_code, stream.identity, call, array)
                    is_accepted = number != 0
                else:
                    data = array if message_type.is_buffer else array.reshape(-1).view(np.uint8)
                    name = message_type.type_code, stream.identity, call, array.shape
                    is_accepted = outward.put(*name, data, array.nbytes, waits=True)
                if not is_accepted:
                    return False
                count.next_call = count.number = stream.next_call = call + 1
                is_over = not waits or outward.is_read_soon(number)
                if is_over:
                    stream.recorder.add(
                        (message_type.info, call, begin, monotonic_ns(), get_ident())
                    )
                self._keep((array.dtype, array.shape, kind), message_type)
                operation = None if is_over else self._resumed(request(), call, begin, number)
            except BaseException as error:  # the other rank may or may not have the message
                if number:
                    outward.cancel(number)
                stream.interrupt(call, begin, error)
                raise
            if operation is not None:
                engine.take_over(operation, timeout)
            return True
        finally:
            stream.busy.release()

    def _type_of(
        self, array: NDArray[Any], kind: int, words: Callable[[], tuple[CollectiveSpec, int]]
    ) -> MessageType:
        """Return the properties that this message shares with others."""
        message_type = self._types.get((array.dtype, array.shape, kind))
        if message_type is not None:
            return message_type
        stream, (spec, dtype) = self.stream, words()
        info = CallInfo(spec, stream.identity, stream.members, 0, array.nbytes, WAY)
        return MessageType(array_code(kind, dtype, array.ndim), info, array.dtype.kind in _EXPORTED)

    def take(
        self,
        request: Callable[[], CheckedCall],
        landing: Landing,
        finish: Callable[[int, NDArray[Any]], Any],
        timeout: float | None,
        *,
        waits: bool,
    ) -> Any:
        """Receive a message that is there or comes while spinning; else the engine waits.

        Returns NOT_YET if nothing has been done.
        """
        stream, inward = self.stream, self.end
        engine, count = stream.engine, stream.count
        if engine is None or count is None or not isinstance(inward, RecvEndpoint):
            return NOT_YET
        if not engine.is_quiet or engine.under_way or not stream.busy.acquire(blocking=False):
            return NOT_YET
        try:
            number, begin = self.number(), monotonic_ns()
            stream.next_call = count.number = number + 1
            key = stream.identity, number
            try:
                message_parts = inward.take(key, landing)
                while message_parts is None and waits and inward.wait():
                    news = inward.seen
                    message_parts = inward.take(key, landing)
                    if inward.seen == news:  # another thread reads the ring
                        break
                if message_parts is not None:
                    count.next_call = number + 1
                    result = finish(*message_parts)
                    message_type = self._received_type(request, *message_parts)
                    stream.recorder.add(
                        (message_type.info, number, begin, monotonic_ns(), get_ident())
                    )
                    return result
                if not waits:
                    stream.next_call = count.number = number
                    return NOT_YET
                operation = stream.operation(number, request(), begin)
            except SyncvarError as error:
                count.next_call = number + 1
                stream.recorder.begin(self._call_info(request, 0), number, begin).end(error)
                stream.recorder.failed(error)
                raise
            except BaseException as error:
                stream.interrupt(number, begin, error)
                raise
            return engine.take_over(operation, timeout)
        finally:
            stream.busy.release()

    def perform(
        self,
        name: str,
        check: Callable[[], CheckedCall],
        timeout: float | None,
        *,
        async_op: bool,
    ) -> Any:
        """Make a call on the slow path; see `Communicator.perform`."""
        self.number()
        try:
            return self.stream.perform(name, check, timeout, async_op=async_op)
        finally:
            if self.stream.count is not None:
                self.stream.count.number = self.stream.next_call

    def number(self) -> int:
        """Return the number of the next message, and update the communicator."""
        stream, count = self.stream, self.stream.count
        if count is not None and count.number > stream.next_call:
            stream.next_call = count.number
        return stream.next_call

    def _call_info(self, request: Callable[[], CheckedCall], nbytes: int) -> CallInfo:
        checked = request()
        checked.body.close()
        return self.stream.call_info(checked.spec, nbytes, WAY)

    def _received_type(
        self, request: Callable[[], CheckedCall], kind: int, message: NDArray[Any]
    ) -> MessageType:
        """Return the properties that a received message shares with others."""
        key = message.dtype, message.shape, kind
        found = self._types.get(key)
        if found is None:
            type_code = array_code(kind, dtype_index(message.dtype), message.ndim)
            info = self._call_info(request, message.nbytes)
            found = MessageType(type_code, info, is_buffer=False)
        self._keep(key, found)
        return found

    def _keep(
        self, key: tuple[np.dtype[Any], tuple[int, ...], int], message_type: MessageType
    ) -> None:
        """Cache a message type; for arrays, also in the C endpoint."""
        if key not in self._types:
            if len(self._types) >= _TYPES_MAX:
                self._types.clear()
            self._types[key] = message_type
        dtype, shape, kind = key
        stream, end = self.stream, self.end
        if kind != self._array or stream.engine is None or end is None:
            return
        if self.native is None:
            self.native = end.native_endpoint(
                stream.identity,
                self._context.config.eager_bytes,
                count=stream.count,
                engine=stream.engine,
                context=self._context,
                add=stream.recorder.add,
                go_on=self._go_on,
                busy=stream.busy,
                shared=stream.engine.under_way,
            )
        if self.native is not None:
            self.native.remember(dtype, shape, message_type.type_code, message_type.info)

    def _go_on(
        self,
        array: NDArray[Any],
        call: int,
        begin: int,
        number: int,
        done: int,
        error: BaseException | None,
    ) -> Any:
        """Continue in the engine a long message that did not complete in C while spinning."""
        stream, end, engine = self.stream, self.end, self.stream.engine
        assert engine is not None
        assert end is not None
        try:
            if error is None and isinstance(end, RecvEndpoint):
                end.adopt((stream.identity, call), self._array, array, done)
        finally:
            end.lock.release()
        try:
            if error is not None:
                raise error
            operation = self._resumed(self._request(self, array), call, begin, number, done)
        except BaseException as failure:
            if isinstance(end, SendEndpoint):
                end.cancel(number)
            stream.interrupt(call, begin, failure)
            raise
        return engine.take_over(operation, None)

    def _resumed(
        self, checked: CheckedCall, call: int, begin: int, number: int, done: int = 0
    ) -> Request:
        """Return the call of a message that continues in the ring after `done` bytes."""
        if isinstance(checked.message, Sending):
            checked.message.go_on_with(number, done)
        return self.stream.operation(call, checked, begin)


def done(result: Any = None) -> Work:
    """Return a completed work.

    Example:
        >>> done(5).wait()
        5
    """
    operation = Request(PendingRecord(_TO_ITSELF, 0, 0), None)
    operation.complete(result)
    return Work(None, operation)


def failed(error: SyncvarError) -> Work:
    """Return a failed work; `wait` raises its error."""
    operation = Request(PendingRecord(_TO_ITSELF, 0, 0), None)
    operation.fail(error)
    return Work(None, operation)


class Mailbox:
    """Messages with one tag that this rank has sent to itself, or receives that wait for them."""

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
        """Return `finish` of the oldest message; raise UsageError if there is none."""
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
            result = self._finish_message(kind, message)
        except SyncvarError as error:  # the receive fails, not the send
            operation.fail(error)
        else:
            operation.complete(result)

    def wait(self, timeout: float | None = None) -> Any:
        """Return the message; raise UsageError, now or again later, if it has not been sent."""
        if not self._operation.is_over:
            raise self._refusal
        return super().wait(timeout)
