"""The memory of a variable's copy: in the host's arena where there is one, written in place, never under a reader.

Reads hand out views, which cost nothing. What has been handed out must not change, so a write looks first whether a
view is alive: every view refers, by way of its own buffer, to the bytes that the array lies in, so that the references
to these bytes count the views. If one is alive, the write goes to new memory and leaves the old to it.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.errors import ArenaFull

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.runtime.context import Context

__all__ = ["Storage", "being_written", "say_arena_is_full"]

_log = logging.getLogger("syncvar")


def say_arena_is_full(context: Context, error: ArenaFull) -> None:
    """Say once what it means that there is no room in the arena."""
    if not context.extras.get("said_arena_is_full"):
        context.extras["said_arena_is_full"] = True
        _log.warning("variables of this rank take private memory from now on, their writes are copied: %s", str(error))


@contextmanager
def being_written(storages: Sequence[Storage]) -> Iterator[None]:
    """Mark storages as written by a call that other replicas take part in: readers get copies."""
    for storage in storages:
        storage.is_being_written = True
    try:
        yield
    finally:
        for storage in storages:
            storage.is_being_written = False


class Storage:
    """One array, of fixed shape and dtype.

    Args:
        context: The job, whose arena gives the memory.
        value: What it holds at first; copied.

    Example:
        >>> from syncvar.runtime.context import current
        >>> storage = Storage(current(), np.zeros(3))
        >>> before = storage.expose()
        >>> storage.writable()[0] = 1.0
        >>> before, storage.view
        (array([0., 0., 0.]), array([1., 0., 0.]))
    """

    __slots__ = ("_bytes", "_context", "_references", "array", "is_being_written", "lock", "view")

    is_shared = False  # by the replicas of a host, as their only copy

    def __init__(self, context: Context, value: NDArray[Any]) -> None:
        self._context = context
        self.is_being_written = False  # by a call that other replicas take part in
        self.lock = threading.Lock()  # held while the array is written by this process alone
        self._take(value.shape, value.dtype)
        self.array[...] = value

    def _take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        array = self._resident(shape, dtype)
        if array is None:
            array = np.ndarray(shape, dtype, np.empty(math.prod(shape) * dtype.itemsize, np.uint8))
        self.array: NDArray[Any] = array
        self._bytes: Any = array.base
        self.view = self._seen()
        self._references = sys.getrefcount(self._bytes)

    def _resident(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        arena = self._context.arena
        if arena is None:
            return None
        try:
            return arena.empty(shape, dtype)
        except ArenaFull as error:
            say_arena_is_full(self._context, error)
            return None

    @property
    def is_exposed(self) -> bool:
        """Whether a view that was handed out is alive."""
        return sys.getrefcount(self._bytes) > self._references

    def expose(self) -> NDArray[Any]:
        """Return a read-only view that never changes; nobody can make it writable.

        Another thread that reads beside a write gets a copy, in which the write may have been made in part.
        """
        if self.is_being_written:
            copy = self.array.copy()
            copy.flags.writeable = False
            return copy
        return self._seen()

    def _seen(self) -> NDArray[Any]:
        """Return a read-only view of the memory."""
        # By way of frombuffer: np.ndarray itself looks through a read-only memoryview.
        ground = np.frombuffer(memoryview(self._bytes).toreadonly(), np.uint8)
        return np.ndarray(self.array.shape, self.array.dtype, ground)

    @property
    def _is_parents(self) -> bool:
        """Whether the array lies in memory that a forked copy of this process shares with its parent."""
        return not (type(self._bytes) is np.ndarray and self._bytes.base is None)

    def writable(self, *, keep: bool = True) -> NDArray[Any]:
        """Return the array to write to: no view of it is alive.

        Args:
            keep: It has to hold what the array held; else anything.
        """
        if self.is_exposed or (self._context.is_forked and self._is_parents):
            before = self.array
            self._take(before.shape, before.dtype)
            if keep:
                self.array[...] = before
        return self.array
