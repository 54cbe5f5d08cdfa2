"""Frames of calls over links: schedules run round by round, and credit bounds unread bytes.

`LinkExchange` gets arrived frames and posts frames to send. Nothing here waits, reads a clock or
opens a socket.

ZeroMQ's limits count messages, so one absent peer could hold gigabytes. Here every frame uses
credit of its (peer, group). The receiver returns credit for used frames, a quarter of the window at
a time. A frame without credit waits; credit frames need none.

A peer uses frames of a call only when it makes that call. So calls that are not the oldest running
get a quarter of the window, and frames of the oldest always get through. Otherwise calls started in
advance could block the call that the peer is in.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from syncvar.algorithms.compile_schedule import INCOMING_LEFT, OVERWRITE
from syncvar.algorithms.schedule import Copy, Reduce
from syncvar.core.errors import InternalError
from syncvar.protocol.frame import HEADER_NBYTES, FrameType, Header
from syncvar.runtime.arithmetic import combine_two
from syncvar.transports.base import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from syncvar.algorithms.compile_schedule import Incoming, LinkRound, LinkSchedule
    from syncvar.core.reduce_ops import Combiner
    from syncvar.core.settings import RuntimeConfig
    from syncvar.runtime.call_record import PendingRecord
    from syncvar.transports.base import Frame, Transport

_ROUNDS_PER_STAGE = 1 << 24
_PIECES, _PIECE_NBYTES_MIN = 16, 128 << 10
_SCRATCH_MAX = 4  # pieces of memory that a process keeps


def _per_segment(count: int, itemsize: int, nbytes_max: int) -> int:
    """Return how many elements of a chunk go into one frame; sender and receiver compute the same.

    A frame is encrypted before its first byte leaves, and used when its last byte has come. So a
    chunk is split into frames that overlap sending and computing, unless they would be too short.

    Example:
        >>> counts = (1 << 14, 1 << 17, 1 << 21, 1 << 24)
        >>> [_per_segment(count, 4, 1 << 20) * 4 >> 10 for count in counts]  # KiB
        [64, 128, 512, 1024]
    """
    if 0 < count * itemsize <= _PIECE_NBYTES_MIN <= nbytes_max:
        return count
    piece_nbytes = max(_PIECE_NBYTES_MIN, -(-count // _PIECES) * itemsize)
    return max(1, min(nbytes_max, piece_nbytes) // itemsize)


class ScratchPool:
    """Memory for payloads that are combined when they have arrived; it stays in the cache."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview:
        """Return memory of this length."""
        for index, memory in enumerate(self._free):
            if len(memory) == nbytes:
                return self._free.pop(index)
        return np.empty(nbytes, np.uint8).data

    def keep(self, memory: memoryview) -> None:
        """Use memory again for a later payload."""
        self._free.append(memory)
        del self._free[:-_SCRATCH_MAX]


class FrameSink(Protocol):
    """Destination of the frames of calls."""

    rank: int
    generation: int
    segment_bytes: int
    scratch: ScratchPool

    def post(
        self, links: LinkExchange, peer: int, header: bytes, payload: memoryview | None, /
    ) -> None:
        """Send a frame as soon as the link's credit allows."""

    def consumed(self, peer: int, group: int, nbytes: int, /) -> None:
        """Return credit for a frame that has been used."""


class NullSink:
    """Frame sink of a group of one, whose schedules send nothing."""

    rank = 0
    generation = 0
    segment_bytes = 1 << 20

    def __init__(self) -> None:
        self.scratch = ScratchPool()

    def post(
        self, links: LinkExchange, peer: int, _header: bytes, _payload: memoryview | None
    ) -> None:
        """Raise InternalError."""
        raise InternalError(f"call {links.call}: a group of one sent a frame to rank {peer}")

    def consumed(self, peer: int, _group: int, _nbytes: int) -> None:
        """Raise InternalError."""
        raise InternalError(f"a group of one received a frame of rank {peer}")


