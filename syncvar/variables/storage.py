"""The memory of a variable's copy: in the host's shared memory where there is one, written in place, never under a reader.

Reads hand out views, which cost nothing. What has been handed out must not change, so a write looks first whether a
view is alive: every view refers to one read-only array over the bytes that the value lies in, its ground, so that the
references to the ground count the views. If one is alive, the write goes to new memory and leaves the old to it.

Another thread may read at any moment of a write. A reader takes its view first and looks then whether a write goes on; a
writer says first that it writes and looks then for views. Whichever comes first, one of them sees the other: either

1. the view is there before the writer looks, and the write goes to new memory; or
2. the reader finds that a write goes on, lets go of its view, and waits until the write has ended.

What is written by a call that other replicas take part in cannot be waited for: its readers get copies, in which the
write may have been made in part.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar._native import Copied
from syncvar.core.errors import SharedMemoryFull, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator

_log = logging.getLogger("syncvar")


def warn_shm_is_full(context: ProcessContext, error: SharedMemoryFull) -> None:
    """Say once what it means that there is no room in shared memory."""
    if not context.extras.get("warned_shm_is_full"):
        context.extras["warned_shm_is_full"] = True
        _log.warning(
            "variables of this rank take private memory from now on, their writes are copied: %s",
            str(error),
        )


def refuse_overlap(communicator: Communicator, name: str) -> Never:
    """Raise UsageError: somebody else in this process writes the same variables, by a call of all replicas."""
    communicator.require_free(name)  # says what else goes on
    raise UsageError(
        f"{name}: another thread is writing a variable of these, by a call of all replicas; take turns (threading.Lock)"
    )


@contextlib.contextmanager
def being_written(
    communicator: Communicator, name: str, storages: Sequence[Storage]
) -> Iterator[None]:
    """Mark storages as written in place by a call that other replicas take part in: readers get copies.

    Args:
        communicator: The replicas' group.
        name: The call.
        storages: Of the variables that it writes.

    Raises:
        UsageError: Another thread, or what a signal's handler has interrupted, writes one of them; nothing has been done.
    """
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


class Storage(Copied):
    """One array, of fixed shape and dtype. As a context manager, it lets this thread alone change the array.

    Args:
        context: The job, whose shm gives the memory.
        value: What it holds at first; copied.

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

    is_shared = False  # by the replicas of a host, as their only copy

    def __init__(self, context: ProcessContext, value: NDArray[Any]) -> None:
        self._context = context
        self._prepare()
        self._take(value)

    def _prepare(self) -> None:
        self.moves = 0
        self.is_being_written = False  # in place, by a call that other replicas take part in
        # A thread may come again, in a signal's handler or a finalizer.
        self._lock = threading.RLock()
        self.changes = 0  # that this process makes by itself, under the lock

    def mark(self) -> bool:
        """Mark the copy as written in place by a call of all replicas; False where it is already, by somebody else."""
        with self._lock:
            if self.is_being_written:  # and whose mark it is may take it off at any moment
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
        """Go to new memory, which is as it has to be before anybody sees it."""
        self._go_to(self.memory(value.shape, value.dtype), value if keep else None)

    def memory(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return new memory such as copies lie in, with any content."""
        array = self._resident(shape, dtype)
        if array is None:
            array = np.ndarray(shape, dtype, np.empty(math.prod(shape) * dtype.itemsize, np.uint8))
        return array

    def move_to(self, array: NDArray[Any], value: NDArray[Any]) -> None:
        """Let the copy lie in an array of its form that nobody else writes to, with a new value; the old memory is its readers'."""
        self._go_to(array, value)

    def _go_to(self, array: NDArray[Any], value: NDArray[Any] | None) -> None:
        if value is not None:
            array[...] = value
        view, shown = _view_of(array), _view_of(array)
        self.moves += 1  # an odd number: nobody may keep in mind what is seen of it now
        try:
            self._ground = np.asarray(
                shown.base
            )  # the very array, which all that are handed out refer to
            self._beneath: Any = self._ground.base  # somebody may hold that alone
            self._references = _count(self._ground) + _count(
                self._beneath
            )  # before a reader can add its own
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
        """Whether a view that was handed out is alive."""
        return _count(self._ground) + _count(self._beneath) > self._references

    def expose(self) -> NDArray[Any]:
        """Return a read-only view that never changes; nobody can make it writable.

        Another thread that reads beside a call of all replicas that writes in place gets a copy, in which the write may
        have been made in part.
        """
        view = self._shown[...]
        if not self.changes and not self.is_being_written:
            return view
        del view
        return self._exposed_beside_a_write()

    def read(self, copy: bool) -> NDArray[Any]:
        """Return what `expose` returns; without a copy, a view that is valid until the next write."""
        return self.expose() if copy else self.view

    def held(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (the array itself or a copy, what keeps it): it does not change as long as the second is referred to."""
        array = self.array
        ground = self._ground  # of that array; or of another one, to which a write has gone meanwhile, and then that one is left alone
        if not self.changes and not self.is_being_written:
            return array, ground
        del ground
        copy = self._exposed_beside_a_write()
        return copy, copy

    def _exposed_beside_a_write(self) -> NDArray[Any]:
        # In a forked copy of this process the thread that writes does not exist.
        with contextlib.nullcontext() if self._context.is_forked else self._lock:
            if not self.changes and not self.is_being_written:
                return self._shown[...]
            copy = self.array.copy()
        copy.flags.writeable = False
        return copy

    @property
    def _is_parents(self) -> bool:
        """Whether the array lies in memory that a forked copy of this process shares with its parent."""
        below = self.array.base
        return not (type(below) is np.ndarray and below.base is None)

    def writable(self, *, keep: bool = True) -> NDArray[Any]:
        """Return the array to write to: no view of it is alive.

        Args:
            keep: It has to hold what the array held; else anything.
        """
        if _count(self._ground) + _count(self._beneath) > self._references or (
            self._context.is_forked and self._is_parents
        ):
            self._take(self.array, keep=keep)
        return self.array


def _view_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view of an array's memory, by way of a read-only array of its own, the base of all parts of it."""
    # By way of frombuffer: np.ndarray itself looks through a read-only memoryview.
    ground = np.frombuffer(memoryview(array.reshape(-1).view(np.uint8)).toreadonly(), np.uint8)  # type: ignore[arg-type]
    return np.ndarray(array.shape, array.dtype, ground)
