"""Requests between two ranks that wait in the engine: messages, and remote gets outside of groups.

A message goes through the message ring if possible, else over a link; the receiver polls both. A
long message waits in the ring until the receiver has read it. `p2p_channel` lists all ways.

In a get, one process asks by key. The driver of the other's engine, at worst the progress thread,
answers from published data. A get has a number of its own. If no answer comes in time, only the get
fails. An answer of k frames carries k in the header's `round` and the index in `segment`: first a
description, then the bytes. k = 0 means that the key is not published.

When this process leaves the job, `SentMessages` gives the launcher the numbers of sent messages.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import DeadlineExceeded, SyncvarError
from syncvar.protocol.frame import FrameType, Header
from syncvar.protocol.unreceived_messages import STREAMS_MAX, SentCount
from syncvar.runtime.call_record import UNRECORDED, own_site
from syncvar.runtime.request import BodyError
from syncvar.shm.message_ring import RingAnswer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.runtime.call_record import PendingRecord
    from syncvar.runtime.link_exchange import LinkExchange
    from syncvar.runtime.p2p_endpoints import Key, Landing, Received, RecvEndpoint, SendEndpoint
    from syncvar.runtime.request import Steps
    from syncvar.runtime.state import Core
    from syncvar.transports.base import Frame

WAY = "shm message"  # in flight records
_LINE_MAX = 200  # characters of a program line; all of them must fit into one control message
_EMPTY = memoryview(b"")

Answer = tuple[bytes, memoryview]  # description, and bytes that are never written again


class RingRequest:
    """A message in the ring; its request waits for this object, which is a `Wait`."""

    need = 0  # bytes sent in parts
    _end: SendEndpoint | RecvEndpoint
    _key: Key
    _links: LinkExchange

    @property
    def awaiting(self) -> tuple[int, ...]:
        """The other rank."""
        return (self._end.peer,)

    def steps(self, entry: PendingRecord, links: LinkExchange, over_link: Steps) -> Steps:
        """Return the steps of the call, given those over a link; none is taken before the first."""
        self._key = entry.info.group, entry.call
        self._links = links
        return self._steps(entry, over_link)

    def _steps(self, entry: PendingRecord, over_link: Steps) -> Steps:
        raise NotImplementedError


class Sending(RingRequest):
    """A message to send; a long one waits for its receiver.

    An announced one has a `number` in the ring, and `sent_nbytes` of it have been sent in parts.
    """

    _end: SendEndpoint

    def __init__(
        self,
        end: SendEndpoint,
        type_code: int,
        array: NDArray[Any],
        number: int = 0,
        sent_nbytes: int = 0,
        *,
        is_long: bool,
    ) -> None:
        self._end = end
        self._type_code = type_code
        self._array = array
        self._is_long = is_long
        self._number = number
        self.need = sent_nbytes

    def put(self, key: Key, *, spins: bool) -> bool:
        """Write or announce the message in the ring; return False if that is impossible."""
        number = self._end.put(
            self._type_code, key, self._array, is_long=self._is_long, spins=spins
        )
        self._number = number or 0
        return number is not None

    def is_read_soon(self) -> bool:
        """Return whether no receiver has to come, or it reads a long message while this spins."""
        if self._number == 0:
            return True
        ring, number = self._end.announced_ring, self._number
        return self._end.is_answered(number) and ring.answer(number) == RingAnswer.RECEIVED

    @property
    def needs_looks(self) -> bool:
        """Whether this waits for the receiver's answer, which needs polling."""
        return self._number != 0

    is_published = needs_looks  # then the receiver may have seen the message

    def is_reached(self) -> bool:
        """Send the requested parts; return whether the receiver has the message."""
        end, ring, nbytes = self._end, self._end.announced_ring, self._array.nbytes
        answer = ring.answer(self._number)
        if answer != RingAnswer.WANTS_PARTS or not end.lock.acquire(blocking=False):
            return answer == RingAnswer.RECEIVED
        data = self._array.reshape(-1).view(np.uint8)
        try:
            while self.need < nbytes and (sent := ring.part(*self._key, self.need, data)):
                self.need += sent
        finally:
            end.lock.release()
        if self.need == nbytes:
            ring.cancel(self._number)  # its number becomes free
        return self.need == nbytes

    def look(self) -> bool:
        """Spin for a short while; return whether the receiver has answered."""
        ring = self._end.announced_ring
        # the receiver has to read the sent parts first
        if ring.answer(self._number) == RingAnswer.WANTS_PARTS:
            return False
        return self._end.is_answered(self._number)

    def abandon(self) -> None:
        """Withdraw the message of a failed call."""
        if self._number:
            self._end.cancel(self._number)

    def _steps(self, entry: PendingRecord, over_link: Steps) -> Steps:
        try:
            try:
                goes_by_link = not self._number and not self.put(self._key, spins=False)
            except SyncvarError as error:  # an error of this message only
                raise BodyError(error) from error
            if goes_by_link:
                self._end.announce_link()
                return (yield from over_link)
            if self._number:
                yield self
        finally:
            over_link.close()
        entry.way, entry.nbytes = WAY, self._array.nbytes
        return None


