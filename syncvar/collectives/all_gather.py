"""All-gather: every rank ends with the values of all ranks, in rank order."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives._arguments import (
    Structure,
    arrays_of,
    as_array,
    describe,
    flatten,
    fresh,
    is_structure,
    unflatten,
)
from syncvar.collectives._headers import array_record, exchange, require_same
from syncvar.collectives._kinds import in_kind, is_foreign
from syncvar.collectives._moving import call_prepared, detail_of, fitting, landed, landing, moved, moves
from syncvar.collectives._preparing import plain_array
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request, fingerprint
from syncvar.engine.operation import Stage
from syncvar.engine.timeouts import is_seconds
from syncvar.errors import ConfigError
from syncvar.execution.moves import Blocks, Layout
from syncvar.joining.context import entered_natively
from syncvar.loading import unexpected

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator

__all__ = ["all_gather", "along_axis", "gather_flat", "gather_request", "gathered"]


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
        blocks: one in, one out); without leave to read the other ranks' memory one in and one out, in windows. Else a header round of ceil(log2 n) small frames, then n-1 rounds in which each rank sends (n-1)/n of the result.
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
    is_plain = type(axis) is int and algorithm is None and not async_op and (timeout is None or is_seconds(timeout))
    array = plain_array(x) if is_plain else None
    if array is not None and not array.ndim:
        array = array.reshape(1)
    if array is not None and axis in (0, -array.ndim):
        public = all_gather if group is None else None
        key = ("all_gather", axis, array.dtype, array.shape)
        result = call_prepared(communicator, key, array, out, timeout, _prepare, axis, public=public)
        if result is not None:
            return result
    if is_foreign(x, out):
        call = partial(
            all_gather, axis=axis, group=group, async_op=async_op, timeout=timeout, algorithm=algorithm
        )
        return in_kind(call, x, out)
    return communicator.perform(
        "all_gather",
        partial(gather_request, communicator, x, axis, out, algorithm=algorithm, keep=async_op),
        timeout,
        async_op=async_op,
    )


if not TYPE_CHECKING:
    all_gather = entered_natively(all_gather, second="axis", usual=0)


def _prepare(communicator: Communicator, x: NDArray[Any], axis: int) -> Any:
    size, rank = communicator.size, communicator.member_rank
    return (
        gather_request(communicator, x, axis),
        _layout(x, 0, size, rank),
        lambda x, out: fitting(_blocks(x, out, size, rank), out),
        lambda x, out: gather_request(communicator, x, axis, out, is_moved=False).body,
    )


def gather_request(
    communicator: Communicator,
    x: Any,
    axis: int,
    out: Any = None,
    name: str = "all_gather",
    algorithm: str | None = None,
    is_moved: bool | None = None,
    keep: bool = False,
) -> Request:
    """Check the arguments of an all-gather and return the request.

    Args:
        communicator: The group.
        x: What this rank brings.
        axis: Where to concatenate.
        out: As the caller gave it.
        name: What is compared, and told.
        algorithm: Forced, or None.
        is_moved: False where the ranks have found that they do not bring the same; None lets the group decide.
        keep: Take copies of the arrays now: the caller may change them before the call ends.
    """
    structure, arrays, axes, kinds = along_axis(x, axis, out)
    like = x
    if keep:
        arrays, like = [array.copy() for array in arrays], fresh(structure, x)
    if is_moved is None:
        is_moved = structure is None and moves(communicator, "all_gather", algorithm)

    def body() -> Generator[Stage, None, Any]:
        if is_moved:
            size, rank, array, place = communicator.size, communicator.member_rank, arrays[0], axes[0]
            blocks = _blocks(np.moveaxis(array, place, 0), out if place == 0 else None, size, rank)
            if (yield from moved(_layout(array, place, size, rank), blocks)):
                return landed(blocks.made if place == 0 else _turned(blocks.made, place), out)
        results = []
        for array, place in zip(arrays, axes, strict=True):
            results.append((yield from gathered(communicator, array, place, name, None, algorithm)))
        if structure is not None:
            return unflatten(structure, results, like)
        return landed(results[0], out)

    return Request(f"{name}({kinds}, axis {axis})", fingerprint(name, int(axis), structure, algorithm), body())


def along_axis(x: Any, axis: Any, out: Any) -> tuple[Structure | None, list[NDArray[Any]], list[int], str]:
    """Check what is to be concatenated.

    Returns:
        (structure or None, its arrays, the axis of each, the arrays in words).
    """
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise ConfigError(f"axis must be an integer, not {axis!r}")
    structure, leaves = flatten(x) if is_structure(x) else (None, [x])
    if structure is not None and out is not None:
        raise ConfigError("out cannot be given with a structure")
    found = [as_array(x)] if structure is None else arrays_of(x, leaves)
    arrays = [np.atleast_1d(array) for array in found]
    axes = []
    for array in arrays:
        if not -array.ndim <= axis < array.ndim:
            raise ConfigError(f"axis {axis} is outside an array of {array.ndim} dimensions")
        array_record(array)  # refuses too many dimensions, also where no record travels
        axes.append(int(axis) % array.ndim)
    kinds = (arrays[0].dtype.name if arrays else "") + ("" if structure is None else f" in {describe(structure)}")
    return structure, arrays, axes, kinds


def gathered(
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


def _layout(array: NDArray[Any], axis: int, size: int, rank: int) -> Layout:
    """Return how arrays are moved where all ranks bring one of this shape and dtype."""
    shape = array.shape if axis == 0 else np.moveaxis(array, axis, 0).shape
    takes = tuple(((rank + distance) % size, 0) for distance in range(1, size))
    return Layout(detail_of(array.dtype, array.shape, axis), array.dtype, shape, 1, takes)


def _blocks(array: NDArray[Any], out: Any, size: int, rank: int) -> Blocks:
    rows = array.shape[0]
    made = landing(out, (size * rows, *array.shape[1:]), array.dtype, array)
    parts = [made[start : start + rows] for start in range(0, size * rows, rows)] if rows else [made] * size
    return Blocks(made, (array,), (*parts[rank + 1 :], *parts[:rank]), array, parts[rank])


def gather_flat(
    communicator: Communicator,
    mine: NDArray[Any],
    counts: tuple[int, ...],
    root: int | None = None,
    algorithm: str | None = None,
) -> Generator[Stage, None, NDArray[Any]]:
    """Gather flat blocks whose counts are known on all ranks; returns the concatenation (on the root, if there is one)."""
    work = np.empty(sum(counts), mine.dtype)
    rank = communicator.member_rank
    start = list(accumulate(counts, initial=0))[rank]
    work[start : start + counts[rank]] = mine
    collective = "all_gather" if root is None else "gather"
    plan = communicator.plan(collective, counts, work.itemsize, root=root or 0, algorithm=algorithm)
    yield Stage(plan, work)
    return work
