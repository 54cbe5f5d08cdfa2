"""Channel tables: where ranks of a host publish how far calls are and where their data are.

`ChannelTable` makes and finds the entries; `GroupChannel` reads and writes them. A rank's table
begins its region. The first 128 bytes hold the number of entries and what others need to read this
process's memory (`ProcessReader`). Each (group, rank) has one entry of 128 bytes:

* line 0: the **word**, two checks, the **phase**, the last phase of the call before, two targets.
  The two checks and targets belong to the two sides. A target says where the output array is, or
  the slot of a small vector.
* line 1: two sources (input arrays), the group key, the offsets of small slots and segments, the
  closed mark.

The protocol has five rules:

* **One-writer rule**: only its own rank writes an entry. What a rank publishes together is in one
  line.
* **Growth rule**: (word, phase) only grow, with `word = (call + 1) << 1 | side`. A rank sets the
  phase to 0 and writes the check, then the word: this is phase 0. Readers read the word first, then
  the phase. So they never mix two calls.
* **One-ahead invariant**: a rank publishes only after all others have reached its own last
  publication. So no rank is more than one publication ahead.
* **Parity rule**: successive calls use the two sides in turn. By the one-ahead invariant the data
  of a side stay unchanged until all ranks have published again, that is, have read them.
* **Abandon rule**: a call that fails needs no repair. The next call has a higher number, and a rank
  that still waits in the old call sees that the other rank has passed it.

These rules need stores that other cores see in program order, so only x86-64 uses shared memory.

Cost: an entry and two small slots of 64 KiB for each (group, rank). On first use: 2 to 3 MiB for
    segments, and 2 MiB for the slot ring of groups with up to four ranks.

`ProcessReader` reads arrays in the memory of another process: one copy instead of two.
process_vm_readv(2) follows the rules for debuggers: the same user, and permission by the target
where Yama restricts debuggers to descendants (ptrace_scope 1). A worker permits the process that
started it, and with it the other workers. A probe finds out whether reading works: the reader looks
for a random number at a published address. If it fails, data go through shared memory.

A rank waits for a word of another rank by spinning (`waiter`). With a core for each rank the word
changes within a microsecond, so the rank keeps looking. Ranks that share cores yield, then sleep
briefly, because the other rank needs the core. After `BUDGET_S` the engine takes over: it sleeps
longer and longer, listens to the launcher and checks deadlines.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
import weakref
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native.constants import RING_SLOTS, SPREAD
from syncvar.core.errors import SharedMemoryFull, SyncvarError
from syncvar.shm.segment_file import ABORT, PAGE_BYTES, TABLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncvar.shm.segment import SharedSegment

    Waiter = Callable[..., bool]

# -- waiting ---------------------------------------------------------------------------------------

BUDGET_S = 0.001
HOLD_BUDGET_S = 0.02  # several switch intervals of the interpreter
PAUSE_MAX_S = 0.01
_LOOKS_FIRST = 400  # about 20 us
_LOOKS_PER_YIELD = 4
_LOOKS_PER_TURN = 10
_TURNS_PER_CLOCK = 4
_YIELDS_SHARED = 200  # about 0.2 ms; fewer yields slow down small calls on shared cores
_SLEEP_S = 1e-6
_NEVER = 1 << 64  # above every word


def pause_after(waited_s: float) -> float:
    """Return how long to sleep after `waited_s` seconds of waiting: an eighth, at most PAUSE_MAX_S.

    Example:
        >>> pause_after(0.008), pause_after(10.0)
        (0.001, 0.01)
    """
    return min(PAUSE_MAX_S, 0.125 * waited_s)


def waiter(words: memoryview, abort: int, phase: int, done: int, *, has_own_core: bool) -> Waiter:
    """Return a function `wait(indices, need, limit)` that spins until others have published a need.

    `constants.Need` explains needs. A rank whose word is at least `limit` has begun a later call:
    its DONE word counts then. The function returns False after BUDGET_S or an abort. `abort` is the
    index of that word; `phase` and `done` are distances from a rank's word.
    """
    make = _own_core_waiter if has_own_core else _shared_core_waiter
    return make(words, abort, phase, done)


def _own_core_waiter(words: memoryview, abort: int, phase: int, done: int) -> Waiter:
    give_way, clock = os.sched_yield, time.perf_counter

    def wait(indices: Sequence[int], need: int, limit: int = _NEVER) -> bool:
        offset, need = (0, need) if need > 0 else (phase, -need)
        for index in indices:
            place = index + offset
            if words[place] >= need:
                continue
            for _ in range(_LOOKS_FIRST):
                if words[place] >= need:
                    break
            else:
                until = clock() + BUDGET_S
                while words[place] < need and (words[index] < limit or words[index + done] < need):
                    for _ in range(_LOOKS_PER_YIELD):
                        if words[place] >= need:
                            break
                    else:
                        give_way()
                        if words[abort] or clock() > until:
                            return False
        return True

    return wait


def _shared_core_waiter(  # noqa: C901  (its loop must not call Python functions)
    words: memoryview, abort: int, phase: int, done: int
) -> Waiter:
    give_way, sleep, clock = os.sched_yield, time.sleep, time.perf_counter

    def wait(indices: Sequence[int], need: int, limit: int = _NEVER) -> bool:
        offset, need = (0, need) if need > 0 else (phase, -need)
        for index in indices:
            place = index + offset
            if words[place] >= need:
                continue
            until = clock() + BUDGET_S
            for turn in range(_YIELDS_SHARED):
                give_way()
                for _ in range(_LOOKS_PER_TURN):
                    if words[place] >= need:
                        break
                else:
                    if words[index] < limit or words[index + done] < need:
                        # Beside other busy processes each turn may take milliseconds.
                        if turn % _TURNS_PER_CLOCK == 0 and (words[abort] or clock() > until):
                            return False
                        continue
                break
            else:
                while words[place] < need and (words[index] < limit or words[index + done] < need):
                    sleep(_SLEEP_S)
                    if words[abort] or clock() > until:
                        return False
        return True

    return wait


def holding_waiter(words: memoryview, abort: int, phase: int, done: int) -> Waiter:
    """Return a `wait` as from `waiter` that keeps the interpreter lock, beside busy threads."""
    clock = time.perf_counter

    def hold(indices: Sequence[int], need: int, limit: int = _NEVER) -> bool:
        offset, need = (0, need) if need > 0 else (phase, -need)
        until = 0.0
        for index in indices:
            while words[index + offset] < need and (
                words[index] < limit or words[index + done] < need
            ):
                now = clock()
                until = until or now + HOLD_BUDGET_S
                if now > until or words[abort]:
                    return False
        return True

    return hold


# -- reading the memory of other processes ---------------------------------------------------------

_PR_SET_PTRACER = 0x59616D61
_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _functions() -> tuple[Any, Any] | None:
    """Return process_vm_readv without and with the interpreter lock; None if unsupported."""
    found = []
    for library in (ctypes.CDLL, ctypes.PyDLL):
        try:
            function: Any = library(None, use_errno=True).process_vm_readv
        except AttributeError:
            return None
        iovecs = (ctypes.c_void_p, ctypes.c_ulong)
        function.argtypes = (ctypes.c_int, *iovecs, *iovecs, ctypes.c_ulong)
        function.restype = ctypes.c_ssize_t
        found.append(function)
    return found[0], found[1]


class ProbeCell:
    """A random 64-bit number: other processes read it to find out whether they can."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.number = int.from_bytes(os.urandom(8), "little")
        self._memory = ctypes.c_uint64(self.number)
        self.address = ctypes.addressof(self._memory)

    @staticmethod
    def permit_reading() -> None:
        """Permit this process's parent and the parent's descendants to read it under Yama.

        Yama knows no permission to read only: who may read may also attach as a debugger, as the
        same user.
        """
        parent = os.getppid()
        try:
            with open(_SCOPE, encoding="ascii") as file:
                scope = file.read().strip()
        except OSError:  # the system has no Yama
            return
        if scope == "1" and parent > 1:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(parent), 0, 0, 0)


