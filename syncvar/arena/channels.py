"""Channels: how the ranks of a group that share an arena tell each other how far they are, and where their data lie.

A channel belongs to (group, rank). It is an entry in the table at the beginning of the rank's region, written by that
rank only, and looked at by the others:

The first line of the table tells how many entries there are, and where the other processes can try to read this one's
memory (`reaching.py`). An entry has two lines:

* line 0: the **word** of the call, the **phase** in it, the last phase of the call before, and for each of two sides a
  **check**: what the call is, as a number.
* line 1: for each side what the rank says of where its source and target arrays lie, or, of a call that moves blocks, of
  where these are put or told; the group's
  identity; where the channel's slots are; a mark when the rank has let go of the group.

Word and phase say everything about progress, and together they only grow:

    word = (call + 1) << 1 | side

Phase 0 of a call publishes the check (and, of a small call, the data) by setting the word, after the phase has gone
back to 0; later phases are what the algorithm needs. Waiting means: until all others have reached (call, phase). A
reader looks at the word first and at the phase then, so that it never takes one call's phase for another's. Whoever publishes has first seen everybody reach
its own publication before, so nobody is ever more than one publication ahead, and data of one side stay untouched
until everyone has published again, that is, has read them. A call that a rank gives up (a verdict, a bad argument) needs no
repair: its next call has a higher number, and who still waits in the old call sees that the rank is past it without
having published what it needs.

Only x86-64 takes this path: there, aligned 8-byte stores are seen after the ordinary stores before them.

Cost: an entry of 128 bytes and two small slots of 64 KiB for each (group, rank); room for segments, 2 to 3 MiB, and of up
to four ranks for 32 slots that take turns, 2 MiB, when first needed.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.arena.layout import ABORT, PAGE_BYTES, TABLE_BYTES
from syncvar.arena.reaching import Reach, Spot
from syncvar.arena.waiting import holding_waiter, waiter
from syncvar.errors import ArenaFull, InternalError
from syncvar.kernel import ChannelState, bind, slot_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.arena.mapping import Arena

__all__ = [
    "CHECK",
    "DONE",
    "MASK",
    "PHASE",
    "SEGMENT_BYTES",
    "SMALL_BYTES",
    "SPREAD",
    "TARGET",
    "WIDE_BYTES",
    "Channel",
    "Channels",
    "check_of",
]

SMALL_BYTES = 64 << 10  # for each of the two sides
WIDE_BYTES = 8 << 10  # a longer vector that everybody sums is put where its rank tells with phase 0
RING_SLOTS = 32  # small slots that take turns, so that their lines have left the cores' own caches when they are written again
_RING_RANKS_MAX = 4  # of more, everybody sums no vector that gains by them
SEGMENT_BYTES = 1 << 20  # of the vector; each rank has two for what it brings, and two parts of one for results

_ENTRY_BYTES = 128
_HEADER_WORDS = _ENTRY_BYTES // 8
_ENTRIES_MAX = TABLE_BYTES // _ENTRY_BYTES - 1
# Words of an entry.
CHECK, PHASE, DONE = 1, 3, 4  # the checks of both sides, the phase, and the last phase of the call before
_SOURCE, TARGET, _GROUP, _SMALL, _SEGMENTS, _CLOSED = 8, 10, 12, 13, 14, 15
_LOOKS_ALONE, _LOOKS_SHARED = 400, 8  # of the C runner: about 15 us with a core for each rank; then it yields, or Python goes on
_PROCESS, _ADDRESS, _NUMBER = 1, 2, 3  # of the table: where others can try to read this process's memory
_RUNNER = 4  # of the table: 1 where programs run in C
NATIVE_RANKS_MAX = 64
MASK = (1 << 64) - 1
SPREAD = 0x9E3779B97F4A7C15  # odd, so that different calls of the same kind have different checks


def check_of(fingerprint: int, call: int) -> int:
    """Return the number by which ranks know that they make the same call.

    Example:
        >>> check_of(5, 1) == check_of(5, 2)
        False
    """
    return (fingerprint + call * SPREAD) & MASK


class Channels:
    """The channels of this rank, and how it finds those of others.

    Args:
        arena: The mapped arena.
        ranks: The ranks of the world on this host, in the order of their regions.
        reaches: Read the memory of the others where they and the system allow it.
        runner: Of prepared calls, "c" or "python".
    """

    def __init__(self, arena: Arena, ranks: Sequence[int], *, reaches: bool = True, runner: str = "python") -> None:
        self.arena = arena
        self.is_native = runner == "c" and not arena.is_checked
        self.words = arena.words
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self._table = arena.table(arena.local_rank) // 8
        self._entries = 0
        self._populated = PAGE_BYTES
        self._open: dict[int, tuple[int, tuple[int, ...]]] = {}  # entry -> (group, members' regions)
        self._rings: dict[int, int] = {}  # entry -> where its slots that take turns begin; 0 where there was no room
        self._free: deque[int] = deque()  # entries whose channel was let go, others may still look at them
        self.wait = waiter(self.words, ABORT, PHASE, DONE, has_own_core=arena.local_world_size <= arena.usable_cores)
        self.hold = holding_waiter(self.words, ABORT, PHASE, DONE)
        self.shares_cores = arena.local_world_size > arena.usable_cores
        arena.populate(self._table * 8, PAGE_BYTES)
        self.words[self._table + _RUNNER] = self.is_native  # before any entry is seen
        if reaches:
            self._spot = Spot()
            self._spot.give_leave()
            self.words[self._table + _ADDRESS] = self._spot.address
            self.words[self._table + _NUMBER] = self._spot.number
            self.words[self._table + _PROCESS] = self._spot.process  # before any entry is seen

    def reach(self, regions: Sequence[int]) -> Reach | None:
        """Return how the memory of ranks whose entries are there is read, or None where that of one of them cannot be."""
        tables = [self.arena.table(region) // 8 for region in regions]
        if not all(self.words[table + _PROCESS] for table in tables):
            return None
        made = Reach([self.words[table + _PROCESS] for table in tables])
        found = all(
            made.finds(rank, self.words[table + _ADDRESS], self.words[table + _NUMBER]) for rank, table in enumerate(tables)
        )
        return made if found else None

    def are_native(self, regions: Sequence[int]) -> bool:
        """Return whether programs run in C on all ranks whose entries are there."""
        return all(self.words[self.arena.table(region) // 8 + _RUNNER] for region in regions)

    def serves(self, members: Sequence[int]) -> bool:
        """Return whether all ranks of a group share this arena."""
        return all(rank in self.places for rank in members)

    def patience(self, regions: Sequence[int]) -> tuple[int, bool]:
        """Return how often the C runner looks for ranks, and whether it gives way between looks: of threads of one process neither."""
        own = self.words[self._table + _PROCESS]
        others = [self.arena.table(region) // 8 for region in regions if region != self.arena.local_rank]
        if any(self.words[table + _PROCESS] == own != 0 for table in others):
            return 0, False
        return _LOOKS_SHARED if self.shares_cores else _LOOKS_ALONE, self.shares_cores

    def make(self, group: int, members: Sequence[int], rank: int) -> Channel:
        """Make this rank's channel of a group; the others find it by the group's identity.

        Args:
            group: The group's identity, the same on all its ranks.
            members: Its ranks in the world.
            rank: This process in the group.

        Raises:
            ArenaFull: The table is full, or the memory.
        """
        regions = tuple(self.places[member] for member in members)
        entry = self._reuse() or self._new_entry()
        words = self.words
        small = words[entry + _SMALL]
        for place in range(_HEADER_WORDS):
            words[entry + place] = 0
        try:
            words[entry + _SMALL] = small or self.arena.allocate(2 * SMALL_BYTES)
        except BaseException:
            self._free.append(entry)
            self._open[entry] = (0, ())
            raise
        key = group or MASK  # 0 is the world, and the mark of an entry without a group
        words[entry + _GROUP] = key  # last: it makes the entry visible
        self._open[entry] = (key, regions)
        channel = Channel(self, key, members, regions, rank, entry)
        weakref.finalize(channel, _let_go, words, entry, self._free, os.getpid()).atexit = False
        return channel

    def find(self, region: int, group: int) -> int:
        """Return the entry of another rank's channel of a group (as in its entry), or 0 when there is none yet."""
        start = self.arena.table(region) // 8
        count = self.words[start]
        if not count:
            return 0
        first = start + _HEADER_WORDS
        groups = self.arena.entries(first, count * _HEADER_WORDS)[_GROUP::_HEADER_WORDS]
        found = np.flatnonzero(groups == np.uint64(group))
        return first + int(found[-1]) * _HEADER_WORDS if found.size else 0

    def _new_entry(self) -> int:
        if self._entries >= _ENTRIES_MAX:
            raise ArenaFull(
                f"this rank is in {self._entries} groups that are still in use; let go of groups that are not needed "
                f"any more (del group) on all their ranks, or run with SYNCVAR_TRANSPORT=zmq"
            )
        end = (self._entries + 2) * _ENTRY_BYTES
        if end > self._populated:
            self.arena.populate(self._table * 8 + self._populated, PAGE_BYTES)
            self._populated += PAGE_BYTES
        self._entries += 1
        entry = self._table + self._entries * _HEADER_WORDS
        self.words[self._table] = self._entries
        return entry

    def _reuse(self) -> int:
        """Return an entry that nobody looks at any more, or 0: all members have let go of its group."""
        for _ in range(len(self._free)):
            entry = self._free.popleft()
            group, regions = self._open[entry]
            if all(self._has_let_go(region, group) for region in regions):
                segments = self.words[entry + _SEGMENTS]
                if segments:
                    self.words[entry + _SEGMENTS] = 0
                    self.arena.release(segments)
                ring = self._rings.pop(entry, 0)
                if ring:
                    self.arena.release(ring)
                del self._open[entry]
                return entry
            self._free.append(entry)
        return 0

    def ring(self, entry: int) -> int:
        """Return where the slots of an entry that take turns begin, made when first asked for; 0 where there is no room."""
        if entry not in self._rings:
            self._rings[entry] = 0
            with contextlib.suppress(ArenaFull):
                self._rings[entry] = self.arena.allocate(RING_SLOTS * SMALL_BYTES)
        return self._rings[entry]

    def _has_let_go(self, region: int, group: int) -> bool:
        found = self.find(region, group)
        return not found or self.words[found + _CLOSED] != 0


