"""The memory of a variable's copy: in the host's shared memory if there is any, written in place.

Reads return views, which cost nothing. A view must not change, so a write first looks whether a
view is alive. Every view refers to one read-only array over the bytes, the *ground*; its reference
count counts the views. If one is alive, the write goes to new memory and leaves the old one to the
view.

Announce-then-look invariant: a reader takes its view before it looks for a writer, and a writer
announces itself before it looks for views. So either the writer sees the view and goes to new
memory, or the reader sees the writer, drops its view and waits. During a collective write the
reader cannot wait; it gets a copy, which may be partly written.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar._native import CopyGuard
from syncvar.core.errors import SharedMemoryFull, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator

_log = logging.getLogger("syncvar")


def warn_shm_is_full(context: ProcessContext, error: SharedMemoryFull) -> None:
    """Log once what a full shared memory means for variables."""
    if not context.extras.get("warned_shm_is_full"):
        context.extras["warned_shm_is_full"] = True
        _log.warning(
            "variables of this rank use private memory from now on, so their writes are copied: %s",
            str(error),
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


_count = sys.getrefcount


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
        array = self._resident(shape, dtype)
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

    def _resident(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        shm = self._context.shm
        if shm is None:
            return None
        try:
            return shm.empty(shape, dtype)
        except SharedMemoryFull as error:
            warn_shm_is_full(self._context, error)
            return None

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
        return self._exposed_beside_a_write()

    def read(self, copy: bool) -> NDArray[Any]:
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
        copy = self._exposed_beside_a_write()
        return copy, copy

    def _exposed_beside_a_write(self) -> NDArray[Any]:
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
