"""Frames as MPI messages, for fabrics that only an MPI library drives.

All messages go through the `Fabric` of the process: a private communicator, and a lock, because
MPI_THREAD_SERIALIZED allows one thread at a time. A frame is one message; a large payload is a
second message, sent and received without a copy.

MPI signals no arrivals, and its blocking calls use a whole core. So waits look, and sleep between
looks in proportion to the time waited. Nor does MPI report the end of a peer: most libraries end
the job, others wait for ever. A rank that closes sends BYE as its last message, and the control
channel, which does not use MPI, reports killed processes.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import TransportError, WireError, error_message
from syncvar.protocol.frame import CARRIERS, HEADER_NBYTES, FrameType, Header, parse_header
from syncvar.transports.base import (
    Arrival,
    BorrowedFrame,
    Frame,
    PeerDisconnected,
    Wakeup,
    check_length,
    check_sender,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncvar.transports.base import Placer
    from syncvar.transports.zeromq_links import ZeromqControl

_SCHEME = "mpi:"
_JOINED_NBYTES_MAX = 4096  # a payload up to this size travels in one message with its header
_MATCHES = 32  # messages received from MPI before their handling
_YIELD_S = 50e-6
_PAUSE_MAX_S = 0.001
_IDLE_PAUSE_MAX_S = 0.005
_FAREWELL_S = 0.05  # how long a failing rank waits for its last messages to leave
_FINISH_S = 30.0
_TAGS = 16_384  # MPI guarantees 32 767


def pause_after(waited_s: float, most_s: float = _PAUSE_MAX_S) -> float:
    """Return how long to sleep between two looks: a quarter of the time waited, 0 to yield only.

    Example:
        >>> pause_after(0.00001), pause_after(0.002), pause_after(10.0)
        (0.0, 0.0005, 0.001)
    """
    return 0.0 if waited_s < _YIELD_S else min(most_s, waited_s / 4)


def tag_of(generation: int) -> int:
    """Return the tag of a generation's messages, so that a rank ignores those of earlier ones."""
    return 1 + generation % _TAGS


class _MpiLoan:
    """A borrowed payload that MPI reads until its request is complete."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def is_done(self) -> bool:
        return self.done


class _Sending:
    """A message that MPI has not sent yet; it keeps the memory alive."""

    __slots__ = ("data", "loan", "peer", "request")

    def __init__(self, request: Any, peer: int, data: Any, loan: _MpiLoan | None) -> None:
        self.request = request
        self.peer = peer
        self.data = data
        self.loan = loan


class _Incoming:
    """The matched messages of a peer in order, and the header whose payload comes next."""

    __slots__ = ("header", "messages", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.messages: collections.deque[tuple[Any, bytearray]] = collections.deque()
        self.header: Header | None = None


class Fabric:
    """This process's end of MPI; the transports of successive generations share it.

    `mpi` is the module `mpi4py.MPI`, `comm` a private communicator of all ranks that raises its
    errors. It `is_broken` once a transport has closed without a goodbye.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        self.comm = comm
        self.lock = threading.Lock()
        self.is_broken = False
        self._abandoned: list[_Sending] = []  # messages of closed links, which MPI may still read
        self._finishing: list[threading.Thread] = []

    def abandon(self, sendings: Iterable[_Sending]) -> None:
        """Keep messages of closed links until MPI has done with them; the caller holds the lock."""
        self._abandoned = [
            one for one in (*self._abandoned, *sendings) if not self.is_complete(one)
        ]

    def finish(self, sendings: Iterable[_Sending]) -> None:
        """Let MPI send the rest of a closed transport: without calls it makes no progress."""
        thread = threading.Thread(
            target=self._finish, args=(list(sendings),), name="syncvar-mpi-farewell", daemon=True
        )
        self._finishing.append(thread)
        thread.start()

    def _finish(self, sendings: list[_Sending]) -> None:
        until = time.monotonic() + _FINISH_S
        while sendings and time.monotonic() < until:
            time.sleep(_IDLE_PAUSE_MAX_S)
            with self.lock:
                sendings = [one for one in sendings if not self.is_complete(one)]
        with self.lock:
            self.abandon(sendings)

    def close(self) -> None:
        """Wait for the messages of closed transports, and receive what remains. Idempotent."""
        while self._finishing:
            self._finishing.pop().join()
        with self.lock, contextlib.suppress(self.mpi.Exception):
            status = self.mpi.Status()
            source, tag = self.mpi.ANY_SOURCE, self.mpi.ANY_TAG
            while (message := self.comm.Improbe(source, tag, status)) is not None:
                message.Irecv([bytearray(status.Get_count(self.mpi.BYTE)), self.mpi.BYTE]).Test()

    def is_complete(self, sending: _Sending) -> bool:
        """Return whether MPI has done with a message, also after an error; needs the lock."""
        try:
            return bool(sending.request.Test())
        except self.mpi.Exception:
            return True