class ProcessReader:
    """Reads the memory of the processes of a group's ranks. One thread at a time.

    Example:
        >>> import os
        >>> import numpy as np
        >>> probe, here = ProbeCell(), np.zeros(1, np.uint64)
        >>> ProcessReader([os.getpid()]).read(0, probe.address, here)
        True
        >>> int(here[0]) == probe.number
        True
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self.processes = tuple(processes)
        self._here, self._there = _IoVec(), _IoVec()
        self._places = ctypes.addressof(self._here), ctypes.addressof(self._there)

    def finds(self, rank: int, address: int, number: int) -> bool:
        """Return whether a rank's memory is readable: this number is at this address."""
        value = ctypes.c_uint64()
        try:
            is_read = self._read(rank, address, ctypes.addressof(value), 8, hold=False)
        except SyncvarError:
            return False
        return is_read and value.value == number

    def can_read(self, rank: int, address: int, nbytes: int) -> bool:
        """Return whether the first and last of these bytes are readable; device memory is not."""
        byte = ctypes.c_uint64()
        into = ctypes.addressof(byte)
        ends = (address, address + max(1, nbytes) - 1)
        try:
            return all(self._read(rank, end, into, 1, hold=True) for end in ends)
        except SyncvarError:
            return False

    def read(self, rank: int, address: int, target: NDArray[Any], *, hold: bool = False) -> bool:
        """Copy bytes at `address` of a rank into a contiguous array.

        Return False if the process is gone; then the content of the array is undefined. `hold`
        keeps the interpreter lock.

        Cost: about 1 us, and 0.1 us for each page in addition to the copy.
        """
        into = target.__array_interface__["data"][0]
        return self._read(rank, address, into, target.nbytes, hold=hold)

    def _read(self, rank: int, address: int, into: int, nbytes: int, *, hold: bool) -> bool:
        functions = _functions()
        here, there = self._here, self._there
        mine, theirs = self._places
        process = self.processes[rank]
        if functions is None:
            raise SyncvarError("this system cannot read the memory of another process")
        function = functions[hold]
        while nbytes:
            here.base, here.length = into, nbytes
            there.base, there.length = address, nbytes
            done = function(process, mine, 1, theirs, 1, 0)
            if done <= 0:
                number = ctypes.get_errno() if done else 0
                if number == errno.ESRCH:
                    return False
                reason = os.strerror(number) if number else "it ends there"
                raise SyncvarError(
                    f"the memory of rank {rank} of the group (process {process}) cannot be read "
                    f"any more ({reason}); set SYNCVAR_SINGLE_COPY=off for all ranks"
                )
            into, address, nbytes = into + done, address + done, nbytes - done
        return True