class Receiving(RingRequest):
    """A message to receive."""

    is_published = False  # the sender does not see that this rank waits
    _end: RecvEndpoint

    def __init__(
        self, end: RecvEndpoint, landing: Landing, finish: Callable[[int, NDArray[Any]], Any]
    ) -> None:
        self._end = end
        self._landing = landing
        self._finish = finish
        self._received: Received | None = None

    def steps(self, entry: PendingRecord, links: LinkExchange, over_link: Steps) -> Steps:
        """Return the steps of the call; now the message is expected."""
        self._end.expected.add((entry.info.group, entry.call))
        return super().steps(entry, links, over_link)

    @property
    def needs_looks(self) -> bool:
        """Whether the message may come through the ring, which needs polling."""
        return not self._end.is_without_ring

    def is_reached(self) -> bool:
        """Take the message if it is there; return whether it was, or comes over a link."""
        if self._links.has_heard:
            return True
        try:
            self._received = self._end.take(self._key, self._landing, spins=False)
        except SyncvarError as error:  # an error of this message only; the sender has completed
            raise BodyError(error) from error
        return self._received is not None

    def look(self) -> bool:
        """Spin for a short while; return whether something has come."""
        return self._end.wait()

    def abandon(self) -> None:
        """Drop the message of a failed call."""
        self._end.forget(self._key)

    def _steps(self, entry: PendingRecord, over_link: Steps) -> Steps:
        try:
            next(over_link)  # starts the exchange: the first round waits for a frame
            yield self
            self._end.expected.discard(self._key)
            if self._received is None:
                self._end.links += 1
                return (yield from over_link)
        finally:
            over_link.close()
        kind, message = self._received
        try:
            result = self._finish(kind, message)
        except SyncvarError as error:
            raise BodyError(error) from error
        entry.way, entry.nbytes = WAY, message.nbytes
        return result


class GetRequest:
    """A remote get that waits for its answer; it is an `Awaited`."""

    call = -1
    entry = UNRECORDED
    thread = 0
    is_over = False
    error: BaseException | None = None
    result: tuple[bytes, bytes] | None = None

    def __init__(self, peer: int, key: int, label: str, deadline: float, timeout_s: float) -> None:
        self.peer = peer
        self.key = key
        self.label = label
        self.deadline = deadline
        self.timeout_s = timeout_s
        self._parts: dict[int, bytes | memoryview] = {}

    def look(self) -> bool:
        """Return False: answers arrive through the engine."""
        return False

    def fail(self, error: BaseException) -> None:
        """End without an answer."""
        if not self.is_over:
            self.error = error
            self.is_over = True
            self.entry.end(error)

    def accept(self, frame: Frame) -> None:
        """Use a frame of the answer; frames may come in any order."""
        count = frame.header.round
        if frame.header.segment < count:
            self._parts[frame.header.segment] = frame.payload
        if len(self._parts) < count:
            return
        if count:
            data = b"".join(self._parts[index] for index in range(1, count))
            self.result = bytes(self._parts[0]), data
        self._parts.clear()
        self.is_over = True
        self.entry.end()


