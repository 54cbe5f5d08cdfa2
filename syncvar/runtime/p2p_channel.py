"""Messages of a pair of ranks with one tag: without the engine, or as calls that it drives.

A message takes one of three ways:

* An endpoint in shared memory sends or receives it, in C or by `SendChannel.send` and
  `RecvChannel.receive`. That succeeds if the ring has room, or the message arrives while spinning.
* The engine drives a request through the ring (`p2p_requests`), if the receiver or the sender has
  to wait. It continues what an endpoint has begun, with the same call number.
* The request uses links, if there is no ring or no room in it. There a message has two stages: a
  record of fixed length with dtype and shape, then the array.

A message of a rank to itself takes none of them: it waits in a `p2p_mailbox.Mailbox`.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native import MessageCounter
from syncvar.algorithms.compile_schedule import compile_for_links
from syncvar.algorithms.schedule import Chunk, Recv, Schedule, Send
from syncvar.core.array_arguments import deliver
from syncvar.core.array_types import dtype_from_index
from syncvar.core.errors import ConfigError, SyncvarError
from syncvar.protocol.fixed_records import (
    ARRAY,
    BYTES,
    RECORD_BYTES,
    array_record,
    pack_record,
    unpack_record,
)
from syncvar.protocol.object_codec import unpack_object
from syncvar.runtime.call_record import CallInfo, PendingRecord
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint
from syncvar.runtime.communicator import CheckedCall, MessageCall
from syncvar.runtime.p2p_requests import WAY, Receiving, Sending
from syncvar.runtime.request import Request, Stage
from syncvar.runtime.work import Work
from syncvar.shm.message_ring import array_code

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.algorithms.schedule import Step
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.p2p_endpoints import RecvEndpoint, SendEndpoint

_SOURCE, _DEST = 0, 1  # ranks of the pair
_MESSAGE = "message"  # what both ends compare: the group has the pair and the tag
_TYPES_MAX = 64  # message types cached per pair and tag
TO_ITSELF = CallInfo(CollectiveSpec("a message to this rank itself"), 0)
EITHER = -1  # a receive takes an array or an object
SEND_NAMES = {ARRAY: "send", BYTES: "send_object"}
RECV_NAMES = {ARRAY: "recv", BYTES: "recv_object", EITHER: "recv_any"}
TAG_MAX = (1 << 31) - 1
_TAG_SPREAD = 0x9E3779B97F4A7C15  # odd, so that its inverse gives the tag of an identity
_TAG_INVERSE = pow(_TAG_SPREAD, -1, 1 << 64)
_IDENTITY_MASK = (1 << 64) - 1


def pair_identity(group: int, source: int, dest: int) -> int:
    """Return the number of a sender and a receiver of a group, for `stream_identity`."""
    return fingerprint("message", group, source, dest)


def stream_identity(pair: int, tag: int) -> int:
    """Return the identity of the messages of a pair and tag, the same on both ranks."""
    return (pair + tag * _TAG_SPREAD) & _IDENTITY_MASK


def tag_of(identity: int, pair: int) -> int | None:
    """Return the tag of a pair's messages; None if they are those of another pair.

    Example:
        >>> tag_of(stream_identity(12345, 678), 12345)
        678
    """
    tag = (identity - pair) * _TAG_INVERSE & _IDENTITY_MASK
    return tag if tag <= TAG_MAX else None


class ReceiveArgs(NamedTuple):
    """What a receive takes: with `kind` ARRAY an array, perhaps in `out`; with BYTES an object.

    With EITHER it takes what comes.
    """

    kind: int = ARRAY
    out: Any = None

    def landing(
        self, kind: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> NDArray[Any] | None:
        """Return `out` if a message can be written directly to it."""
        out = self.out
        is_alike = (
            kind == ARRAY
            and type(out) is np.ndarray
            and out.shape == shape
            and out.dtype == dtype
            and out.flags.c_contiguous
            and out.flags.writeable
        )
        return out if is_alike else None

    def finish(self, kind: int, message: NDArray[Any]) -> Any:
        """Return the result of a message; raise ConfigError if it is not as expected."""
        if kind == self.kind or (self.kind == EITHER and (kind == ARRAY or self.out is None)):
            return deliver(message, self.out) if kind == ARRAY else unpack_object(message.tobytes())
        if kind == BYTES:
            raise ConfigError(
                "the message is an object, not an array: receive it with sv.recv_object(source)"
            )
        raise ConfigError(
            f"the message is an array, {message.dtype.name}{list(message.shape)}, not an object: "
            f"receive it with sv.recv(source)"
        )


class Delivered(NamedTuple):
    """The result of a receive, which may be None; `kind` is that of a message that was there."""

    result: Any
    kind: int = ARRAY


class MessageType(NamedTuple):
    """Properties shared by messages of one dtype and shape."""

    kind: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    type_code: int  # see `RingWriter.put`
    info: CallInfo  # shared part of the flight records


class P2PChannel:
    """The messages of a pair and tag, as seen by one of the two ranks.

    Args:
        stream: Sequence of the pair's calls.
        tag: Tag of the messages.
        end: This rank's end of the message ring; None without shared memory.
        context: Process context.
    """

    end: SendEndpoint | RecvEndpoint | None

    def __init__(
        self, stream: Communicator, tag: int, end: SendEndpoint | RecvEndpoint | None, context: Any
    ) -> None:
        assert stream.engine is not None  # there are two ranks
        self._engine = stream.engine
        self.stream = stream
        self.tag = tag
        self.end = end
        self.counter = MessageCounter(stream.identity, stream.next_call)
        if end is not None:
            stream.counter = self.counter
            self._engine.book.count_by(self.counter)
        self.native: Any = None  # C endpoint, once it has something to do
        self.users = 0  # threads that have looked it up and may begin a message
        self._context = context
        self._eager_bytes: int = context.config.eager_bytes
        self._types: dict[tuple[int, np.dtype[Any], tuple[int, ...]], MessageType] = {}

    def retire(self) -> None:
        """Stop using this channel: another one now counts messages of the pair and tag."""
        native, self.native = self.native, None
        if native is not None:
            native.retire()

    def _begin(self) -> bool:
        """Return whether a message may begin without the engine; then this thread has `busy`."""
        return self._engine.is_quiet and self.stream.busy.acquire(blocking=False)

    def _spec(self, kind: int, array: NDArray[Any] | None) -> CollectiveSpec:
        """Return the description of a call; `array` is the message, if it is known."""
        raise NotImplementedError

    def _type_of(self, kind: int, array: NDArray[Any]) -> MessageType:
        """Return the properties that a message shares with others; raise ConfigError."""
        key = kind, array.dtype, array.shape
        found = self._types.get(key)
        if found is None:
            type_code = array_code(kind, array_record(array).dtype, array.ndim)
            found = MessageType(*key, type_code, self._call_info(kind, array))
            if len(self._types) >= _TYPES_MAX:
                self._types.clear()
            self._types[key] = found
        return found

    def _call_info(self, kind: int, array: NDArray[Any] | None) -> CallInfo:
        nbytes = 0 if array is None else array.nbytes
        return self.stream.call_info(self._spec(kind, array), nbytes, WAY)

    def _complete(self, message_type: MessageType, call: int, begin: int) -> None:
        """Count and record a message that has ended without the engine."""
        stream = self.stream
        self.counter.next_call = stream.next_call = call + 1
        stream.recorder.add((message_type.info, call, begin, monotonic_ns(), get_ident()))
        self._remember(message_type)

    def _remember(self, message_type: MessageType) -> None:
        """Let the C endpoint make messages of this dtype and shape from now on."""
        kind, dtype, shape, type_code, info = message_type
        stream, end = self.stream, self.end
        if end is None or not end.is_native or kind != ARRAY:
            return
        if self.native is None:
            self.native = end.native_endpoint(
                stream.identity,
                self._eager_bytes,
                stream=stream,
                count=self.counter,
                engine=self._engine,
                context=self._context,
                add=stream.recorder.add_slot,
                go_on=self.continue_in_engine,
                busy=stream.busy,
                shared=self._engine.under_way,
            )
        if self.native is not None:
            self.native.remember(dtype, shape, type_code, info)

    def continue_in_engine(
        self,
        array: NDArray[Any],
        call: int,
        begin: int,
        number: int,
        done: int,
        error: BaseException | None,
    ) -> Any:
        """Continue a long message that did not complete in C while spinning.

        `number` is that of the message in the ring, `done` how many bytes went in parts, and
        `error` what a signal handler has raised meanwhile.
        """
        stream, end = self.stream, self.end
        assert end is not None
        try:
            try:
                if error is not None:
                    raise error
                checked = self._resumed(array, call, number, done)
            finally:
                end.lock.release()
            request = stream.request_of(call, checked, begin)
        except BaseException as failure:
            end.cancel(number)
            stream.interrupt(call, begin, failure)
            raise
        return self._engine.take_over(request, None)

    def _resumed(self, array: NDArray[Any], call: int, number: int, done: int) -> CheckedCall:
        """Return the call that continues a long message; the caller holds the ring's lock."""
        raise NotImplementedError

    def _stage(self, work: NDArray[Any], *steps: Step) -> Stage:
        """Return a stage over the link for this end of the pair, with one step in each round."""
        stream, rounds = self.stream, tuple((step,) for step in steps)
        schedule = Schedule("message", "pair", stream.member_rank, 2, work.size, 0, rounds)
        return Stage(compile_for_links(schedule, stream.members), work)


