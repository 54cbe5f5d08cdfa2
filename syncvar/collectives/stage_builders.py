"""Stages that several collectives share, and calls in which ranks meet or gather objects.

The stages move flat arrays whose counts all ranks know, and bytes whose length only some ranks
know; they check no arguments. In a header round every rank sends every other one a small record of
its input. All ranks see the same records, so all of them raise the same error.
"""

from __future__ import annotations

import struct
from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.algorithms.compile_schedule import LinkSchedule
from syncvar.core.array_arguments import result_buffer
from syncvar.core.errors import MismatchError
from syncvar.protocol.fixed_records import BYTES, InputRecord, pack_record, unpack_record
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.communicator import CheckedCall
from syncvar.runtime.request import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.runtime.communicator import Communicator


_NOTHING = np.empty(0, np.uint8)
AT_ONCE = 248  # bytes that travel together with their length: four cache lines in all
HEAD = struct.Struct(f"<Q{AT_ONCE}s")


def broadcast_flat(
    communicator: Communicator,
    mine: NDArray[Any] | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    root: int,
    algorithm: str | None = None,
    out: Any = None,
) -> Generator[Stage, None, NDArray[Any]]:
    """Broadcast an array whose shape and dtype all ranks know; `mine` is the root's value.

    Return a new array; or `out` if it fits, but on the root `mine` if it is there already.
    """
    count, nbytes = prod(shape), dtype.itemsize
    plan = communicator.plan("broadcast", count, nbytes, root=root, algorithm=algorithm)
    if mine is None:
        received = result_buffer(out, shape, dtype)
        yield Stage(plan, received.reshape(-1))
        return received
    is_sent_itself = (
        isinstance(plan, LinkSchedule)
        and plan.only_sends
        and mine.dtype == dtype
        and mine.flags.c_contiguous
    )
    is_there = out is mine
    if is_sent_itself:  # the others get it before this rank makes its own copy
        yield Stage(plan, mine.reshape(-1))
        if is_there:
            return mine
    result = result_buffer(out, shape, dtype, mine)
    result[...] = mine
    if not is_sent_itself:
        yield Stage(plan, result.reshape(-1))
    return result


def broadcast_bytes(
    communicator: Communicator, mine: bytes, root: int
) -> Generator[Stage, None, bytes]:
    """Broadcast bytes whose length only the root knows."""
    records = yield from exchange(communicator, InputRecord(BYTES, nbytes=len(mine)))
    data = np.frombuffer(mine, np.uint8) if communicator.member_rank == root else None
    shape, dtype = (records[root].nbytes,), np.dtype(np.uint8)
    result = yield from broadcast_flat(communicator, data, shape, dtype, root)
    return result.tobytes()


def gather_flat(
    communicator: Communicator,
    mine: NDArray[Any],
    counts: tuple[int, ...],
    root: int | None = None,
    algorithm: str | None = None,
) -> Generator[Stage, None, NDArray[Any]]:
    """Gather flat blocks whose counts all ranks know; return them (on the root, if any)."""
    work = np.empty(sum(counts), mine.dtype)
    rank = communicator.member_rank
    start = list(accumulate(counts, initial=0))[rank]
    work[start : start + counts[rank]] = mine
    collective = "all_gather" if root is None else "gather"
    plan = communicator.plan(collective, counts, work.itemsize, root=root or 0, algorithm=algorithm)
    yield Stage(plan, work)
    return work


def scatter_flat(
    communicator: Communicator,
    whole: NDArray[Any] | None,
    dtype: np.dtype[Any],
    counts: tuple[int, ...],
    root: int,
    algorithm: str | None = None,
) -> Generator[Stage, None, NDArray[Any]]:
    """Scatter a flat array whose counts all ranks know; return a view of this rank's block."""
    work = np.empty(sum(counts), dtype) if whole is None else whole
    start = list(accumulate(counts, initial=0))[communicator.member_rank]
    plan = communicator.plan("scatter", counts, work.itemsize, root=root, algorithm=algorithm)
    yield Stage(plan, work)
    return work[start : start + counts[communicator.member_rank]]


