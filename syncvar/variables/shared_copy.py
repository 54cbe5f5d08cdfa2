"""One copy of a variable for all replicas of a host, in the host's arena.

Every replica of the host reads the same memory. A write makes the new value beside it, on each replica; when all have
come so far, each puts its part of the new value into the copy, and when all have done that, the write ends. So nobody
who is outside of a write ever sees the copy change, and it is written once.

Reads hand out copies, because the memory under a view would change with the next write: whether a view of it is alive
in another process cannot be seen from here. A program that wants no copy reads with `copy=False`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.barrier import meet
from syncvar.collectives.broadcast import broadcast_request
from syncvar.errors import ArenaFull
from syncvar.variables.storage import Storage, say_arena_is_full

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.arena.mapping import Arena
    from syncvar.runtime.context import Context
    from syncvar.runtime.group import Communicator
    from syncvar.variables.places import Owner

__all__ = ["SharedCopy", "shared_copy", "written_once"]

_WORD = np.dtype(np.uint64)
_LINE_BYTES = 64


class _Hold:
    """Holds a shared copy for this process: as long as it lives, the memory is not given to anybody else.

    Args:
        arena: Where the memory is.
        offset: Where the copy begins.
        nbytes: Of the copy.
        mark: This replica's word: 1 says that it has let go.
    """

    __slots__ = ("__array_interface__", "_ground", "_mark", "_process")

    def __init__(self, arena: Arena, offset: int, nbytes: int, mark: NDArray[Any]) -> None:
        self._mark = mark
        self._ground = arena.view(offset, nbytes, np.uint8)  # keeps the mapping
        self._process = os.getpid()
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (arena.address + offset, False), "version": 3,
        }  # fmt: skip

    def __del__(self) -> None:
        if os.getpid() == self._process:  # a forked copy has let go of nothing
            self._mark[0] = 1


class SharedCopy(Storage):
    """The copy that this process shares with the other replicas of its host.

    Args:
        array: The copy.
        part: Which elements of it, flat, this replica writes.
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
        """Reads hand out copies."""
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
        """Return the array to write to: in a write the new value beside the copy, else the copy itself.

        Args:
            keep: It has to hold what the copy holds; else anything.
        """
        if not self.is_staging:
            return self.array
        if self._staged is None:
            self._staged = self.array.copy() if keep else np.empty_like(self.array)
        return self._staged

    def commit(self) -> None:
        """Put this replica's part of the new value into the copy."""
        if self._staged is not None:
            self.array.reshape(-1)[self._part] = self._staged.reshape(-1)[self._part]

    def end(self) -> None:
        """Forget the new value."""
        self.is_staging = False
        self._staged = None


@contextmanager
def written_once(owner: Owner, storages: Sequence[Storage]) -> Iterator[None]:
    """Make the writes inside the block, which all replicas make, change each shared copy once.

    Args:
        owner: The strategy of the variables.
        storages: Their memory; those that are not shared are written at once.
    """
    shared = [storage for storage in storages if isinstance(storage, SharedCopy)]
    if not shared:
        yield
        return
    owner.communicator.require_all("writing a copy that the replicas of a host share")
    for storage in shared:
        storage.is_staging = True
    try:
        yield
        # The new values are there, on all replicas: nobody reads the old ones any more.
        meet(owner.communicator, "write a shared copy", ("shared copy", "ready"), owner.timeout)
        for storage in shared:
            storage.commit()
        meet(owner.communicator, "write a shared copy", ("shared copy", "written"), owner.timeout)
    finally:
        for storage in shared:
            storage.end()


def shared_copy(context: Context, on_host: Communicator, value: NDArray[Any], timeout: float | None) -> SharedCopy:
    """Make the copy that the replicas of this host share. Collective on the host.

    Where they share no memory, or there is no room in it, each of them keeps a copy of its own; all do the same with it.

    Args:
        context: The job.
        on_host: The replicas of this host; the first of them gives the memory.
        value: What it holds at first, the same on all replicas.
        timeout: Seconds; None for the job's default.
    """
    rank, size = on_host.member_rank, on_host.size
    arena = context.arena
    if size == 1 or arena is None:
        return SharedCopy(np.array(value, order="C"), slice(0, value.size))
    head = -(-size * _WORD.itemsize // _LINE_BYTES) * _LINE_BYTES
    nbytes = max(1, value.nbytes)
    offset = 0
    if rank == 0:
        offset = _allocated(context, arena, size, head, value)
    offset = int(
        on_host.perform("share a copy", lambda: broadcast_request(on_host, np.asarray(offset), 0, name="share a copy"), timeout)
    )
    if not offset:
        return SharedCopy(np.array(value, order="C"), slice(0, value.size))
    mark = arena.view(offset, size, _WORD)[rank : rank + 1]
    flat = np.asarray(_Hold(arena, offset + head, nbytes, mark))
    array = flat[: value.nbytes].view(value.dtype).reshape(value.shape)
    base, longer = divmod(value.size, size)
    start = rank * base + min(rank, longer)
    return SharedCopy(array, slice(start, start + base + (rank < longer)))


def _allocated(context: Context, arena: Arena, size: int, head: int, value: NDArray[Any]) -> int:
    """Take memory for a copy and what is said about it, and write the value; 0 where there is no room."""
    kept: list[tuple[NDArray[Any], NDArray[Any]]] = context.extras.setdefault("shared_copies", [])
    kept[:] = [one for one in kept if not one[1].all()]  # what all replicas have let go of
    try:
        block = arena.empty(head + max(1, value.nbytes), np.uint8)
    except ArenaFull as error:
        say_arena_is_full(context, error)
        return 0
    offset = arena.locate(block)
    assert offset is not None
    marks = arena.view(offset, size, _WORD)
    marks[:] = 0
    block[head : head + value.nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    kept.append((block, marks))
    return offset
