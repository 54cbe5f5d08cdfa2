"""All-to-all: each rank gives every rank a part of its own, and gets one from each."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives._arguments import deliver
from syncvar.collectives._kinds import call_generally
from syncvar.collectives._moving import UNMOVED, call_prepared, detail_of, moved, moves, place_of
from syncvar.collectives.flat import gather_bytes
from syncvar.collectives.groups import by_rank, communicator_of
from syncvar.collectives.scatter import cut
from syncvar.engine.group import Request, fingerprint
from syncvar.engine.operation import Stage
from syncvar.engine.timeouts import is_seconds
from syncvar.errors import ConfigError, MismatchError
from syncvar.execution.moves import Blocks, Layout
from syncvar.joining.process import entered_natively
from syncvar.loading import unexpected
from syncvar.plans import even_chunks
from syncvar.wire import DTYPE_NAMES, Untaken, dtype_index, pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator

__all__ = ["all_to_all"]


def all_to_all(
    parts: Any,
    *,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Give part d to rank d, and get from each rank the part it has for this one.

    Args:
        parts: A list of one array for each rank, of one dtype (the same on every rank) and any shapes; or one array, which
            is cut along axis 0, first parts longer.
        out: List of arrays of the results' shapes and dtype to write to, one for each rank, or one array to be cut along
            axis 0. They may not overlap `parts`.
        group: Ranks that take part; None means the world.
        async_op: Return a `Work` at once. The parts are taken when the call is made.
        timeout: Seconds; None means the job's default.
        algorithm: Force one of `syncvar plan all_to_all`; the same on every rank.

    Returns:
        A list of arrays, one from each rank, in rank order, in the shapes in which they were given; those of `out`, if
        it is given.

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError and the group stays usable.
        MismatchError: The dtypes differ, or the ranks do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: where the ranks share memory and all parts have one shape, one copy of each part where it lies
        (small parts: one in, one out); with the C kernel below 4 MiB, and without leave to read the other ranks' memory, one in and one out, cell by cell. Else an
        exchange of the shapes, then n-1 rounds over links, one in shared memory.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.all_to_all([np.arange(3)])
        [array([0, 1, 2])]
    """
    if _foreign:
        raise unexpected(all_to_all, _foreign)
    communicator = communicator_of(group)
    is_plain = type(parts) is np.ndarray and algorithm is None and not async_op and (timeout is None or is_seconds(timeout))
    if is_plain and parts.ndim and parts.shape[0] % communicator.size == 0:
        result = call_prepared(communicator, ("all_to_all", None, parts.dtype, parts.shape), parts, out, timeout, _prepare, None, public=all_to_all)
        if result is not None:
            return result
    return call_generally(all_to_all, communicator, _request, parts, out, group=group, timeout=timeout, async_op=async_op, algorithm=algorithm)


if not TYPE_CHECKING:
    all_to_all = entered_natively(all_to_all, takes_numbers=False)


def _prepare(communicator: Communicator, parts: NDArray[Any], _how: None) -> Any:
    size, rank = communicator.size, communicator.member_rank
    rows = parts.shape[0] // size
    shape = (rows, *parts.shape[1:])
    cuts = [slice(start * rows, (start + 1) * rows) for start in range(size)]

    def front(x: NDArray[Any], out: Any) -> Blocks | None:
        mine = [x[cut] for cut in cuts]
        made = np.empty(x.shape, x.dtype) if out is None else out
        is_like_x = type(made) is np.ndarray and made.shape == x.shape and made.dtype == x.dtype and made.flags.carray
        if is_like_x and not np.may_share_memory(made, x):
            return _sides(mine, [made[cut] for cut in cuts], rank)._replace(made=made, parts=size)
        return _blocks(mine, shape, _checked_outs(out, communicator, mine), rank)

    return (
        _request(communicator, parts, None, None, keep=False),
        _layout(parts.dtype, shape, size, rank),
        front,
        lambda x, out: _request(communicator, x, out, None, keep=False, is_moved=False).body,
    )


