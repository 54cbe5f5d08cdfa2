"""One copy of a variable for all replicas of a host, in the host's shared memory.

Each replica computes the new value in private memory. When all have done so, each stores its part
of it into the shared copy; then the write ends. So nobody outside of a write sees the copy change.

Reads return copies, because a process cannot see whether another one holds a view. With
`copy=False` a read returns a view.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.shm_arrays import SharedArraySpec, memory_in_common
from syncvar.collectives.stage_builders import meet
from syncvar.core.errors import SharedMemoryFull
from syncvar.variables.storage import Storage, warn_shm_is_full

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.variable_owner import VariableOwner


class SharedCopy(Storage):
    """The copy that this process shares with the other replicas of its host."""

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


@contextmanager
def write_once(owner: VariableOwner, storages: Sequence[Storage]) -> Iterator[None]:
    """Make the writes in the block, which all replicas make, change each shared copy once."""
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
        meet(owner.communicator, "write a shared copy", ("shared copy", "ready"), owner.timeout)
        for storage in shared:
            storage.commit()
        meet(owner.communicator, "write a shared copy", ("shared copy", "written"), owner.timeout)
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
    wanted = SharedArraySpec("share a copy", (), value.nbytes, content)
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