# -- the table -------------------------------------------------------------------------------------

SMALL_BYTES = 64 << 10  # of one small slot; there is one for each side
WIDE_BYTES = 8 << 10  # a longer vector is in a slot of the ring, whose offset is the target
RING_RANKS_MAX = 4  # larger groups do not sum vectors that profit from a ring
# Each rank has two segments for inputs, and two parts of one (a share for each rank) for results.
SEGMENT_BYTES = 1 << 20

_ENTRY_BYTES = 128
_HEADER_WORDS = _ENTRY_BYTES // 8
_ENTRIES_MAX = TABLE_BYTES // _ENTRY_BYTES - 1
# Words of an entry. CHECK, TARGET and SOURCE have a word for each side; DONE is the last phase of
# the call before.
CHECK, PHASE, DONE, TARGET = 1, 3, 4, 5
SOURCE, _GROUP, SMALL, SEGMENTS, _CLOSED = 8, 12, 13, 14, 15
# Words of the table's first 128 bytes: where others can probe this process's memory, and whether it
# runs programs in C.
_PROCESS, _ADDRESS, _NUMBER, _RUNNER = 1, 2, 3, 4
# How often the C runner looks (400 looks: about 15 us) before it yields, or Python takes over.
_LOOKS_OWN_CORE, _LOOKS_SHARED = 400, 8
MASK = (1 << 64) - 1


def group_key(identity: int) -> int:
    """Return the group identity as an entry stores it; the world's 0 becomes MASK."""
    return identity or MASK


def check_of(fingerprint: int, call: int) -> int:
    """Return the check of a call: ranks whose checks are equal make the same call.

    Example:
        >>> check_of(5, 1) == check_of(5, 2)
        False
    """
    return (fingerprint + call * SPREAD) & MASK


