"""Creates the segment that the ranks of a host share, and checks one before its mapping.

The launcher creates it, so it imports no NumPy.

The segment has no name that a process could open or leave behind: it is a memfd, or a file unlinked
at once. The launcher passes the descriptor to the workers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from typing import TYPE_CHECKING

from syncvar.core.errors import SharedMemoryUnavailable
from syncvar.shm import segment_layout
from syncvar.shm.segment_layout import SegmentLayout, bytes_in_words

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

_SHARED_FOLDER = "/dev/shm"  # noqa: S108  (a random name, O_EXCL and O_NOFOLLOW, unlinked at once)
_MFD_NOEXEC_SEAL = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class CreatedSegment:
    """The segment as its creator holds it.

    Args:
        fd: Its descriptor.
        how: Its kind: "memfd", "a file in /dev/shm".
        said: The sentence that tells the user why it is no memfd; empty for a memfd.
        generation: Version of the membership.
    """

    __slots__ = ("fd", "generation", "how", "is_aborted", "said")

    def __init__(self, fd: int, how: str, said: str, generation: int) -> None:
        self.fd = fd
        self.how = how
        self.said = said
        self.generation = generation
        self.is_aborted = False

    def abort(self) -> None:
        """Set the abort word, which all waiting ranks read. Never raises."""
        if not self.is_aborted and self.fd >= 0:
            self.is_aborted = True
            with contextlib.suppress(OSError):
                os.pwrite(self.fd, struct.pack("=Q", 1), segment_layout.ABORT * 8)

    def close(self) -> None:
        """Close the descriptor; mappings keep the memory alive. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


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
        >>> shm.how, reason, shm.close()
        ('memfd', '', None)
    """
    size = -(-shm_bytes // segment_layout.PAGE_BYTES) * segment_layout.PAGE_BYTES
    layout = SegmentLayout(size, local_world_size)
    version = segment_layout.MAGIC_VALUE, segment_layout.LAYOUT_VERSION
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
    for how, open_it in ways:
        try:
            fd = open_it()
        except OSError as error:
            failed.append(f"{how} ({error.strerror})")
            continue
        try:
            _initialize(fd, layout, header)
            if how == "memfd":
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            failed.append(f"{how} ({error.strerror})")
            continue
        said = f"shared memory: {how} instead of {' or '.join(failed)}" if failed else ""
        return CreatedSegment(fd, how, said, generation), ""
    return None, f"it cannot be made: {', '.join(failed)}"


def _initialize(fd: int, layout: SegmentLayout, header: bytes) -> None:
    os.ftruncate(fd, layout.shm_bytes)
    os.posix_fallocate(fd, 0, segment_layout.HEADER_BYTES)
    for rank in range(layout.local_world_size):  # others may read a table before its rank starts
        os.posix_fallocate(fd, layout.table(rank), segment_layout.PAGE_BYTES)
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


def check_machine() -> None:
    """Raise SharedMemoryUnavailable if this machine cannot use shared memory."""
    reason = unsupported_machine(os.uname().machine)
    if reason:
        raise SharedMemoryUnavailable(reason)


def checked_size(fd: int) -> int:
    """Return the size of the segment behind a descriptor, which must be unable to shrink."""
    size = os.fstat(fd).st_size
    if size < segment_layout.HEADER_BYTES:
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
        if words[segment_layout.MAGIC] != segment_layout.MAGIC_VALUE:
            raise SharedMemoryUnavailable(
                "the launcher's descriptor is no shared memory: it begins with other bytes"
            )
        version = words[segment_layout.VERSION]
        if version != segment_layout.LAYOUT_VERSION:
            raise SharedMemoryUnavailable(
                f"the launcher's shared memory has layout {version}, this process reads "
                f"{segment_layout.LAYOUT_VERSION}: use the same version of syncvar for both"
            )
        if words[segment_layout.SHM_BYTES] != size:
            raise SharedMemoryUnavailable(
                f"the shared memory has {size} bytes, but its header says "
                f"{words[segment_layout.SHM_BYTES]}"
            )
        ranks = words[segment_layout.LOCAL_WORLD_SIZE]
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
    why = error.strerror if isinstance(error, OSError) else str(error)
    failure = f"the system refused to map {bytes_in_words(size)}: {why}{limit}"
    return f"{failure}; a smaller SYNCVAR_SHM_BYTES may fit"
