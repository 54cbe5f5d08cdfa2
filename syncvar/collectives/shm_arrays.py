"""Arrays in the shared memory of a host: `sv.empty`, `sv.zeros` and `sv.shared_array`.

The ranks of a host read and write a shared array without synchronization. Its memory lies in the
region of the group's first rank. In front of it each rank has a word that it sets when its last
view is gone. The first rank frees the memory when all words are set.
"""

from __future__ import annotations

import operator
import os
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.collectives.broadcast import BroadcastCall
from syncvar.collectives.groups import communicator_of
from syncvar.core.errors import ConfigError, MismatchError, SharedMemoryFull
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.shm.segment_file import REFERENCE_NBYTES, SharedMemoryReference, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import DTypeLike, NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage
    from syncvar.shm.segment import SharedSegment

_WORD = np.dtype(np.uint64)
_LINE_BYTES = 64


def empty(shape: Any, dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return a new uninitialized array in the shared memory of the host. Not collective.

    Collectives read and write such arrays in place: `sv.all_reduce(x, out=x)` copies nothing if `x`
    is an array of `sv.empty` on every rank. Without shared memory (one rank on a host, or
    SYNCVAR_TRANSPORT=zmq) the array is an ordinary one.

    A forked child sees the same memory: its writes to such an array appear in the parent, and the
    other way round. A child that writes should take `x.copy()` first.

    Args:
        shape: An integer or a tuple of integers, each >= 0.
        dtype: Any dtype whose elements hold no references.

    Returns:
        A C-contiguous array. Its memory is freed when its last view is gone. It outlives
        `sv.shutdown()`.

    Raises:
        ConfigError: The shape or the dtype is wrong.
        SharedMemoryFull: There is no room in shared (or private) memory. The text names what is in
            use, and the setting `shm_bytes`.

    Cost: little if freed memory is reused; otherwise a page fault for each page.

    Example:
        >>> import syncvar as sv
        >>> sv.empty((2, 3), "float32").shape
        (2, 3)
    """
    lengths, kind = checked_shape_dtype(shape, dtype)
    shm = current().shm
    if shm is not None:
        return shm.empty(lengths, kind)
    try:
        return np.empty(lengths, kind)
    except (ValueError, MemoryError) as error:
        nbytes = prod(lengths) * kind.itemsize
        text = f"no room for {format_bytes(nbytes)} of private memory"
        raise SharedMemoryFull(f"{text} (this process shares none): {error}") from error


def zeros(shape: Any, dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return a new array of zeros in the host's shared memory; see `empty`.

    Example:
        >>> import syncvar as sv
        >>> sv.zeros(3)
        array([0., 0., 0.])
    """
    output = empty(shape, dtype)
    output[...] = 0
    return output


def checked_shape_dtype(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the lengths and the dtype; raise ConfigError if such an array cannot be shared."""
    try:
        lengths = tuple(
            operator.index(one) for one in (shape if isinstance(shape, tuple | list) else (shape,))
        )
    except TypeError:
        raise ConfigError(
            f"shape must be an integer or a tuple of integers, not {shape!r}"
        ) from None
    if any(length < 0 for length in lengths):
        raise ConfigError(f"no length of a shape may be negative: {shape!r}")
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"dtype must name a NumPy dtype, not {dtype!r} ({error})") from None
    if kind.hasobject:
        raise ConfigError(
            f"an array of {kind} cannot be shared between processes: its elements are references"
        )
    return lengths, kind


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

    Cost: one small broadcast. The group's first rank allocates the memory, with a page fault for
        each page.

    Example:
        >>> import syncvar as sv
        >>> weights = sv.shared_array(3)
        >>> weights[sv.rank()] += 1
    """
    communicator = communicator_of(group)
    context = current()
    context.refuse_in_block("sv.shared_array")
    if communicator.size == 1:
        return zeros(shape, dtype)
    check = partial(_shared_array_spec, context, communicator, shape, dtype)
    found = memory_in_common(context, communicator, "shared_array", check, timeout)
    if isinstance(found, SharedMemoryFull):
        raise found
    lengths, kind = checked_shape_dtype(shape, dtype)
    return found.view(kind).reshape(lengths)


class SharedArraySpec(NamedTuple):
    """Shared memory to allocate."""

    call: CollectiveSpec
    nbytes: int  # size in bytes
    content: NDArray[np.uint8] | None = None  # initial bytes, on the first rank; None for zeros


def _shared_array_spec(
    context: ProcessContext, communicator: Communicator, shape: Any, dtype: Any
) -> SharedArraySpec:
    """Check the arguments of `shared_array`, and return the memory of the array."""
    lengths, kind = checked_shape_dtype(shape, dtype)
    _require_one_host(context, communicator)
    shown = list(lengths), kind.name
    spec = CollectiveSpec(
        "shared_array", options=(kind.str,), dtype=kind.name, shape=lengths, shown=shown
    )
    return SharedArraySpec(spec, int(np.prod(lengths, dtype=object)) * kind.itemsize)


def memory_in_common(
    context: ProcessContext,
    communicator: Communicator,
    name: str,
    check: Callable[[], SharedArraySpec],
    timeout: float | None,
) -> NDArray[np.uint8] | SharedMemoryFull:
    """Return memory that all ranks of a group share; SharedMemoryFull, on all ranks, if it is full.

    Collective. `check` checks the arguments; the group's first rank allocates.
    """
    mappings: list[_SharedMapping] = context.extras.setdefault("memory_in_common", [])
    mappings[:] = [one for one in mappings if not one.marks.all()]  # free the rest
    count, make = len(mappings), partial(_AllocationCall, context, communicator, name, check)
    try:
        call, found = communicator.perform(name, make, timeout)
    except MismatchError:
        del mappings[count:]  # no rank has received it
        raise
    nbytes = call.wanted.nbytes
    if not any(found):
        first = communicator.members[0]
        return call.refusal or SharedMemoryFull(
            f"{call.spec}: rank {first} has no room for {format_bytes(nbytes)} of shared memory"
        )
    shm = context.shm
    assert shm is not None
    offset, rank = shm.resolve(SharedMemoryReference.unpack(found)), communicator.member_rank
    mark = shm.view(offset, communicator.size, _WORD)[rank : rank + 1]
    hold = _Hold(shm, offset + _head_of(communicator), max(1, nbytes), mark)
    return np.asarray(hold)[:nbytes]


def _head_of(communicator: Communicator) -> int:
    """Return the bytes of the words of the ranks, in front of the memory."""
    return -(-communicator.size * _WORD.itemsize // _LINE_BYTES) * _LINE_BYTES


class _AllocationCall(BroadcastCall):
    """A call in which the first rank allocates memory and broadcasts where it is.

    Its result is (this call, reference to the memory).
    """

    def __init__(
        self,
        context: ProcessContext,
        communicator: Communicator,
        name: str,
        check: Callable[[], SharedArraySpec],
    ) -> None:
        self.wanted, self.refusal = check(), None
        reference = bytes(REFERENCE_NBYTES)  # of no memory
        if communicator.member_rank == 0:
            try:
                reference = _allocate(context, communicator, self.wanted)
            except SharedMemoryFull as error:
                self.refusal = error
        super().__init__(communicator, np.frombuffer(reference, np.uint8), name=name)
        self.spec = self.wanted.call

    def stages(self) -> Generator[Stage, None, tuple[_AllocationCall, bytes]]:
        reference = yield from super().stages()
        return self, reference.tobytes()


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

    block: NDArray[Any]
    marks: NDArray[Any]


def _allocate(
    context: ProcessContext, communicator: Communicator, wanted: SharedArraySpec
) -> bytes:
    """Allocate the memory and the words in front of it, write the content, return a reference."""
    shm, head = context.shm, _head_of(communicator)
    assert shm is not None
    block = shm.empty(head + max(1, wanted.nbytes), np.uint8)
    offset = shm.locate(block)
    assert offset is not None
    marks = shm.view(offset, communicator.size, _WORD)
    marks[:] = 0
    block[head : head + wanted.nbytes] = 0 if wanted.content is None else wanted.content
    context.extras["memory_in_common"].append(_SharedMapping(block, marks))
    return shm.refer(offset, block.nbytes).pack()


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
