"""A worker's view of shared memory: memory of its own region, and arrays that live there.

Every page that is ever touched was asked for before (`posix_fallocate`, after a look at the container's limit), so that
too little memory is an `SharedMemoryFull` with numbers in it. An array keeps its memory through the `SegmentBlock` at the end of its
chain of bases; when the last view dies, at whatever moment and in whatever thread, the block only leaves a note, which
the next allocation reads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
)
from syncvar.shm import segment_layout
from syncvar.shm.allocator import Extents, Range, Taken
from syncvar.shm.debug_check import AllocationMap
from syncvar.shm.host_limits import MemoryLimits
from syncvar.shm.segment_file import why_not_here
from syncvar.shm.segment_layout import SegmentLayout, bytes_in_words
from syncvar.shm.shm_references import SegmentId, SharedMemoryReference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig

__all__ = ["SegmentBlock", "SharedSegment"]

_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE is newer than the oldest Python we run on
# Some systems undo a request when a signal comes: a profiler's timer would keep a large one from ever ending.
_PIECE_BYTES = 1 << 20
_WAIT_MAX_S = 3600.0
_REMEDY = "ask for less, or raise {}"


class SegmentBlock:
    """The owner of an array's memory, at the end of the chain of bases.

    Args:
        shared memory: Where the memory was taken.
        ground: The whole shared memory as bytes: as long as this lives, the mapping does.
        offset: Where the memory begins in it.
        nbytes: How much of it the array has.
    """

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
    """Shared memory as one process sees it. Made by `attach`.

    Attributes:
        memory: All of it; gone after `close`.
        words: All of it as 64-bit words; the index is the offset in bytes divided by 8.
        address: Where it begins in this process.
        shm_bytes: Its size.
        local_world_size: How many ranks share it.
        usable_cores: How many cores they may use together.
        generation: Which membership it was made for.
        segment: Which segment it is.
        local_rank: Who we are.
        layout: Where everything is in it.
        ground: All of it, as bytes.
        given: What has been given out; None where uses are not compared with it.
    """

    _current_process = staticmethod(
        os.getpid
    )  # also there when this module is already being taken down

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
        self.shm_bytes = self.words[segment_layout.SHM_BYTES]
        self.local_world_size = self.words[segment_layout.LOCAL_WORLD_SIZE]
        self.usable_cores = self.words[segment_layout.USABLE_CORES]
        self.generation = self.words[segment_layout.GENERATION]
        self.segment = SegmentId(
            self.words[segment_layout.HOST],
            self.generation,
            self.words[segment_layout.SEGMENT_TOKEN],
        )
        self.local_rank = local_rank
        self.layout = SegmentLayout(self.shm_bytes, self.local_world_size)
        self.ground: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.address: int = self.ground.__array_interface__["data"][0]
        self._fd = fd
        self._room = room
        start, stop = self.layout.arrays(local_rank)
        self.given = AllocationMap(self) if checks else None
        self._extents = Extents(start, stop if self.given is None else self.given.start)
        self._lock = (
            threading.RLock()
        )  # a signal's handler gets it in the middle of what it protects, and is refused
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
        """Ask for shared memory of a generation and map it; return in words why there is none where that cannot be.

        Args:
            path: Where it is handed over.
            environment: The job and the host of this process.
            generation: Version of the membership.
            local_rank: Which of its regions is ours.
            config: How long to wait, and whether uses are checked.
        """
        from syncvar.shm.fd_passing import (
            fetch,
        )  # sockets: a world that is given its memory has none

        fd, reason = fetch(
            path,
            environment.job_id,
            generation,
            local_rank,
            min(config.handshake_timeout_s, _WAIT_MAX_S),
        )
        if fd is None:
            return reason or "the launcher gave no reason"
        try:
            shm = cls.attach(fd, local_rank, checks=config.check_shm == "on")
        except SharedMemoryUnavailable as error:
            return str(error)
        if shm.segment[:2] != (environment.host_index, generation):
            shm.close()
            here = f"host {environment.host_index}, generation {generation}"
            return f"{path} hands over {shm.segment}, and this process belongs to {here}"
        return shm

    @classmethod
    def attach(
        cls, fd: int, local_rank: int, *, room: MemoryLimits | None = None, checks: bool = False
    ) -> SharedSegment:
        """Map shared memory behind a descriptor, which belongs to shared memory from now on, also when this fails.

        Args:
            fd: As the launcher hands it over.
            local_rank: Which of its regions is ours.
            room: The limits of memory; those of this process by default.
            checks: Compare every use of the memory with what has been given out, and tell the others what this rank gives.

        Raises:
            SharedMemoryUnavailable: It is no shared memory, is of another version, could be cut short by somebody, or is too large
                for this process's address space.
        """
        try:
            _check_machine()
            size = _checked_size(fd)
            memory = mmap.mmap(
                fd, size, mmap.MAP_SHARED | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except SharedMemoryUnavailable:
            os.close(fd)
            raise
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            size = os.fstat(fd).st_size
            os.close(fd)
            raise SharedMemoryUnavailable(_mapping_refused(size, error)) from error
        try:
            _check_header(memory, size, local_rank)
        except SharedMemoryUnavailable:
            memory.close()
            os.close(fd)
            raise
        with contextlib.suppress(
            OSError
        ):  # a core file of a process that crashed would take minutes to find its pages
            memory.madvise(mmap.MADV_DONTDUMP)
        return cls(fd, memory, local_rank, room or MemoryLimits(), checks=checks)

    # -- words that everybody sees -----------------------------------------------------------------

    def table(self, local_rank: int) -> int:
        """Return where a rank's table of channels begins, in bytes; its first page is populated from the start."""
        return self.layout.table(local_rank)

    @property
    def is_aborted(self) -> bool:
        """Whether the launcher has said that a rank is lost."""
        return self.words[segment_layout.ABORT] != 0

    @property
    def is_checked(self) -> bool:
        """Whether every use of the memory is compared with what has been given out."""
        return self.given is not None

    def view(self, offset: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return a flat view of `count` elements at `offset`, in anybody's region.

        Raises:
            InternalError: Nobody was given this memory; only where that is checked.
        """
        kind = np.dtype(dtype)
        self.check(offset, count * kind.itemsize)
        return np.ndarray(count, kind, self.ground, offset)

    def refer(self, offset: int, nbytes: int) -> SharedMemoryReference:
        """Return the reference by which a message names some bytes of this memory."""
        return SharedMemoryReference(self.segment, offset, nbytes)

    def resolve(self, reference: SharedMemoryReference) -> int:
        """Return the offset of bytes that another process refers to.

        Raises:
            InternalError: They are in memory that this process has not mapped, or outside of it.
        """
        refusal = reference.refusal(self.segment, self.shm_bytes)
        if refusal:
            place = f"{reference.nbytes} bytes at {reference.offset} of shared memory"
            raise InternalError(f"another process refers to {place}: {refusal}")
        return reference.offset

    def rows(
        self, offsets: Sequence[int], shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """Return arrays of one shape at evenly spaced offsets as one array (which, *shape), without a copy.

        Raises:
            ValueError: They are not evenly spaced.
            InternalError: As for `view`.
        """
        step = offsets[1] - offsets[0]
        if any(offset != offsets[0] + place * step for place, offset in enumerate(offsets)):
            raise ValueError("the offsets are not evenly spaced")
        lane = np.ndarray(shape, dtype)
        for offset in offsets:
            self.check(offset, lane.nbytes)
        return np.ndarray(
            (len(offsets), *shape), dtype, self.ground, offsets[0], (step, *lane.strides)
        )

    def entries(self, word: int, count: int) -> NDArray[np.uint64]:
        """Return a view of words of somebody's table of channels."""
        return np.ndarray(count, np.uint64, self.ground, word * 8)

    def check(self, offset: int, nbytes: int) -> None:
        """Raise InternalError where nobody was given these bytes, and that is checked."""
        reason = "" if self.given is None else self.given.why_not(offset, nbytes)
        if reason:
            raise InternalError(
                f"local rank {self.local_rank} was going to use memory that is nobody's: {reason}"
            )

    # -- memory of our own -------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Take memory in our region.

        Returns:
            Its offset, a multiple of 64; a cache line into a page where it is at least a page. The memory reads as zeros.

        Raises:
            SharedMemoryFull: The region, the container or the machine has no room; nothing was taken.

        Cost: at most a microsecond or two where freed memory is used again, else 0.2 ms for each MiB.
        """
        with self._alone():
            taken = self._take(nbytes)
            for start, stop in taken.dirty:
                self.ground[start:stop] = 0
            return taken.offset

    def release(self, offset: int) -> None:
        """Free what `allocate` has returned. Safe in any thread and in the middle of anything, as in `__del__`."""
        if (
            self._process == self._current_process()
        ):  # a forked child has the same arrays, but not the memory
            self._released.append(offset)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a new array in our region, with any content; its memory is freed with its last view.

        Raises:
            SharedMemoryFull: There is no room for it.
            ConfigError: Elements of this dtype are references, which mean nothing to another process.
        """
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ConfigError(
                f"an array of {kind} cannot be shared between processes: its elements are references"
            )
        nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * kind.itemsize
        with self._alone():
            offset = self._take(nbytes).offset
            ground = self.ground
        return np.ndarray(shape, kind, np.asarray(SegmentBlock(self, ground, offset, nbytes)))

    def locate(self, array: NDArray[Any]) -> int | None:
        """Return the offset of an array made by `empty` here, or of a view of one; None where it is none.

        Only what lies in one piece, in C order, is located.
        """
        base: Any = array.base
        if base is None:
            return None
        while isinstance(base, np.ndarray):
            base = base.base
        if (
            not isinstance(base, SegmentBlock)
            or base.shm is not self
            or not array.flags.c_contiguous
        ):
            return None
        if array.nbytes == base.nbytes:
            return base.offset  # in one piece and as long as all of it: it begins where that begins
        address: int = array.__array_interface__["data"][0]
        return address - self.address

    def populate(self, offset: int, nbytes: int) -> None:
        """Make sure that there is memory behind a range, so that it can be touched.

        Raises:
            SharedMemoryFull: The container, the machine or the file system that holds shared memory has no room.
        """
        shortage = self._room.shortage(nbytes)
        if shortage is not None:
            raise SharedMemoryFull(
                f"{bytes_in_words(nbytes)} of shared memory asked for, but {bytes_in_words(shortage.used)} of "
                f"{bytes_in_words(shortage.limit)} are in use: {_REMEDY.format(shortage.whose)}"
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
        """Whether a signal's handler has interrupted this thread while it takes memory: then it gets none."""
        return self._changer == threading.get_ident()

    # -- ends --------------------------------------------------------------------------------------

    def quarantine(self) -> None:
        """Free and reuse nothing from now on: the generation broke, and others may still write what they began. From anywhere."""
        self._is_quarantined = True

    def close(self) -> None:
        """Let go of shared memory. Arrays stay as they are, and the last of them takes the mapping with it."""
        with self._alone():
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd = -1
            self.ground, self.given = np.empty(0, np.uint8), None
            self.words.release()
            with contextlib.suppress(
                BufferError
            ):  # arrays are alive: the mapping ends with the last one
                self.memory.close()
            del self.memory  # whoever still holds us must not hold the mapping

    # -- inside ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other thread change what is taken, nor a handler that interrupts this one."""
        with self._lock:
            if self._changer:
                raise UsageError(
                    "a signal's handler asks for shared memory in the middle of another such call of its thread, which has to end first; let "
                    "the handler set a flag, and make the array after that call"
                )
            self._changer = threading.get_ident()
            try:
                yield
            finally:
                self._changer = 0

    def _take(self, nbytes: int) -> Taken:
        if self._fd < 0:
            raise UsageError("shared memory is closed")
        if self._is_quarantined:
            self._extents.retire()
        self._give_back(self._freed())
        try:
            return self._take_populated(nbytes)
        except SharedMemoryFull:
            kept = self._extents.trim(0)
            if not kept:
                raise
            self._give_back(kept)  # what we hold for later may be what is missing now
            return self._take_populated(nbytes)

    def _take_populated(self, nbytes: int) -> Taken:
        taken = self._extents.allocate(nbytes)
        if taken is None:
            raise SharedMemoryFull(self._no_room(nbytes))
        try:
            for start, stop in taken.missing:
                self.populate(start, stop - start)
            if self.given is not None:
                self.given.add(taken.offset, taken.nbytes)
        except BaseException:
            self._give_back(self._extents.cancel(taken))
            self._give_back(taken.missing, are_clean=True)
            raise
        return taken

    def _freed(self) -> list[Range]:
        ranges: list[Range] = []
        while self._released and not self._is_quarantined:
            offset = self._released.popleft()
            if self.given is not None:
                self.given.remove(offset)
            ranges += self._extents.free(offset)
        return ranges

    def _give_back(self, ranges: Iterable[Range], *, are_clean: bool = False) -> None:
        for start, stop in ranges:
            try:
                self.memory.madvise(mmap.MADV_REMOVE, start, stop - start)
            except OSError:
                # This file system cannot give pages back. The next one to take them must still find zeros.
                if not are_clean:
                    self.ground[start:stop] = 0

    def _no_room(self, nbytes: int) -> str:
        start, stop = self.layout.arrays(self.local_rank)
        return (
            f"{bytes_in_words(nbytes)} of shared memory asked for, but {bytes_in_words(self._extents.taken_bytes)} of the "
            f"{bytes_in_words(stop - start)} of local rank {self.local_rank} are in use and no free piece is as large: "
            f"{_REMEDY.format('shm_bytes')} ({bytes_in_words(self.shm_bytes)} for all ranks of the host), "
            f"for instance by SYNCVAR_SHM_BYTES={2 * self.shm_bytes}"
        )

    def _no_space(self, nbytes: int) -> str:
        held = os.fstat(self._fd).st_blocks * 512
        return (
            f"{bytes_in_words(nbytes)} of shared memory asked for, but the system has no more room where shared memory is "
            f"(the ranks of this host hold {bytes_in_words(held)} there): "
            f"{_REMEDY.format('the size of /dev/shm or the memory limit of the container')}"
        )


def _check_machine() -> None:
    reason = why_not_here(os.uname().machine)
    if reason:
        raise SharedMemoryUnavailable(reason)


def _checked_size(fd: int) -> int:
    size = os.fstat(fd).st_size
    if size < segment_layout.HEADER_BYTES:
        raise SharedMemoryUnavailable(
            f"the descriptor handed over is no shared memory: it has {size} bytes"
        )
    if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
        needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed != needed:
            raise SharedMemoryUnavailable(
                "shared memory's size is not sealed: another process could cut it short"
            )
    return size


def _check_header(memory: mmap.mmap, size: int, local_rank: int) -> None:
    with memoryview(memory) as whole, whole.cast("Q") as words:
        if words[segment_layout.MAGIC] != segment_layout.MAGIC_VALUE:
            raise SharedMemoryUnavailable(
                "the descriptor handed over is no shared memory: it begins with other bytes"
            )
        if words[segment_layout.VERSION] != segment_layout.LAYOUT_VERSION:
            raise SharedMemoryUnavailable(
                f"the launcher's shared memory has layout {words[segment_layout.VERSION]}, this process reads {segment_layout.LAYOUT_VERSION}: "
                "use the same version of syncvar for both"
            )
        if words[segment_layout.SHM_BYTES] != size:
            raise SharedMemoryUnavailable(
                f"shared memory has {size} bytes but says {words[segment_layout.SHM_BYTES]}"
            )
        if local_rank >= words[segment_layout.LOCAL_WORLD_SIZE]:
            raise SharedMemoryUnavailable(
                f"shared memory is for {words[segment_layout.LOCAL_WORLD_SIZE]} ranks, so there is no local rank {local_rank}"
            )


def _mapping_refused(size: int, error: Exception) -> str:
    import resource  # only a refusal needs it

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = (
        ""
        if soft == resource.RLIM_INFINITY
        else f"; this process may map {bytes_in_words(soft)} (ulimit -v)"
    )
    why = error.strerror if isinstance(error, OSError) else str(error)
    return f"mapping {bytes_in_words(size)} was refused: {why}{limit}; a smaller SYNCVAR_SHM_BYTES may fit"
