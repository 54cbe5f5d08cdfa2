"""Channels: how the ranks of a group that share shared memory tell each other how far they are, and where their data lie.

A channel belongs to (group, rank). It is an entry in the table at the beginning of the rank's region, written by that
rank only, and looked at by the others:

The first line of the table tells how many entries there are, and where the other processes can try to read this one's
memory (`reaching.py`). An entry has two lines:

* line 0: the **word** of the call, the **phase** in it, the last phase of the call before, and for each of two sides a
  **check**: what the call is, as a number; and what the rank says of where its target array lies, or where it has put a
  vector that everybody sums.
* line 1: for each side what the rank says of where its source array lies, or, of a call that moves blocks, of where these
  are put or told; the group's identity; where the channel's slots are; a mark when the rank has let go of the group.

A line is the others' when they look at it, and has to come back before its rank writes to it: what is published together is
in line 0, and written at once.

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
from typing import TYPE_CHECKING

import numpy as np

from syncvar.core.errors import SharedMemoryFull
from syncvar.shm.cross_process_read import ProbeCell, ProcessReader
from syncvar.shm.segment_layout import ABORT, PAGE_BYTES, TABLE_BYTES
from syncvar.shm.spin_wait import holding_waiter, waiter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.shm.segment import SharedSegment

__all__ = [
    "CHECK",
    "DONE",
    "MASK",
    "NATIVE_RANKS_MAX",
    "PHASE",
    "RING_RANKS_MAX",
    "RING_SLOTS",
    "SEGMENTS",
    "SEGMENT_BYTES",
    "SMALL",
    "SMALL_BYTES",
    "SOURCE",
    "SPREAD",
    "TARGET",
    "WIDE_BYTES",
    "Channels",
    "check_of",
    "group_key",
]

SMALL_BYTES = 64 << 10  # for each of the two sides
WIDE_BYTES = 8 << 10  # a longer vector that everybody sums is put where its rank tells with phase 0
RING_SLOTS = 32  # small slots that take turns, so that their lines have left the cores' own caches when they are written again
RING_RANKS_MAX = 4  # of more, everybody sums no vector that gains by them
SEGMENT_BYTES = (
    1 << 20
)  # of the vector; each rank has two for what it brings, and two parts of one for results

_ENTRY_BYTES = 128
_HEADER_WORDS = _ENTRY_BYTES // 8
_ENTRIES_MAX = TABLE_BYTES // _ENTRY_BYTES - 1
# Words of an entry.
CHECK, PHASE, DONE, TARGET = (
    1,
    3,
    4,
    5,
)  # the checks of both sides, the phase, the last phase of the call before, both sides' targets
SOURCE, _GROUP, SMALL, SEGMENTS, _CLOSED = 8, 12, 13, 14, 15
_LOOKS_ALONE, _LOOKS_SHARED = (
    400,
    8,
)  # of the C runner: about 15 us where there may be a core for each rank; then it yields, or Python goes on
_PROCESS, _ADDRESS, _NUMBER = (
    1,
    2,
    3,
)  # of the table: where others can try to read this process's memory
_RUNNER = 4  # of the table: 1 where programs run in C
NATIVE_RANKS_MAX = 64
MASK = (1 << 64) - 1
SPREAD = 0x9E3779B97F4A7C15  # odd, so that different calls of the same kind have different checks


def group_key(identity: int) -> int:
    """Return a group's identity as it stands in an entry: 0 is the world, and there the mark of an entry without a group."""
    return identity or MASK


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
        shm: The mapped shared memory.
        ranks: The ranks of the world on this host, in the order of their regions.
        reaches: Read the memory of the others where they and the system allow it.
        runner: Of persistent calls, "c" or "python".
    """

    def __init__(
        self,
        shm: SharedSegment,
        ranks: Sequence[int],
        *,
        reaches: bool = True,
        runner: str = "python",
    ) -> None:
        self.shm = shm
        self.is_native = runner == "c" and not shm.is_checked
        self.words = shm.words
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self._table = shm.table(shm.local_rank) // 8
        self._entries = 0
        self._populated = PAGE_BYTES
        self._open: dict[
            int, tuple[int, tuple[int, ...]]
        ] = {}  # entry -> (group, members' regions)
        self._rings: dict[
            int, int
        ] = {}  # entry -> where its slots that take turns begin; 0 where there was no room
        self._free: deque[int] = (
            deque()
        )  # entries whose channel was let go, others may still look at them
        self.wait = waiter(
            self.words,
            ABORT,
            PHASE,
            DONE,
            has_own_core=shm.local_world_size <= shm.usable_cores,
        )
        self.hold = holding_waiter(self.words, ABORT, PHASE, DONE)
        self.shares_cores = shm.local_world_size > shm.usable_cores
        shm.populate(self._table * 8, PAGE_BYTES)
        self.words[self._table + _RUNNER] = self.is_native  # before any entry is seen
        if reaches:
            self._spot = ProbeCell()
            self._spot.give_leave()
            self.words[self._table + _ADDRESS] = self._spot.address
            self.words[self._table + _NUMBER] = self._spot.number
            self.words[self._table + _PROCESS] = self._spot.process  # before any entry is seen

    def reach(self, regions: Sequence[int]) -> ProcessReader | None:
        """Return how the memory of ranks whose entries are there is read, or None where that of one of them cannot be."""
        tables = [self.shm.table(region) // 8 for region in regions]
        if not all(self.words[table + _PROCESS] for table in tables):
            return None
        made = ProcessReader([self.words[table + _PROCESS] for table in tables])
        found = all(
            made.finds(rank, self.words[table + _ADDRESS], self.words[table + _NUMBER])
            for rank, table in enumerate(tables)
        )
        return made if found else None

    def are_native(self, regions: Sequence[int]) -> bool:
        """Return whether programs run in C on all ranks whose entries are there."""
        return all(self.words[self.shm.table(region) // 8 + _RUNNER] for region in regions)

    def serves(self, members: Sequence[int]) -> bool:
        """Return whether all ranks of a group share this shared memory."""
        return all(rank in self.places for rank in members)

    def patience(self, regions: Sequence[int]) -> tuple[int, bool]:
        """Return how often the C runner looks for ranks, and whether it gives way between looks: of threads of one process neither."""
        own = self.words[self._table + _PROCESS]
        others = [
            self.shm.table(region) // 8 for region in regions if region != self.shm.local_rank
        ]
        if any(self.words[table + _PROCESS] == own != 0 for table in others):
            return 0, False
        return _LOOKS_SHARED if len(
            others
        ) >= self.shm.usable_cores else _LOOKS_ALONE, self.shares_cores

    def regions_of(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the regions of ranks of the world that share this shared memory."""
        return tuple(self.places[member] for member in members)

    def take_entry(self, group: int, regions: tuple[int, ...]) -> int:
        """Take an entry for this rank's channel of a group; the others find it by the group's key.

        Args:
            group: The group's key, see `group_key`.
            regions: Of its ranks.

        Returns:
            Index of its first word.

        Raises:
            SharedMemoryFull: The table is full, or the memory.
        """
        entry = self._reuse() or self._new_entry()
        words = self.words
        small = words[entry + SMALL]
        for place in range(_HEADER_WORDS):
            words[entry + place] = 0
        try:
            words[entry + SMALL] = small or self.shm.allocate(2 * SMALL_BYTES)
        except BaseException:
            self._free.append(entry)
            self._open[entry] = (0, ())
            raise
        words[entry + _GROUP] = group  # last: it makes the entry visible
        self._open[entry] = (group, regions)
        return entry

    def let_go_with(self, owner: object, entry: int) -> None:
        """Let go of an entry when its owner is gone."""
        weakref.finalize(owner, _let_go, self.words, entry, self._free, os.getpid()).atexit = False

    def find(self, region: int, group: int) -> int:
        """Return the entry of another rank's channel of a group (as in its entry), or 0 when there is none yet."""
        start = self.shm.table(region) // 8
        count = self.words[start]
        if not count:
            return 0
        first = start + _HEADER_WORDS
        groups = self.shm.entries(first, count * _HEADER_WORDS)[_GROUP::_HEADER_WORDS]
        found = np.flatnonzero(groups == np.uint64(group))
        return first + int(found[-1]) * _HEADER_WORDS if found.size else 0

    def _new_entry(self) -> int:
        if self._entries >= _ENTRIES_MAX:
            raise SharedMemoryFull(
                f"this rank is in {self._entries} groups that are still in use; let go of groups that are not needed "
                f"any more (del group) on all their ranks, or run with SYNCVAR_TRANSPORT=zmq"
            )
        end = (self._entries + 2) * _ENTRY_BYTES
        if end > self._populated:
            self.shm.populate(self._table * 8 + self._populated, PAGE_BYTES)
            self._populated += PAGE_BYTES
        self._entries += 1
        entry = self._table + self._entries * _HEADER_WORDS
        self.words[self._table] = self._entries
        return entry

    def _reuse(self) -> int:
        """Return an entry that nobody looks at any more, or 0: all members have let go of its group."""
        for _ in range(len(self._free)):
            try:
                entry = self._free.popleft()
            except IndexError:  # another thread makes a group too
                return 0
            group, regions = self._open[entry]
            if all(self._has_let_go(region, group) for region in regions):
                segments = self.words[entry + SEGMENTS]
                if segments:
                    self.words[entry + SEGMENTS] = 0
                    self.shm.release(segments)
                ring = self._rings.pop(entry, 0)
                if ring:
                    self.shm.release(ring)
                del self._open[entry]
                return entry
            self._free.append(entry)
        return 0

    def ring(self, entry: int) -> int:
        """Return where the slots of an entry that take turns begin, made when first asked for; 0 where there is no room."""
        if entry not in self._rings:
            self._rings[entry] = 0
            with contextlib.suppress(SharedMemoryFull):
                self._rings[entry] = self.shm.allocate(RING_SLOTS * SMALL_BYTES)
        return self._rings[entry]

    def _has_let_go(self, region: int, group: int) -> bool:
        found = self.find(region, group)
        return not found or self.words[found + _CLOSED] != 0


def _let_go(words: memoryview, entry: int, free: deque[int], process: int) -> None:
    if os.getpid() == process:  # a forked copy has let go of nothing
        with contextlib.suppress(ValueError):  # shared memory is closed
            words[entry + _CLOSED] = 1
            free.append(entry)
