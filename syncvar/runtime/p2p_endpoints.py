"""Message rings between ranks of one host, as the runtime uses them.

Message k of a pair and tag matches receive k, whichever way it comes. So the sender decides for
each message: one that does not fit into the ring goes over a link. The receiver polls both.

A message of another tag in front of the wanted one is taken out and kept. If too much is kept, the
sender is asked to use links, whose credit bounds unread data.

A long message stays with the sender until the receiver has read it. Both transfer it in parts in C
while they spin. Otherwise the receiver reads it from shared memory, from the sender's memory if the
system permits, or in parts. If the sender gives up meanwhile, what was read is not used.
"""

from __future__ import annotations

import collections
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native import message_end
from syncvar._native.constants import EntryForm
from syncvar.core.array_types import dtype_from_index
from syncvar.core.errors import SyncvarError
from syncvar.shm.channel_table import BUDGET_S
from syncvar.shm.message_ring import ENTRY_BYTES_MAX, RingEntry
from syncvar.shm.segment_file import ABORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar.runtime.state import Core
    from syncvar.shm.channel_table import ProcessReader
    from syncvar.shm.message_ring import RingReader, RingTable, RingWriter

    Key = tuple[int, int]  # (identity of the pair's calls, call number)
    # (kind, dtype, shape) -> buffer for a message.
    Landing = Callable[[int, np.dtype[Any], tuple[int, ...]], NDArray[Any] | None]
    Received = tuple[int, NDArray[Any]]  # kind, message


class MessageForm(NamedTuple):
    """What a message holds."""

    kind: int  # ARRAY, or BYTES for an object
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def _form_of(found: Received | RingEntry) -> MessageForm:
    if isinstance(found, RingEntry):
        return MessageForm(found.kind, dtype_from_index(found.dtype), found.shape)
    kind, message = found
    return MessageForm(kind, message.dtype, message.shape)


class EndpointTable:
    """Message endpoints of this rank to and from others of its host.

    Beyond `unexpected_nbytes_max` bytes of unexpected messages from one rank, messages use links.
    """

    def __init__(self, rings: RingTable, engine: Core, unexpected_nbytes_max: int) -> None:
        self._rings = rings
        self._unexpected_nbytes_max = unexpected_nbytes_max
        self._following = engine.book.following
        self._outward: dict[int, SendEndpoint] = {}
        self._inward: dict[int, RecvEndpoint] = {}

    def serves(self, rank: int) -> bool:
        """Return whether a world rank is on this host."""
        return rank in self._rings.channels.places

    def outward(self, dest: int) -> SendEndpoint:
        """Return the endpoint for sending to a rank."""
        return self._outward.get(dest) or self._outward.setdefault(
            dest, SendEndpoint(self._rings, dest)
        )

    def inward(self, source: int) -> RecvEndpoint:
        """Return the endpoint for receiving from a rank."""
        return self._inward.get(source) or self._inward.setdefault(
            source,
            RecvEndpoint(self._rings, source, self._unexpected_nbytes_max, self._following),
        )


class RingEndpoint:
    """This rank's end of the ring to or from another rank, for all groups and tags."""

    def __init__(self, rings: RingTable, peer: int) -> None:
        self.peer = peer
        # Held while using the ring. No thread waits for it: a message that does not get it uses a
        # link, or is received later.
        self.lock = threading.Lock()
        self.is_native = rings.channels.is_native  # C makes messages
        self._rings = rings
        self._wait = rings.channels.wait
        self._ring: Any = None
        self._unexpected: dict[Key, Received | RingEntry] = {}

    def cancel(self, number: int) -> None:
        """Withdraw a long message, if this is its sender."""

    def native_endpoint(self, identity: int, eager_bytes: int, **objects: Any) -> Any:
        """Return the C endpoint of a pair and tag, whose calls have an `identity`; or None.

        `p2p.c` lists the `objects`.
        """
        ring, channels = self._ring, self._rings.channels
        if ring is None:
            return None
        patience = channels.patience((channels.places[self.peer],)), int(BUDGET_S * 1e9)
        places = ring.start, ring.ring_bytes, ENTRY_BYTES_MAX, eager_bytes, ABORT * 8
        objects |= {"box": self.lock, "kept": self._unexpected}
        return message_end(channels.shm.memory, places, identity, *patience, **objects)