class SendChannel(P2PChannel):
    """The sender's side of a pair and tag."""

    end: SendEndpoint | None

    def send(
        self,
        kind: int,
        array: NDArray[Any],
        timeout: float | None,
        *,
        waits: bool,
        synchronous: bool = False,
    ) -> bool:
        """Send a contiguous array through the ring; return False if nothing has been done.

        A long or `synchronous` one needs a caller that `waits`: the engine goes on if no receiver
        comes soon.
        """
        stream, end = self.stream, self.end
        is_long = synchronous or array.nbytes > self._eager_bytes
        if end is None or (is_long and (self._engine.under_way or not waits)):
            return False
        message_type = self._type_of(kind, array)
        if not self._begin():
            return False
        call, begin = stream.next_call, monotonic_ns()
        message = Sending(end, message_type.type_code, array, is_long=is_long)
        try:
            try:
                if not message.put((stream.identity, call), spins=True):
                    return False
                if message.is_read_soon():
                    self._complete(message_type, call, begin)
                    return True
                stream.next_call = call + 1
                request = stream.request_of(
                    call, self._checked_message(kind, array, message, is_long=is_long), begin
                )
            except BaseException as error:  # the other rank may or may not have the message
                message.abandon()
                stream.interrupt(call, begin, error)
                raise
            self._engine.take_over(request, timeout)
            self._remember(message_type)
            return True
        finally:
            stream.busy.release()

    def checked(self, kind: int, array: NDArray[Any], *, synchronous: bool = False) -> CheckedCall:
        """Return the call that sends an array, or an object as bytes; raise ConfigError."""
        is_long = synchronous or array.nbytes > self._eager_bytes
        return self._checked_message(kind, array, is_long=is_long)

    def _checked_message(
        self, kind: int, array: NDArray[Any], message: Sending | None = None, *, is_long: bool
    ) -> CheckedCall:
        record = array_record(array, int(is_long))._replace(kind=kind)
        if message is None and self.end is not None:
            type_code = array_code(kind, record.dtype, array.ndim)
            message = Sending(self.end, type_code, array, is_long=is_long)
        data = np.frombuffer(pack_record(record), np.uint8)
        body = self._stages(data, array.reshape(-1), waits=is_long)
        return MessageCall(self._spec(kind, array), body, message)

    def _stages(
        self, record: NDArray[Any], work: NDArray[Any], *, waits: bool
    ) -> Generator[Stage, None, None]:
        yield self._stage(record, Send(_DEST, Chunk(0, record.size)))
        steps: list[Step] = [Recv(_DEST, Chunk(0, 0))] if waits else []
        yield self._stage(work, *steps, Send(_DEST, Chunk(0, work.size)))

    def _resumed(self, array: NDArray[Any], call: int, number: int, done: int) -> CheckedCall:
        assert self.end is not None
        type_code = self._type_of(ARRAY, array).type_code
        message = Sending(self.end, type_code, array, number, done, is_long=True)
        return self._checked_message(ARRAY, array, message, is_long=True)

    def _spec(self, kind: int, array: NDArray[Any] | None) -> CollectiveSpec:
        assert array is not None
        peer, nbytes = self.stream.members[_DEST], array.nbytes
        spec = CollectiveSpec(
            SEND_NAMES[kind], size=nbytes, peer=peer, tag=self.tag, compared=_MESSAGE
        )
        data = f"{nbytes} bytes"
        if kind != BYTES:
            spec = spec.with_array(array)
            data = spec.array
        return spec._replace(shown=(f"{data} to rank {peer}", f"tag {self.tag}"))


