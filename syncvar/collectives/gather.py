"""Gather and all-gather: the root, or every rank, ends with the values of all ranks."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.dispatch import make_call, native_dispatch, plain_array
from syncvar.collectives.groups import checked_root
from syncvar.collectives.stage_builders import exchange, gather_flat, require_same
from syncvar.collectives.transfer_args import (
    TransferCall,
    detail_of,
    even_parts,
    moves,
)
from syncvar.core.array_arguments import checked_integer, deliver, result_buffer
from syncvar.core.errors import ConfigError
from syncvar.core.pytree import TreeDef, arrays_in, describe, private_copy, unflatten
from syncvar.protocol.fixed_records import array_record
from syncvar.runtime.block_transfer import NO_RESULT, Blocks, TransferLayout
from syncvar.runtime.collective_spec import CollectiveSpec

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


@native_dispatch(second="axis", usual=0)
def all_gather(
    x: Any,
    *,
    axis: int = 0,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Concatenate the arrays of all ranks, in rank order, on every rank.

    Args:
        x: Array, or a nested dict/list/tuple of arrays. Lengths along `axis` may differ between
            ranks and may be 0; the other lengths and the dtype must be the same on every rank. A
            0-d array counts as length 1, so that the result has shape (N,).
        axis: Axis along which to concatenate; may be negative.
        out: Array of the result's shape and dtype to write to. Not for pytrees.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        The concatenation, or the same pytree of concatenations.

    Raises:
        MismatchError: The arrays of the ranks do not fit together.
        ConfigError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory, with one shape on all ranks, one direct copy of each block. Else a
        header round of ceil(log2 n) small frames, then n-1 rounds; each rank sends (n-1)/n of the
        result.
    Order: nothing is combined; the bytes are equal on every rank.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.all_gather(np.arange(3))
        array([0, 1, 2])
        >>> sv.all_gather(7.0).shape
        (1,)
    """
    options = (axis, algorithm)
    return make_call(all_gather, AllGatherCall, x, out, group, async_op, timeout, _foreign, options)


class AllGatherCall(TransferCall):
    """An all-gather, or a gather to `root`; `keep` copies the input."""

    @staticmethod
    def persistent_input(
        _communicator: Communicator, x: Any, _out: Any, options: Any
    ) -> NDArray[Any] | None:
        """Return the array of a gather along axis 0, or None for any other gather."""
        *numbers, algorithm = options  # the axis is the last number
        is_plain = algorithm is None and all(type(one) is int for one in numbers)
        array = plain_array(x) if is_plain else None
        if array is None or numbers[-1] not in (0, -max(1, array.ndim)):
            return None
        return array if array.ndim else array.reshape(1)

    def __init__(  # noqa: PLR0913  (the arguments of two public calls)
        self,
        communicator: Communicator,
        x: Any,
        out: Any = None,
        axis: int = 0,
        algorithm: str | None = None,
        *,
        keep: bool = False,
        name: str = "all_gather",
        root: int | None = None,
    ) -> None:
        self._name, self._algorithm = name, algorithm
        self._root = root = None if root is None else checked_root(root, communicator)
        structure, arrays, self._axes, kinds = _along_axis(x, axis, out)
        size, rank = communicator.size, communicator.member_rank
        self._gets = root in (None, rank)
        if keep:
            arrays = [array.copy() for array in arrays]
        self._structure, self._like = structure, None  # of a pytree
        spec = CollectiveSpec(
            name,
            root=-1 if root is None else root,
            algorithm=algorithm,
            structure=structure,
            options=(int(axis),),
            is_uniform=False,
            shown=(kinds, f"axis {axis}", *([] if root is None else [f"root {root}"])),
        )
        layout = None
        if structure is not None:
            self._like = private_copy(structure, x) if keep else x
        else:
            array = arrays[0]
            spec = spec._replace(dtype=kinds, shape=array.shape, elements=array.size)
            if moves(communicator, "all_gather" if root is None else "gather", algorithm):
                layout = gathered_layout(array, self._axes[0], size, rank, root)
        super().__init__(communicator, spec, layout, arrays, out)

    def blocks_of(self, parts: list[NDArray[Any]], out: Any) -> Blocks:
        """Return the arrays of a gather along axis 0."""
        return gathered_blocks(parts[0], out, self.size, self.rank, self._root)

    def arrange(self) -> Blocks:
        """Return the arrays of this call."""
        axis = self._axes[0]
        moved = np.moveaxis(self.inputs[0], axis, 0)
        return self.blocks_of([moved], self.out if axis == 0 else None)

    def finish(self, output: NDArray[Any]) -> Any:
        """Return the concatenation along the axis, None on a rank that is not the root."""
        if not self._gets:
            return None
        return deliver(_turned(output, self._axes[0]), self.out)

    def slow_path(self) -> Generator[Stage, None, Any]:
        """Yield the stages for lengths that may differ, array by array."""
        results = []
        for array, axis in zip(self.inputs, self._axes, strict=True):
            output = yield from self._gathered(array, axis)
            results.append(output)
        if not self._gets:
            return None
        if self._structure is None:
            return deliver(results[0], self.out)
        return unflatten(self._structure, results, self._like)

    def _gathered(self, array: NDArray[Any], axis: int) -> Generator[Stage, None, NDArray[Any]]:
        """Concatenate arrays on the root, or on every rank if there is none."""
        communicator = self.communicator
        records = yield from exchange(communicator, array_record(array))
        same = [
            (one.kind, one.dtype, len(one.shape), one.shape[:axis], one.shape[axis + 1 :])
            for one in records
        ]
        text = f"{self._name}: only lengths along axis {axis} may differ"
        require_same(communicator, text, same, records)
        moved = np.ascontiguousarray(np.moveaxis(array, axis, 0))
        lengths = [record.shape[axis] for record in records]
        row = prod(moved.shape[1:])
        counts = tuple(length * row for length in lengths)
        mine = moved.reshape(-1)
        flat = yield from gather_flat(communicator, mine, counts, self._root, self._algorithm)
        return _turned(flat.reshape((sum(lengths), *moved.shape[1:])), axis)