def _request(
    communicator: Communicator,
    parts: Any,
    out: Any,
    algorithm: str | None,
    *,
    keep: bool,
    is_moved: bool | None = None,
) -> Request:
    """Check the arguments and return the request; `keep` takes copies of the parts now."""
    mine = cut(parts, communicator, "all_to_all")
    if out is not None:
        out = _checked_outs(out, communicator, mine)
    if keep:
        mine = [part.copy() for part in mine]
    packed = pack_object([dtype_index(mine[0].dtype), [list(part.shape) for part in mine]])
    if is_moved is None:
        is_moved = moves(communicator, "all_to_all", algorithm)

    def body() -> Generator[Stage, None, list[NDArray[Any]]]:
        if is_moved:
            layout, blocks = UNMOVED
            shape = mine[0].shape
            if all(part.shape == shape for part in mine):
                found = _blocks(mine, shape, out, communicator.member_rank)
                if found is not None:
                    layout, blocks = _layout(mine[0].dtype, shape, communicator.size, communicator.member_rank), found
            if (yield from moved(layout, blocks)):
                return _for_each(communicator, list(blocks.made))
        told = [unpack_object(data) for data in (yield from gather_bytes(communicator, packed))]
        if any(index != told[0][0] for index, _ in told):
            table = {communicator.members[rank]: f"brings {DTYPE_NAMES[index]}" for rank, (index, _) in enumerate(told)}
            raise MismatchError("all_to_all: the parts must have one dtype on all ranks", table)
        made = yield from _exchanged(communicator, mine, [shapes for _, shapes in told], algorithm)
        if out is not None:
            made = [deliver(one, target) for one, target in zip(made, out, strict=True)]
        return _for_each(communicator, made)

    what = f"all_to_all({mine[0].dtype.name}, {sum(part.nbytes for part in mine)} bytes)"
    return Request(what, fingerprint("all_to_all", algorithm), body())


def _for_each(communicator: Communicator, made: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return one array for each rank; from ranks that have left a block of sv.uneven one without elements."""
    return by_rank(communicator, made, np.empty((0, *made[0].shape[1:]), made[0].dtype))


def _checked_outs(out: Any, communicator: Communicator, mine: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return one array to write to for each rank that takes part.

    Raises:
        ConfigError: There are not as many, or they overlap the parts.
    """
    if type(out) is Untaken:
        raise ConfigError(f"out {out.reason}")
    size = len(communicator.whole)
    if isinstance(out, np.ndarray) and out.ndim:
        outs = [out[chunk.start : chunk.stop] for chunk in even_chunks(out.shape[0], len(mine))]
    elif isinstance(out, list | tuple) and len(out) == size and all(isinstance(one, np.ndarray) for one in out):
        outs = [out[rank] for rank in communicator.present]
    else:
        raise ConfigError(f"out must be a list of {size} arrays, or one array to be cut along axis 0")
    for one in outs:
        if any(np.may_share_memory(one, part) for part in mine):
            raise ConfigError("out overlaps the parts that are given: pass another array, or leave it out")
    return outs


def _layout(dtype: np.dtype[Any], shape: tuple[int, ...], size: int, rank: int) -> Layout:
    """Return how parts are moved where those of all ranks have this shape and dtype."""
    takes = tuple((peer, place_of(peer, rank)) for peer in ((rank + distance) % size for distance in range(1, size)))
    return Layout(detail_of(dtype, shape), dtype, shape, size - 1, takes, most_takes=size - 1)


def _blocks(mine: list[NDArray[Any]], shape: tuple[int, ...], outs: list[NDArray[Any]] | None, rank: int) -> Blocks | None:
    """Return the arrays of a call whose parts all have one shape; None where they cannot be written to piece by piece."""
    size, dtype = len(mine), mine[0].dtype
    if outs is None:
        made = list(np.empty((size, *shape), dtype)) if shape else [np.empty((), dtype) for _ in mine]
    else:
        made = outs
        if any(one.shape != shape or one.dtype != dtype or not one.flags.carray for one in made):
            return None
    return _sides(mine, made, rank)


def _sides(mine: list[NDArray[Any]], made: list[NDArray[Any]], rank: int) -> Blocks:
    targets = (*made[rank + 1 :], *made[:rank])
    return Blocks(made, (*mine[:rank], *mine[rank + 1 :]), targets, mine[rank], made[rank])


def _exchanged(
    communicator: Communicator, mine: list[NDArray[Any]], shapes: list[list[list[int]]], algorithm: str | None
) -> Generator[Stage, None, list[NDArray[Any]]]:
    size, rank = communicator.size, communicator.member_rank
    matrix = tuple(tuple(prod(shape) for shape in row) for row in shapes)
    sent, received = matrix[rank], tuple(row[rank] for row in matrix)
    work = np.empty(sum(sent) + sum(received), mine[0].dtype)
    start = 0
    for part in mine:
        work[start : start + part.size] = part.reshape(-1)
        start += part.size
    yield Stage(communicator.plan("all_to_all", matrix, work.itemsize, algorithm=algorithm), work)
    results = []
    for source in range(size):
        stop = start + received[source]
        results.append(work[start:stop].reshape(shapes[source][rank]).copy())
        start = stop
    return results