def _let_go(words: memoryview, entry: int, free: deque[int], process: int) -> None:
    if os.getpid() == process:  # a forked copy has let go of nothing
        with contextlib.suppress(ValueError):  # the arena is closed
            words[entry + _CLOSED] = 1
            free.append(entry)


class Channel(ChannelState):
    """This rank's end of a group's channels.

    Args:
        channels: Whose it is.
        group: The group, as in the entry.
        members: Its ranks in the world.
        regions: Their regions.
        rank: This process in the group.
        entry: Index of the own entry's first word.
    """

    __slots__ = (
        "__weakref__", "_channels", "_entries", "_kept", "_part_bytes", "_segments", "_views", "are_native", "arena", "entry", "found", "group", "hold",
        "is_native", "is_open", "members", "others", "queue", "rank", "reach", "regions", "size", "wait", "words",
    )  # fmt: skip

    def __init__(
        self, channels: Channels, group: int, members: Sequence[int], regions: tuple[int, ...], rank: int, entry: int
    ) -> None:
        self._channels = channels
        self.arena = channels.arena
        self.words = channels.words
        self.wait = channels.wait
        self.hold = channels.hold
        self.group = group
        self.members = tuple(members)
        self.regions = regions
        self.rank = rank
        self.size = len(regions)
        self.entry = entry
        self.side = 0
        self.last = 0  # the last word published, without its side
        self.phase = 0  # the last phase published
        self.is_settled = True  # everyone has reached it, or will before this rank is told that the call has ended
        self.tail = 0  # the side on which a segment was published last
        self.queue: deque[Any] = deque()  # started calls, oldest first
        self.is_open = self.size == 1
        self.is_native = False  # programs run in C here
        self.are_native = False  # and on all ranks of the group
        self.others: tuple[int, ...] = ()  # words of the other ranks, the next one first
        self.reach: Reach | None = None  # where the memory of all of them can be read
        self._kept: list[Any] = []
        self._entries = [0] * self.size
        self._entries[rank] = entry
        self._views: dict[Any, Any] = {}
        self.found: dict[Any, list[Any]] = {}  # where memories of programs lie, see `execution/running.py`
        self._segments = [0] * self.size
        self._part_bytes = (SEGMENT_BYTES // self.size // PAGE_BYTES + 2) * PAGE_BYTES

    # -- finding the others ---------------------------------------------------------------------------------------

    def open(self) -> tuple[int, ...]:
        """Look for the other ranks' channels; returns the ranks of the group whose channel is not there yet."""
        missing = []
        for distance in range(1, self.size):
            rank = (self.rank + distance) % self.size
            if not self._entries[rank]:
                self._entries[rank] = self._channels.find(self.regions[rank], self.group)
                if not self._entries[rank]:
                    missing.append(rank)
        if not missing:
            self.others = tuple(self._entries[(self.rank + distance) % self.size] for distance in range(1, self.size))
            self.reach = self._channels.reach(self.regions)
            self.is_native = self._channels.is_native and self._bind()
            self.are_native = self.size <= NATIVE_RANKS_MAX and self._channels.are_native(self.regions)
            self.is_open = True
        return tuple(missing)

    # -- publishing and waiting -----------------------------------------------------------------------------------

    def begin(self, call: int, check: int, source: int = 0, target: int = 0) -> int:
        """Publish phase 0 of a call; returns what the others have to reach, for `is_reached` and `wait`.

        Args:
            call: Its number.
            check: `check_of` it.
            source: What the call says of the arrays to read, see `Vector.told` and `Said`.
            target: The same of the arrays to write.
        """
        words, entry = self.words, self.entry
        side = self.side = self.side ^ 1
        words[entry + CHECK + side] = check
        words[entry + _SOURCE + side] = source
        words[entry + TARGET + side] = target
        last = self.last = (call + 1) << 1
        if self.phase or words[entry + DONE]:
            words[entry + DONE] = self.phase
            self.phase = words[entry + PHASE] = 0
        words[entry] = last | side
        return last

    def publish(self) -> int:
        """Publish the next phase of the call; returns what the others have to reach: minus the phase."""
        phase = self.phase = self.words[self.entry + PHASE] = self.phase + 1
        return -phase

    def next_parity(self) -> int:
        """Return the side of the segments for data that are published next, in a phase after 0: the same on all ranks."""
        return (self.phase + 1) & 1

    def _is_at(self, entry: int, need: int) -> bool:
        words = self.words
        word = words[entry]
        if need > 0:
            return word >= need
        return words[entry + (DONE if word >= self.last + 2 else PHASE)] >= -need

    def is_reached(self, need: int) -> bool:
        """Return whether all other ranks have published `need` or something later.

        Args:
            need: A word, or minus a phase of the call that this rank published last.
        """
        return all(self._is_at(other, need) for other in self.others)

    def missing(self, need: int) -> tuple[int, ...]:
        """Return the ranks of the world that have not published `need` yet."""
        if not self.is_open:
            return tuple(self.members[rank] for rank in range(self.size) if not self._entries[rank])
        return tuple(
            self.members[rank]
            for rank, entry in enumerate(self._entries)
            if rank != self.rank and not self._is_at(entry, need)
        )

    def passed(self) -> tuple[int, ...]:
        """Return the ranks of the group that are past this call."""
        return tuple(rank for rank, entry in enumerate(self._entries) if self.words[entry] >= self.last + 2)

    def side_of(self, rank: int) -> int:
        """Return on which side a rank of the group, this one too, has published phase 0 of this call."""
        word = self.words[self._entries[rank]]
        side = word & 1
        return side if word < self.last + 2 else side ^ 1

    def own_side(self, side: int) -> tuple[int, ...]:
        """Return sides by rank of which only this rank's is known; -1 for the others."""
        return (*(-1,) * self.rank, side, *(-1,) * (self.size - self.rank - 1))

    def sides(self) -> tuple[int, ...]:
        """Return on which side each rank has published phase 0 of this call."""
        return tuple([self.side_of(rank) for rank in range(self.size)])

    def disagreeing(self, check: int) -> tuple[int, ...]:
        """Return the ranks of the group whose phase 0 of this call says something else."""
        words = self.words
        return tuple(
            rank
            for rank, entry in enumerate(self._entries)
            if rank != self.rank and words[entry + CHECK + self.side_of(rank)] != check
        )

    def arrays(self) -> tuple[list[int], list[int]]:
        """Return source and target of all ranks in this call, as given to `begin`."""
        words = self.words
        sources, targets = [], []
        for rank, entry in enumerate(self._entries):
            side = self.side_of(rank)
            sources.append(words[entry + _SOURCE + side])
            targets.append(words[entry + TARGET + side])
        return sources, targets

    def tell_places(self, places: Sequence[int]) -> None:
        """Tell with phase 0 of the next call where this rank's blocks lie: numbers of 64 bits, in its small slot."""
        first = self.told_word(self.rank, self.side ^ 1)
        for index, place in enumerate(places):
            self.words[first + index] = place

    def told_place(self, rank: int, index: int) -> int:
        """Return where a block of a rank lies, as told in this call."""
        return self.words[self.told_word(rank, self.side_of(rank)) + index]

    def told_word(self, rank: int, side: int) -> int:
        """Return the word in which a rank tells on a side where its first block lies."""
        return self.small_offset(rank, side) // 8

    def keep(self, arrays: Any) -> None:
        """Keep arrays alive as long as the channel: a call has failed in which others may still read them."""
        self._kept.append(arrays)

    def _bind(self) -> bool:
        """Tell the C runner where the words of all ranks are; returns whether it takes so many."""
        looks, shares_cores = self._channels.patience(self.regions)
        return bind(
            self, self.arena.memory, self.entry, (CHECK, PHASE, DONE, _SOURCE, TARGET, ABORT, _SEGMENTS), self.others,
            tuple(self.words[entry + _SMALL] for entry in self._entries), (SMALL_BYTES, SEGMENT_BYTES, self._part_bytes), self.rank,
            shares_cores, looks, () if self.reach is None else self.reach.processes,
        )  # fmt: skip

    def slot_call(self, **parts: Any) -> Any:
        """Return the C runner of a call through small slots, or None where Python has to run it; see `kernel.slot_call`."""
        return slot_call(channel=self, queue=self.queue, **parts) if self.is_native else None

    def ring_of(self, nbytes: int) -> int:
        """Return what the C runner is told of the slots of this rank that take turns, for vectors that everybody sums.

        Returns:
            Where they begin; 0 where there are none; -1 for a vector whose slot nobody tells.
        """
        if nbytes <= WIDE_BYTES:
            return -1
        return self._channels.ring(self.entry) if self.is_native and self.size <= _RING_RANKS_MAX else 0

    def smalls_now(self, count: int, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
        """Return what all ranks have put to be summed by everybody, in their order, as published in this call."""
        return [self.resident(self.put_offset(rank, count * dtype.itemsize), count, dtype) for rank in range(self.size)]

    def put_offset(self, rank: int, nbytes: int) -> int:
        """Return where in the arena a rank has put what everybody sums, as published in this call."""
        side = self.side_of(rank)
        told = self.words[self._entries[rank] + TARGET + side] if nbytes > WIDE_BYTES else 0
        return told or self.small_offset(rank, side)

    # -- memory ---------------------------------------------------------------------------------------------------

    def small(self, rank: int, side: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a view of a rank's small slot."""
        key = ("small", rank, side, count, dtype)
        found = self._views.get(key)
        if found is None:
            found = self._seen(key, self.small_offset(rank, side), count, dtype)
        view: NDArray[Any] = found
        return view

    def small_offset(self, rank: int, side: int) -> int:
        """Return where a rank's small slot begins in the arena."""
        return self.words[self._entries[rank] + _SMALL] + side * SMALL_BYTES

    def smalls(self, side: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the small slots of all ranks as one array (rank, *shape): without a copy where they are evenly spaced.

        Raises:
            ValueError: They are not.
        """
        return self.arena.rows([self.small_offset(rank, side) for rank in range(self.size)], shape, dtype)

    def reserve_segments(self) -> None:
        """Take memory for this rank's segments, before the call that needs them is published.

        Raises:
            ArenaFull: There is no room.
        """
        if not self._segments[self.rank]:
            made = self.arena.allocate(2 * (SEGMENT_BYTES + self._part_bytes))
            self.words[self.entry + _SEGMENTS] = made
            self._segments[self.rank] = made

    def segment(self, rank: int, number: int, count: int, dtype: np.dtype[Any], start: int = 0) -> NDArray[Any]:
        """Return a view of a rank's segment.

        Args:
            rank: In the group.
            number: 0 and 1 hold what is brought, by side; 2 and 3 hold results.
            count: Elements.
            dtype: Theirs.
            start: First element.
        """
        key = (rank, number, count, dtype, start)
        found = self._views.get(key)
        if found is None:
            found = self._seen(key, self.segment_offset(rank, number) + start * dtype.itemsize, count, dtype)
        view: NDArray[Any] = found
        return view

    def segment_offset(self, rank: int, number: int) -> int:
        """Return where a rank's segment begins in the arena, see `segment`."""
        base = self._segments[rank]
        if not base:
            base = self._segments[rank] = self.words[self._entries[rank] + _SEGMENTS]
            if not base:
                raise InternalError(f"rank {rank} of the group has taken no memory for segments, and one is to be looked at")
        place = number * SEGMENT_BYTES if number < 2 else 2 * SEGMENT_BYTES + (number - 2) * self._part_bytes
        return int(base + place)

    def resident(self, offset: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a flat view of an array anywhere in the arena."""
        key = (offset, count, dtype)
        found = self._views.get(key)
        if found is None:
            found = self._seen(key, offset, count, dtype)
        view: NDArray[Any] = found
        return view

    def _seen(self, key: Any, offset: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        try:
            view = self.arena.view(offset, count, dtype)
        except InternalError as error:
            raise InternalError(f"rank {self.members[self.rank]}, call {(self.last >> 1) - 1} of group {self.group}: {error}") from None
        if not self.arena.is_checked:  # else it is checked again each time
            if len(self._views) >= 4096:
                self._views.clear()
            self._views[key] = view
        return view
