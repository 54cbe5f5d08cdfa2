"""Byte credit: how much may be on its way to a peer for one group, and what waits until some of it is used.

ZeroMQ's own marks count messages, so one absent peer could hold gigabytes. Here every frame that is sent uses credit
of its (peer, group), the receiver gives credit back when it has used frames, in pieces of a quarter of the window, and
a frame that finds none waits in order. A frame may always go when nothing is on its way; credit frames need none.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from syncvar.wire import HEADER_NBYTES, Kind, pack_header

if TYPE_CHECKING:
    from syncvar.runtime.executor import Operation
    from syncvar.transports import Transport

__all__ = ["Flow"]


class _Credit:
    __slots__ = ("outstanding", "queue")

    def __init__(self) -> None:
        self.outstanding = 0
        self.queue: collections.deque[tuple[Operation, bytes, memoryview | None]] = collections.deque()


class Flow:
    """The credit of all links of a process.

    Args:
        rank: This process in the world.
        generation: Version of the membership.
        transport: Where frames go.
        window_bytes: Unused bytes allowed on a link for each group.
    """

    def __init__(self, rank: int, generation: int, transport: Transport, window_bytes: int) -> None:
        self.frames_sent = 0
        self._rank = rank
        self._generation = generation
        self._transport = transport
        self._window_bytes = window_bytes
        self._credits: dict[tuple[int, int], _Credit] = {}
        self._owed: dict[tuple[int, int], int] = {}

    def post(self, operation: Operation, peer: int, header: bytes, payload: memoryview | None) -> None:
        """Send a frame now, or when the credit allows."""
        credit = self._credits.get((peer, operation.group))
        if credit is None:
            credit = self._credits[peer, operation.group] = _Credit()
        nbytes = HEADER_NBYTES + (payload.nbytes if payload is not None else 0)
        if credit.queue or self._exceeds(credit.outstanding, nbytes):
            credit.queue.append((operation, header, payload))
            operation.queued += 1
            return
        self._send(credit, nbytes, operation, peer, header, payload)

    def consumed(self, peer: int, group: int, nbytes: int) -> None:
        """Note that a frame of `nbytes` payload has been used; give credit back when enough has come together."""
        key = (peer, group)
        owed = self._owed.get(key, 0) + nbytes + HEADER_NBYTES
        if owed * 4 >= self._window_bytes:
            self._transport.send(peer, pack_header(Kind.CREDIT, self._rank, self._generation, group, nbytes=owed))
            owed = 0
        self._owed[key] = owed

    def credited(self, peer: int, group: int, nbytes: int) -> None:
        """Take credit back and send what waited for it."""
        credit = self._credits.get((peer, group))
        if credit is None:
            return
        credit.outstanding -= nbytes
        while credit.queue:
            operation, header, payload = credit.queue[0]
            size = HEADER_NBYTES + (payload.nbytes if payload is not None else 0)
            if self._exceeds(credit.outstanding, size):
                return
            credit.queue.popleft()
            operation.queued -= 1
            self._send(credit, size, operation, peer, header, payload)

    def _exceeds(self, outstanding: int, nbytes: int) -> bool:
        # The peer may keep back the credit of nearly a quarter of the window, for ever where nothing else is sent: up to
        # there a frame is always allowed, however large.
        return outstanding * 4 >= self._window_bytes and outstanding + nbytes > self._window_bytes

    def clear(self) -> None:
        """Forget what waits: the generation is broken."""
        self._credits.clear()

    def outstanding(self, peer: int, group: int) -> int:
        """Return the bytes on their way to a peer for a group."""
        credit = self._credits.get((peer, group))
        return credit.outstanding if credit is not None else 0

    def _send(
        self, credit: _Credit, nbytes: int, operation: Operation, peer: int, header: bytes, payload: memoryview | None
    ) -> None:
        credit.outstanding += nbytes
        self.frames_sent += 1
        loan = self._transport.send(peer, header, payload, borrow=True)
        if loan is not None and not loan.is_done():
            operation.loans.append(loan)