class SendEndpoint(RingEndpoint):
    """Messages to another rank."""

    _ring: RingWriter | None
    _has_none = False

    @property
    def announced_ring(self) -> RingWriter:
        """The ring, in which a long message has been announced."""
        assert self._ring is not None
        return self._ring

    def ring_writer(self) -> RingWriter | None:
        """Return the ring, created by the first message; None if there is no space for it."""
        if self._ring is None and not self._has_none:
            self._ring = self._rings.outbox(self.peer)
            self._has_none = self._ring is None
        return self._ring

    def put(
        self, type_code: int, key: Key, array: NDArray[Any], *, is_long: bool, spins: bool
    ) -> int | None:
        """Write a message to the ring, or announce a long one.

        Return the number of a long message in the ring, and 0 for a short one. None: there is no
        space, also not soon if it `spins`, or another thread writes.
        """
        if not self.lock.acquire(blocking=False):
            return None
        try:
            ring, shape = self.ring_writer(), array.shape
            if ring is None:
                return None
            if is_long:
                address = array.__array_interface__["data"][0]
                offset = self._rings.channels.shm.locate(array)
                place = 0 if offset is None else offset + 1
                number = ring.put_address(type_code, *key, shape, array.nbytes, address, place)
                return number or None
            data = array.reshape(-1).view(np.uint8)
            while not ring.put(type_code, *key, shape, data, data.size):
                room = ring.room_at(shape, data.size) if spins else None
                if room is None or not self._wait(room[:1], room[1]):
                    return None
            return 0
        finally:
            self.lock.release()

    def is_answered(self, number: int) -> bool:
        """Spin for a short while; return whether the receiver has answered a long message."""
        return self._wait((self.announced_ring.answers_at(number),), (number << 1) - 1)

    def cancel(self, number: int) -> None:
        """Withdraw a long message."""
        self.announced_ring.cancel(number)

    def announce_link(self) -> None:
        """Announce, as the driver, that a message goes over a link.

        So the receiver does not poll the ring for it. If another call holds the lock, perhaps one
        that a signal handler has interrupted in this thread, the receiver learns it later.
        """
        ring = self._ring
        if ring is None:
            return
        ring.count_link()
        if self.lock.acquire(blocking=False):
            try:
                ring.note_news()
            finally:
                self.lock.release()


class _Parts:
    def __init__(self, kind: int, message: NDArray[Any]) -> None:
        self.kind = kind
        self.message = message
        self.bytes = message.reshape(-1).view(np.uint8)
        self.missing = self.bytes.size


