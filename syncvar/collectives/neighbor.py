"""Neighbour collectives: each rank exchanges arrays with its neighbours in a mesh."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.dispatch import make_call
from syncvar.collectives.groups import Mesh
from syncvar.collectives.stage_builders import all_to_all_flat, exchange, require_same
from syncvar.collectives.transfer_args import TransferCall, detail_of, moves
from syncvar.core.array_arguments import as_array, checked_output, deliver, result_buffer
from syncvar.core.errors import ConfigError
from syncvar.protocol.fixed_records import array_record
from syncvar.runtime.block_transfer import Blocks, TransferLayout
from syncvar.runtime.collective_spec import CollectiveSpec

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.collective_registry import Case
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


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
    options = (mesh, periodic, "neighbor_all_gather")
    call = _NeighborCall
    return make_call(neighbor_all_gather, call, x, out, None, async_op, timeout, _foreign, options)


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
        out: Array of the shape and dtype of `x` to write to; it may be `x`.
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
    options = (mesh, periodic, "neighbor_all_to_all")
    call = _NeighborCall
    return make_call(neighbor_all_to_all, call, x, out, None, async_op, timeout, _foreign, options)


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
        for at in (place[axis] - 1, place[axis] + 1):
            there = [*place[:axis], at % length, *place[axis + 1 :]]
            has_rank = is_ring or 0 <= at < length
            found.append(int(np.ravel_multi_index(there, shape)) if has_rank else None)
    return tuple(found)


def _checked_rings(mesh: Any, periodic: Any, size: int) -> tuple[bool, ...]:
    """Return whether each axis of the mesh is a ring; raise ConfigError if arguments are wrong."""
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh must be made by sv.mesh, not {type(mesh).__name__}")
    if prod(mesh.shape) != size:
        raise ConfigError(
            f"the mesh has {prod(mesh.shape)} ranks, and {size} take part: make a mesh of them, or "
            f"call outside sv.uneven"
        )
    axes = len(mesh.shape)
    rings = (periodic,) * axes if isinstance(periodic, bool) else periodic
    if not isinstance(rings, list | tuple) or [type(one) for one in rings] != [bool] * axes:
        raise ConfigError(
            f"periodic must be True, False, or a tuple of {axes} of them, not {periodic!r}"
        )
    return tuple(rings)


class _NeighborCall(TransferCall):
    """A call of one of the two collectives; `keep` copies the input."""

    # `inputs`: the block for each neighbour of this rank, all of one shape.
    def __init__(
        self, communicator: Communicator, x: Any, out: Any, *options: Any, keep: bool
    ) -> None:
        mesh, periodic, name = options
        rings = _checked_rings(mesh, periodic, communicator.size)
        array = as_array(x).copy() if keep else as_array(x)
        array_record(array)  # raises for too many dimensions
        slots, is_gather = 2 * len(rings), name == "neighbor_all_gather"
        if not is_gather and array.shape[:1] != (slots,):
            raise ConfigError(
                f"{name} needs an array with a block for each of {slots} neighbours along axis 0, "
                f"not one of shape {array.shape}"
            )
        blocks = [array] * slots if is_gather else [array[slot, ...] for slot in range(slots)]
        if out is not None:
            checked_output(out, (slots, *blocks[0].shape), array.dtype)
        spec = CollectiveSpec(
            name,
            options=(mesh.shape, rings),
            dtype=array.dtype.name,
            shape=array.shape,
            elements=array.size,
            is_uniform=False,
            shown=(array.dtype.name, f"mesh {mesh.shape}", f"periodic {rings}"),
        )
        super().__init__(communicator, spec, None, blocks, out)
        self._name = name
        # The neighbours of each rank, and (slot, neighbour) of this rank's, without itself.
        self._tables = [neighbors(mesh.shape, rings, rank) for rank in range(communicator.size)]
        mine = enumerate(self._tables[self.rank])
        self._others = [(slot, peer) for slot, peer in mine if peer not in (None, self.rank)]
        self._published = 1 if is_gather else slots  # number of different blocks
        if moves(communicator, "all_to_all"):
            takes = tuple((peer, 0 if is_gather else slot ^ 1) for slot, peer in self._others)
            shape, dtype, published = blocks[0].shape, array.dtype, self._published
            detail = detail_of(dtype, shape)
            self.layout = TransferLayout(detail, dtype, shape, published, takes, most_takes=slots)

    def _buffer(self) -> NDArray[Any]:
        """Return the output, complete except for the blocks of other ranks."""
        blocks, out = self.inputs, self.out
        shape = (len(blocks), *blocks[0].shape)
        output = result_buffer(out, shape, blocks[0].dtype, *blocks)
        for slot, peer in enumerate(self._tables[self.rank]):
            if peer == self.rank:
                output[slot] = blocks[slot ^ 1]
            elif peer is None and output is not out:
                output[slot] = 0 if out is None else out[slot]
        return output

    def arrange(self) -> Blocks:
        output = self._buffer()
        targets = [output[slot, ...] for slot, _ in self._others]
        return Blocks(output, self.inputs[: self._published], targets)

    def slow_path(self) -> Generator[Stage, None, Any]:
        # A header round, then an all-to-all among neighbours.
        communicator, rank, blocks = self.communicator, self.rank, self.inputs
        records = yield from exchange(communicator, array_record(blocks[0]))
        kinds = [(one.kind, one.dtype, one.shape) for one in records]
        text = f"{self._name}: the arrays must have one shape and dtype on all ranks"
        require_same(communicator, text, kinds, records)
        count, ranks = blocks[0].size, range(self.size)
        # Counted by the slots of the receiver; nothing goes from a rank to itself.
        matrix = tuple(
            tuple(count * self._tables[dest].count(rank) * (rank != dest) for dest in ranks)
            for rank in ranks
        )
        outgoing = [
            blocks[slot ^ 1].reshape(-1)
            for dest in ranks
            for slot, peer in enumerate(self._tables[dest])
            if peer == rank != dest
        ]
        incoming = sorted((peer, slot) for slot, peer in self._others)
        sent = np.concatenate([*outgoing, np.empty(0, blocks[0].dtype)])
        received = yield from all_to_all_flat(communicator, sent, matrix)
        output = self._buffer()
        for place, (_, slot) in enumerate(incoming):
            output[slot] = received[count * place : count * (place + 1)].reshape(output[slot].shape)
        return deliver(output, self.out)


def _in_a_ring(case: Case, x: Any) -> tuple[Any, Mesh, bool]:
    """Return the arguments of a call in a ring of all ranks, a mesh that needs no groups."""
    return x, Mesh((case.size,), ("axis0",), case.rank, ()), True


register(
    Collective(
        (neighbor_all_gather,), CollectiveKind.MOVE,
        gives="an array", gets="the arrays of its neighbours in a mesh",
        cost="one direct copy of each block; over links each block once",
        wanted=lambda case: np.stack([case.part(case.rank - 1), case.part(case.rank + 1)]),
        schedules=("all_to_all",), arguments=_in_a_ring,
    ),
    Collective(
        (neighbor_all_to_all,), CollectiveKind.MOVE,
        gives="an array with a block for each neighbour in a mesh",
        gets="the block of each neighbour, an array",
        cost="one direct copy of each block; over links each block once",
        # The block for -1 is the pattern of a rank, the block for +1 its reverse.
        wanted=lambda case: np.stack([case.part(case.rank - 1)[::-1], case.part(case.rank + 1)]),
        inputs=lambda case, rank: np.stack([case.part(rank), case.part(rank)[::-1]]),
        schedules=("all_to_all",), arguments=_in_a_ring,
    ),
)  # fmt: skip
