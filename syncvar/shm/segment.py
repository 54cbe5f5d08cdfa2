"""A worker's view of the host's shared-memory segment: allocation in its region, and arrays.

`posix_fallocate` reserves each page before its first use, after a look at the container's limit. So
a shortage raises `SharedMemoryFull` with numbers. The `SegmentBlock` at the end of an array's chain
of bases owns its memory. The last view may die at any moment in any thread, so the block only
queues its offset, and the next allocation frees it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import (
    ConfigError,
    InternalError,
    SharedMemoryFull,
    SharedMemoryUnavailable,
    UsageError,
    error_message,
)
from syncvar.shm import segment_file
from syncvar.shm.allocator import AllocatedRange, AllocationMap, Range, RegionAllocator
from syncvar.shm.host_limits import MemoryLimits
from syncvar.shm.segment_file import (
    SegmentId,
    SegmentLayout,
    SharedMemoryReference,
    check_header,
    check_machine,
    checked_size,
    format_bytes,
    mapping_error_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import DTypeLike, NDArray

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig

_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE is newer than the oldest Python we run on
# A signal may undo a request on some systems, so a profiler's timer could keep a large one from
# ever ending.
_PIECE_BYTES = 1 << 20
_WAIT_MAX_S = 3600.0
_REMEDY = "ask for less, or raise {}"


class SegmentBlock:
    """The owner of an array's memory, at the end of the chain of bases; keeps the mapping alive."""

    __slots__ = ("__array_interface__", "ground", "nbytes", "offset", "shm")

    def __init__(
        self, shm: SharedSegment, ground: NDArray[np.uint8], offset: int, nbytes: int
    ) -> None:
        self.shm, self.ground, self.offset, self.nbytes = shm, ground, offset, nbytes
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (shm.address + offset, False),
            "version": 3,
        }

    def __del__(self) -> None:
        self.shm.release(self.offset)