class RecvChannel(P2PChannel):
    """The receiver's side of a pair and tag."""

    end: RecvEndpoint | None

    def receive(self, args: ReceiveArgs, timeout: float | None, *, waits: bool) -> Delivered | None:
        """Receive a message that is there. If it `waits`: or comes soon, else by the engine.

        Return None if nothing has been done.
        """
        stream, end, engine = self.stream, self.end, self._engine
        if end is None or engine.under_way or not self._begin():
            return None
        call, begin = stream.next_call, monotonic_ns()
        try:
            try:
                key = stream.identity, call
                received = end.take(key, args.landing, spins=waits)
                if received is not None:
                    delivered = Delivered(args.finish(*received), received[0])
                    self._complete(self._type_of(*received), call, begin)
                    return delivered
                if not waits:
                    return None
                stream.next_call = call + 1
                request = stream.request_of(call, self.checked(args), begin)
            except SyncvarError as error:  # of this message only; the sender has completed
                self.counter.next_call = stream.next_call = call + 1
                stream.recorder.begin(self._call_info(args.kind, None), call, begin).end(error)
                stream.recorder.failed(error)
                raise
            except BaseException as error:
                stream.interrupt(call, begin, error)
                raise
            return Delivered(engine.take_over(request, timeout))
        finally:
            stream.busy.release()

    def checked(self, args: ReceiveArgs) -> CheckedCall:
        """Return the call that receives a message."""
        message = None if self.end is None else Receiving(self.end, args.landing, args.finish)
        return MessageCall(self._spec(args.kind, None), self._stages(args), message)

    def _stages(self, args: ReceiveArgs) -> Generator[Stage, None, Any]:
        data = np.empty(RECORD_BYTES, np.uint8)
        yield self._stage(data, Recv(_SOURCE, Chunk(0, data.size)))
        record = unpack_record(data.tobytes())
        output: NDArray[Any] = np.empty(record.shape, dtype_from_index(record.dtype))
        work = output.reshape(-1)
        steps: list[Step] = [Send(_SOURCE, Chunk(0, 0))] if record.nbytes else []
        yield self._stage(work, *steps, Recv(_SOURCE, Chunk(0, work.size)))
        return args.finish(record.kind, output)

    def _resumed(self, array: NDArray[Any], call: int, number: int, done: int) -> CheckedCall:
        assert self.end is not None
        self.end.adopt((self.stream.identity, call), ARRAY, array, done)
        return self.checked(ReceiveArgs())

    def _spec(self, kind: int, array: NDArray[Any] | None) -> CollectiveSpec:
        peer = self.stream.members[_SOURCE]
        shown = f"from rank {peer}", f"tag {self.tag}"
        return CollectiveSpec(
            RECV_NAMES[kind], peer=peer, tag=self.tag, compared=_MESSAGE, shown=shown
        )


def ended(result: Any = None, error: SyncvarError | None = None) -> Work:
    """Return a work that has ended with a result or an error.

    Example:
        >>> ended(5).wait()
        5
    """
    request = Request(PendingRecord(TO_ITSELF, 0, 0), None)
    if error is None:
        request.complete(result)
    else:
        request.fail(error)
    return Work(None, request)