class GetRequests:
    """The remote gets of a process: its own, and those that it answers."""

    def __init__(self, core: Core) -> None:
        self.frames_sent = 0
        # Finds published data by key; the driver calls it
        self.find: Callable[[int], Answer | None] = _nothing
        # Appended by any thread, sent by the driver.
        self.waiting: collections.deque[GetRequest] = collections.deque()
        self._core = core
        self._segment_bytes = core.config.segment_bytes
        self._numbers = itertools.count()
        self._open: dict[int, GetRequest] = {}
        core.when_broken.append(self.fail)

    def send_requests(self) -> None:
        """Send the waiting requests, and fail those that cannot be answered any more."""
        core = self._core
        while self.waiting:
            question = self.waiting.popleft()
            if core.failure is not None:
                question.fail(core.failure)
            elif question.peer in core.book.left:
                question.fail(core.book.ended(question.peer, question.label))
            else:
                question.call = next(self._numbers)
                self._open[question.call] = question
                self._send(FrameType.ASK, question.peer, question.call, question.key)

    def answer(self, header: Header) -> None:
        """Answer a request of another rank."""
        where = FrameType.ANSWER, header.source, header.call, header.fingerprint
        found = self.find(header.fingerprint)
        if found is None:
            self._send(*where)
            return
        description, data = found
        starts = range(0, data.nbytes, self._segment_bytes)
        pieces = [memoryview(description), *(data[at : at + self._segment_bytes] for at in starts)]
        for segment, piece in enumerate(pieces):
            self._send(*where, len(pieces), segment, piece)

    def accept(self, frame: Frame) -> bool:
        """Use a frame of an answer, if it is not late; return whether it completed a request."""
        question = self._open.get(frame.header.call)
        if question is None or question.key != frame.header.fingerprint:
            return False
        question.accept(frame)
        if question.is_over:
            del self._open[frame.header.call]
        return question.is_over

    def expire(self, now: float, due: float) -> float:
        """Fail the requests past their deadline; return when the next one is due, or `due`."""
        for number, question in list(self._open.items()):
            if now >= question.deadline:
                del self._open[number]
                peer, allowed = question.peer, question.timeout_s
                text = f"{question.label} was not answered within {allowed:g} s by rank {peer}"
                text += "; the group is not affected"
                question.fail(DeadlineExceeded(text, (peer,), allowed))
                due = now
            else:
                due = min(due, question.deadline)
        return due

    def fail(self, error: SyncvarError, peer: int | None = None) -> None:
        """Fail the requests to a rank, or all."""
        for number, question in list(self._open.items()):
            if peer is None or question.peer == peer:
                del self._open[number]
                question.fail(error)

    def _send(  # noqa: PLR0917
        self,
        kind: FrameType,
        peer: int,
        call: int,
        key: int,
        count: int = 0,
        segment: int = 0,
        payload: memoryview = _EMPTY,
    ) -> None:
        core, nbytes = self._core, payload.nbytes
        header = Header(kind, core.rank, core.generation, 0, call, count, segment, key, nbytes)
        self.frames_sent += 1
        core.transport.send(peer, header.pack(), payload if nbytes else None, borrow=True)


def _nothing(_key: int) -> None:
    pass


class SentMessages:
    """The pairs and tags with which this rank has sent messages, limited to those used last."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[int, int, str]] = {}

    def note(self, identity: int, dest: int, tag: int) -> None:
        """Record, from any thread, that this rank begins to send messages with a pair and tag."""
        known = self._streams.pop(identity, None)
        self._streams[identity] = known or (dest, tag, own_site()[-_LINE_MAX:])
        if len(self._streams) > STREAMS_MAX:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread has changed it
                self._streams.pop(next(iter(self._streams)), None)

    def counts(self, following: Callable[[int], int]) -> list[SentCount]:
        """Return how many messages were sent with each pair and tag."""
        streams = list(self._streams.items())[-STREAMS_MAX:]
        return [
            SentCount(one, dest, tag, following(one), line) for one, (dest, tag, line) in streams
        ]
