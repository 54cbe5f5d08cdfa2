"""Byte credit of links: a bound for unread frames per peer and group.

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
from typing import TYPE_CHECKING

from syncvar.protocol.frame import HEADER_NBYTES, FrameType, Header

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncvar.runtime.links.exchange import LinkExchange
    from syncvar.runtime.request import Request
    from syncvar.runtime.state import Core
    from syncvar.transports.base import Frame


class _Credit:
    __slots__ = ("outstanding", "queue")

    def __init__(self) -> None:
        self.outstanding = 0
        # Heap by call and order of sending; the counter makes entries comparable.
        self.queue: list[tuple[int, int, LinkExchange, bytes, memoryview | None]] = []


class Flow:
    """Credit of all links of a process, and the frame sink of its calls."""

    def __init__(self, core: Core) -> None:
        self.rank = core.rank
        self.generation = core.generation
        self.segment_bytes = core.config.segment_bytes
        self.frames_sent = 0
        self._transport = core.transport
        self._window_bytes = core.config.window_bytes
        self._active = core.active
        self._numbers = count()
        self._credits: dict[tuple[int, int], _Credit] = {}
        self._owed: dict[tuple[int, int], int] = {}
        # (group, peer) of released pairs, from any thread.
        self._resting: deque[tuple[int, int]] = deque()
        core.when_broken.append(lambda _: self._credits.clear())

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
            self._transport.send(
                peer,
                Header(FrameType.CREDIT, self.rank, self.generation, group, nbytes=owed).pack(),
            )
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

    def notify_waiting(self, operation: Request, peer: int) -> None:
        """Inform a rank that this rank waits for it in shared memory.

        A rank that does not poll would not notice.
        """
        header = Header(
            FrameType.WAKE,
            self.rank,
            self.generation,
            operation.group,
            operation.call,
            fingerprint=operation.fingerprint,
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
                self._transport.send(
                    peer,
                    Header(FrameType.CREDIT, self.rank, self.generation, group, nbytes=owed).pack(),
                )

    def go_on(self, group: int) -> None:
        """Send what is possible after an operation of a group has ended.

        Another one may be the oldest.
        """
        for (peer, other), credit in list(self._credits.items()):  # a failing send clears the dict
            if other == group and credit.queue:
                self._go_on(peer, credit)

    def _fits(self, credit: _Credit, nbytes: int, links: LinkExchange) -> bool:
        total = credit.outstanding + nbytes
        if total * 4 <= self._window_bytes:
            return True
        # If less than half of the window is used, a frame of the oldest call may go however large
        # it is.
        return (
            credit.outstanding * 2 < self._window_bytes or total <= self._window_bytes
        ) and self._is_oldest(links)

    def _is_oldest(self, links: LinkExchange) -> bool:
        """Return whether no older operation of the group is running."""
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
        loan = self._transport.send(peer, header, payload, borrow=True)
        if loan is not None and not loan.is_done():
            links.loans.append(loan)
