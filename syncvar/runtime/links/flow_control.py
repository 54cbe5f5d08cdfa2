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

from syncvar.protocol.frame import HEADER_NBYTES, FrameType, pack_header

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncvar.runtime.links.exchange import LinkExchange
    from syncvar.runtime.request import Request
    from syncvar.runtime.state import Core
    from syncvar.transports.base import Frame

__all__ = ["Flow"]


class _Credit:
    __slots__ = ("outstanding", "queue")

    def __init__(self) -> None:
        self.outstanding = 0
        # A heap by call and order of sending; the number makes entries differ before an operation is compared.
        self.queue: list[tuple[int, int, LinkExchange, bytes, memoryview | None]] = []


class Flow:
    """The credit of all links of a process: the outlet of its operations.

    Args:
        core: Has the transport, the limits and the running operations.
    """

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
        self._resting: deque[tuple[int, int]] = (
            deque()
        )  # (group, peer) of pairs that are let go, by threads that do not drive
        core.when_broken.append(
            lambda _: self._credits.clear()
        )  # nothing that waits is sent any more

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
        """Note that a frame of `nbytes` payload has been used; give credit back when enough has come together."""
        key = (peer, group)
        owed = self._owed.get(key, 0) + nbytes + HEADER_NBYTES
        if owed * 4 >= self._window_bytes:
            self._transport.send(
                peer, pack_header(FrameType.CREDIT, self.rank, self.generation, group, nbytes=owed)
            )
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
            self._credits.pop((peer, group), None)

    def use_up(self, frames: Iterable[Frame]) -> None:
        """Give credit back for frames that nobody will look at."""
        for frame in frames:
            if frame.header.kind != FrameType.KNOCK:
                self.consumed(frame.header.source, frame.header.group, frame.header.nbytes)

    def knock(self, operation: Request, peer: int) -> None:
        """Tell a rank that has not come: shared memory says nothing to those who are not looking."""
        header = pack_header(
            FrameType.KNOCK,
            self.rank,
            self.generation,
            operation.group,
            operation.call,
            fingerprint=operation.fingerprint,
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
                self._transport.send(
                    peer,
                    pack_header(FrameType.CREDIT, self.rank, self.generation, group, nbytes=owed),
                )

    def go_on(self, group: int) -> None:
        """Send what may go now that an operation of a group has ended: another one may be the oldest."""
        for (peer, other), credit in list(self._credits.items()):  # a send that fails clears them
            if other == group and credit.queue:
                self._go_on(peer, credit)

    def _fits(self, credit: _Credit, nbytes: int, links: LinkExchange) -> bool:
        total = credit.outstanding + nbytes
        if total * 4 <= self._window_bytes:
            return True
        # Below half of the window a frame of the oldest call may go however large it is.
        return (
            credit.outstanding * 2 < self._window_bytes or total <= self._window_bytes
        ) and self._is_oldest(links)

    def _is_oldest(self, links: LinkExchange) -> bool:
        """Return whether no older operation of its group is running here."""
        group, call = links.group, links.call
        return not any(
            number < call for other, number in list(self._active) if other == group
        )  # another thread may break the generation

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
