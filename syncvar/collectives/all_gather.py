"""All-gather: every rank ends with the values of all ranks, in rank order."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives._arguments import (
    Structure,
    arrays_in,
    checked_integer,
    checked_root,
    deliver,
    describe,
    fresh,
    unflatten,
)
from syncvar.collectives._headers import array_record, exchange, require_same
from syncvar.collectives._kinds import call_generally
from syncvar.collectives._moving import call_prepared, detail_of, fits_out, moved, moves, result_buffer
from syncvar.collectives._preparing import plain_array
from syncvar.collectives.flat import gather_flat
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request, fingerprint
from syncvar.engine.timeouts import is_seconds
from syncvar.errors import ConfigError
from syncvar.execution.moves import NOTHING, Blocks, Layout
from syncvar.joining.process import entered_natively
from syncvar.loading import unexpected

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator
    from syncvar.engine.operation import Stage

__all__ = ["all_gather", "gather_prepared", "gather_request", "gathered_blocks", "gathered_layout"]


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
        x: Array, or a nested dict/list/tuple of arrays. Lengths along `axis` may differ between ranks and may be 0;
            all else must be the same. A 0-d array counts as length 1, so that the result has shape (N,).
        axis: Where to concatenate; may be negative.
        out: Array of the result's shape and dtype to write to; not for structures.
        group: Ranks that take part; None means the world.
        async_op: Return a `Work` at once. The value of `x` is taken when the call is made.
        timeout: Seconds; None means the job's default.
        algorithm: Force one of `syncvar plan all_gather`; the same on every rank.

    Returns:
        The concatenation, or the same structure of concatenations.

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError.
        MismatchError: The ranks' arrays do not fit together, or they do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: where the ranks share memory and bring one shape, one copy of each block where it lies (small
        blocks: one in, one out); with the C kernel below 4 MiB, and without leave to read the other ranks' memory, one in and one out, cell by cell. Else a header round of ceil(log2 n) small frames, then n-1 rounds in which each rank sends (n-1)/n of the result.
    Order: nothing is combined; the bytes are equal on every rank.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.all_gather(np.arange(3))
        array([0, 1, 2])
        >>> sv.all_gather(7.0).shape
        (1,)
    """
    if _foreign:
        raise unexpected(all_gather, _foreign)
    communicator = communicator_of(group)
    if algorithm is None and not async_op:
        result = gather_prepared(communicator, x, out, timeout, axis, public=all_gather)
        if result is not None:
            return result
    return call_generally(
        all_gather, communicator, gather_request, x, out, group=group, timeout=timeout, async_op=async_op, axis=axis, algorithm=algorithm
    )


if not TYPE_CHECKING:
    all_gather = entered_natively(all_gather, second="axis", usual=0)


def gather_prepared(
    communicator: Communicator, x: Any, out: Any, timeout: float | None, axis: int, root: int | None = None, *, public: Any = None
) -> Any:
    """Make a plain gather by its prepared way; None where nothing has been done.

    Args:
        communicator: The group.
        x: What this rank brings.
        out: As the caller gave it.
        timeout: As the caller gave it.
        axis: Where to concatenate.
        root: Who gets the result, None for everybody; elsewhere the result is an array without elements.
        public: The public function that is called with `root`, or with `axis` where there is no root, beside `x` for the world; or None.
    """
    if type(axis) is not int or not (root is None or type(root) is int) or not (timeout is None or is_seconds(timeout)):
        return None
    array = plain_array(x)
    if array is not None and not array.ndim:
        array = array.reshape(1)
    if array is None or axis not in (0, -array.ndim):
        return None
    if root is None:
        key = ("all_gather", axis, array.dtype, array.shape)
        return call_prepared(communicator, key, array, out, timeout, _prepare, axis, public=public)
    rooted = ("gather", axis, root, array.dtype, array.shape)
    return call_prepared(communicator, rooted, array, out, timeout, _prepare, root, axis, public=None if axis else public)


def _prepare(communicator: Communicator, x: NDArray[Any], *how: int) -> Any:
    """Prepare gathers of (axis), or of (root, axis)."""
    axis, root = how[-1], None if len(how) == 1 else how[0]
    size, rank, name = communicator.size, communicator.member_rank, "all_gather" if root is None else "gather"

    def front(x: NDArray[Any], out: Any) -> Blocks | None:
        blocks = gathered_blocks(x, out, size, rank, root)
        return fits_out(blocks, out) if root in (None, rank) else blocks

    return (
        gather_request(communicator, x, axis, name=name, root=root),
        gathered_layout(x, 0, size, rank, root),
        front,
        lambda x, out: gather_request(communicator, x, axis, out, name, root=root, is_moved=False).body,
    )