class LinkExchange:
    """The frames of one call; its request waits for this object until a round has all frames.

    It has no reference to its request, so the call's buffers are freed with the request.
    """

    __slots__ = (
        "_ahead",
        "_buffers",
        "_entry",
        "_incoming",
        "_is_closed",
        "_pending",
        "_places",
        "_round",
        "_sink",
        "_stage",
        "_tag",
        "_ufunc",
        "call",
        "group",
        "has_heard",
        "loans",
        "queued",
    )

    need = 1
    needs_looks = False

    def __init__(self, entry: PendingRecord, sink: FrameSink) -> None:
        self.group = entry.info.group
        self.call = entry.call
        self.queued = 0  # frames that wait for credit
        self.loans: list[Any] = []  # memory that the transport still reads
        self.has_heard = False  # a frame has been used
        self._entry = entry
        self._sink = sink
        self._stage = -1
        self._round = -1
        self._tag = -1  # tag of this round's frames; -1 between stages
        self._buffers: tuple[NDArray[Any], ...] = ()
        self._ufunc: Combiner | None = None
        self._pending: dict[int, int] = {}  # peer -> segments still missing in this round
        self._incoming: dict[int, Incoming] = {}
        self._ahead: dict[int, list[Frame]] = {}
        self._places: dict[int, Place] = {}  # where payloads of this round arrive, by peer
        self._is_closed = False

    @property
    def is_published(self) -> bool:
        """Whether a stage has begun: other ranks may have seen this rank in the call."""
        return self._stage >= 0

    @property
    def awaiting(self) -> tuple[int, ...]:
        """Ranks whose frames are missing in this round."""
        return tuple(self._pending)

    def is_reached(self) -> bool:
        """Return whether all frames of the round have been used."""
        return not self._pending

    def look(self) -> bool:
        """Return False: frames arrive through the engine."""
        return False

    @property
    def is_drained(self) -> bool:
        """Whether all frames have left and the transport has returned the memory."""
        if self.loans:
            self.loans = [loan for loan in self.loans if not loan.is_done()]
        return not self.loans and not self.queued

    # -- frames ------------------------------------------------------------------------------------

    def expects(self, frame: Frame) -> bool:
        """Return whether a frame belongs to this round."""
        return frame.header.round == self._tag

    def put_aside(self, frame: Frame) -> None:
        """Keep a frame for a later round."""
        self._ahead.setdefault(frame.header.round, []).append(frame)

    def take_aside(self) -> list[Frame]:
        """Return and drop the frames kept for later rounds."""
        frames = [frame for frames in self._ahead.values() for frame in frames]
        self._ahead.clear()
        return frames

    def place(self, header: Header) -> Place | None:
        """Return where the payload of a frame under way belongs; None if it is too early."""
        source = header.source
        wanted = self._incoming.get(source)
        if wanted is None or header.round != self._tag or source not in self._pending:
            return None
        start, stop = self._range_of(wanted, header.segment)
        array = self._buffers[wanted.buffer]
        if header.nbytes != (stop - start) * array.itemsize:
            return None
        if wanted.mode == OVERWRITE:
            place = Place(array[start:stop].view(np.uint8).data)
        else:
            place = Place(self._sink.scratch.take(header.nbytes))
        self._places[source] = place
        if self._is_closed:  # by another thread, perhaps since the line before
            self.close()
        return place

    def close(self) -> None:
        """Let no transport write for this call any more; from any thread."""
        self._is_closed = True
        for place in list(self._places.values()):
            place.close()

    def _range_of(self, wanted: Incoming, segment: int) -> tuple[int, int]:
        """Return where the elements of a part of a chunk begin and end."""
        count, limit = wanted.stop - wanted.start, self._sink.segment_bytes
        per_segment = _per_segment(count, self._buffers[wanted.buffer].itemsize, limit)
        start = wanted.start + segment * per_segment
        return start, max(start, min(wanted.stop, start + per_segment))

    def apply(self, frame: Frame) -> None:
        """Use a frame of this round."""
        label = self._entry.info.spec.label
        header, payload = frame
        source = header.source
        wanted = self._incoming.get(source)
        left = self._pending.get(source)
        if wanted is None or left is None:
            raise InternalError(
                f"{label}: rank {source} sent a frame that round {self._round} does not expect"
            )
        self.has_heard = True
        array = self._buffers[wanted.buffer]
        start, stop = self._range_of(wanted, header.segment)
        if header.nbytes != (stop - start) * array.itemsize:
            raise InternalError(
                f"{label}: rank {source} sent {header.nbytes} bytes, not "
                f"{(stop - start) * array.itemsize}"
            )
        place = self._places.pop(source, None)
        is_there = place is not None and payload is place.memory
        if header.nbytes and not (is_there and wanted.mode == OVERWRITE):
            value = np.frombuffer(payload, np.uint8).view(array.dtype)
            target = array[start:stop]
            own = self._buffers[wanted.operand][start:stop]
            if wanted.mode == OVERWRITE:
                target[...] = value
            elif wanted.mode == INCOMING_LEFT:
                self._combine(value, own, target)
            else:
                self._combine(own, value, target)
            if place is not None and is_there:
                self._sink.scratch.keep(place.memory)
        if left == 1:
            del self._pending[source]
        else:
            self._pending[source] = left - 1
        self._sink.consumed(source, self.group, header.nbytes)

    # -- rounds ------------------------------------------------------------------------------------

    def run(
        self,
        plan: LinkSchedule,
        work: NDArray[Any],
        ufunc: Combiner | None = None,
        send_buffer: NDArray[Any] | None = None,
    ) -> Iterator[LinkExchange]:
        """Run a schedule; the arguments are those of a `Stage`."""
        scratch = np.empty(plan.scratch_count, work.dtype) if plan.scratch_count else work[:0]
        rounds, self._buffers, self._ufunc = plan.rounds, (work, scratch), ufunc
        if send_buffer is not None:
            if plan.in_place is None:
                label = self._entry.info.spec.label
                raise InternalError(f"{label}: the schedule needs its input in the work buffer")
            rounds, self._buffers = plan.in_place, (work, scratch, send_buffer)
        self._entry.stage(plan.algorithm, work.nbytes)
        self._stage += 1
        for self._round, one in enumerate(rounds):  # noqa: B020
            self._enter(one)
            while self._pending:
                yield self
            for step in one.local:
                self._make(step)
        self._tag = -1

    def _enter(self, one: LinkRound) -> None:
        tag = self._tag = self._stage * _ROUNDS_PER_STAGE + self._round
        itemsize, limit = self._buffers[0].itemsize, self._sink.segment_bytes
        self._incoming = one.incoming
        pending = self._pending = {}
        for peer, wanted in one.incoming.items():
            count = wanted.stop - wanted.start
            per_segment = _per_segment(count, itemsize, limit)
            pending[peer] = 1 if count <= per_segment else -(-count // per_segment)
        for peer, buffer, start, stop in one.sends:
            per_segment = _per_segment(stop - start, itemsize, limit)
            self._send(peer, self._buffers[buffer], start, stop, tag, per_segment)
        for frame in self._ahead.pop(tag, ()):
            self.apply(frame)

    def _send(
        self, peer: int, array: NDArray[Any], start: int, stop: int, tag: int, per_segment: int
    ) -> None:
        sink, fingerprint = self._sink, self._entry.info.fingerprint
        segment = 0
        while True:
            end = min(stop, start + per_segment)
            piece = array[start:end]
            call = FrameType.DATA, sink.rank, sink.generation, self.group, self.call
            header = Header(*call, tag, segment, fingerprint, piece.nbytes).pack()
            sink.post(self, peer, header, piece.view(np.uint8).data if end > start else None)
            segment += 1
            start = end
            if start >= stop:
                return

    def _make(self, step: Copy | Reduce) -> None:
        source = self._buffers[step.source.buffer][step.source.start : step.source.stop]
        target = self._buffers[step.target.buffer][step.target.start : step.target.stop]
        if isinstance(step, Copy):
            target[...] = source
        elif step.source_left:
            self._combine(source, target, target)
        else:
            self._combine(target, source, target)

    def _combine(self, left: NDArray[Any], right: NDArray[Any], target: NDArray[Any]) -> None:
        if self._ufunc is None:
            raise InternalError(
                f"{self._entry.info.spec.label}: the schedule reduces, but has no op"
            )
        combine_two(self._ufunc, left, right, target)


class _Credit:
    __slots__ = ("outstanding", "queue")

    def __init__(self) -> None:
        self.outstanding = 0
        # Heap by call and order of sending; the counter makes entries comparable.
        self.queue: list[tuple[int, int, LinkExchange, bytes, memoryview | None]] = []


class Flow:
    """Credit of all links of a process, and the frame sink of its calls."""

    def __init__(
        self,
        rank: int,
        generation: int,
        transport: Transport,
        config: RuntimeConfig,
        active: Iterable[tuple[int, int]],
    ) -> None:
        self.rank = rank
        self.generation = generation
        self.segment_bytes = config.segment_bytes
        self.frames_sent = 0
        self.nbytes_sent: dict[int, int] = {}  # by peer
        self._transport = transport
        self._window_bytes = config.window_bytes
        self._active = active
        self._numbers = count()
        self._credits: dict[tuple[int, int], _Credit] = {}
        self._owed: dict[tuple[int, int], int] = {}
        self.scratch = ScratchPool()
        # (group, peer) of released pairs, from any thread.
        self._resting: deque[tuple[int, int]] = deque()

    def post(
        self, links: LinkExchange, peer: int, header: bytes, payload: memoryview | None
    ) -> None:
        """Send a frame now, or when the credit allows."""
        credit = self._credits.get((peer, links.group))
        if credit is None:
            credit = self._credits[peer, links.group] = _Credit()
        nbytes = HEADER_NBYTES + (payload.nbytes if payload is not None else 0)
        if not credit.queue and self._fits(credit, nbytes, links):
            self._send(credit, nbytes, links, peer, header, payload)
            return
        heapq.heappush(credit.queue, (links.call, next(self._numbers), links, header, payload))
        links.queued += 1
        self._go_on(peer, credit)

    def consumed(self, peer: int, group: int, nbytes: int) -> None:
        """Record that a frame of `nbytes` payload has been used; return credit in larger pieces."""
        key = (peer, group)
        owed = self._owed.get(key, 0) + nbytes + HEADER_NBYTES
        if owed * 4 >= self._window_bytes:
            self._return_credit(peer, group, owed)
            owed = 0
        self._owed[key] = owed

    def credited(self, peer: int, group: int, nbytes: int) -> None:
        """Add returned credit and send frames that waited for it."""
        credit = self._credits.get((peer, group))
        if credit is None:
            return
        credit.outstanding -= nbytes
        self._go_on(peer, credit)
        if not credit.outstanding and not credit.queue:
            self._credits.pop((peer, group), None)

    def use_up(self, frames: Iterable[Frame]) -> None:
        """Return credit for frames that will never be used."""
        for frame in frames:
            if frame.header.kind != FrameType.WAKE:
                self.consumed(frame.header.source, frame.header.group, frame.header.nbytes)

    def forget(self) -> None:
        """Drop all frames that wait for credit."""
        self._credits.clear()

    def notify_waiting(self, peer: int, group: int, call: int, fingerprint: int) -> None:
        """Inform a rank, which may not poll, that this rank waits for it in shared memory."""
        header = Header(
            FrameType.WAKE, self.rank, self.generation, group, call, fingerprint=fingerprint
        ).pack()
        self._transport.send(peer, header)

    def rest(self, group: int, peer: int) -> None:
        """Let the driver drop the accounts of a group that is not in use; from any thread."""
        self._resting.append((group, peer))
        self._transport.wake()

    def settle(self) -> None:
        """Return the credit owed for released groups, and drop their accounts."""
        while self._resting:
            group, peer = self._resting.popleft()
            owed = self._owed.pop((peer, group), 0)
            if owed:
                self._return_credit(peer, group, owed)

    def _return_credit(self, peer: int, group: int, owed: int) -> None:
        header = Header(FrameType.CREDIT, self.rank, self.generation, group, nbytes=owed).pack()
        self._transport.send(peer, header)

    def go_on(self, group: int) -> None:
        """Send what is possible after a request of a group has ended: another may be oldest."""
        for (peer, other), credit in list(self._credits.items()):  # a failing send clears the dict
            if other == group and credit.queue:
                self._go_on(peer, credit)

    def _fits(self, credit: _Credit, nbytes: int, links: LinkExchange) -> bool:
        total = credit.outstanding + nbytes
        if total * 4 <= self._window_bytes:
            return True
        # If less than half of the window is used, any frame of the oldest call may go.
        fits = credit.outstanding * 2 < self._window_bytes or total <= self._window_bytes
        return fits and self._is_oldest(links)

    def _is_oldest(self, links: LinkExchange) -> bool:
        """Return whether no older request of the group is running."""
        group, call = links.group, links.call
        return not any(number < call for other, number in list(self._active) if other == group)

    def _go_on(self, peer: int, credit: _Credit) -> None:
        while credit.queue:
            _, _, links, header, payload = credit.queue[0]
            nbytes = HEADER_NBYTES + (payload.nbytes if payload is not None else 0)
            if not self._fits(credit, nbytes, links):
                return
            heapq.heappop(credit.queue)
            links.queued -= 1
            self._send(credit, nbytes, links, peer, header, payload)

    def _send(
        self,
        credit: _Credit,
        nbytes: int,
        links: LinkExchange,
        peer: int,
        header: bytes,
        payload: memoryview | None,
    ) -> None:
        credit.outstanding += nbytes
        self.frames_sent += 1
        self.nbytes_sent[peer] = self.nbytes_sent.get(peer, 0) + nbytes
        loan = self._transport.send(peer, header, payload, borrow=True)
        if loan is not None and not loan.is_done():
            links.loans.append(loan)
