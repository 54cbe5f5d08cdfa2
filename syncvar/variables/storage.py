"""The memory of a variable's copy: in the host's shared memory if there is any, written in place.

Reads return views, which cost nothing. A view must not change, so a write first looks whether a
view is alive. Every view refers to one read-only array over the bytes, the *ground*; its reference
count counts the views. If one is alive, the write goes to new memory and leaves the old one to the
view.

Announce-then-look invariant: a reader takes its view before it looks for a writer, and a writer
announces itself before it looks for views. So either the writer sees the view and goes to new
memory, or the reader sees the writer, drops its view and waits. During a collective write the
reader cannot wait; it gets a copy, which may be partly written.

A `SharedCopy` is one copy for all replicas of a host. Each replica computes the new value in
private memory. When all have done so, each stores its part of it into the shared copy; then the
write ends. So nobody outside of a write sees the copy change.

The digest of a block is the sum of its 64-bit words, each times an odd factor of its place, modulo
2**64. Two blocks that differ in one word always have different digests. If several words differ,
one pair in 2**64 collides. This guards against faults, not against attackers. It compares bytes,
not values. Source: Carter and Wegman 1979 (multilinear hashing).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar._native import CopyGuard
from syncvar.collectives.shm_arrays import SharedArraySpec, memory_in_common
from syncvar.collectives.stage_builders import meet
from syncvar.core.errors import SharedMemoryFull, UsageError, error_message
from syncvar.runtime.collective_spec import CollectiveSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.variable_owner import VariableOwner

BLOCK_BYTES = 1 << 16
_SHORT_BYTES = 4096  # longer arrays: the digest of the digests of blocks, ten times as fast
_WORDS = BLOCK_BYTES // 8
_MASK = (1 << 64) - 1
_COMMIT = "write a shared copy"
_count = sys.getrefcount
_log = logging.getLogger("syncvar")


def warn_shm_is_full(context: ProcessContext, error: SharedMemoryFull) -> None:
    """Log once what a full shared memory means for variables."""
    if not context.extras.get("warned_shm_is_full"):
        context.extras["warned_shm_is_full"] = True
        _log.warning(
            "variables of this rank use private memory from now on, so their writes are copied: %s",
            error_message(error),
        )


def refuse_overlap(communicator: Communicator, name: str) -> Never:
    """Raise UsageError: another collective of this process is writing the same variables."""
    communicator.require_free(name)  # names the other collective
    raise UsageError(
        f"{name}: a collective in another thread is writing one of these variables; serialize the "
        "writes with a threading.Lock"
    )


@contextlib.contextmanager
def marked_as_written(
    communicator: Communicator, name: str, storages: Sequence[Storage]
) -> Iterator[None]:
    """Mark storages as written in place by a collective: readers get copies."""
    marked: list[Storage] = []
    try:
        for storage in storages:
            if not storage.mark():
                refuse_overlap(communicator, name)
            marked.append(storage)
        yield
    finally:
        for storage in marked:
            storage.is_being_written = False


class Storage(CopyGuard):
    """One array of fixed shape and dtype; as a context manager, a lock for local changes.

    Example:
        >>> from syncvar.bootstrap.process import current
        >>> storage = Storage(current(), np.zeros(3))
        >>> before = storage.expose()
        >>> with storage:
        ...     storage.writable()[0] = 1.0
        >>> before, storage.view
        (array([0., 0., 0.]), array([1., 0., 0.]))
    """

    __slots__ = (
        "_beneath",
        "_context",
        "_ground",
        "_lock",
        "_references",
        "_shown",
        "array",
        "view",
    )

    is_shared = False  # the replicas of a host share one copy

    def __init__(self, context: ProcessContext, value: NDArray[Any]) -> None:
        self._context = context
        self._prepare()
        self._take(value)

    def _prepare(self) -> None:
        self.moves = 0
        self.is_being_written = False  # in place, by a collective
        # Reentrant for signal handlers and finalizers.
        self._lock = threading.RLock()
        self.changes = 0  # local changes in progress, under the lock

    def mark(self) -> bool:
        """Mark the copy as written in place by a collective; False if it is marked already."""
        with self._lock:
            if self.is_being_written:  # its owner may remove the mark at any moment
                return False
            self.is_being_written = True
        return True

    def __enter__(self) -> None:
        self._lock.acquire()
        self.changes += 1

    def __exit__(self, *_: object) -> None:
        self.changes -= 1
        self._lock.release()

    def _take(self, value: NDArray[Any], *, keep: bool = True) -> None:
        self._go_to(self.memory(value.shape, value.dtype), value if keep else None)

    def memory(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return new memory of the kind that copies use, with any content."""
        shm = self._context.shm
        try:
            array = None if shm is None else shm.empty(shape, dtype)
        except SharedMemoryFull as error:
            warn_shm_is_full(self._context, error)
            array = None
        if array is None:
            array = np.ndarray(shape, dtype, np.empty(math.prod(shape) * dtype.itemsize, np.uint8))
        return array

    def move_to(self, array: NDArray[Any], value: NDArray[Any]) -> None:
        """Move the copy to an array of its own with a new value; readers keep the old one."""
        self._go_to(array, value)

    def _go_to(self, array: NDArray[Any], value: NDArray[Any] | None) -> None:
        if value is not None:
            array[...] = value
        view, shown = _view_of(array), _view_of(array)
        self.moves += 1  # odd: nobody may cache what it sees now
        try:
            self._ground = np.asarray(shown.base)  # the array to which all views refer
            self._beneath: Any = self._ground.base  # a program may hold this one alone
            # Counted before a reader can add its own reference.
            self._references = _count(self._ground) + _count(self._beneath)
            self._shown = shown
            self.array: NDArray[Any] = array
            self.view = view
        finally:
            self.moves += 1

    @property
    def is_exposed(self) -> bool:
        """Whether a view that a read returned is alive."""
        return _count(self._ground) + _count(self._beneath) > self._references

    def expose(self) -> NDArray[Any]:
        """Return a read-only view that never changes; nobody can make it writable.

        During a collective write in place, another thread gets a copy, which may be partly written.
        """
        view = self._shown[...]
        if not self.changes and not self.is_being_written:
            return view
        del view
        return self._copy_beside_a_write()

    def read(self, copy: bool) -> NDArray[Any]:  # noqa: FBT001  (as the persistent reads of C)
        """Return what `expose` returns; without `copy`, a view valid until the next write."""
        return self.expose() if copy else self.view

    def held(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (array or a copy of it, guard); it is constant while the guard is referenced."""
        array = self.array
        # Belongs to `array`, or to newer memory if a write has moved meanwhile: then nobody writes
        # `array`.
        ground = self._ground
        if not self.changes and not self.is_being_written:
            return array, ground
        del ground
        copy = self._copy_beside_a_write()
        return copy, copy

    def _copy_beside_a_write(self) -> NDArray[Any]:
        # In a forked child the writing thread does not exist.
        with contextlib.nullcontext() if self._context.is_forked else self._lock:
            if not self.changes and not self.is_being_written:
                return self._shown[...]
            copy = self.array.copy()
        copy.flags.writeable = False
        return copy

    @property
    def _is_parents(self) -> bool:
        """Whether a forked child of this process shares the array's memory with its parent."""
        below = self.array.base
        return not (type(below) is np.ndarray and below.base is None)

    def writable(self, *, keep: bool = True) -> NDArray[Any]:
        """Return the array to write to, of which no view is alive."""
        if _count(self._ground) + _count(self._beneath) > self._references or (
            self._context.is_forked and self._is_parents
        ):
            self._take(self.array, keep=keep)
        return self.array


def _view_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view of an array's memory, whose base is a read-only array of its own."""
    # np.ndarray would look through a read-only memoryview, frombuffer does not.
    ground = np.frombuffer(memoryview(array.reshape(-1).view(np.uint8)).toreadonly(), np.uint8)  # type: ignore[arg-type]
    return np.ndarray(array.shape, array.dtype, ground)


class SharedCopy(Storage):
    """The copy that this process shares with the other replicas of its host.

    Reads return copies, because a process cannot see whether another one holds a view.
    """

    __slots__ = ("_part", "_staged", "is_staging")

    is_shared = True

    def __init__(self, array: NDArray[Any], part: slice) -> None:
        self.array = array
        self.view = array.view()
        self.view.flags.writeable = False
        self._prepare()
        self.is_staging = False
        self._staged: NDArray[Any] | None = None
        self._part = part

    @property
    def is_exposed(self) -> bool:
        """False: reads return copies."""
        return False

    def expose(self) -> NDArray[Any]:
        """Return a read-only copy that never changes."""
        return self.held()[1]

    def held(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return a read-only copy that never changes, twice."""
        copy = self.array.copy()
        copy.flags.writeable = False
        return copy, copy

    def writable(self, *, keep: bool = True) -> NDArray[Any]:
        """Return the array to write to: during a write the private new value, else the copy."""
        if not self.is_staging:
            return self.array
        if self._staged is None:
            self._staged = self.array.copy() if keep else np.empty_like(self.array)
        return self._staged

    def commit(self) -> None:
        """Store this replica's part of the new value into the copy."""
        if self._staged is not None:
            self.array.reshape(-1)[self._part] = self._staged.reshape(-1)[self._part]

    def end(self) -> None:
        """Drop the new value."""
        self.is_staging = False
        self._staged = None


@contextlib.contextmanager
def write_once(owner: VariableOwner, storages: Sequence[Storage]) -> Iterator[None]:
    """Change each shared copy once by the writes of the block, which all replicas make."""
    shared = [storage for storage in storages if isinstance(storage, SharedCopy)]
    if not shared:
        yield
        return
    owner.communicator.require_all("writing a copy that the replicas of a host share")
    for storage in shared:
        storage.is_staging = True
    try:
        yield
        # All replicas have computed the new values, so nobody needs the old ones.
        meet(owner.communicator, CollectiveSpec(_COMMIT, options=("ready",)), owner.timeout)
        for storage in shared:
            storage.commit()
        meet(owner.communicator, CollectiveSpec(_COMMIT, options=("written",)), owner.timeout)
    finally:
        for storage in shared:
            storage.end()


def shared_copy(
    context: ProcessContext, on_host: Communicator, value: NDArray[Any], timeout: float | None
) -> SharedCopy:
    """Create the copy that the replicas of this host share. Collective on the host.

    Without shared memory, or if it is full, each replica keeps a copy of its own.
    """
    rank, size = on_host.member_rank, on_host.size
    if size == 1 or context.shm is None:
        return SharedCopy(np.array(value, order="C"), slice(0, value.size))
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    wanted = SharedArraySpec(CollectiveSpec("share a copy"), value.nbytes, content)
    found = memory_in_common(context, on_host, "share a copy", lambda: wanted, timeout)
    if isinstance(found, SharedMemoryFull):
        if rank == 0:
            warn_shm_is_full(context, found)
        return SharedCopy(np.array(value, order="C"), slice(0, value.size))
    base, longer = divmod(value.size, size)
    start = rank * base + min(rank, longer)
    return SharedCopy(
        found.view(value.dtype).reshape(value.shape), slice(start, start + base + (rank < longer))
    )


@lru_cache(maxsize=1)
def _factors() -> NDArray[np.uint64]:
    """Return the odd factors by place: splitmix64 of the place."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, _WORDS + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        factors: NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    factors.flags.writeable = False
    return factors


def block_count(nbytes: int) -> int:
    """Return the number of blocks in so many bytes."""
    return -(-nbytes // BLOCK_BYTES)


def block_bytes(array: NDArray[Any], block: int) -> NDArray[np.uint8]:
    """Return the bytes of one block of a contiguous array, without a copy."""
    flat: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    return flat[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]


def block_digests(array: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the digests of all blocks of a contiguous array.

    Cost: about 0.1 ns for each byte in cache, and 2 us for each block.

    Example:
        >>> one, other = np.zeros(10), np.zeros(10)
        >>> other[3] = -0.0
        >>> bool((block_digests(one) == block_digests(other)).all())
        False
    """
    factors = _factors()
    flat: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    words = flat[: flat.size & ~7].view(np.uint64)
    found = np.empty(block_count(flat.size), np.uint64)
    for block in range(found.size):
        part = words[block * _WORDS : (block + 1) * _WORDS]
        found[block] = np.dot(part, factors[: part.size])
    rest = flat.size & 7
    if rest:
        last = int.from_bytes(flat[-rest:].tobytes(), "little") * int(factors[words.size % _WORDS])
        found[-1] = (int(found[-1]) + last) & _MASK
    return found


def combined(digests: NDArray[np.uint64]) -> int:
    """Return one digest of many; it depends on their order."""
    factors = _factors()
    count = digests.size
    row = factors[:count] if count <= factors.size else np.resize(factors, count)
    return int(np.dot(digests, row))


def digest_of(array: NDArray[Any]) -> int:
    """Return the 64-bit digest of dtype, shape and bytes."""
    digest = _begin_digest(array.dtype, array.shape).copy()
    flat = np.ascontiguousarray(array)
    short = flat.nbytes <= _SHORT_BYTES
    data = flat.reshape(-1).view(np.uint8) if short else block_digests(flat)
    digest.update(data)  # type: ignore[arg-type]
    return int.from_bytes(digest.digest(), "little")


@lru_cache(maxsize=256)
def _begin_digest(dtype: np.dtype[Any], shape: tuple[int, ...]) -> hashlib.blake2b:
    return hashlib.blake2b(f"{dtype.name}{shape}".encode(), digest_size=8)
