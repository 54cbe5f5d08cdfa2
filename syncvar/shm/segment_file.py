"""The segment that the ranks of a host share, as a file: layout, creation, checks, identity.

The launcher uses this module, so it imports no NumPy.

**Layout**: a header page, then one region for each local rank. The header holds 64-bit words in
native order. The abort word has a cache line of its own, because all waiting ranks read it. A
region begins with the rank's channel table; the rest is for arrays.

**Creation**: the segment has no name that a process could open or leave behind: it is a memfd, or a
file unlinked at once. The launcher passes the descriptor to the workers.

**Identity**: an offset means the same bytes only to processes that map the same segment. So a
message carries a `SharedMemoryReference`, which names the segment, and `SharedSegment.resolve`
compares the name. An offset inside a segment needs no name: its reader has that segment mapped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError, SharedMemoryUnavailable

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

LINE_BYTES = 64
PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
HEADER_BYTES = 64 << 10
TABLE_BYTES = 256 << 10

# Indices of the header's words.
MAGIC, VERSION, SHM_BYTES, LOCAL_WORLD_SIZE = 0, 1, 2, 3
USABLE_CORES, GENERATION, HOST, SEGMENT_TOKEN = 4, 5, 6, 7
ABORT = LINE_BYTES // 8

_MOST_BYTES = 1 << 46  # half of what a process can address

MAGIC_VALUE = int.from_bytes(b"SYNCVAR\x01", "little")
LAYOUT_VERSION = 2


class SegmentLayout:
    """The offsets of one segment, in bytes.

    Args:
        shm_bytes: Size of the segment, a multiple of a page.
        local_world_size: Number of ranks that share it.

    Raises:
        ConfigError: The size is too small for so many ranks, or too large to map; the message has
            the limit.

    Example:
        >>> layout = SegmentLayout(16 << 20, 2)
        >>> layout.region_bytes >> 20, [layout.region(rank)[0] >> 20 for rank in range(2)]
        (6, [2, 8])
    """

    __slots__ = ("local_world_size", "shm_bytes")

    def __init__(self, shm_bytes: int, local_world_size: int) -> None:
        least = HUGE_BYTES * (1 + local_world_size)
        if local_world_size < 1 or shm_bytes < least:
            raise ConfigError(
                f"shm_bytes ({shm_bytes}) is too small for {local_world_size} ranks on a host: "
                f"they need at least {least}"
            )
        if shm_bytes > _MOST_BYTES:
            raise ConfigError(
                f"shm_bytes ({shm_bytes}) is more than a process can map: at most {_MOST_BYTES}"
            )
        self.shm_bytes = shm_bytes
        self.local_world_size = local_world_size

    @property
    def region_bytes(self) -> int:
        """Size of each rank's region: a multiple of 2 MiB, so that huge pages fit."""
        return (self.shm_bytes - HUGE_BYTES) // self.local_world_size // HUGE_BYTES * HUGE_BYTES

    def region(self, local_rank: int) -> tuple[int, int]:
        """Return start and end of a rank's region."""
        start = HUGE_BYTES + local_rank * self.region_bytes
        return start, start + self.region_bytes

    def table(self, local_rank: int) -> int:
        """Return the offset of a rank's channel table of TABLE_BYTES."""
        return self.region(local_rank)[0]

    def arrays(self, local_rank: int) -> tuple[int, int]:
        """Return start and end of the memory for a rank's arrays."""
        start, stop = self.region(local_rank)
        return start + TABLE_BYTES, stop


