"""One rank's end of a group's channel: publish progress, wait for the others, find their data.

The runtime makes one for each group of one host. `channel_table.py` names the rules of the
protocol.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from syncvar._native import ChannelState, bind
from syncvar._native.constants import RANKS_MAX
from syncvar.core.errors import InternalError
from syncvar.shm.channel_table import (
    CHECK,
    DONE,
    PHASE,
    RING_RANKS_MAX,
    SEGMENT_BYTES,
    SEGMENTS,
    SMALL,
    SMALL_BYTES,
    SOURCE,
    TARGET,
    WIDE_BYTES,
    group_key,
)
from syncvar.shm.segment_file import ABORT, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from syncvar.shm.channel_table import ChannelTable, ProcessReader


class GroupChannel(ChannelState):
    """This rank's end of a group's channel; the other ranks find it by the group's identity.

    Raises SharedMemoryFull if the table of entries or the segment is full.
    """

    __slots__ = (
        "__weakref__",
        "_channels",
        "_entries",
        "_in_use",
        "_part_bytes",
        "_segments",
        "_views",
        "are_native",
        "entry",
        "found",
        "group",
        "hold",
        "is_native",
        "is_open",
        "members",
        "others",
        "queue",
        "rank",
        "reach",
        "regions",
        "shm",
        "size",
        "wait",
        "words",
    )

    def __init__(self, channels: ChannelTable, group: int, members: Sequence[int]) -> None:
        self._channels = channels
        self.shm = channels.shm
        self.words = channels.words
        self.wait = channels.wait
        self.hold = channels.hold
        self.group = group_key(group)
        self.members = tuple(members)
        self.regions = channels.regions_of(members)
        self.rank = self.regions.index(channels.shm.local_rank)
        self.size = len(members)
        self.entry = channels.take_entry(self.group, self.regions)
        channels.close_with(self, self.entry)
        self.side = 0
        self.last = 0  # the last word published, without its side
        self.phase = 0  # the last phase published
        self.is_settled = True  # no call was abandoned: all ranks reach `last`
        self.tail = 0  # the side of the last published segment
        self.queue: deque[Any] = deque()  # started calls, oldest first
        self.is_open = self.size == 1
        self.is_native = False  # this rank runs programs in C
        self.are_native = False  # all ranks of the group do
        self.others: tuple[int, ...] = ()  # words of the other ranks, beginning with the next rank
        self.reach: ProcessReader | None = None  # set if the memory of all ranks is readable
        self._in_use: list[Any] = []
        self._entries = [0] * self.size
        self._entries[self.rank] = self.entry
        self._views: dict[tuple[int, int, np.dtype[Any]], NDArray[Any]] = {}
        self.found: dict[Any, list[Any]] = {}  # the memories that `program_runner` has located
        self._segments = [0] * self.size
        self._part_bytes = (SEGMENT_BYTES // self.size // PAGE_BYTES + 2) * PAGE_BYTES

    @property
    def first(self) -> Any:
        """The oldest started call, or None, by one read: other threads change the queue."""
        try:
            return self.queue[0]
        except IndexError:
            return None

    # -- finding the others ------------------------------------------------------------------------

    def try_open(self) -> bool:
        """Open the channel if all ranks have made their entries; return whether it is open."""
        for distance in range(1, self.size):
            rank = (self.rank + distance) % self.size
            if not self._entries[rank]:
                self._entries[rank] = self._channels.find(self.regions[rank], self.group)
        if all(self._entries):
            self.others = tuple(
                self._entries[(self.rank + distance) % self.size]
                for distance in range(1, self.size)
            )
            self.reach = self._channels.reach(self.regions)
            self.is_native = self._channels.is_native and self._bind()
            self.are_native = self.size <= RANKS_MAX and self._channels.are_native(self.regions)
            self.is_open = True
        return self.is_open

    # -- publishing and waiting --------------------------------------------------------------------

    def begin(self, call: int, check: int, source: int = 0, target: int = 0) -> int:
        """Publish phase 0 of a call; return its need.

        `check` is the call's `check_of`. docs/internals.md describes the words `source` and
        `target`, under "The channel protocol".
        """
        words, entry = self.words, self.entry
        side = self.side = self.side ^ 1
        words[entry + CHECK + side] = check
        words[entry + SOURCE + side] = source
        words[entry + TARGET + side] = target
        last = self.last = (call + 1) << 1
        if self.phase or words[entry + DONE]:
            words[entry + DONE] = self.phase
            self.phase = words[entry + PHASE] = 0
        words[entry] = last | side
        return last

    def publish(self) -> int:
        """Publish the next phase; return its need."""
        phase = self.phase = self.words[self.entry + PHASE] = self.phase + 1
        return -phase

    def next_parity(self) -> int:
        """Return which result segment the next phase uses (parity rule); equal on all ranks."""
        return (self.phase + 1) & 1

    def _is_at(self, entry: int, need: int) -> bool:
        """Return whether a rank has published a need: a word, or minus a phase of this call."""
        words = self.words
        word = words[entry]
        if need > 0:
            return word >= need
        return words[entry + (DONE if word >= self.last + 2 else PHASE)] >= -need

    def is_reached(self, need: int) -> bool:
        """Return whether all others have published a need, see `Need`."""
        return all(self._is_at(other, need) for other in self.others)

    def missing(self, need: int) -> tuple[int, ...]:
        """Return the world ranks that have not published a need yet, see `Need`."""
        if not self.is_open:
            return tuple(self.members[rank] for rank in range(self.size) if not self._entries[rank])
        others = [rank for rank in range(self.size) if rank != self.rank]
        late = [rank for rank in others if not self._is_at(self._entries[rank], need)]
        return tuple(self.members[rank] for rank in late)

    def passed(self) -> tuple[int, ...]:
        """Return the ranks of the group that have begun a later call."""
        return tuple(
            rank for rank, entry in enumerate(self._entries) if self.words[entry] >= self.last + 2
        )

    def side_of(self, rank: int) -> int:
        """Return the side on which a rank of the group published phase 0 of this call."""
        word = self.words[self._entries[rank]]
        side = word & 1
        return side if word < self.last + 2 else side ^ 1

    def own_side(self, side: int) -> tuple[int, ...]:
        """Return the sides by rank where only this rank's is known; -1 for the others."""
        return (*(-1,) * self.rank, side, *(-1,) * (self.size - self.rank - 1))

    def disagreeing(self, check: int) -> tuple[int, ...]:
        """Return the ranks of the group whose check of this call differs."""
        words = self.words
        return tuple(
            [
                rank
                for rank, entry in enumerate(self._entries)
                if rank != self.rank and words[entry + CHECK + self.side_of(rank)] != check
            ]
        )

    def arrays(self) -> tuple[list[int], list[int]]:
        """Return the sources and the targets of this call by rank, as passed to `begin`."""
        words = self.words
        sources, targets = [], []
        for rank, entry in enumerate(self._entries):
            side = self.side_of(rank)
            sources.append(words[entry + SOURCE + side])
            targets.append(words[entry + TARGET + side])
        return sources, targets

    def publish_locations(self, places: Sequence[int]) -> None:
        """Write the locations of this rank's blocks to its small slot of the next call."""
        first = self.location_word(self.rank, self.side ^ 1)
        for index, place in enumerate(places):
            self.words[first + index] = place

    def block_location(self, rank: int, index: int) -> int:
        """Return the location of a block of a rank in this call."""
        return self.words[self.location_word(rank, self.side_of(rank)) + index]

    def location_word(self, rank: int, side: int) -> int:
        """Return the index of the word with the location of a rank's first block on a side."""
        return self.small_offset(rank, side) // 8

    def keep(self, arrays: Any) -> None:
        """Keep arrays alive as long as the channel: other ranks may read them after a failure."""
        self._in_use.append(arrays)

    def _bind(self) -> bool:
        """Pass the words of all ranks to the C runner; return whether it accepts the size."""
        looks, shares_cores = self._channels.patience(self.regions)
        return bind(
            self,
            self.shm.memory,
            self.entry,
            (CHECK, PHASE, DONE, SOURCE, TARGET, ABORT, SEGMENTS),
            self.others,
            tuple(self.words[entry + SMALL] for entry in self._entries),
            (SMALL_BYTES, SEGMENT_BYTES, self._part_bytes),
            self.rank,
            shares_cores,
            looks,
            () if self.reach is None else self.reach.processes,
        )

    def ring_of(self, nbytes: int) -> int:
        """Return the offset of this rank's slot ring for vectors of this size that every rank sums.

        0 means no ring; -1 means that the vector goes to the fixed small slot.
        """
        if nbytes <= WIDE_BYTES:
            return -1
        has_ring = self.is_native and self.size <= RING_RANKS_MAX
        return self._channels.ring(self.entry) if has_ring else 0

    def slots_now(self, nbytes: int) -> tuple[int, ...]:
        """Return by rank the offset of the slot that holds its `nbytes` in this call."""
        found = []
        for rank, entry in enumerate(self._entries):
            side = self.side_of(rank)
            offset = self.words[entry + TARGET + side] if nbytes > WIDE_BYTES else 0
            found.append(offset or self.small_offset(rank, side))
        return tuple(found)

    # -- memory ------------------------------------------------------------------------------------

    def small(self, rank: int, side: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a view of a rank's small slot."""
        return self.resident(self.small_offset(rank, side), count, dtype)

    def small_offset(self, rank: int, side: int) -> int:
        """Return the offset of a rank's small slot in the segment."""
        return self.words[self._entries[rank] + SMALL] + side * SMALL_BYTES

    def reserve_segments(self) -> None:
        """Allocate this rank's segments; call it before publishing the call that needs them."""
        if self._segments[self.rank]:
            return
        offset = self.shm.allocate(2 * (SEGMENT_BYTES + self._part_bytes))
        if self._segments[self.rank]:  # another thread, which starts or drives a call, was faster
            self.shm.release(offset)
            return
        self.words[self.entry + SEGMENTS] = offset
        self._segments[self.rank] = offset

    def segment(self, rank: int, number: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a view of a rank's segment; 0 and 1 hold inputs, by side; 2 and 3 hold results."""
        return self.resident(self.segment_offset(rank, number), count, dtype)

    def segment_offset(self, rank: int, number: int) -> int:
        """Return the offset of a rank's segment, numbered as in `segment`."""
        base = self._segments[rank]
        if not base:
            base = self._segments[rank] = self.words[self._entries[rank] + SEGMENTS]
            if not base:
                raise InternalError(
                    f"rank {rank} of the group published a segment that it never allocated"
                )
        if number < 2:
            return int(base + number * SEGMENT_BYTES)
        return int(base + 2 * SEGMENT_BYTES + (number - 2) * self._part_bytes)

    def resident(self, offset: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a flat view of an array anywhere in the segment."""
        key = (offset, count, dtype)
        found = self._views.get(key)
        if found is not None:
            return found
        try:
            view = self.shm.view(offset, count, dtype)
        except InternalError as error:
            call = f"call {(self.last >> 1) - 1} of group {self.group}"
            raise InternalError(f"rank {self.members[self.rank]}, {call}: {error}") from None
        if not self.shm.is_checked:  # with checks on, each use is checked anew
            if len(self._views) >= 4096:
                self._views.clear()
            self._views[key] = view
        return view
