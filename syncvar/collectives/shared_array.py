"""Arrays that the ranks of a host share: all read and write one memory without synchronization.

The memory lies in the region of the group's first rank. In front of it each rank has a word that it
sets when its last view is gone. The first rank frees the memory when all words are set.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.collectives.broadcast import broadcast_request
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.shm_empty import checked_shape_dtype, zeros
from syncvar.core.errors import ConfigError, MismatchError, SharedMemoryFull
from syncvar.runtime.call_record import CallFields, CallLabel
from syncvar.runtime.communicator import CollectiveSpec, fingerprint
from syncvar.shm.segment_layout import bytes_in_words
from syncvar.shm.shm_references import REFERENCE_NBYTES, SharedMemoryReference

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.shm.segment import SharedSegment

_WORD = np.dtype(np.uint64)
_LINE_BYTES = 64


def shared_array(
    shape: Any,
    dtype: DTypeLike = np.float64,
    *,
    group: Group | None = None,
    timeout: float | None = None,
) -> NDArray[Any]:
    """Return an array of zeros that is the same memory on all ranks of the group. Collective.

    Every rank reads and writes it like any array, without a message, a lock or a copy, and sees the
    writes of other ranks at once. These rules apply:

    * An element of at most 8 bytes is never torn: it is zero, or a value that some rank has
      written.
    * Several elements may come from different writes, also within one read of a row or of the
      whole.
    * `x[i] += d` reads, adds and writes: a concurrent write to the same element is lost.
    * Writes of a rank become visible in no fixed order. After `sv.barrier()` all earlier writes are
      visible.

    Use `sv.Variable` for values that must be the same on all ranks, and for sums that lose nothing.

    Args:
        shape: An integer or a tuple of integers, each >= 0; the same on all ranks.
        dtype: Any dtype whose elements hold no references; the same on all ranks.
        group: Ranks that share it, all on one host; None means the world.
        timeout: Seconds; None means the job's default.

    Returns:
        A C-contiguous array, aligned to 64 bytes. It outlives `sv.shutdown()`. Its memory is freed
        when all ranks have dropped their last view and the group's first rank makes another such
        array.

    Raises:
        ConfigError: The shape or the dtype is wrong, or the ranks of the group share no memory. The
            text says why: several hosts, or no shared memory.
        MismatchError: The ranks ask for different arrays.
        SharedMemoryFull: There is no room, on any rank.
        PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: one small broadcast. The group's first rank allocates the memory: 0.2 ms for each MiB.

    Example:
        >>> import syncvar as sv
        >>> weights = sv.shared_array(3)
        >>> weights[sv.rank()] += 1
    """
    communicator = communicator_of(group)
    context = current()
    context.refuse_in_block("sv.shared_array")
    asked: list[tuple[tuple[int, ...], np.dtype[Any]]] = []

    def check() -> SharedArraySpec:
        lengths, kind = checked_shape_dtype(shape, dtype)
        _require_one_host(context, communicator)
        asked.append((lengths, kind))
        label = CallLabel(
            f"shared_array({list(lengths)}, {kind.name})",
            CallFields("shared_array", dtype=kind.name, shape=lengths),
        )
        nbytes = int(np.prod(lengths, dtype=object)) * kind.itemsize
        return SharedArraySpec(label, (lengths, kind.str), nbytes)

    if communicator.size == 1:
        return zeros(shape, dtype)
    found = memory_in_common(context, communicator, "shared_array", check, timeout)
    if isinstance(found, SharedMemoryFull):
        raise found
    ((lengths, kind),) = asked
    return found.view(kind).reshape(lengths)


class SharedArraySpec(NamedTuple):
    """Shared memory to allocate.

    Args:
        what: Text of the call.
        parts: Values that all ranks must pass alike.
        nbytes: Size in bytes.
        content: Initial bytes, on the first rank; None for zeros.
    """

    what: str
    parts: tuple[Any, ...]
    nbytes: int
    content: NDArray[np.uint8] | None = None


def memory_in_common(
    context: ProcessContext,
    communicator: Communicator,
    name: str,
    check: Callable[[], SharedArraySpec],
    timeout: float | None,
) -> NDArray[np.uint8] | SharedMemoryFull:
    """Return memory that all ranks of a group share; SharedMemoryFull, on all ranks, if it is full.

    Collective. `check` checks the arguments; the group must share memory, and its first rank
    allocates.
    """
    rank, size = communicator.member_rank, communicator.size
    head = -(-size * _WORD.itemsize // _LINE_BYTES) * _LINE_BYTES
    kept: list[_SharedMapping] = context.extras.setdefault("memory_in_common", [])
    wanted: list[SharedArraySpec] = []
    refused: list[SharedMemoryFull] = []

    def request() -> CollectiveSpec:
        one = check()
        wanted.append(one)
        reference = bytes(REFERENCE_NBYTES)  # of no memory
        if rank == 0:
            kept[:] = [each for each in kept if not each.marks.all()]  # free what all have dropped
            try:
                assert context.shm is not None
                kept.append(_allocated(context.shm, size, head, one))
                reference = context.shm.refer(kept[-1].offset, kept[-1].block.nbytes).pack()
            except SharedMemoryFull as error:
                refused.append(error)
        made = broadcast_request(communicator, np.frombuffer(reference, np.uint8), name=name)
        return CollectiveSpec(one.what, fingerprint(name, *one.parts), made.body)

    try:
        found = communicator.perform(name, request, timeout).tobytes()
    except MismatchError:
        if rank == 0 and wanted and not refused:
            kept.pop()  # no rank has received it
        raise
    ((what, _, nbytes, _),) = wanted
    if not any(found):
        first = communicator.members[0]
        if refused:
            return refused[0]
        return SharedMemoryFull(
            f"{what}: rank {first} has no room for {bytes_in_words(nbytes)} of shared memory"
        )
    shm = context.shm
    assert shm is not None
    offset = shm.resolve(SharedMemoryReference.unpack(found))
    mark = shm.view(offset, size, _WORD)[rank : rank + 1]
    return np.asarray(_Hold(shm, offset + head, max(1, nbytes), mark))[:nbytes]


class _Hold:
    """Keeps `nbytes` of shared memory at `offset`; sets `mark`, this rank's word, when dropped."""

    __slots__ = ("__array_interface__", "_ground", "_mark", "_process")

    def __init__(self, shm: SharedSegment, offset: int, nbytes: int, mark: NDArray[Any]) -> None:
        self._mark = mark
        self._ground = shm.view(offset, nbytes, np.uint8)  # keeps the mapping
        self._process = os.getpid()
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (shm.address + offset, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if os.getpid() == self._process:  # the copy in a forked child does not count
            self._mark[0] = 1


class _SharedMapping(NamedTuple):
    """Shared memory that this process has allocated, and the words of the ranks in front of it."""

    offset: int
    block: NDArray[Any]
    marks: NDArray[Any]


def _allocated(shm: SharedSegment, size: int, head: int, wanted: SharedArraySpec) -> _SharedMapping:
    """Allocate the memory and the words in front of it, and write the content."""
    block = shm.empty(head + max(1, wanted.nbytes), np.uint8)
    offset = shm.locate(block)
    assert offset is not None
    marks = shm.view(offset, size, _WORD)
    marks[:] = 0
    block[head : head + wanted.nbytes] = 0 if wanted.content is None else wanted.content
    return _SharedMapping(offset, block, marks)


def _require_one_host(context: ProcessContext, communicator: Communicator) -> None:
    if communicator.is_shared:
        return
    hosts = sorted({context.hosts.host_of(rank) for rank in communicator.members})
    ranks = f"shared_array: the ranks {list(communicator.members)}"
    if len(hosts) > 1:
        raise ConfigError(
            f"{ranks} are on {len(hosts)} hosts, which share no memory: pass a group of the ranks "
            f"of one host, sv.new_group([…]), or use sv.Variable, which sends its writes"
        )
    raise ConfigError(f"{ranks} share no memory: {context.without_shm}")
