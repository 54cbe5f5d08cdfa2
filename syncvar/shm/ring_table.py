"""The table of message rings: how the ranks of a host make and find them.

An ordered pair of ranks has one ring for all groups and tags, in the sender's region. The sender
makes it with its first message, so pairs that send nothing cost nothing. Word 5 of a rank's table
is the offset of its list of rings. The list has a word for each receiver: 0 while there is no ring,
1 if the segment had no room and all messages go over links.

Cost: 2 MiB of shared memory for each pair; down to 256 KiB with more than eight ranks on the host,
    or without room.
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
    from syncvar.shm.channel_table import ChannelTable
    from syncvar.shm.cross_process_read import ProcessReader

RING_BYTES = 2 << 20  # shorter rings fit into private caches, and are slower
_RINGS_BYTES = 16 << 20  # of all rings of a rank together, about
_RINGS = 5  # word of a rank's table: offset of its list of rings
_NEVER = 1  # value in the list: all messages go over links


class RingTable:
    """Makes this rank's rings and finds those of the other ranks.

    Args:
        channels: Channel table of this rank, in the same segment.
        ring_bytes: Size of a new ring at most; a multiple of 64.
    """

    def __init__(self, channels: ChannelTable, ring_bytes: int = RING_BYTES) -> None:
        self.channels = channels
        self._shm = channels.shm
        self._list = 0
        fair = _RINGS_BYTES // self._shm.local_world_size // LINE_BYTES * LINE_BYTES
        self._ring_bytes = min(ring_bytes, max(RING_BYTES_LEAST, fair))

    def outbox(self, dest: int) -> RingWriter | None:
        """Make the ring for messages to a world rank of this host; None without room."""
        shm, words = self._shm, self._shm.words
        table = shm.table(shm.local_rank) // 8
        place = self.channels.places[dest]
        if words[table + _RINGS] == _NEVER:
            return None
        try:
            if not self._list:
                listed = shm.allocate(shm.local_world_size * 8)
                if self._list:  # another thread made it meanwhile
                    shm.release(listed)  # type: ignore[unreachable]
                else:
                    self._list = listed
                    words[table + _RINGS] = listed
            start, ring_bytes = self._allocate()
        except SharedMemoryFull:
            words[self._list // 8 + place if self._list else table + _RINGS] = _NEVER
            return None
        words[start // 8 + RING] = ring_bytes  # all else reads as zeros
        words[self._list // 8 + place] = start
        return RingWriter(shm, start)

    def _allocate(self) -> tuple[int, int]:
        """Return the offset of a new ring, and its size."""
        with contextlib.suppress(SharedMemoryFull):
            return self._shm.allocate(HEADER_WORDS * 8 + self._ring_bytes), self._ring_bytes
        return self._shm.allocate(HEADER_WORDS * 8 + RING_BYTES_LEAST), RING_BYTES_LEAST

    def inbox(self, source: int) -> RingReader | None:
        """Return the ring of messages from a world rank of this host; None while there is none."""
        found = self._word_of(source)
        start = self._shm.words[found] if found else 0
        if start in (0, _NEVER):
            return None
        reader = RingReader(self._shm, start)
        self._shm.check(start, HEADER_WORDS * 8 + reader.ring_bytes)
        return reader

    def has_none(self, source: int) -> bool:
        """Return whether a rank will never have a ring to this one."""
        words, places = self._shm.words, self.channels.places
        found = self._word_of(source)
        return words[found or self._shm.table(places[source]) // 8 + _RINGS] == _NEVER

    def appears_word(self, source: int) -> int:
        """Return the word that changes when the ring from a rank appears."""
        return self._word_of(source) or self._shm.table(self.channels.places[source]) // 8 + _RINGS

    def reach(self, source: int) -> ProcessReader | None:
        """Return the reader of a rank's memory, as rank 0; None if it is not readable."""
        places = self.channels.places
        return self.channels.reach((places[source], self._shm.local_rank))

    def native_endpoint(
        self,
        end: RingWriter | RingReader,
        other: int,
        identity: int,
        eager_bytes: int,
        **objects: Any,
    ) -> Any:
        """Return the C runner of one end of a pair's messages; None if Python runs them.

        `identity` names the pair's calls, a message above `eager_bytes` waits for its receiver, and
        `p2p.h` lists `objects`.
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
        """Return the index of the list word of the ring from a rank; 0 without a list."""
        shm = self._shm
        listed = shm.words[shm.table(self.channels.places[source]) // 8 + _RINGS]
        return 0 if listed in (0, _NEVER) else listed // 8 + shm.local_rank
