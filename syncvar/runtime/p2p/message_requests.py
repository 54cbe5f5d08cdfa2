"""Steps of a message that waits in the engine.

Through the message ring if possible, else over a link.

The receiver polls the ring and the link at the same time. A long message waits in the ring until
the receiver has read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import InternalError, SyncvarError
from syncvar.runtime.request import BodyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.runtime.flight_recorder.call_record import PendingRecord
    from syncvar.runtime.links.exchange import LinkExchange
    from syncvar.runtime.p2p.endpoints import Key, Landing, RecvEndpoint, SendEndpoint, Taken
    from syncvar.runtime.request import Steps

WAY = "shm message"  # in flight records


class Sending:
    """A message to send; its request waits for this object until the receiver has answered."""

    def __init__(
        self, outward: SendEndpoint, type_word: int, array: NDArray[Any], *, waits: bool
    ) -> None:
        self._outward = outward
        self._type_word = type_word
        self._array = array
        self._waits = waits
        self._bytes = array.reshape(-1).view(np.uint8).data
        self._number = 0  # number of a long message in the ring
        self._sent_nbytes = 0  # bytes sent in parts
        self._group = self._call = 0

    def go_on_with(self, number: int, sent_nbytes: int = 0) -> None:
        """Continue an announced long message, of which `sent_nbytes` have been sent in parts."""
        self._number = number
        self._sent_nbytes = sent_nbytes

    def steps(self, entry: PendingRecord, _links: LinkExchange, over_link: Steps) -> Steps:
        """Return the steps of the call, given its steps over a link.

        Nothing happens before the first one.
        """
        self._group, self._call = entry.info.group, entry.call
        return self._steps(entry, over_link)

    # -- the `Wait` protocol -----------------------------------------------------------------------

    @property
    def need(self) -> int:
        """Number that changes whenever the message makes progress."""
        return self._sent_nbytes

    @property
    def needs_looks(self) -> bool:
        """Whether this waits for the receiver's answer, which needs polling."""
        return self._number != 0

    @property
    def is_published(self) -> bool:
        """Whether the receiver may have seen the message."""
        return self._number != 0

    @property
    def awaiting(self) -> tuple[int, ...]:
        """The receiver."""
        return (self._outward.dest,)

    def is_reached(self) -> bool:
        """Send the requested parts; return whether the receiver has the message."""
        outward, ring = self._outward, self._outward.box()
        if ring is None:
            raise InternalError("the ring of an announced message is gone")
        answer = ring.answer(self._number)
        if answer != 1 or not outward.lock.acquire(blocking=False):
            return answer == 2
        nbytes = len(self._bytes)
        try:
            while self._sent_nbytes < nbytes and (
                sent := ring.part(self._group, self._call, self._sent_nbytes, self._bytes)
            ):
                self._sent_nbytes += sent
        finally:
            outward.lock.release()
        if self._sent_nbytes == nbytes:
            ring.cancel(self._number)  # its number becomes free
        return self._sent_nbytes == nbytes

    def look(self) -> bool:
        """Spin for a short while; return whether the receiver has answered."""
        ring = self._outward.box()
        # the receiver has to read the sent parts first
        if ring is None or ring.answer(self._number) == 1:
            return False
        return self._outward.wait((ring.answers_at(self._number),), (self._number << 1) - 1)

    # -- inside ------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Withdraw the message of a failed call."""
        if self._number:
            self._outward.cancel(self._number)

    def _steps(self, entry: PendingRecord, over_link: Steps) -> Steps:
        try:
            try:
                goes_by_link = not self._number and not self._put()
                if goes_by_link:
                    self._outward.announce_link()
            except SyncvarError as error:  # an error of this message only
                raise BodyError(error) from error
            if goes_by_link:
                return (yield from over_link)
            if self._number:
                yield self
        finally:
            over_link.close()
        _record_ring_transfer(entry, len(self._bytes))
        return None

    def _put(self) -> bool:
        """Write or announce the message in the ring; return False if that is impossible."""
        array = self._array
        if self._waits:
            self._number = self._outward.tell(self._type_word, self._group, self._call, array)
            return self._number != 0
        return self._outward.put(
            self._type_word,
            self._group,
            self._call,
            array.shape,
            self._bytes,
            array.nbytes,
            waits=False,
        )


class Receiving:
    """A message to receive; its request waits for this object until the message comes."""

    need = 0

    def __init__(
        self, inward: RecvEndpoint, landing: Landing, finish: Callable[[int, NDArray[Any]], Any]
    ) -> None:
        self._inward = inward
        self._landing = landing
        self._finish = finish
        self._links: LinkExchange | None = None
        self._key: Key = (0, 0)
        self._taken: Taken | None = None

    def steps(self, entry: PendingRecord, links: LinkExchange, over_link: Steps) -> Steps:
        """Return the steps of the call, given its steps over a link.

        From now on the message is expected.
        """
        self._links = links
        self._key = entry.info.group, entry.call
        self._inward.expected.add(self._key)
        return self._steps(entry, over_link)

    # -- as what is waited for ---------------------------------------------------------------------

    @property
    def needs_looks(self) -> bool:
        """Whether the message may come through the ring, which needs polling."""
        return not self._inward.is_without_ring

    @property
    def is_published(self) -> bool:
        """Return False: the sender does not see that this rank waits."""
        return False

    @property
    def awaiting(self) -> tuple[int, ...]:
        """The sender."""
        return (self._inward.source,)

    def is_reached(self) -> bool:
        """Take the message if it is there; return whether it was, or comes over a link."""
        if self._links is not None and self._links.has_heard:
            return True
        try:
            self._taken = self._inward.take(self._key, self._landing)
        except SyncvarError as error:  # an error of this message only; the sender has completed
            raise BodyError(error) from error
        return self._taken is not None

    def look(self) -> bool:
        """Spin for a short while; return whether something has come."""
        return self._inward.wait()

    # -- inside ------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drop the message of a failed call."""
        self._inward.forget(self._key)

    def _steps(self, entry: PendingRecord, over_link: Steps) -> Steps:
        try:
            next(over_link)  # starts the exchange: the first round waits for a frame
            yield self
            if self._taken is None:
                self._inward.links += 1
                self._inward.expected.discard(self._key)
                return (yield from over_link)
        finally:
            over_link.close()
        kind, message = self._taken
        self._inward.expected.discard(self._key)
        try:
            result = self._finish(kind, message)
        except SyncvarError as error:
            raise BodyError(error) from error
        _record_ring_transfer(entry, message.nbytes)
        return result


def _record_ring_transfer(entry: PendingRecord, nbytes: int) -> None:
    entry.way = WAY
    entry.nbytes = nbytes
