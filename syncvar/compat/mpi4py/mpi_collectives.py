"""Collectives of the mpi4py layer, as plans: a call of the core, and what happens with its result.

Each collective has one plan. A communicator runs it at once, starts it, or keeps its arguments for
a persistent request. Data move as bytes, so that the datatypes of two ranks may differ as in MPI.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv
from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py import mpi_objects
from syncvar.compat.mpi4py.mpi_buffers import (
    is_in_place,
    simple_region,
    typed_regions,
    vector_regions,
)
from syncvar.compat.mpi4py.mpi_errors import MpiException
from syncvar.compat.mpi4py.mpi_ops import SUM, Op, fold_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncvar.compat.mpi4py.mpi_buffers import Region

    Bytes = NDArray[np.uint8]

_EMPTY = np.empty(0, np.uint8)


class CallPlan:
    """One collective call of the core.

    Args:
        function: Collective of the core.
        args: Its positional arguments.
        finish: Function of its result, or None.
        options: Its keyword arguments.
    """

    __slots__ = ("args", "finish", "function", "options")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        finish: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self.function, self.args, self.finish, self.options = function, args, finish, options


def checked_root(comm: Any, root: int) -> bool:
    """Return whether this rank is the root; raise if there is no such rank."""
    if not 0 <= root < comm.size:
        raise MpiException(const.ERR_ROOT, f"root {root} is not in 0..{comm.size - 1}")
    return bool(comm.rank == root)


def _fill_blocks(regions: Sequence[Region], result: Any) -> None:
    """Write the bytes of all ranks, joined in their order, to the blocks of a buffer."""
    position = 0
    for region in regions:
        region.fill(result[position : position + region.nbytes])
        position += region.nbytes
    if position < len(result):
        raise MpiException(
            const.ERR_TRUNCATE, f"{len(result)} bytes came, and the buffer has room for {position}"
        )


def _fill_parts(regions: Sequence[Region], parts: Sequence[Any]) -> None:
    """Write the bytes of each rank to its block of a buffer."""
    for region, part in zip(regions, parts, strict=True):
        region.fill(np.asarray(part))


def blocks_of(message: Any, blocks: int) -> list[Region]:
    """Return the equal blocks of a buffer, one for each rank."""
    whole = simple_region(message, blocks)
    count = whole.count // blocks
    step = count * whole.layout.extent
    return [
        whole._replace(origin=whole.origin + rank * step, count=count) for rank in range(blocks)
    ]


# -- calls that move data --------------------------------------------------------------------------


def plan_barrier(comm: Any) -> CallPlan:
    """Wait for all ranks."""
    return CallPlan(sv.barrier, ())


def plan_bcast(comm: Any, buf: Any, root: int = 0) -> CallPlan:
    """Send the root's buffer to all."""
    is_root = checked_root(comm, root)
    region = simple_region(buf)
    data = region.packed()
    if is_root:
        return CallPlan(sv.broadcast, (data, root))
    if region.layout.is_dense and data.flags.writeable:
        return CallPlan(sv.broadcast, (data, root), out=data)
    return CallPlan(sv.broadcast, (data, root), region.fill)


