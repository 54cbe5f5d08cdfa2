"""Boxes: how the ranks of a host make and find what the messages of one to another lie in.

A box belongs to an ordered pair of ranks of the host, for all groups and tags, and lies in the sender's region. It is made
when the first message is sent, so pairs that never talk cost nothing. The fifth word of a rank's table says where its list
of boxes is: a word for each rank of the host, 0 where there is no box yet, and 1 where there never will be one, because the
shared memory had no room: then all messages of the pair go over links.

Cost: 2 MiB of shared memory for each ordered pair that talks; less, down to 256 KiB, where more than eight ranks share it, or
where there is no room.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from syncvar._native import message_end
from syncvar.core.errors import SharedMemoryFull
from syncvar.shm.message_ring import (
    ENTRY_BYTES_MAX,
    HEADER_WORDS,
    RING,
    RING_BYTES_LEAST,
    RingReader,
    RingWriter,
)
from syncvar.shm.segment_layout import ABORT, LINE_BYTES
from syncvar.shm.spin_wait import BUDGET_S

if TYPE_CHECKING:
    from syncvar.shm.channel_table import Channels
    from syncvar.shm.cross_process_read import ProcessReader

__all__ = ["RING_BYTES", "Boxes"]

RING_BYTES = (
    2 << 20
)  # of 64 KiB there and back took 17 us with 256 KiB, 9 with 512, 6.5 from here on (measured)
_RINGS_BYTES = 16 << 20  # of all boxes of a rank together, about
_BOXES = 5  # word of a rank's table: where its list of boxes is
_NEVER = 1  # in the list: all messages go over links


class Boxes:
    """The boxes of this rank, and how it finds those of others.

    Args:
        channels: This rank's channels, of the same shared memory.
        ring_bytes: Of the rings that it makes, at most; a multiple of 64.
    """

    def __init__(self, channels: Channels, ring_bytes: int = RING_BYTES) -> None:
        self.channels = channels
        self._shm = channels.shm
        self._list = 0
        fair = _RINGS_BYTES // self._shm.local_world_size // LINE_BYTES * LINE_BYTES
        self._ring_bytes = min(ring_bytes, max(RING_BYTES_LEAST, fair))

    def outbox(self, dest: int) -> RingWriter | None:
        """Make the box for messages to a rank of the world on this host; None where shared memory has no room for it."""
        shm, words = self._shm, self._shm.words
        table = shm.table(shm.local_rank) // 8
        place = self.channels.places[dest]
        if words[table + _BOXES] == _NEVER:
            return None
        try:
            if not self._list:
                listed = shm.allocate(shm.local_world_size * 8)
                if self._list:  # another thread has made it meanwhile, for another rank
                    shm.release(listed)  # type: ignore[unreachable]
                else:
                    self._list = listed
                    words[table + _BOXES] = listed
            made, ring_bytes = self._allocate()
        except SharedMemoryFull:
            words[self._list // 8 + place if self._list else table + _BOXES] = _NEVER
            return None
        words[made // 8 + RING] = ring_bytes  # all else reads as zeros
        words[self._list // 8 + place] = made
        return RingWriter(shm, made)

    def _allocate(self) -> tuple[int, int]:
        """Return where in shared memory there is room for a box, and how long its ring can be."""
        with contextlib.suppress(SharedMemoryFull):
            return self._shm.allocate(HEADER_WORDS * 8 + self._ring_bytes), self._ring_bytes
        return self._shm.allocate(HEADER_WORDS * 8 + RING_BYTES_LEAST), RING_BYTES_LEAST

    def inbox(self, source: int) -> RingReader | None:
        """Return the box of messages from a rank of the world on this host; None while there is none."""
        found = self._word_of(source)
        where = self._shm.words[found] if found else 0
        if where in (0, _NEVER):
            return None
        made = RingReader(self._shm, where)
        self._shm.check(where, HEADER_WORDS * 8 + made.ring_bytes)
        return made

    def has_none(self, source: int) -> bool:
        """Return whether a rank has no box for this one and will never have one."""
        words, places = self._shm.words, self.channels.places
        found = self._word_of(source)
        return words[found or self._shm.table(places[source]) // 8 + _BOXES] == _NEVER

    def comes_at(self, source: int) -> int:
        """Return the word in which the box of messages from a rank shows as soon as it is there."""
        return self._word_of(source) or self._shm.table(self.channels.places[source]) // 8 + _BOXES

    def reach(self, source: int) -> ProcessReader | None:
        """Return how the memory of a rank can be read, as the first of the ranks there; None where it cannot be."""
        places = self.channels.places
        return self.channels.reach((places[source], self._shm.local_rank))

    def native_end(
        self,
        end: RingWriter | RingReader,
        other: int,
        identity: int,
        eager_bytes: int,
        **objects: Any,
    ) -> Any:
        """Return the C runner of one end of a pair's messages; None where Python runs them.

        Args:
            end: Where they lie.
            other: The other rank, in the world.
            identity: Of the pair's calls.
            eager_bytes: A longer message waits for its receiver.
            objects: What it asks and tells; see `p2p.h`.
        """
        channels = self.channels
        if not channels.is_native:
            return None
        looks, shares_cores = channels.patience((channels.places[other],))
        return message_end(
            self._shm.memory,
            end.start,
            end.ring,
            end.ring_bytes,
            ENTRY_BYTES_MAX,
            eager_bytes,
            ABORT * 8,
            identity,
            looks,
            shares_cores,
            int(BUDGET_S * 1e9),
            **objects,
        )

    def _word_of(self, source: int) -> int:
        """Return the index of the word that says where the box of messages from a rank is; 0 while it has no list."""
        shm = self._shm
        listed = shm.words[shm.table(self.channels.places[source]) // 8 + _BOXES]
        return 0 if listed in (0, _NEVER) else listed // 8 + shm.local_rank
