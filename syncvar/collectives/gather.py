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
    TransferArgs,
    detail_of,
    fits_out,
    moves,
    result_buffer,
)
from syncvar.core.array_arguments import checked_integer, deliver
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
    rest = (axis, algorithm)
    return make_call(
        all_gather, _form, checked_gather, x, out, group, async_op, timeout, _foreign, rest
    )


def _form(
    _communicator: Communicator, x: Any, _out: Any, rest: tuple[Any, ...]
) -> NDArray[Any] | None:
    """Return the array of a gather along axis 0, or None for any other gather."""
    *numbers, algorithm = rest  # the axis is the last number
    is_plain = algorithm is None and all(type(one) is int for one in numbers)
    array = plain_array(x) if is_plain else None
    if array is None or numbers[-1] not in (0, -max(1, array.ndim)):
        return None
    return array if array.ndim else array.reshape(1)


def checked_gather(  # noqa: PLR0913  (the arguments of two public calls)
    communicator: Communicator,
    x: Any,
    out: Any = None,
    axis: int = 0,
    algorithm: str | None = None,
    *,
    keep: bool = False,
    name: str = "all_gather",
    root: int | None = None,
) -> TransferArgs:
    """Check the arguments of an all-gather, or of a gather to `root`; `keep` copies the input."""
    target = None if root is None else checked_root(root, communicator)
    structure, arrays, axes, kinds = _along_axis(x, axis, out)
    size, rank, like = communicator.size, communicator.member_rank, x
    gets = target in (None, rank)
    if keep:
        arrays, like = [array.copy() for array in arrays], private_copy(structure, x)

    def finish(output: NDArray[Any]) -> Any:
        return deliver(output if axes[0] == 0 else _turned(output, axes[0]), out) if gets else None

    def general() -> Generator[Stage, None, Any]:
        results = []
        for array, place in zip(arrays, axes, strict=True):
            output = yield from _gathered(communicator, array, place, name, target, algorithm)
            results.append(output)
        if not gets:
            return None
        if structure is None:
            return deliver(results[0], out)
        return unflatten(structure, results, like)

    collective = "all_gather" if target is None else "gather"
    spec = CollectiveSpec(
        name,
        root=-1 if target is None else target,
        algorithm=algorithm,
        structure=structure,
        options=(int(axis),),
        is_uniform=False,
        shown=(kinds, f"axis {axis}", *([] if target is None else [f"root {target}"])),
    )
    if structure is None:
        array = arrays[0]
        spec = spec._replace(dtype=kinds, shape=array.shape, elements=array.size)
    is_moved = structure is None and moves(communicator, collective, algorithm)
    return TransferArgs(
        spec,
        gathered_layout(arrays[0], axes[0], size, rank, target) if is_moved else None,
        arrange=lambda: gathered_blocks(
            np.moveaxis(arrays[0], axes[0], 0), out if axes[0] == 0 else None, size, rank, target
        ),
        finish=finish,
        general=general,
        front=lambda x, out: fits_out(gathered_blocks(x, out, size, rank, target), out),
    )


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


def _gathered(
    communicator: Communicator,
    array: NDArray[Any],
    axis: int,
    name: str,
    root: int | None,
    algorithm: str | None = None,
) -> Generator[Stage, None, NDArray[Any]]:
    """Concatenate arrays on `root`, or on every rank if `root` is None."""
    records = yield from exchange(communicator, array_record(array))
    same = [
        (one.kind, one.dtype, len(one.shape), one.shape[:axis], one.shape[axis + 1 :])
        for one in records
    ]
    require_same(communicator, f"{name}: only lengths along axis {axis} may differ", same, records)
    moved = np.ascontiguousarray(np.moveaxis(array, axis, 0))
    lengths = [record.shape[axis] for record in records]
    row = prod(moved.shape[1:])
    counts = tuple(length * row for length in lengths)
    flat = yield from gather_flat(communicator, moved.reshape(-1), counts, root, algorithm)
    whole = flat.reshape((sum(lengths), *moved.shape[1:]))
    return whole if axis == 0 else _turned(whole, axis)


def _turned(whole: NDArray[Any], axis: int) -> NDArray[Any]:
    return np.ascontiguousarray(np.moveaxis(whole, 0, axis))


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
    rows = array.shape[0]
    output = result_buffer(out, (size * rows, *array.shape[1:]), array.dtype, array)
    parts = [output[rows * peer : rows * (peer + 1)] for peer in range(size)]
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
    rest = (root, axis, algorithm)
    return make_call(
        gather, _form, _checked_rooted, x, out, group, async_op, timeout, _foreign, rest
    )


def _checked_rooted(
    communicator: Communicator, x: Any, out: Any, root: int, *rest: Any, keep: bool
) -> TransferArgs:
    return checked_gather(communicator, x, out, *rest, keep=keep, name="gather", root=root)


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