class ChannelTable:
    """Makes this rank's channels and finds those of the other ranks of the host.

    `ranks` are the world ranks of the host in the order of their regions. `runner` of persistent
    calls is "c" or "python". If it `reaches`, it reads the memory of other processes where
    possible.
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
        self._open: dict[int, tuple[int, tuple[int, ...]]] = {}  # entry -> (group, regions)
        self._rings: dict[int, int] = {}  # entry -> offset of its slot ring; 0: there was no room
        self._free: deque[int] = deque()  # closed entries, which others may still read
        has_own_core = shm.local_world_size <= shm.usable_cores
        self.wait = waiter(self.words, ABORT, PHASE, DONE, has_own_core=has_own_core)
        self.hold = holding_waiter(self.words, ABORT, PHASE, DONE)
        self.shares_cores = not has_own_core
        shm.populate(self._table * 8, PAGE_BYTES)
        self.words[self._table + _RUNNER] = self.is_native  # before others find an entry
        if reaches:
            self._probe = ProbeCell()
            self._probe.permit_reading()
            self.words[self._table + _ADDRESS] = self._probe.address
            self.words[self._table + _NUMBER] = self._probe.number
            self.words[self._table + _PROCESS] = self._probe.process  # last, as above

    def reach(self, regions: Sequence[int]) -> ProcessReader | None:
        """Return a reader for the memory of these ranks, or None if one of them is not readable."""
        tables = [self.shm.table(region) // 8 for region in regions]
        if not all(self.words[table + _PROCESS] for table in tables):
            return None
        reader = ProcessReader([self.words[table + _PROCESS] for table in tables])
        probes = [(self.words[table + _ADDRESS], self.words[table + _NUMBER]) for table in tables]
        found = all(reader.finds(rank, *probe) for rank, probe in enumerate(probes))
        return reader if found else None

    def are_native(self, regions: Sequence[int]) -> bool:
        """Return whether all ranks of these regions run programs in C."""
        return all(self.words[self.shm.table(region) // 8 + _RUNNER] for region in regions)

    def serves(self, members: Sequence[int]) -> bool:
        """Return whether all members share this segment."""
        return all(rank in self.places for rank in members)

    def patience(self, regions: Sequence[int]) -> tuple[int, bool]:
        """Return how often the C runner looks for ranks, and whether it yields between looks.

        Threads of one process need the interpreter lock that the runner holds: it neither looks nor
        yields.
        """
        own = self.words[self._table + _PROCESS]
        mine = self.shm.local_rank
        others = [self.shm.table(region) // 8 for region in regions if region != mine]
        if any(self.words[table + _PROCESS] == own != 0 for table in others):
            return 0, False
        is_crowded = len(others) >= self.shm.usable_cores
        return _LOOKS_SHARED if is_crowded else _LOOKS_OWN_CORE, self.shares_cores

    def regions_of(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the regions of world ranks that share this segment."""
        return tuple(self.places[member] for member in members)

    def take_entry(self, group: int, regions: tuple[int, ...]) -> int:
        """Take an entry for this rank's channel of a group; return the index of its first word."""
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
        words[entry + _GROUP] = group  # last: now others find the entry
        self._open[entry] = (group, regions)
        return entry

    def close_with(self, owner: object, entry: int) -> None:
        """Mark the entry as closed when its owner is garbage."""
        weakref.finalize(owner, _let_go, self.words, entry, self._free, os.getpid()).atexit = False

    def find(self, region: int, group: int) -> int:
        """Return the entry of a region's channel with this group key, or 0 if there is none yet."""
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
                f"this rank uses {self._entries} groups, and the shared-memory table has no room "
                "for another; delete unused groups (del group) on all their ranks, or set "
                "SYNCVAR_TRANSPORT=zmq"
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
        """Return an entry whose group all members have closed, or 0."""
        for _ in range(len(self._free)):
            try:
                entry = self._free.popleft()
            except IndexError:  # another thread took it
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
        """Return the offset of the entry's slot ring, allocated on first use; 0 without room."""
        if entry not in self._rings:
            self._rings[entry] = 0
            with contextlib.suppress(SharedMemoryFull):
                self._rings[entry] = self.shm.allocate(RING_SLOTS * SMALL_BYTES)
        return self._rings[entry]

    def _has_let_go(self, region: int, group: int) -> bool:
        found = self.find(region, group)
        return not found or self.words[found + _CLOSED] != 0


def _let_go(words: memoryview, entry: int, free: deque[int], process: int) -> None:
    if os.getpid() == process:  # a forked child owns no entry
        with contextlib.suppress(ValueError):  # the segment is closed
            words[entry + _CLOSED] = 1
            free.append(entry)