def plan_gather(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> CallPlan:
    """Collect a block of each rank at the root."""
    is_root = checked_root(comm, root)
    return _gather(comm, sendbuf, blocks_of(recvbuf, comm.size) if is_root else None, root)


def plan_gatherv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> CallPlan:
    """Collect blocks of different lengths at the root."""
    is_root = checked_root(comm, root)
    return _gather(comm, sendbuf, vector_regions(recvbuf, comm.size) if is_root else None, root)


def _gather(comm: Any, sendbuf: Any, blocks: list[Region] | None, root: int) -> CallPlan:
    if blocks is None:
        return CallPlan(sv.gather, (simple_region(sendbuf).packed(), root))
    keeps = sendbuf is None or is_in_place(sendbuf)
    mine = blocks[comm.rank] if keeps else simple_region(sendbuf)
    return CallPlan(sv.gather, (mine.packed(), root), partial(_fill_blocks, blocks))


def plan_scatter(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> CallPlan:
    """Send each rank a block of the root's buffer."""
    is_root = checked_root(comm, root)
    return _scatter(comm, blocks_of(sendbuf, comm.size) if is_root else None, recvbuf, root)


def plan_scatterv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> CallPlan:
    """Send each rank a block of some length."""
    is_root = checked_root(comm, root)
    return _scatter(comm, vector_regions(sendbuf, comm.size) if is_root else None, recvbuf, root)


def _scatter(comm: Any, blocks: list[Region] | None, recvbuf: Any, root: int) -> CallPlan:
    if blocks is None:
        return CallPlan(sv.scatter, (None, root), simple_region(recvbuf).fill)
    finish = None if recvbuf is None or is_in_place(recvbuf) else simple_region(recvbuf).fill
    return CallPlan(sv.scatter, ([block.packed() for block in blocks], root), finish)


def plan_allgather(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Collect a block of each rank on all."""
    return _all_gather(comm, sendbuf, blocks_of(recvbuf, comm.size))


def plan_allgatherv(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Collect blocks of different lengths on all."""
    return _all_gather(comm, sendbuf, vector_regions(recvbuf, comm.size))


def _all_gather(comm: Any, sendbuf: Any, blocks: list[Region]) -> CallPlan:
    keeps = sendbuf is None or is_in_place(sendbuf)
    mine = blocks[comm.rank] if keeps else simple_region(sendbuf)
    return CallPlan(sv.all_gather, (mine.packed(),), partial(_fill_blocks, blocks))


def plan_alltoall(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Send each rank a block, and receive one from each."""
    return _all_to_all(sendbuf, comm.size, blocks_of, blocks_of(recvbuf, comm.size))


def plan_alltoallv(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Send each rank a block of some length, and receive one from each."""
    return _all_to_all(sendbuf, comm.size, vector_regions, vector_regions(recvbuf, comm.size))


def plan_alltoallw(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Send each rank a block of some length and datatype, and receive one from each."""
    return _all_to_all(sendbuf, comm.size, typed_regions, typed_regions(recvbuf, comm.size))


def _all_to_all(
    sendbuf: Any,
    size: int,
    read: Callable[[Any, int], list[Region]],
    blocks: list[Region],
) -> CallPlan:
    if is_in_place(sendbuf):
        parts = [block.packed().copy() for block in blocks]
    else:
        parts = [block.packed() for block in read(sendbuf, size)]
    return CallPlan(sv.all_to_all, (parts,), partial(_fill_parts, blocks))


# -- calls that combine ----------------------------------------------------------------------------


def _operands(sendbuf: Any, recvbuf: Any, *, writes: bool = True) -> tuple[Region, Region | None]:
    """Return the input and the output of a reduction; the output is None where there is none."""
    if is_in_place(sendbuf):
        target = simple_region(recvbuf)
        return target, target
    source = simple_region(sendbuf)
    if not writes:
        return source, None
    target = simple_region(recvbuf)
    if source.nbytes > target.nbytes:
        raise MpiException(
            const.ERR_TRUNCATE, f"the result needs {source.nbytes} bytes, not {target.nbytes}"
        )
    return source, target


def _core_values(op: Op, region: Region) -> NDArray[Any] | None:
    """Return the values of a region if the core has the op for their dtype."""
    dtype = region.layout.dtype
    if dtype is None or dtype.char not in op.core_dtypes:
        return None
    return region.packed().view(dtype)


def _fill_values(target: Region, values: Any) -> None:
    target.fill(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _fill_folded(op: Op, source: Region, target: Region, ranks: int, joined: Any) -> None:
    """Combine the packed input of the first ranks, and write the result."""
    size = source.nbytes
    folded = op.folded(source, (joined[rank * size : (rank + 1) * size] for rank in range(ranks)))
    if folded is not None:
        target.fill(folded)


def plan_reduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> CallPlan:
    """Combine the buffers of all ranks at the root."""
    is_root = checked_root(comm, root)
    source, target = _operands(sendbuf, recvbuf, writes=is_root)
    values = _core_values(op, source)
    if values is not None:
        finish = None if target is None else partial(_fill_values, target)
        return CallPlan(sv.reduce, (values, op.core_name, root), finish)
    if target is None:
        return CallPlan(sv.gather, (source.packed(), root))
    fold = partial(_fill_folded, op, source, target, comm.size)
    return CallPlan(sv.gather, (source.packed(), root), fold)


def plan_allreduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CallPlan:
    """Combine the buffers of all ranks on all."""
    source, target = _operands(sendbuf, recvbuf)
    assert target is not None
    values = _core_values(op, source)
    if values is None:
        fold = partial(_fill_folded, op, source, target, comm.size)
        return CallPlan(sv.all_gather, (source.packed(),), fold)
    if target.layout.is_dense and target.memory.flags.writeable:
        start, dtype = target.origin, values.dtype
        out = target.memory[start : start + values.nbytes].view(dtype)
        return CallPlan(sv.all_reduce, (values, op.core_name), out=out)
    return CallPlan(sv.all_reduce, (values, op.core_name), partial(_fill_values, target))


def _scanned(comm: Any, sendbuf: Any, recvbuf: Any, op: Op, *, is_inclusive: bool) -> CallPlan:
    source, target = _operands(sendbuf, recvbuf)
    assert target is not None
    values = _core_values(op, source)
    if values is None:
        ranks = comm.rank + (1 if is_inclusive else 0)
        fold = partial(_fill_folded, op, source, target, ranks)
        return CallPlan(sv.all_gather, (source.packed(),), fold)
    finish = partial(_fill_values, target)
    if is_inclusive:
        return CallPlan(sv.scan, (values, op.core_name), finish)
    return CallPlan(sv.exscan, (values, op.core_name), finish if comm.rank else None)


def plan_scan(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CallPlan:
    """Combine the buffers of this rank and all lower ranks."""
    return _scanned(comm, sendbuf, recvbuf, op, is_inclusive=True)


def plan_exscan(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CallPlan:
    """Combine the buffers of all lower ranks; rank 0 keeps its buffer."""
    return _scanned(comm, sendbuf, recvbuf, op, is_inclusive=False)


def _fill_piece(op: Op, target: Region, pieces: Sequence[Any]) -> None:
    """Combine the pieces that came from all ranks, and write the result."""
    folded = op.folded(target, map(np.asarray, pieces))
    if folded is not None:
        target.fill(folded)


def _reduce_scatter(source: Region, target: Region, counts: Sequence[int], op: Op) -> CallPlan:
    """Send each rank its piece of all inputs; each rank combines what it gets."""
    packed, size = source.packed(), source.layout.size
    if sum(counts) * size > packed.size:
        raise ValueError(
            f"message: the counts need {sum(counts)} elements, and the buffer has {source.count}"
        )
    parts, position = [], 0
    for count in counts:
        parts.append(packed[position : position + count * size])
        position += count * size
    return CallPlan(sv.all_to_all, (parts,), partial(_fill_piece, op, target))


def plan_reduce_scatter_block(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CallPlan:
    """Combine the buffers of all ranks; each rank gets a block of the result."""
    if is_in_place(sendbuf):
        source = simple_region(recvbuf, comm.size)
        count = source.count // comm.size
        target = source._replace(count=count)
    else:
        source = simple_region(sendbuf, comm.size)
        target = simple_region(recvbuf)
        count = source.count // comm.size
        if count > target.count:
            raise ValueError("message: the receive buffer is shorter than a block")
        target = target._replace(count=count)
    return _reduce_scatter(source, target, [count] * comm.size, op)


def plan_reduce_scatter(
    comm: Any, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
) -> CallPlan:
    """Combine the buffers of all ranks; each rank gets a part of the result."""
    if is_in_place(sendbuf):
        source = simple_region(recvbuf)
        if recvcounts is None:
            raise ValueError("message: the counts are needed with IN_PLACE")
        target = source._replace(count=recvcounts[comm.rank])
    else:
        source, target = simple_region(sendbuf), simple_region(recvbuf)
        if recvcounts is None:
            counts = comm.allgather_plain(target.count)
            return _reduce_scatter(source, target, counts, op)
        target = target._replace(count=min(target.count, recvcounts[comm.rank]))
    return _reduce_scatter(source, target, list(recvcounts), op)


# -- objects ---------------------------------------------------------------------------------------


def _bytes_of(value: Any) -> Bytes:
    return np.frombuffer(mpi_objects.pickle.dumps(value), np.uint8)


def _object_of(data: Any) -> Any:
    return mpi_objects.pickle.loads(data)


def _objects_of(parts: Sequence[Any]) -> list[Any]:
    return [mpi_objects.pickle.loads(memoryview(part)) for part in parts]


def plan_bcast_object(comm: Any, obj: Any, root: int = 0) -> CallPlan:
    """Send the root's object to all."""
    data = mpi_objects.pickle.dumps(obj) if checked_root(comm, root) else None
    return CallPlan(sv.broadcast_object, (data, root), _object_of)


def plan_gather_objects(comm: Any, sendobj: Any, root: int = 0) -> CallPlan:
    """Collect the objects of all ranks at the root."""
    is_root = checked_root(comm, root)
    data = mpi_objects.pickle.dumps(sendobj)
    return CallPlan(sv.gather_object, (data, root), _objects_of if is_root else None)


def plan_scatter_objects(comm: Any, sendobj: Any, root: int = 0) -> CallPlan:
    """Send each rank an object of the root's list."""
    parts = None
    if checked_root(comm, root):
        parts = [mpi_objects.pickle.dumps(one) for one in _checked_list(sendobj, comm.size)]
    return CallPlan(sv.scatter_object, (parts, root), _object_of)


def _checked_list(values: Any, size: int) -> list[Any]:
    listed = [None] * size if values is None else list(values)
    if len(listed) != size:
        raise ValueError(f"expecting {size} items, got {len(listed)}")
    return listed


def plan_allgather_objects(comm: Any, sendobj: Any) -> CallPlan:
    """Collect the objects of all ranks on all."""
    return CallPlan(sv.all_gather_object, (mpi_objects.pickle.dumps(sendobj),), _objects_of)


def plan_alltoall_objects(comm: Any, sendobj: Any) -> CallPlan:
    """Send each rank an object, and receive one from each."""
    parts = [_bytes_of(one) for one in _checked_list(sendobj, comm.size)]
    return CallPlan(sv.all_to_all, (parts,), _objects_of)


def plan_reduce_objects(comm: Any, sendobj: Any, op: Any = SUM, root: int = 0) -> CallPlan:
    """Combine the objects of all ranks at the root."""
    plan = plan_gather_objects(comm, sendobj, root)
    if comm.rank == root:
        plan.finish = partial(_folded_objects, op, comm.size)
    return plan


def plan_allreduce_objects(comm: Any, sendobj: Any, op: Any = SUM) -> CallPlan:
    """Combine the objects of all ranks on all."""
    data = mpi_objects.pickle.dumps(sendobj)
    return CallPlan(sv.all_gather_object, (data,), partial(_folded_objects, op, comm.size))


def plan_scan_objects(comm: Any, sendobj: Any, op: Any = SUM) -> CallPlan:
    """Combine the objects of this rank and all lower ranks."""
    data = mpi_objects.pickle.dumps(sendobj)
    return CallPlan(sv.all_gather_object, (data,), partial(_folded_objects, op, comm.rank + 1))


def plan_exscan_objects(comm: Any, sendobj: Any, op: Any = SUM) -> CallPlan:
    """Combine the objects of all lower ranks; None on rank 0."""
    data = mpi_objects.pickle.dumps(sendobj)
    return CallPlan(sv.all_gather_object, (data,), partial(_folded_objects, op, comm.rank))


def _folded_objects(op: Any, ranks: int, parts: Sequence[Any]) -> Any:
    """Combine the objects of the first ranks."""
    return fold_objects(op, _objects_of(parts[:ranks])) if ranks else None


# -- neighbours ------------------------------------------------------------------------------------


def _outgoing(comm: Any, blocks: Sequence[Bytes]) -> list[Bytes]:
    """Return the data for each rank: the blocks of its slots, in the order of its receive slots."""
    parts: list[list[Bytes]] = [[] for _ in range(comm.size)]
    for slot in comm.send_order():
        rank = comm.outneighbors[slot]
        if rank != const.PROC_NULL:
            parts[rank].append(blocks[slot])
    return [np.concatenate(part) if part else _EMPTY for part in parts]


def _incoming(comm: Any, regions: Sequence[Region], parts: Sequence[Any]) -> None:
    """Write the data of each neighbour to its block."""
    positions = [0] * comm.size
    for rank, region in zip(comm.inneighbors, regions, strict=True):
        if rank != const.PROC_NULL:
            start = positions[rank]
            positions[rank] = start + region.nbytes
            region.fill(np.asarray(parts[rank])[start : start + region.nbytes])


def plan_neighbor_allgather(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Collect a block of each neighbour."""
    return _neighbor_gather(comm, sendbuf, blocks_of(recvbuf, max(1, len(comm.inneighbors))))


def plan_neighbor_allgatherv(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Collect blocks of different lengths of the neighbours."""
    return _neighbor_gather(comm, sendbuf, vector_regions(recvbuf, len(comm.inneighbors)))


def _neighbor_gather(comm: Any, sendbuf: Any, blocks: list[Region]) -> CallPlan:
    data = simple_region(sendbuf).packed()
    return _exchange(comm, [data] * len(comm.outneighbors), blocks)


def plan_neighbor_alltoall(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Exchange a block with each neighbour."""
    return _neighbor_exchange(comm, sendbuf, recvbuf, blocks_of)


def plan_neighbor_alltoallv(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Exchange blocks of different lengths with the neighbours."""
    return _neighbor_exchange(comm, sendbuf, recvbuf, vector_regions)


def plan_neighbor_alltoallw(comm: Any, sendbuf: Any, recvbuf: Any) -> CallPlan:
    """Exchange blocks of different lengths and datatypes with the neighbours."""
    return _neighbor_exchange(comm, sendbuf, recvbuf, typed_regions)


def _neighbor_exchange(
    comm: Any, sendbuf: Any, recvbuf: Any, read: Callable[[Any, int], list[Region]]
) -> CallPlan:
    outgoing, incoming = len(comm.outneighbors), len(comm.inneighbors)
    sends = [block.packed() for block in read(sendbuf, outgoing)] if outgoing else []
    return _exchange(comm, sends, read(recvbuf, incoming) if incoming else [])


def _exchange(comm: Any, sends: Sequence[Bytes], blocks: list[Region]) -> CallPlan:
    parts = _outgoing(comm, sends)
    regions = blocks[: len(comm.inneighbors)]
    return CallPlan(sv.all_to_all, (parts,), partial(_incoming, comm, regions))


def plan_neighbor_allgather_objects(comm: Any, sendobj: Any) -> CallPlan:
    """Collect the objects of the neighbours."""
    return _exchange_objects(comm, [sendobj] * len(comm.outneighbors))


def plan_neighbor_alltoall_objects(comm: Any, sendobj: Any) -> CallPlan:
    """Exchange an object with each neighbour."""
    return _exchange_objects(comm, _checked_list(sendobj, len(comm.outneighbors)))


def _exchange_objects(comm: Any, values: Sequence[Any]) -> CallPlan:
    lists: list[list[bytes]] = [[] for _ in range(comm.size)]
    for slot in comm.send_order():
        rank = comm.outneighbors[slot]
        if rank != const.PROC_NULL:
            lists[rank].append(mpi_objects.pickle.dumps(values[slot]))
    parts = [np.frombuffer(_join(one), np.uint8) for one in lists]
    return CallPlan(sv.all_to_all, (parts,), partial(_incoming_objects, comm))


def _join(parts: Sequence[bytes]) -> bytes:
    """Return several byte strings as one, each after its length."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _incoming_objects(comm: Any, parts: Sequence[Any]) -> list[Any]:
    positions = [0] * comm.size
    values: list[Any] = []
    for rank in comm.inneighbors:
        if rank == const.PROC_NULL:
            values.append(None)
            continue
        data, start = np.asarray(parts[rank]).tobytes(), positions[rank]
        stop = start + 8 + int.from_bytes(data[start : start + 8], "little")
        positions[rank] = stop
        values.append(mpi_objects.pickle.loads(data[start + 8 : stop]))
    return values