def gather_request(
    communicator: Communicator,
    x: Any,
    axis: int,
    out: Any = None,
    name: str = "all_gather",
    algorithm: str | None = None,
    root: int | None = None,
    is_moved: bool | None = None,
    keep: bool = False,
) -> Request:
    """Check the arguments of an all-gather, or of a gather to a root, and return the request.

    `is_moved` is False where the ranks have found that they do not bring the same; None lets the group decide.
    """
    target = None if root is None else checked_root(root, communicator)
    structure, arrays, axes, kinds = _along_axis(x, axis, out)
    size, rank, like = communicator.size, communicator.member_rank, x
    gets = target in (None, rank)
    if keep:
        arrays, like = [array.copy() for array in arrays], fresh(structure, x)
    if is_moved is None:
        is_moved = structure is None and moves(communicator, "all_gather" if target is None else "gather", algorithm)

    def body() -> Generator[Stage, None, Any]:
        if is_moved:
            array, place = arrays[0], axes[0]
            blocks = gathered_blocks(np.moveaxis(array, place, 0), out if place == 0 else None, size, rank, target)
            if (yield from moved(gathered_layout(array, place, size, rank, target), blocks)):
                return deliver(blocks.made if place == 0 else _turned(blocks.made, place), out) if gets else None
        results = []
        for array, place in zip(arrays, axes, strict=True):
            results.append((yield from _gathered(communicator, array, place, name, target, algorithm)))
        if not gets:
            return None
        if structure is not None:
            return unflatten(structure, results, like)
        return deliver(results[0], out)

    shown, rooted = ("", ()) if target is None else (f", root {target}", (target,))
    return Request(f"{name}({kinds}, axis {axis}{shown})", fingerprint(name, int(axis), *rooted, structure, algorithm), body())


def _along_axis(x: Any, axis: Any, out: Any) -> tuple[Structure | None, list[NDArray[Any]], list[int], str]:
    """Check what is to be concatenated.

    Returns:
        (structure or None, its arrays, the axis of each, the arrays in words).
    """
    axis = checked_integer("axis", axis)
    structure, found = arrays_in(x, out)
    arrays = [np.atleast_1d(array) for array in found]
    axes = []
    for array in arrays:
        if not -array.ndim <= axis < array.ndim:
            raise ConfigError(f"axis {axis} is outside an array of {array.ndim} dimensions")
        array_record(array)  # refuses too many dimensions, also where no record travels
        axes.append(axis % array.ndim)
    kinds = (arrays[0].dtype.name if arrays else "") + ("" if structure is None else f" in {describe(structure)}")
    return structure, arrays, axes, kinds


def _gathered(
    communicator: Communicator, array: NDArray[Any], axis: int, name: str, root: int | None, algorithm: str | None = None
) -> Generator[Stage, None, NDArray[Any]]:
    """Concatenate arrays of all ranks on the root, or on every rank (None)."""
    records = yield from exchange(communicator, array_record(array))
    same = [
        (record.kind, record.dtype, len(record.shape), record.shape[:axis], record.shape[axis + 1 :]) for record in records
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


def gathered_layout(array: NDArray[Any], axis: int, size: int, rank: int, root: int | None = None) -> Layout:
    """Return how arrays are moved where all ranks bring one of this shape and dtype."""
    shape = array.shape if axis == 0 else np.moveaxis(array, axis, 0).shape
    takes = tuple(((rank + distance) % size, 0) for distance in range(1, size)) if root in (None, rank) else ()
    return Layout(detail_of(array.dtype, array.shape, axis), array.dtype, shape, 1, takes, most_takes=size - 1)


def gathered_blocks(array: NDArray[Any], out: Any, size: int, rank: int, root: int | None = None) -> Blocks:
    """Return the arrays of a call in which all ranks bring such an array as this one; a root brings nothing for others, who get nothing."""
    outgoing = () if rank == root else (array,)
    if root not in (None, rank):
        return Blocks(NOTHING, outgoing)
    rows = array.shape[0]
    made = result_buffer(out, (size * rows, *array.shape[1:]), array.dtype, array)
    parts = [made[start : start + rows] for start in range(0, size * rows, rows)] if rows else [made] * size
    return Blocks(made, outgoing, (*parts[rank + 1 :], *parts[:rank]), array, parts[rank])