class SharedSegment:
    """The shared-memory segment as one process sees it; `attach` makes it.

    `words` and `ground` are the segment as 64-bit words and as bytes. `memory`, the mapping, is
    gone after `close`. All ranks of the host may use `usable_cores` together. Without checks the
    `allocation_map` is None.
    """

    _current_process = staticmethod(os.getpid)  # also works while the interpreter shuts down

    def __init__(
        self,
        fd: int,
        memory: mmap.mmap,
        local_rank: int,
        room: MemoryLimits,
        *,
        checks: bool = False,
    ) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("Q")
        self.shm_bytes = self.words[segment_file.SHM_BYTES]
        self.local_world_size = self.words[segment_file.LOCAL_WORLD_SIZE]
        self.usable_cores = self.words[segment_file.USABLE_CORES]
        self.generation = self.words[segment_file.GENERATION]
        host, token = self.words[segment_file.HOST], self.words[segment_file.SEGMENT_TOKEN]
        self.segment = SegmentId(host, self.generation, token)
        self.local_rank = local_rank
        self.layout = SegmentLayout(self.shm_bytes, self.local_world_size)
        self.ground: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.address: int = self.ground.__array_interface__["data"][0]
        self._fd = fd
        self._room = room
        start, stop = self.layout.arrays(local_rank)
        self.allocation_map: AllocationMap | None = None
        if checks:
            self.allocation_map = AllocationMap(
                self.layout, local_rank, self.words, self.ground, self.populate
            )
        self._extents = RegionAllocator(
            start, stop if self.allocation_map is None else self.allocation_map.start
        )
        self._lock = threading.RLock()  # reentrant: a signal handler must get an error, not hang
        self._changer = 0
        self._released: deque[int] = deque()
        self._process = self._current_process()
        self._is_quarantined = False

    @classmethod
    def fetch(
        cls,
        path: str,
        environment: RankEnvironment,
        generation: int,
        local_rank: int,
        config: RuntimeConfig,
    ) -> SharedSegment | str:
        """Fetch a generation's segment from the launcher and map it, or return a reason."""
        from syncvar.shm.fd_passing import fetch  # imports socket

        timeout_s = min(config.handshake_timeout_s, _WAIT_MAX_S)
        fd, reason = fetch(path, environment.job_id, generation, local_rank, timeout_s)
        if fd is None:
            return reason or "the launcher gave no reason"
        try:
            shm = cls.attach(fd, local_rank, checks=config.check_shm == "on")
        except SharedMemoryUnavailable as error:
            return error_message(error)
        if shm.segment[:2] != (environment.host_index, generation):
            shm.close()
            here = f"host {environment.host_index}, generation {generation}"
            return f"{path} hands over {shm.segment}, and this process belongs to {here}"
        return shm

    @classmethod
    def attach(
        cls, fd: int, local_rank: int, *, room: MemoryLimits | None = None, checks: bool = False
    ) -> SharedSegment:
        """Map the segment behind a descriptor, which it owns from now on, also after a failure.

        It raises SharedMemoryUnavailable if this is no segment, has another version, can shrink, or
        does not fit into the address space. `checks` compares each use of the memory with what the
        ranks allocated.
        """
        try:
            check_machine()
            size = checked_size(fd)
            memory = mmap.mmap(
                fd, size, mmap.MAP_SHARED | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except SharedMemoryUnavailable:
            os.close(fd)
            raise
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            size = os.fstat(fd).st_size
            os.close(fd)
            raise SharedMemoryUnavailable(mapping_error_text(size, error)) from error
        try:
            check_header(memory, size, local_rank)
        except SharedMemoryUnavailable:
            memory.close()
            os.close(fd)
            raise
        with contextlib.suppress(OSError):  # else a core dump takes minutes
            memory.madvise(mmap.MADV_DONTDUMP)
        return cls(fd, memory, local_rank, room or MemoryLimits(), checks=checks)

    # -- words that everybody sees -----------------------------------------------------------------

    def table(self, local_rank: int) -> int:
        """Return the offset of a rank's channel table; its first page is populated."""
        return self.layout.table(local_rank)

    @property
    def is_aborted(self) -> bool:
        """Whether the launcher has reported a failed rank."""
        return self.words[segment_file.ABORT] != 0

    @property
    def is_checked(self) -> bool:
        """Whether each use of the memory is checked."""
        return self.allocation_map is not None

    def view(self, offset: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return a flat view of `count` elements at `offset`, in any region."""
        kind = np.dtype(dtype)
        self.check(offset, count * kind.itemsize)
        return np.ndarray(count, kind, self.ground, offset)

    def refer(self, offset: int, nbytes: int) -> SharedMemoryReference:
        """Return the reference to some bytes of the segment for a message."""
        return SharedMemoryReference(self.segment, offset, nbytes)

    def resolve(self, reference: SharedMemoryReference) -> int:
        """Return the offset of bytes that another process refers to."""
        refusal = reference.refusal(self.segment, self.shm_bytes)
        if refusal:
            place = f"{reference.nbytes} bytes at {reference.offset} of shared memory"
            raise InternalError(f"another process refers to {place}: {refusal}")
        return reference.offset

    def entries(self, word: int, count: int) -> NDArray[np.uint64]:
        """Return a view of words of a rank's channel table."""
        return np.ndarray(count, np.uint64, self.ground, word * 8)

    def check(self, offset: int, nbytes: int) -> None:
        """Raise InternalError if checks are on and nobody allocated these bytes."""
        reason = "" if self.allocation_map is None else self.allocation_map.misuse(offset, nbytes)
        if reason:
            raise InternalError(f"local rank {self.local_rank} uses unallocated memory: {reason}")

    # -- memory of our own -------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Allocate zeroed memory in this rank's region; return its offset, a multiple of 64.

        Blocks of a page or more begin one cache line into a page, see `allocator`. It raises
        SharedMemoryFull if the region, the container or the machine has no room.

        Cost: little for reused memory; otherwise a page fault for each page.
        """
        with self._changing():
            allocation = self._take(nbytes)
            for start, stop in allocation.dirty:
                self.ground[start:stop] = 0
            return allocation.offset

    def release(self, offset: int) -> None:
        """Free what `allocate` returned. Safe in any thread and at any moment, as in `__del__`."""
        if self._process == self._current_process():  # a forked child does not own the memory
            self._released.append(offset)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a new uninitialized array in this rank's region; its last view frees it."""
        kind = np.dtype(dtype)
        if kind.hasobject:
            reason = "its elements are references"
            raise ConfigError(f"an array of {kind} cannot be shared between processes: {reason}")
        nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * kind.itemsize
        with self._changing():
            offset = self._take(nbytes).offset
            ground = self.ground
        return np.ndarray(shape, kind, np.asarray(SegmentBlock(self, ground, offset, nbytes)))

    def locate(self, array: NDArray[Any]) -> int | None:
        """Return the offset of an array of `empty`, or of a C-contiguous view of one; else None."""
        base: Any = array.base
        if base is None:
            return None
        while isinstance(base, np.ndarray):
            base = base.base
        if not isinstance(base, SegmentBlock) or base.shm is not self:
            return None
        if not array.flags.c_contiguous:
            return None
        if array.nbytes == base.nbytes:
            return base.offset  # contiguous and equally long: both begin at the same byte
        address: int = array.__array_interface__["data"][0]
        return address - self.address

    def populate(self, offset: int, nbytes: int) -> None:
        """Reserve the pages of a range, so that this process can touch it."""
        shortage = self._room.shortage(nbytes)
        if shortage is not None:
            used, limit = format_bytes(shortage.used), format_bytes(shortage.limit)
            raise SharedMemoryFull(
                f"{format_bytes(nbytes)} of shared memory asked for, but {used} of {limit} "
                f"are in use: {_REMEDY.format(shortage.limit_name)}"
            )
        try:
            for start in range(offset, offset + nbytes, _PIECE_BYTES):
                os.posix_fallocate(self._fd, start, min(_PIECE_BYTES, offset + nbytes - start))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            raise SharedMemoryFull(self._no_space(nbytes)) from error

    @property
    def is_changing_here(self) -> bool:
        """Whether a signal handler has interrupted an allocation of this thread."""
        return self._changer == threading.get_ident()

    # -- ends --------------------------------------------------------------------------------------

    def quarantine(self) -> None:
        """Stop freeing and reusing memory, from any thread: other ranks may still write to it."""
        self._is_quarantined = True

    def close(self) -> None:
        """Unmap the segment. Arrays stay valid: the last one ends the mapping."""
        with self._changing():
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd = -1
            self.ground, self.allocation_map = np.empty(0, np.uint8), None
            self.words.release()
            with contextlib.suppress(BufferError):  # live arrays end the mapping later
                self.memory.close()
            del self.memory  # a reference to this object must not keep the mapping alive

    # -- inside ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Exclude other threads and interrupting signal handlers from an allocation."""
        with self._lock:
            if self._changer:
                raise UsageError(
                    "a signal handler asks for shared memory while it interrupts an allocation of "
                    "its own thread; let the handler set a flag, and make the array after that call"
                )
            self._changer = threading.get_ident()
            try:
                yield
            finally:
                self._changer = 0

    def _take(self, nbytes: int) -> AllocatedRange:
        if self._fd < 0:
            raise UsageError("shared memory is closed")
        if self._is_quarantined:
            self._extents.retire()
        self._give_back(self._freed())
        try:
            return self._take_populated(nbytes)
        except SharedMemoryFull:
            spare = self._extents.trim(0)
            if not spare:
                raise
            self._give_back(spare)  # the reserve of free pages may be what is missing
            return self._take_populated(nbytes)

    def _take_populated(self, nbytes: int) -> AllocatedRange:
        allocation = self._extents.allocate(nbytes)
        if allocation is None:
            raise SharedMemoryFull(self._no_room(nbytes))
        try:
            for start, stop in allocation.missing:
                self.populate(start, stop - start)
            if self.allocation_map is not None:
                self.allocation_map.add(allocation.offset, allocation.nbytes)
        except BaseException:
            self._give_back(self._extents.cancel(allocation))
            self._give_back(allocation.missing, are_clean=True)
            raise
        return allocation

    def _freed(self) -> list[Range]:
        ranges: list[Range] = []
        while self._released and not self._is_quarantined:
            offset = self._released.popleft()
            if self.allocation_map is not None:
                self.allocation_map.remove(offset)
            ranges += self._extents.free(offset)
        return ranges

    def _give_back(self, ranges: Iterable[Range], *, are_clean: bool = False) -> None:
        for start, stop in ranges:
            try:
                self.memory.madvise(mmap.MADV_REMOVE, start, stop - start)
            except OSError:
                # This file system cannot give pages back, but the next allocation needs zeros.
                if not are_clean:
                    self.ground[start:stop] = 0

    def _no_room(self, nbytes: int) -> str:
        start, stop = self.layout.arrays(self.local_rank)
        used, region = format_bytes(self._extents.used_bytes), format_bytes(stop - start)
        total = format_bytes(self.shm_bytes)
        return (
            f"{format_bytes(nbytes)} of shared memory asked for, but {used} of the {region} of "
            f"local rank {self.local_rank} are in use and no free piece is as large: "
            f"{_REMEDY.format('shm_bytes')} ({total} for all ranks of the host), "
            f"for instance by SYNCVAR_SHM_BYTES={2 * self.shm_bytes}"
        )

    def _no_space(self, nbytes: int) -> str:
        held = os.fstat(self._fd).st_blocks * 512
        return (
            f"{format_bytes(nbytes)} of shared memory asked for, but the system has no more room "
            f"for it (the ranks of this host hold {format_bytes(held)}): "
            f"{_REMEDY.format('the size of /dev/shm or the memory limit of the container')}"
        )
