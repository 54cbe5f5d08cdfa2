"""Byte credit: how much may be on its way to a peer for one group, and what waits until some of it is used.

ZeroMQ's own marks count messages, so one absent peer could hold gigabytes. Here every frame that is sent uses credit
of its (peer, group), the receiver gives credit back when it has used frames, in pieces of a quarter of the window, and
a frame that finds none waits. Credit frames need none.

A peer uses frames of a call only when it has made that call, and it may make the calls one by one where this process
has started many. So calls that are not the oldest running here get a quarter of the window, and the oldest's frames
always get through: what the peer does not use stays below that quarter and another one, which it may have used without
telling, for ever where nothing else is sent.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from typing import TYPE_CHECKING

from syncvar.wire import HEADER_NBYTES, Kind, pack_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncvar.engine.operation import Operation
    from syncvar.transports import Frame, Transport

__all__ = ["Flow"]


class _Credit:
    __slots__ = ("outstanding", "queue")

    def __init__(self) -> None:
        self.outstanding = 0
        # A heap by call and order of sending; the number makes entries differ before an operation is compared.
        self.queue: list[tuple[int, int, Operation, bytes, memoryview | None]] = []


class Flow:
    """The credit of all links of a process: the outlet of its operations.

    Args:
        rank: This process in the world.
        generation: Version of the membership.
        transport: Where frames go.
        segment_bytes: Largest payload of a frame.
        window_bytes: Unused bytes allowed on a link for each group.
        is_oldest: Whether no older operation of its group is running here.
    """

    def __init__(
        self,
        rank: int,
        generation: int,
        transport: Transport,
        segment_bytes: int,
        window_bytes: int,
        is_oldest: Callable[[Operation], bool],
    ) -> None:
        self.rank = rank
        self.generation = generation
        self.segment_bytes = segment_bytes
        self.frames_sent = 0
        self._transport = transport
        self._window_bytes = window_bytes
        self._is_oldest = is_oldest
        self._numbers = count()
        self._credits: dict[tuple[int, int], _Credit] = {}
        self._owed: dict[tuple[int, int], int] = {}
        self._resting: deque[tuple[int, int]] = deque()  # (group, peer) of pairs that are let go, by threads that do not drive

    def post(self, operation: Operation, peer: int, header: bytes, payload: memoryview | None) -> None:
        """Send a frame now, or when the credit allows."""
        credit = self._credits.get((peer, operation.group))
        if credit is None:
            credit = self._credits[peer, operation.group] = _Credit()
        nbytes = HEADER_NBYTES + (payload.nbytes if payload is not None else 0)
        if not credit.queue and self._fits(credit, nbytes, operation):
            self._send(credit, nbytes, operation, peer, header, payload)
            return
        heapq.heappush(credit.queue, (operation.call, next(self._numbers), operation, header, payload))
        operation.queued += 1
        self._go_on(peer, credit)

    def consumed(self, peer: int, group: int, nbytes: int) -> None:
        """Note that a frame of `nbytes` payload has been used; give credit back when enough has come together."""
        key = (peer, group)
        owed = self._owed.get(key, 0) + nbytes + HEADER_NBYTES
        if owed * 4 >= self._window_bytes:
            self._transport.send(peer, pack_header(Kind.CREDIT, self.rank, self.generation, group, nbytes=owed))
            owed = 0
        self._owed[key] = owed

    def credited(self, peer: int, group: int, nbytes: int) -> None:
        """Take credit back and send what waited for it."""
        credit = self._credits.get((peer, group))
        if credit is None:
            return
        credit.outstanding -= nbytes
        self._go_on(peer, credit)
        if not credit.outstanding and not credit.queue:
            del self._credits[peer, group]

    def use_up(self, frames: Iterable[Frame]) -> None:
        """Give credit back for frames that nobody will look at."""
        for frame in frames:
            if frame.header.kind != Kind.KNOCK:
                self.consumed(frame.header.source, frame.header.group, frame.header.nbytes)

    def knock(self, operation: Operation, peer: int) -> None:
        """Tell a rank that has not come: shared memory says nothing to those who are not looking."""
        header = pack_header(
            Kind.KNOCK, self.rank, self.generation, operation.group, operation.call, fingerprint=operation.fingerprint
        )
        self._transport.send(peer, header)

    def rest(self, group: int, peer: int) -> None:
        """Let the driver keep no account of a group that is not used for the time being; from any thread."""
        self._resting.append((group, peer))
        self._transport.wake()

    def settle(self) -> None:
        """Give back what is owed for the groups that rest, and keep no account of it."""
        while self._resting:
            group, peer = self._resting.popleft()
            owed = self._owed.pop((peer, group), 0)
            if owed:
                self._transport.send(peer, pack_header(Kind.CREDIT, self.rank, self.generation, group, nbytes=owed))

    def go_on(self, group: int) -> None:
        """Send what may go now that an operation of a group has ended: another one may be the oldest."""
        for (peer, other), credit in self._credits.items():
            if other == group and credit.queue:
                self._go_on(peer, credit)

    def clear(self) -> None:
        """Forget what waits: the generation is broken."""
        self._credits.clear()

    def _fits(self, credit: _Credit, nbytes: int, operation: Operation) -> bool:
        total = credit.outstanding + nbytes
        if total * 4 <= self._window_bytes:
            return True
        # Below half of the window a frame of the oldest call may go however large it is.
        return (credit.outstanding * 2 < self._window_bytes or total <= self._window_bytes) and self._is_oldest(operation)

    def _go_on(self, peer: int, credit: _Credit) -> None:
        while credit.queue:
            _, _, operation, header, payload = credit.queue[0]
            nbytes = HEADER_NBYTES + (payload.nbytes if payload is not None else 0)
            if not self._fits(credit, nbytes, operation):
                return
            heapq.heappop(credit.queue)
            operation.queued -= 1
            self._send(credit, nbytes, operation, peer, header, payload)

    def _send(
        self, credit: _Credit, nbytes: int, operation: Operation, peer: int, header: bytes, payload: memoryview | None
    ) -> None:
        credit.outstanding += nbytes
        self.frames_sent += 1
        loan = self._transport.send(peer, header, payload, borrow=True)
        if loan is not None and not loan.is_done():
            operation.loans.append(loan)
