"""An array that the ranks of a host have in common: all read it and all write it, and nobody waits for anybody.

It lies in the region of the group's first rank, which keeps it until each of the others has said, by a word of its own in front
of the array, that its last view is gone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.collectives.broadcast import broadcast_request
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.shm_empty import checked_kind, zeros
from syncvar.core.errors import ConfigError, MismatchError, SharedMemoryFull
from syncvar.runtime.communicator import CollectiveSpec, fingerprint
from syncvar.runtime.flight_recorder.call_record import CallFields, CallLabel
from syncvar.shm.segment_layout import bytes_in_words
from syncvar.shm.shm_references import REFERENCE_NBYTES, SharedMemoryReference

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.shm.segment import SharedSegment

__all__ = ["SharedArraySpec", "memory_in_common", "shared_array"]

_WORD = np.dtype(np.uint64)
_LINE_BYTES = 64


def shared_array(
    shape: Any,
    dtype: DTypeLike = np.float64,
    *,
    group: Group | None = None,
    timeout: float | None = None,
) -> NDArray[Any]:
    """Return an array of zeros that is one and the same memory on all ranks of the group. Collective.

    Every rank reads and writes it as any array, without a message, a lock or a copy, and sees at once what the others write. What
    it may see:

    * An element of at most 8 bytes is never torn: it is what some rank has written, or zero.
    * Several elements may be of different writes, also within one read of a row or of the whole.
    * `x[i] += d` reads, adds and writes: what another rank writes to the same element in between is lost.
    * Nothing says when a write is seen, or in which order two are. After `sv.barrier()` all writes made before it are.

    For values that are to be the same on all ranks, and for sums that lose nothing, there is `sv.Variable`.

    Args:
        shape: An integer or a tuple of integers, each >= 0; the same on all ranks.
        dtype: Any dtype whose elements hold no references; the same on all ranks.
        group: Ranks that share it, all on one host; None means the world.
        timeout: Seconds; None means the job's default.

    Returns:
        A C-contiguous array that begins at a multiple of 64 bytes. Its memory goes back to the shm when the last view of it is
        gone on all ranks and the group's first rank makes another such array. It outlives `sv.shutdown()`.

    Raises:
        ConfigError: A wrong shape or dtype; or the ranks of the group share no memory: they are on several hosts, or there is no
            shm, and the text says why.
        MismatchError: The ranks ask for different arrays.
        SharedMemoryFull: There is no room, on any rank.
        PeerLost, DeadlineExceeded: As for `sv.barrier`.

    Cost: one small broadcast; the memory is taken once for all, by the group's first rank: 0.2 ms for each MiB.

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
        lengths, kind = checked_kind(shape, dtype)
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
    """What is to be shared.

    Args:
        what: The call in words.
        parts: What all ranks must say alike.
        nbytes: Of the memory.
        content: What it holds at first, as bytes; None for zeros. Of the first rank only.
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
    """Return memory that all ranks of a group see, or on all ranks why there is none. Collective; the group shares shared memory.

    Args:
        context: The job.
        communicator: The group; its first rank gives the memory.
        name: The call, for messages.
        check: Looks at the arguments; what it raises is the caller's error.
        timeout: Seconds; None for the job's default.
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
            kept[:] = [
                each for each in kept if not each.marks.all()
            ]  # what all ranks have let go of
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
            kept.pop()  # nobody has been told of it
        raise
    ((what, _, nbytes, _),) = wanted
    if not any(found):
        first = communicator.members[0]
        return (
            refused[0]
            if refused
            else SharedMemoryFull(
                f"{what}: rank {first} has no room for {bytes_in_words(nbytes)} of shared memory"
            )
        )
    shm = context.shm
    assert shm is not None
    offset = shm.resolve(SharedMemoryReference.unpack(found))
    mark = shm.view(offset, size, _WORD)[rank : rank + 1]
    return np.asarray(_Hold(shm, offset + head, max(1, nbytes), mark))[:nbytes]


class _Hold:
    """Holds memory in common for this process: as long as it lives, the memory is not given to anybody else.

    Args:
        shared memory: Where the memory is.
        offset: Where it begins.
        nbytes: Of it.
        mark: This rank's word: 1 says that it has let go.
    """

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
        if os.getpid() == self._process:  # a forked copy has let go of nothing
            self._mark[0] = 1


class _SharedMapping(NamedTuple):
    """Memory in common that this process has given.

    Args:
        offset: Where it begins in shared memory.
        block: It.
        marks: A word of each rank, in front of it.
    """

    offset: int
    block: NDArray[Any]
    marks: NDArray[Any]


def _allocated(shm: SharedSegment, size: int, head: int, wanted: SharedArraySpec) -> _SharedMapping:
    """Take memory for what is shared and for the words in front of it, and write the content."""
    block = shm.empty(head + max(1, wanted.nbytes), np.uint8)
    offset = shm.locate(block)
    assert offset is not None
    marks = shm.view(offset, size, _WORD)
    marks[:] = 0
    block[head : head + wanted.nbytes] = 0 if wanted.content is None else wanted.content
    return _SharedMapping(offset, block, marks)


def _require_one_host(context: ProcessContext, communicator: Communicator) -> None:
    """Raise ConfigError unless the ranks of a group share memory."""
    if communicator.is_shared:
        return
    hosts = sorted({context.hosts.host_of(rank) for rank in communicator.members})
    if len(hosts) > 1:
        raise ConfigError(
            f"shared_array: the ranks {list(communicator.members)} are on {len(hosts)} hosts, which share no memory: pass a group of the "
            f"ranks of one host, sv.new_group([…]), or use sv.Variable, whose writes travel"
        )
    raise ConfigError(
        f"shared_array: the ranks {list(communicator.members)} share no memory: {context.without_shm}"
    )
