"""Neighbour collectives: each rank exchanges arrays with its neighbours in a mesh."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives.dispatch import make_call
from syncvar.collectives.groups import Mesh
from syncvar.collectives.stage_builders import exchange, require_same
from syncvar.collectives.transfer_args import TransferArgs, detail_of, moves, result_buffer
from syncvar.core.array_arguments import as_array, deliver
from syncvar.core.errors import ConfigError
from syncvar.protocol.fixed_records import array_record
from syncvar.runtime.block_transfer import Blocks, TransferLayout
from syncvar.runtime.call_record import CallFields, CallLabel
from syncvar.runtime.communicator import fingerprint
from syncvar.runtime.request import Stage

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.runtime.communicator import Communicator


def neighbor_all_gather(
    x: Any,
    mesh: Mesh,
    periodic: bool | tuple[bool, ...] = False,  # noqa: FBT001, FBT002  (public signature)
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    **_foreign: Never,
) -> Any:
    """Give each rank the arrays of its neighbours in a mesh.

    Args:
        x: Array, of one shape and dtype on all ranks.
        mesh: Mesh of the ranks, from `sv.mesh`.
        periodic: Whether each axis is a ring; a tuple has a value for each axis.
        out: Array of the result's shape and dtype to write to.
        async_op, timeout: See `syncvar.collectives`.

    Returns:
        An array of shape `(2 * axes, *x.shape)`. For each axis it has the array of the neighbour at
        -1, then of the one at +1. Without a neighbour the row keeps what `out` holds; without `out`
        it is 0.

    Raises:
        MismatchError: Shapes or dtypes differ between ranks.
        ConfigError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory one direct copy of each block. Over links a header round, then n-1
        messages of each rank, of which only those to neighbours carry data.
    Order: nothing is combined.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.neighbor_all_gather(np.arange(2), sv.mesh((1,)), periodic=True)
        array([[0, 1],
               [0, 1]])

    Source: MPI 4.1, section 8.6 (`MPI_Neighbor_allgather`).
    """
    rest = (mesh, periodic, "neighbor_all_gather")
    return make_call(
        neighbor_all_gather, _no_form, _request, x, out, None, async_op, timeout, _foreign, rest
    )


def neighbor_all_to_all(
    x: Any,
    mesh: Mesh,
    periodic: bool | tuple[bool, ...] = False,  # noqa: FBT001, FBT002  (public signature)
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    **_foreign: Never,
) -> Any:
    """Send block i to neighbour i in a mesh, and receive block i from neighbour i.

    What a rank sends at +1 along an axis is the block of the receiver's neighbour at -1, also if
    both neighbours are one rank.

    Args:
        x: Array of shape `(2 * axes, ...)`, of one shape and dtype on all ranks. For each axis it
            has the block for the neighbour at -1, then the one for +1.
        mesh: Mesh of the ranks, from `sv.mesh`.
        periodic: Whether each axis is a ring; a tuple has a value for each axis.
        out: Array of the shape and dtype of `x` to write to.
        async_op, timeout: See `syncvar.collectives`.

    Returns:
        An array like `x`. Without a neighbour a block keeps what `out` holds; without `out` it
        is 0.

    Raises:
        MismatchError: Shapes or dtypes differ between ranks.
        ConfigError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: as `neighbor_all_gather`.
    Order: nothing is combined.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.neighbor_all_to_all(np.array([1, 2]), sv.mesh((1,)), periodic=True)
        array([2, 1])

    Source: MPI 4.1, section 8.6 (`MPI_Neighbor_alltoall`).
    """
    rest = (mesh, periodic, "neighbor_all_to_all")
    return make_call(
        neighbor_all_to_all, _no_form, _request, x, out, None, async_op, timeout, _foreign, rest
    )


def _no_form(*_: Any) -> None:
    """Return None: these calls are not persistent."""


def neighbors(
    shape: tuple[int, ...], periodic: tuple[bool, ...], rank: int
) -> tuple[int | None, ...]:
    """Return the neighbours of a rank at -1 and +1 of each axis; None where there is none.

    Example:
        >>> neighbors((2, 3), (False, True), 0)
        (None, 3, 2, 1)
    """
    place = [int(one) for one in np.unravel_index(rank, shape)]
    found: list[int | None] = []
    for axis, (length, is_ring) in enumerate(zip(shape, periodic, strict=True)):
        for step in (-1, 1):
            at = place[axis] + step
            if is_ring or 0 <= at < length:
                there = [*place[:axis], at % length, *place[axis + 1 :]]
                found.append(int(np.ravel_multi_index(there, shape)))
            else:
                found.append(None)
    return tuple(found)


def _checked_rings(mesh: Any, periodic: Any, communicator: Communicator) -> tuple[bool, ...]:
    """Return whether each axis of the mesh is a ring; raise ConfigError if arguments are wrong."""
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh must be made by sv.mesh, not {type(mesh).__name__}")
    if prod(mesh.shape) != communicator.size:
        raise ConfigError(
            f"the mesh has {prod(mesh.shape)} ranks, and {communicator.size} take part: "
            f"make a mesh of them, or call outside sv.uneven"
        )
    axes = len(mesh.shape)
    rings = (periodic,) * axes if isinstance(periodic, bool) else periodic
    is_fit = isinstance(rings, list | tuple) and len(rings) == axes
    if not is_fit or not all(isinstance(one, bool) for one in rings):
        raise ConfigError(
            f"periodic must be True, False, or a tuple of {axes} of them, not {periodic!r}"
        )
    return tuple(rings)


def _request(  # noqa: PLR0913  (the arguments of two public calls)
    communicator: Communicator, x: Any, out: Any, mesh: Any, periodic: Any, name: str, *, keep: bool
) -> TransferArgs:
    """Check the arguments and return the request; `keep` copies the input."""
    rings = _checked_rings(mesh, periodic, communicator)
    array = np.ascontiguousarray(as_array(x)).reshape(np.shape(x))
    slots, is_gather = 2 * len(rings), name == "neighbor_all_gather"
    if not is_gather and array.shape[:1] != (slots,):
        raise ConfigError(
            f"{name} needs an array with a block for each of {slots} neighbours along axis 0, "
            f"not one of shape {array.shape}"
        )
    array_record(array)  # raises for too many dimensions
    array = array.copy() if keep else array
    blocks = [array] * slots if is_gather else list(array)
    call = _NeighborCall(communicator, mesh.shape, rings, name, blocks, out)
    shape, dtype = call.shape, array.dtype
    if isinstance(out, np.ndarray) and (out.shape != (slots, *shape) or out.dtype != dtype):
        raise ConfigError(
            f"out must be {dtype.name} of shape {(slots, *shape)}, not {out.dtype.name} of shape "
            f"{out.shape}"
        )
    layout = None
    if moves(communicator, "all_to_all"):
        published = 1 if is_gather else slots
        takes = tuple((peer, 0 if is_gather else slot ^ 1) for slot, peer in call.others())
        detail = detail_of(dtype, shape)
        layout = TransferLayout(detail, dtype, shape, published, takes, most_takes=slots)
    fields = CallFields(name, dtype=dtype.name, shape=array.shape, elements=array.size)
    return TransferArgs(
        CallLabel(f"{name}({dtype.name}, mesh {mesh.shape}, periodic {rings})", fields),
        fingerprint(name, mesh.shape, rings),
        layout,
        arrange=call.arrange,
        finish=call.finish,
        general=call.general,
    )


class _NeighborCall:
    """One call: the neighbours of this rank, its blocks for them, and where results go."""

    def __init__(  # noqa: PLR0913, PLR0917  (set once)
        self,
        communicator: Communicator,
        mesh_shape: tuple[int, ...],
        rings: tuple[bool, ...],
        name: str,
        blocks: list[NDArray[Any]],
        out: Any,
    ) -> None:
        self.communicator, self.name, self.blocks, self.out = communicator, name, blocks, out
        self.rank, self.size = communicator.member_rank, communicator.size
        self.tables = [neighbors(mesh_shape, rings, rank) for rank in range(self.size)]
        self.shape, self.dtype = np.shape(blocks[0]), blocks[0].dtype

    def others(self) -> list[tuple[int, int]]:
        """Return (slot, neighbour) for all neighbours but this rank itself."""
        mine = enumerate(self.tables[self.rank])
        return [(slot, peer) for slot, peer in mine if peer is not None and peer != self.rank]

    def buffer(self) -> NDArray[Any]:
        """Return the output, complete but for what other ranks send."""
        shape = (len(self.blocks), *self.shape)
        output = result_buffer(self.out, shape, self.dtype, *self.blocks)
        for slot, peer in enumerate(self.tables[self.rank]):
            if peer == self.rank:
                output[slot] = self.blocks[slot ^ 1]
            elif peer is None and output is not self.out:
                output[slot] = 0 if self.out is None else self.out[slot]
        return output

    def arrange(self) -> Blocks:
        """Return the arrays of a call in shared memory."""
        output = self.buffer()
        targets = [output[slot : slot + 1].reshape(self.shape) for slot, _ in self.others()]
        outgoing = self.blocks[:1] if self.name == "neighbor_all_gather" else self.blocks
        return Blocks(output, [np.asarray(block) for block in outgoing], targets)

    def finish(self, output: NDArray[Any]) -> Any:
        """Return the result of the caller."""
        return deliver(output, self.out)

    def general(self) -> Generator[Stage, None, Any]:
        """Yield the stages over links: a header round, then an all-to-all among neighbours."""
        communicator, rank = self.communicator, self.rank
        records = yield from exchange(communicator, array_record(np.asarray(self.blocks[0])))
        kinds = [(one.kind, one.dtype, one.shape) for one in records]
        text = f"{self.name}: the arrays must have one shape and dtype on all ranks"
        require_same(communicator, text, kinds, records)
        count = prod(self.shape)
        # counted by the slots of the receiver; nothing goes from a rank to itself
        matrix = tuple(
            tuple(
                count * self.tables[dest].count(source) * (source != dest)
                for dest in range(self.size)
            )
            for source in range(self.size)
        )
        output = self.buffer()
        sent, received = sum(matrix[rank]), sum(row[rank] for row in matrix)
        work = np.empty(sent + received, self.dtype)
        start = 0
        for dest in range(self.size):
            for slot, peer in enumerate(self.tables[dest]):
                if peer == rank != dest:
                    work[start : start + count] = np.reshape(self.blocks[slot ^ 1], -1)
                    start += count
        yield Stage(communicator.plan("all_to_all", matrix, work.itemsize), work)
        for slot, _ in sorted(self.others(), key=lambda pair: (pair[1], pair[0])):
            output[slot] = work[start : start + count].reshape(self.shape)
            start += count
        return self.finish(output)