def _along_axis(
    x: Any, axis: Any, out: Any
) -> tuple[TreeDef | None, list[NDArray[Any]], list[int], str]:
    """Check the input; return its tree (None for one array), arrays, axis of each, and text."""
    axis = checked_integer("axis", axis)
    structure, found = arrays_in(x, out)
    arrays = [np.atleast_1d(array) for array in found]
    axes = []
    for array in arrays:
        if not -array.ndim <= axis < array.ndim:
            raise ConfigError(f"axis {axis} is outside an array of {array.ndim} dimensions")
        array_record(array)  # raises for too many dimensions, even if no record is sent
        axes.append(axis % array.ndim)
    holder = "" if structure is None else f" in {describe(structure)}"
    kinds = (arrays[0].dtype.name if arrays else "") + holder
    return structure, arrays, axes, kinds


def _turned(whole: NDArray[Any], axis: int) -> NDArray[Any]:
    """Return the concatenation along `axis` of one along axis 0."""
    return whole if axis == 0 else np.ascontiguousarray(np.moveaxis(whole, 0, axis))


def other_ranks(size: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Return (peer, 0) for all other ranks, from the next one on."""
    return tuple(((rank + distance) % size, 0) for distance in range(1, size))


def gathered_layout(
    array: NDArray[Any], axis: int, size: int, rank: int, root: int | None = None
) -> TransferLayout:
    """Return the layout of a call in which the arrays of all ranks have this shape and dtype."""
    shape = array.shape if axis == 0 else np.moveaxis(array, axis, 0).shape
    takes = other_ranks(size, rank) if root in (None, rank) else ()
    dtype, most, detail = array.dtype, size - 1, detail_of(array.dtype, array.shape, axis)
    return TransferLayout(detail, dtype, shape, 1, takes, most_takes=most)


def gathered_blocks(
    array: NDArray[Any], out: Any, size: int, rank: int, root: int | None = None
) -> Blocks:
    """Return the arrays of such a call; a root publishes nothing, the other ranks get nothing."""
    outgoing = () if rank == root else (array,)
    if root not in (None, rank):
        return Blocks(NO_RESULT, outgoing)
    shape = (size * array.shape[0], *array.shape[1:])
    output = result_buffer(out, shape, array.dtype, array)
    parts = even_parts(output, size)
    return Blocks(output, outgoing, (*parts[rank + 1 :], *parts[:rank]), array, parts[rank])


@native_dispatch(second="root", usual=0, positions=2)
def gather(  # noqa: PLR0913  (public signature)
    x: Any,
    root: int = 0,
    *,
    axis: int = 0,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Concatenate the arrays of all ranks, in rank order, on the root.

    Args:
        x: Array or pytree as for `all_gather`: lengths along `axis` may differ and may be 0.
        root: Rank of the group that gets the result.
        axis: Axis along which to concatenate; may be negative.
        out: On the root, an array of the result's shape and dtype to write to. Not for pytrees.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        On the root the concatenation (or the same pytree of concatenations), None on the other
        ranks.

    Raises:
        MismatchError: The arrays of the ranks do not fit together.
        ConfigError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory, with one shape on all ranks, one direct copy of each block. Else a
        header round of small frames, then each block once to the root.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.gather(np.arange(3))
        array([0, 1, 2])
    """
    options = (root, axis, algorithm)
    return make_call(gather, _GatherCall, x, out, group, async_op, timeout, _foreign, options)


class _GatherCall(AllGatherCall):
    """A gather to `root`; `keep` copies the input."""

    def __init__(
        self, communicator: Communicator, x: Any, out: Any, root: int, *options: Any, keep: bool
    ) -> None:
        super().__init__(communicator, x, out, *options, keep=keep, name="gather", root=root)


register(
    Collective(
        (all_gather,), CollectiveKind.MOVE, gives="an array; lengths may differ",
        gets="all ranks' arrays, joined in rank order",
        cost="one direct copy of each block; over links n-1 rounds, (n-1)/n of the result sent",
        wanted=lambda case: np.concatenate(case.parts()), layout="blocks",
    ),
    Collective(
        (gather,), CollectiveKind.MOVE, gives="an array; lengths may differ",
        gets="root: all ranks' arrays, joined in rank order; others: None",
        cost="one direct copy of each block; over links each block once to the root",
        wanted=lambda case: case.at_root(np.concatenate(case.parts())), layout="blocks",
    ),
)  # fmt: skip