def bytes_in_words(count: int) -> str:
    """Return a size in the largest unit that fits.

    Example:
        >>> bytes_in_words(1 << 40), bytes_in_words(3 << 19), bytes_in_words(100)
        ('1 TiB', '1.5 MiB', '100 B')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} B"


# -- creation --------------------------------------------------------------------------------------

_SHARED_FOLDER = "/dev/shm"  # noqa: S108  (a random name, O_EXCL and O_NOFOLLOW, unlinked at once)
_MFD_NOEXEC_SEAL = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class CreatedSegment:
    """The segment as its creator holds it.

    `form` is "memfd" or, for instance, "a file in /dev/shm". `notice` is a sentence for the user if
    it is no memfd, else empty.
    """

    __slots__ = ("fd", "form", "generation", "is_aborted", "notice")

    def __init__(self, fd: int, form: str, notice: str, generation: int) -> None:
        self.fd = fd
        self.form = form
        self.notice = notice
        self.generation = generation
        self.is_aborted = False

    def abort(self) -> None:
        """Set the abort word, which all waiting ranks read. Never raises."""
        if not self.is_aborted and self.fd >= 0:
            self.is_aborted = True
            with contextlib.suppress(OSError):
                os.pwrite(self.fd, struct.pack("=Q", 1), ABORT * 8)

    def close(self) -> None:
        """Close the descriptor; mappings keep the memory alive. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create(
    shm_bytes: int,
    local_world_size: int,
    usable_cores: int,
    generation: int = 0,
    directory: str = "",
    host: int = 0,
) -> tuple[CreatedSegment | None, str]:
    """Create a segment; return (segment, "") or (None, reason).

    Example:
        >>> shm, reason = create(16 << 20, 2, 2)
        >>> shm.form, reason, shm.close()
        ('memfd', '', None)
    """
    size = -(-shm_bytes // PAGE_BYTES) * PAGE_BYTES
    layout = SegmentLayout(size, local_world_size)
    version = MAGIC_VALUE, LAYOUT_VERSION
    token = int.from_bytes(os.urandom(8), "little") or 1
    fields = (size, local_world_size, usable_cores, generation, host, token)
    header = struct.pack("=8Q", *version, *fields)
    ways: list[tuple[str, Callable[[], int]]] = [
        ("memfd", _open_memfd),
        (f"a file in {_SHARED_FOLDER}", lambda: _open_unlinked(_SHARED_FOLDER)),
    ]
    if directory:
        ways.append(("a file in the job's directory", lambda: _open_unlinked(directory)))
    failed: list[str] = []
    for form, open_it in ways:
        try:
            fd = open_it()
        except OSError as error:
            failed.append(f"{form} ({error.strerror})")
            continue
        try:
            _initialize(fd, layout, header)
            if form == "memfd":
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            failed.append(f"{form} ({error.strerror})")
            continue
        notice = f"shared memory: {form} instead of {' or '.join(failed)}" if failed else ""
        return CreatedSegment(fd, form, notice, generation), ""
    return None, f"it cannot be made: {', '.join(failed)}"


def _initialize(fd: int, layout: SegmentLayout, header: bytes) -> None:
    os.ftruncate(fd, layout.shm_bytes)
    os.posix_fallocate(fd, 0, HEADER_BYTES)
    for rank in range(layout.local_world_size):  # others may read a table before its rank starts
        os.posix_fallocate(fd, layout.table(rank), PAGE_BYTES)
    os.pwrite(fd, header, 0)


def _open_memfd() -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # Some systems refuse a memfd that may become executable; old ones do not know this flag.
        return os.memfd_create("syncvar-shm", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("syncvar-shm", flags)


def _open_unlinked(folder: str) -> int:
    path = f"{folder}/syncvar-{os.urandom(8).hex()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(path)
    except OSError:
        os.close(fd)
        raise
    return fd


# -- checks of a segment from the launcher ---------------------------------------------------------


def unsupported_machine(machine: str) -> str:
    """Return why this machine type cannot use shared memory, or an empty text.

    Example:
        >>> unsupported_machine("x86_64"), "aarch64" in unsupported_machine("aarch64")
        ('', True)
    """
    if machine in ("x86_64", "AMD64"):
        return ""
    return (
        f"other cores of {machine} may see stores out of order, so shared memory is for x86-64 only"
    )


def check_machine() -> None:
    """Raise SharedMemoryUnavailable if this machine cannot use shared memory."""
    reason = unsupported_machine(os.uname().machine)
    if reason:
        raise SharedMemoryUnavailable(reason)


def checked_size(fd: int) -> int:
    """Return the size of the segment behind a descriptor, which must be unable to shrink."""
    size = os.fstat(fd).st_size
    if size < HEADER_BYTES:
        raise SharedMemoryUnavailable(
            f"the launcher's descriptor is no shared memory: it has {size} bytes"
        )
    if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
        needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed != needed:
            raise SharedMemoryUnavailable(
                "the size of the shared memory is not sealed: another process could shrink it"
            )
    return size


def check_header(memory: mmap.mmap, size: int, local_rank: int) -> None:
    """Raise SharedMemoryUnavailable if the header does not belong to this process."""
    with memoryview(memory) as whole, whole.cast("Q") as words:
        if words[MAGIC] != MAGIC_VALUE:
            raise SharedMemoryUnavailable(
                "the launcher's descriptor is no shared memory: it begins with other bytes"
            )
        version = words[VERSION]
        if version != LAYOUT_VERSION:
            raise SharedMemoryUnavailable(
                f"the launcher's shared memory has layout {version}, this process reads "
                f"{LAYOUT_VERSION}: use the same version of syncvar for both"
            )
        if words[SHM_BYTES] != size:
            raise SharedMemoryUnavailable(
                f"the shared memory has {size} bytes, but its header says {words[SHM_BYTES]}"
            )
        ranks = words[LOCAL_WORLD_SIZE]
        if local_rank >= ranks:
            raise SharedMemoryUnavailable(
                f"the shared memory is for {ranks} ranks, so there is no local rank {local_rank}"
            )


def mapping_refused(size: int, error: Exception) -> str:
    """Return the error text for a failed mapping."""
    import resource  # only a refusal needs it

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = ""
    if soft != resource.RLIM_INFINITY:
        limit = f"; this process may map {bytes_in_words(soft)} (ulimit -v)"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    failure = f"the system refused to map {bytes_in_words(size)}: {reason}{limit}"
    return f"{failure}; a smaller SYNCVAR_SHM_BYTES may fit"


# -- identity --------------------------------------------------------------------------------------

_ID = struct.Struct("<IIQ")
_REFERENCE = struct.Struct("<16sqq")
REFERENCE_NBYTES = _REFERENCE.size  # length of a packed reference


class SegmentId(NamedTuple):
    """The identity of a segment, unique in the job.

    Args:
        host: Index of the host in the job.
        generation: Version of the membership.
        token: Random 64-bit number, never 0.

    Example:
        >>> one = SegmentId(1, 0, 255)
        >>> str(one), SegmentId.unpack(one.pack()) == one
        ('segment 00000000000000ff (host 1, generation 0)', True)
    """

    host: int
    generation: int
    token: int

    def pack(self) -> bytes:
        """Return the identity as 16 bytes."""
        return _ID.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> SegmentId:
        """Return the identity in 16 bytes."""
        return cls(*_ID.unpack(data))

    def __str__(self) -> str:
        """Return its name for messages."""
        return f"segment {self.token:016x} (host {self.host}, generation {self.generation})"


class SharedMemoryReference(NamedTuple):
    """The location of some bytes, as one process sends it to another.

    Args:
        segment: Segment of the sender.
        offset: Offset of the bytes.
        nbytes: Number of bytes.
    """

    segment: SegmentId
    offset: int
    nbytes: int

    def pack(self) -> bytes:
        """Return it as `REFERENCE_NBYTES` bytes.

        Example:
            >>> one = SharedMemoryReference(SegmentId(1, 0, 255), 64, 8)
            >>> SharedMemoryReference.unpack(one.pack()) == one
            True
        """
        return _REFERENCE.pack(self.segment.pack(), self.offset, self.nbytes)

    @classmethod
    def unpack(cls, data: bytes) -> SharedMemoryReference:
        """Return the reference in `REFERENCE_NBYTES` bytes."""
        segment, offset, nbytes = _REFERENCE.unpack(data)
        return cls(SegmentId.unpack(segment), offset, nbytes)

    def refusal(self, mapped: SegmentId | None, segment_nbytes: int) -> str:
        """Return why the reader of segment `mapped` cannot follow the reference, or an empty text.

        Example:
            >>> here, there = SegmentId(0, 0, 1), SegmentId(1, 0, 2)
            >>> SharedMemoryReference(here, 64, 8).refusal(here, 4096)
            ''
            >>> text = SharedMemoryReference(there, 64, 8).refusal(here, 4096)
            >>> text.startswith("it is in segment 0000000000000002 (host 1, generation 0), and")
            True
            >>> SharedMemoryReference(here, 4095, 8).refusal(here, 4096)
            'it ends beyond the 4096 bytes of the segment'
        """
        if self.segment != mapped:
            own = mapped or "no shared memory"
            return f"it is in {self.segment}, and this process has mapped {own}"
        if self.offset < 0 or self.nbytes < 0:
            return "it begins before the segment, or has a negative length"
        if self.offset + self.nbytes > segment_nbytes:
            return f"it ends beyond the {segment_nbytes} bytes of the segment"
        return ""