class RecvEndpoint(RingEndpoint):
    """Messages from another rank; `following` returns the number of the next call of a pair."""

    _ring: RingReader | None

    def __init__(
        self,
        rings: RingTable,
        peer: int,
        unexpected_nbytes_max: int,
        following: Callable[[int], int],
    ) -> None:
        super().__init__(rings, peer)
        self.expected: set[Key] = set()  # receives that wait in the engine
        self.links = 0  # messages received over links
        self._seen = 0  # last news of the sender that was read
        self._unexpected_nbytes = 0
        self._unexpected_nbytes_max = unexpected_nbytes_max
        self._refuses = False
        self._parts: dict[Key, _Parts] = {}
        self._forgotten: collections.deque[Key] = collections.deque()  # keys of failed receives
        self._following = following

    @cached_property
    def _reader(self) -> ProcessReader | None:
        return self._rings.reach(self.peer)

    @property
    def is_without_ring(self) -> bool:
        """Whether all messages from this rank come over links."""
        return self._ring is None and self._rings.has_none(self.peer)

    def adopt(self, key: Key, kind: int, message: NDArray[Any], done: int) -> None:
        """Continue, holding the lock, a long message of which C has received the first bytes."""
        parts = self._parts[key] = _Parts(kind, message)
        parts.missing -= done

    def wait(self) -> bool:
        """Spin for a short while; return whether there is news.

        Return at once if spinning cannot help: an announced message is known to come over a link.
        """
        ring = self._ring
        if ring is not None:
            return ring.by_link <= self.links and self._wait((ring.news_at,), self._seen + 1)
        if self.is_without_ring:
            return False
        return self._wait((self._rings.appears_word(self.peer),), 1)

    def take(self, key: Key, landing: Landing, *, spins: bool) -> Received | None:
        """Return a message in the buffer from `landing` or a new array; None if it is not there.

        If it `spins`, it waits for a short while.
        """
        received = self._take(key, landing)
        while received is None and spins and self.wait():
            before = self._seen
            received = self._take(key, landing)
            if self._seen == before:  # another thread reads the ring
                break
        return received

    def _take(self, key: Key, landing: Landing) -> Received | None:
        if not self.lock.acquire(blocking=False):
            return None
        try:
            if self._forgotten:
                self._drop_forgotten()
            found = self._pop(key) or self._search(key, landing)
            return self._read(key, found, landing) if isinstance(found, RingEntry) else found
        finally:
            self.lock.release()

    def find(self, accepts: Callable[[Key], bool]) -> tuple[Key, MessageForm] | None:
        """Return the oldest message whose key a function accepts; the message stays where it is.

        None: there is none, or another thread reads the ring.
        """
        if not self.lock.acquire(blocking=False):
            return None
        try:
            self._drop_forgotten()
            for key, found in self._unexpected.items():
                if accepts(key) and not self._is_withdrawn(found):
                    return key, _form_of(found)
            return self._find_in_ring(accepts)
        finally:
            self.lock.release()

    def has_news(self) -> bool:
        """Return whether the sender has sent something since the ring was last read."""
        if self._ring is not None:
            return self._ring.news > self._seen
        return not self._rings.has_none(self.peer) and self._rings.inbox(self.peer) is not None

    def forget(self, key: Key) -> None:
        """Drop a message whose receive has failed; the next holder of the lock does it."""
        self.expected.discard(key)
        self._forgotten.append(key)

    # -- with the lock -----------------------------------------------------------------------------

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            forgotten = self._forgotten.popleft()
            self._parts.pop(forgotten, None)
            self._pop(forgotten)

    def _is_withdrawn(self, found: Received | RingEntry) -> bool:
        """Return whether the sender of a long message has withdrawn it."""
        if not isinstance(found, RingEntry) or not found.number or self._ring is None:
            return False
        return self._ring.is_cancelled(found.number)

    def _find_in_ring(self, accepts: Callable[[Key], bool]) -> tuple[Key, MessageForm] | None:
        """Read the ring up to an accepted message, which stays in it."""
        ring = self._ring = self._ring or self._rings.inbox(self.peer)
        if ring is None:
            return None
        while True:
            self._seen = ring.news
            entry = ring.first()
            if entry is None:
                return None
            key = entry.stream, entry.call
            if entry.form == EntryForm.PART:
                self._add(ring, entry)
            elif accepts(key) and not self._is_withdrawn(entry):
                return key, _form_of(entry)
            else:
                self._keep(ring, entry)
            ring.free()

    def _pop(self, key: Key) -> Received | RingEntry | None:
        """Take out a message that came before its receive."""
        found, ring = self._unexpected.pop(key, None), self._ring
        if found is not None and not isinstance(found, RingEntry):
            self._unexpected_nbytes -= found[1].nbytes
            is_low = self._unexpected_nbytes * 2 < self._unexpected_nbytes_max
            if self._refuses and is_low and ring is not None:
                self._refuses = False
                ring.refuse(refuses=False)
        return found

    def _search(self, key: Key, landing: Landing) -> Received | RingEntry | None:
        """Read the ring up to a message; return it, or where a long one is."""
        ring = self._ring = self._ring or self._rings.inbox(self.peer)
        if ring is None:
            return None
        parts = self._parts.get(key)
        while parts is None or parts.missing:
            self._seen = ring.news
            entry = ring.first()
            if entry is None:
                return None
            is_own = (entry.stream, entry.call) == key
            if entry.form == EntryForm.PART:
                self._add(ring, entry)
            elif not is_own:
                self._keep(ring, entry)
            elif entry.form == EntryForm.WHOLE:
                created = self._copied(entry, ring.bytes_at(entry.data, entry.nbytes), landing)
                ring.free()
                return entry.kind, created
            ring.free()
            if is_own and entry.form == EntryForm.BY_ADDRESS:
                return entry
        del self._parts[key]
        return parts.kind, parts.message

    @staticmethod
    def _buffer_for(entry: RingEntry, landing: Landing | None) -> NDArray[Any]:
        dtype = dtype_from_index(entry.dtype)
        found = None if landing is None else landing(entry.kind, dtype, entry.shape)
        return np.empty(entry.shape, dtype) if found is None else found

    def _copied(
        self, entry: RingEntry, source: NDArray[np.uint8], landing: Landing | None = None
    ) -> NDArray[Any]:
        created = self._buffer_for(entry, landing)
        created.reshape(-1).view(np.uint8)[...] = source
        return created

    def _keep(self, ring: RingReader, entry: RingEntry) -> None:
        key = entry.stream, entry.call
        # In this order: another thread that begins the receive adds to `expected` before the
        # number grows.
        if entry.call < self._following(entry.stream) and key not in self.expected:
            return  # its receive has failed
        if entry.form == EntryForm.BY_ADDRESS:
            self._unexpected[key] = entry
            return
        message = self._copied(entry, ring.bytes_at(entry.data, entry.nbytes))
        self._unexpected[key] = entry.kind, message
        self._unexpected_nbytes += message.nbytes
        if self._unexpected_nbytes > self._unexpected_nbytes_max and not self._refuses:
            self._refuses = True
            ring.refuse(refuses=True)

    def _read(self, key: Key, entry: RingEntry, landing: Landing) -> Received | None:
        """Read a long message; None if it is withdrawn, comes in parts, or the sender died."""
        ring = self._ring
        assert ring is not None
        if ring.is_cancelled(entry.number):
            return None
        if not entry.nbytes:
            created = self._buffer_for(entry, landing)
        elif entry.offset:
            source = ring.resident(entry.offset - 1, entry.nbytes)
            created = self._copied(entry, source, landing)
        else:
            created = self._buffer_for(entry, landing)
            if self._reader is None:
                self._parts[key] = _Parts(entry.kind, created)
                ring.want(entry.number)
                return None
            try:
                is_alive = self._reader.read(0, entry.place, created)
            except SyncvarError:
                if ring.is_cancelled(entry.number):
                    return None
                raise
            if not is_alive:
                return None
        if ring.is_cancelled(entry.number):
            return None
        ring.confirm(entry.number)
        return entry.kind, created

    def _add(self, ring: RingReader, entry: RingEntry) -> None:
        """Copy a part into its message, unless its receive has failed."""
        parts = self._parts.get((entry.stream, entry.call))
        if parts is not None:
            source = ring.bytes_at(entry.data, entry.nbytes)
            parts.bytes[entry.place : entry.place + entry.nbytes] = source
            parts.missing -= entry.nbytes