class MpiTransport:
    """Frames over MPI, with a tag for each generation; `base` has the contract."""

    def __init__(
        self,
        fabric: Fabric,
        rank: int,
        tag: int,
        segment_bytes: int,
        control: ZeromqControl | None = None,
    ) -> None:
        self.placer: Placer | None = None
        self.refused_frames = 0
        self._fabric = fabric
        self._comm = fabric.comm
        self._rank = rank
        self._tag = tag
        self._nbytes_max = segment_bytes
        self._status = fabric.mpi.Status()
        self._bytes = fabric.mpi.BYTE
        self._generation = 0
        self._is_open = False
        self._targets: dict[int, int] = {}  # rank -> rank in the communicator
        self._incoming: dict[int, _Incoming] = {}  # by rank in the communicator
        self._pending: set[int] = set()  # those with incomplete messages
        self._sending: collections.deque[_Sending] = collections.deque()
        self._linked: set[int] = set()
        self._lost: set[int] = set()
        self._departed: set[int] = set()
        self._ready: collections.deque[Arrival] = collections.deque()
        self._closed = False
        self._control = control
        self._wakeup = Wakeup()
        for descriptor in control.descriptors() if control is not None else ():
            self._wakeup.watch(descriptor)

    @property
    def address(self) -> str:
        """Where peers reach this rank."""
        return f"{_SCHEME}{self._comm.rank}"

    @property
    def outside(self) -> str:
        """The same address: MPI reaches other hosts."""
        return self.address

    # -- the contract ------------------------------------------------------------------------------

    def open(self, addresses: Mapping[int, str], generation: int) -> None:
        """Set the addresses of the peers."""
        self._generation = generation
        for rank, address in addresses.items():
            number = address.removeprefix(_SCHEME)
            if number == address or not number.isdecimal() or int(number) >= self._comm.size:
                raise TransportError(
                    f"rank {rank} has the address {address}, which names none of the "
                    f"{self._comm.size} MPI processes: give all ranks the same SYNCVAR_TRANSPORT"
                )
            self._targets[rank] = int(number)
            self._incoming[int(number)] = _Incoming(rank)
        self._is_open = True  # until now MPI keeps the messages of peers that opened earlier

    def send(
        self, peer: int, header: bytes, payload: memoryview | None = None, *, borrow: bool = False
    ) -> BorrowedFrame | None:
        """Pass a frame to MPI."""
        if peer in self._lost or peer in self._departed:
            return None
        target = self._targets.get(peer)
        if target is None:
            raise TransportError(f"no address of rank {peer} is known")
        nbytes = 0 if payload is None else payload.nbytes
        with self._fabric.lock:
            self._linked.add(peer)
            if payload is None or nbytes <= _JOINED_NBYTES_MAX:
                data = header if payload is None or not nbytes else header + payload
                self._post(peer, target, data)
                return None
            self._post(peer, target, header)
            loan = _MpiLoan() if borrow else None
            self._post(peer, target, payload if borrow else bytes(payload), loan)
            return None if loan is None or loan.done else loan

    def receive(self) -> Arrival | None:
        """Return the next arrival, or None."""
        if not self._ready:
            with self._fabric.lock:
                self._advance()
        return self._ready.popleft() if self._ready else None

    def wait(self, timeout_s: float) -> bool:
        """Look until something has arrived, with pauses of at most a millisecond."""
        if self._control is not None and self._control.may_have_more():
            return True
        began = now = time.monotonic()
        while True:
            with self._fabric.lock:
                self._advance()
            if self._ready:
                return False
            left, pause = began + timeout_s - now, pause_after(now - began)
            whole = pause >= _PAUSE_MAX_S  # a poll counts in milliseconds
            poll_ms = int(1000 * _PAUSE_MAX_S) if whole and left > 0 else 0
            if self._wakeup.arrivals.poll(poll_ms):
                self._wakeup.take()
                return True
            if left <= 0:
                return False
            if not pause:
                os.sched_yield()
            elif not whole:
                time.sleep(min(pause, left))
            now = time.monotonic()

    def wait_idle(self, timeout_s: float) -> None:
        """Look until something has arrived, with pauses of at most 5 ms, unless a driver looks."""
        until = time.monotonic() + timeout_s
        pause = _PAUSE_MAX_S
        while True:
            left = until - time.monotonic()
            if self._wakeup.wait_idle(min(pause, left)):
                return
            if self._fabric.lock.acquire(blocking=False):
                try:
                    if not self._closed:
                        self._advance()
                finally:
                    self._fabric.lock.release()
            if self._ready or left <= 0:
                return
            pause = min(_IDLE_PAUSE_MAX_S, 1.25 * pause)

    def wake(self) -> None:
        """Make `wait` and `wait_idle` return, from any thread."""
        self._wakeup.wake()

    def close(self, linger_s: float) -> None:
        """Send BYE on every link, or an empty message if `linger_s` is 0, and flush."""
        if self._closed:
            return
        with self._fabric.lock:
            if linger_s > 0:
                with contextlib.suppress(TransportError):
                    self._advance()  # so that BYE goes to all peers that sent frames
            bye = Header(FrameType.BYE, self._rank, self._generation, 0).pack()
            last = bye if linger_s > 0 else b""
            for peer in self._linked - self._lost - self._departed:
                self._post(peer, self._targets[peer], last)
            began = now = time.monotonic()
            left = len(self._sending)
            while self._sending and now < began + max(linger_s, _FAREWELL_S):
                with contextlib.suppress(TransportError):
                    self._advance()
                time.sleep(pause_after(now - began))
                now = time.monotonic()
                if len(self._sending) < left:  # MPI still moves bytes
                    left, began = len(self._sending), now
            self._closed = True
            self._fabric.is_broken |= linger_s <= 0
            if linger_s > 0 and self._sending:
                self._fabric.finish(self._sending)
            else:
                self._let_go(self._sending)
            self._sending.clear()
        self._wakeup.close()

    # -- inside; the lock is held ------------------------------------------------------------------

    def _post(self, peer: int, target: int, data: Any, loan: _MpiLoan | None = None) -> None:
        if peer in self._lost:
            if loan is not None:
                loan.done = True
            return
        try:
            request = self._comm.Isend([data, self._bytes], target, self._tag)
            sending = _Sending(request, peer, data, loan)
            if not sending.request.Test():
                self._sending.append(sending)
            elif loan is not None:
                loan.done = True
        except self._fabric.mpi.Exception as error:
            self._lose(peer, f"MPI cannot send to it: {error}")
            if loan is not None:
                loan.done = True

    def _advance(self) -> None:
        """Let MPI make progress, and handle arrivals."""
        if not self._is_open:
            return
        try:
            for _ in range(_MATCHES):
                message = self._comm.Improbe(self._fabric.mpi.ANY_SOURCE, self._tag, self._status)
                if message is None:
                    break
                buffer = bytearray(self._status.Get_count(self._bytes))
                request = message.Irecv([buffer, self._bytes])
                source = self._status.Get_source()
                one = self._incoming.get(source)
                if one is None:  # no rank of this world
                    one = self._incoming[source] = _Incoming(-1)
                one.messages.append((request, buffer))
                self._pending.add(source)
        except self._fabric.mpi.Exception as error:
            raise TransportError(f"receiving through MPI failed: {error}") from error
        for source in list(self._pending):
            self._take(source, self._incoming[source])
        if self._sending:
            self._drop_complete()

    def _drop_complete(self) -> None:
        for _ in range(len(self._sending)):
            sending = self._sending.popleft()
            if not self._fabric.is_complete(sending):
                self._sending.append(sending)
            elif sending.loan is not None:
                sending.loan.done = True

    def _take(self, source: int, one: _Incoming) -> None:
        """Handle the arrived messages of a peer, in order."""
        while one.messages:
            request, buffer = one.messages[0]
            try:
                if not request.Test():
                    return
            except self._fabric.mpi.Exception as error:
                self._lose(one.rank, f"MPI cannot receive from it: {error}")
            one.messages.popleft()
            if one.rank < 0 or one.rank in self._lost or one.rank in self._departed:
                self.refused_frames += 1
                continue
            try:
                self._arrived(one, buffer)
            except WireError as error:
                self.refused_frames += 1
                self._lose(one.rank, error_message(error))
        self._pending.discard(source)

    def _arrived(self, one: _Incoming, buffer: bytearray) -> None:
        header, one.header = one.header, None
        if not buffer:
            self._lose(one.rank, "it closed its links without a goodbye")
            return
        payload = memoryview(buffer)
        if header is None:
            header = parse_header(bytes(payload[:HEADER_NBYTES]), self._nbytes_max)
            payload = payload[HEADER_NBYTES:]
            check_sender(header, one.rank, self._generation)
            if header.kind in CARRIERS and header.nbytes > _JOINED_NBYTES_MAX and not payload:
                one.header = header
                return
        check_length(header, one.rank, len(payload))
        self._linked.add(one.rank)
        if header.kind != FrameType.BYE:
            self._ready.append(Frame(header, payload))
            return
        self._departed.add(one.rank)
        self._forget(one.rank)

    def _lose(self, peer: int, reason: str) -> None:
        if peer >= 0 and peer not in self._lost:
            self._lost.add(peer)
            self._ready.append(PeerDisconnected(peer, reason))
            self._forget(peer)

    def _forget(self, peer: int) -> None:
        """Drop the messages to a peer that receives nothing any more."""
        dropped = [one for one in self._sending if one.peer == peer]
        if dropped:
            self._sending = collections.deque(one for one in self._sending if one.peer != peer)
            self._let_go(dropped)

    def _let_go(self, sendings: Iterable[_Sending]) -> None:
        for one in sendings:
            if one.loan is not None:
                one.loan.done = True  # MPI may read on, but no rank receives it
        self._fabric.abandon(sendings)