def all_to_all_flat(
    communicator: Communicator,
    sent: NDArray[Any],
    matrix: tuple[tuple[int, ...], ...],
    received: NDArray[Any] | None = None,
    algorithm: str | None = None,
) -> Generator[Stage, None, NDArray[Any]]:
    """Exchange flat blocks: `sent` has them by destination, the result by source.

    `matrix` has the counts from each rank to each. The result is `received` if that is given.
    """
    plan = communicator.plan("all_to_all", matrix, sent.itemsize, algorithm=algorithm)
    count = sum([row[communicator.member_rank] for row in matrix])
    if isinstance(plan, LinkSchedule):
        work = np.empty(count, sent.dtype) if received is None else received
        yield Stage(plan, work, send_buffer=sent)
        return work
    whole = np.concatenate([sent, np.empty(count, sent.dtype)])
    yield Stage(plan, whole)
    if received is None:
        return whole[sent.size :]
    received[...] = whole[sent.size :]
    return received


def gather_bytes(
    communicator: Communicator, mine: bytes, root: int | None = None
) -> Generator[Stage, None, list[bytes]]:
    """Gather bytes of any length from each rank, on the root or (None) on every rank.

    It takes one exchange of small frames, and a second one if any rank has more bytes.
    """
    packed = yield from exchange_bytes(communicator, HEAD.pack(len(mine), mine))
    heads = list(map(HEAD.unpack, packed))
    counts = tuple(count for count, _ in heads)
    if max(counts) <= AT_ONCE:
        return [data[:count] for count, data in heads]
    flat = yield from gather_flat(communicator, np.frombuffer(mine, np.uint8), counts, root)
    if root is not None and communicator.member_rank != root:
        return []
    data = flat.tobytes()
    ends = list(accumulate(counts))
    return [data[end - count : end] for end, count in zip(ends, counts, strict=True)]


def exchange(
    communicator: Communicator, mine: InputRecord
) -> Generator[Stage, None, list[InputRecord]]:
    """Exchange records; return those of all ranks of the group, in rank order."""
    packed = yield from exchange_bytes(communicator, pack_record(mine))
    return [unpack_record(data) for data in packed]


def exchange_bytes(communicator: Communicator, mine: bytes) -> Generator[Stage, None, list[bytes]]:
    """Exchange bytes, as many from each rank; return those of all ranks, in rank order."""
    size = len(mine)
    work = np.zeros(communicator.size * size, np.uint8)
    rank = communicator.member_rank
    work[rank * size : (rank + 1) * size] = np.frombuffer(mine, np.uint8)
    yield Stage(communicator.plan("header_exchange", size), work)
    everything = work.tobytes()
    return [everything[start : start + size] for start in range(0, len(everything), size)]


def require_same(
    communicator: Communicator, text: str, values: list[Any], records: list[InputRecord]
) -> None:
    """Raise MismatchError with a table of all inputs, unless all `values` are equal."""
    if any(value != values[0] for value in values):
        members = communicator.members
        table = {members[rank]: record.describe() for rank, record in enumerate(records)}
        raise MismatchError(f"{text}: the ranks bring values that do not fit together", table)


# -- calls in which ranks wait for each other, or gather an object of each -------------------------


def meet(
    communicator: Communicator,
    spec: CollectiveSpec,
    timeout: float | None,
    check: Callable[[], None] | None = None,
) -> None:
    """Wait for all ranks at a point that they describe alike."""
    communicator.perform(spec, partial(MeetingCall, communicator, spec, check), timeout)


class MeetingCall(CheckedCall):
    """A call in which ranks wait for each other."""

    def __init__(
        self,
        communicator: Communicator,
        spec: CollectiveSpec,
        check: Callable[[], None] | None = None,
    ) -> None:
        if check is not None:
            check()
        super().__init__(spec)
        self.communicator = communicator

    def stages(self) -> Generator[Stage, None, Any]:
        """Yield the stage of a barrier."""
        yield Stage(self.communicator.plan("barrier", 0), _NOTHING)


def gather_objects(
    communicator: Communicator,
    name: str,
    make: Callable[[], Any],
    timeout: float | None,
    *,
    async_op: bool = False,
) -> Any:
    """Gather the objects that `make` returns; an error in `make` fails the call on all ranks."""
    make_checked = partial(GatheredObjects, communicator, name, make)
    return communicator.perform(name, make_checked, timeout, async_op=async_op)


class GatheredObjects(CheckedCall):
    """A call in which each rank gets the objects of all ranks."""

    def __init__(self, communicator: Communicator, name: str, make: Callable[[], Any]) -> None:
        super().__init__(CollectiveSpec(name))
        self._communicator, self._mine = communicator, pack_object(make())

    def stages(self) -> Generator[Stage, None, list[Any]]:
        """Yield the stages, which end with the objects."""
        packed = yield from gather_bytes(self._communicator, self._mine)
        return list(map(unpack_object, packed))
