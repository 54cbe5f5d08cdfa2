"""Scatter: each rank ends with its part of the root's value."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives._arguments import as_array, checked_root, deliver
from syncvar.collectives._kinds import call_generally
from syncvar.collectives._moving import (
    UNMOVED,
    call_prepared,
    detail_of,
    fits_out,
    moved,
    moves,
    place_of,
    result_buffer,
)
from syncvar.collectives.flat import broadcast_bytes, scatter_flat
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request, fingerprint
from syncvar.engine.timeouts import is_seconds
from syncvar.errors import ConfigError
from syncvar.execution.moves import Blocks, Layout
from syncvar.joining.process import entered_natively
from syncvar.loading import unexpected
from syncvar.plans import even_chunks
from syncvar.wire import dtype_from_index, dtype_index, pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator
    from syncvar.engine.operation import Stage

__all__ = ["cut", "scatter"]


def scatter(
    x: Any = None,
    *,
    root: int = 0,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Give each rank its part of what the root brings.

    Args:
        x: On the root a list of one array for each rank, of one dtype and any shapes; or one array, which is cut along
            axis 0, first parts longer. What other ranks pass is not looked at.
        root: Rank of the group that brings it.
        out: Array of the part's shape and dtype to write to.
        group: Ranks that take part; None means the world.
        async_op: Return a `Work` at once. The root's value is taken when the call is made.
        timeout: Seconds; None means the job's default.
        algorithm: Force one of `syncvar plan scatter`; the same on every rank.

    Returns:
        A new array: this rank's part.

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError.
        MismatchError: The ranks do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: where the ranks share memory, all parts have one shape, and the others pass `out` or got a part of that shape the last time,
        one copy of each part where it lies (small parts: one in, one out). Else a broadcast of the shapes, then each part once.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.scatter([np.arange(3)])
        array([0, 1, 2])
    """
    if _foreign:
        raise unexpected(scatter, _foreign)
    communicator = communicator_of(group)
    if type(root) is int and algorithm is None and not async_op and (timeout is None or is_seconds(timeout)):
        like = _likely(communicator, x, root, out)
        if like is not None:
            key = ("scatter", root, like.dtype, like.shape)
            result = call_prepared(communicator, key, like, out, timeout, _prepare, root, public=scatter)
            if result is not None:
                return result
    return call_generally(
        scatter, communicator, _request, x, out, group=group, timeout=timeout, async_op=async_op, root=root, algorithm=algorithm
    )


if not TYPE_CHECKING:
    scatter = entered_natively(scatter, second="root", usual=0)


def _likely(communicator: Communicator, x: Any, root: int, out: Any) -> NDArray[Any] | None:
    """Return the array of a plain call: what the root brings; elsewhere `out`, or one like the part that came last. None for any other.

    Only the root knows what it brings. The others say what they look for, and where that is something else the shapes are told.
    """
    if communicator.rank == root:
        return x if type(x) is np.ndarray and x.ndim and x.shape[0] % communicator.size == 0 else None
    if x is not None and type(x) is not np.ndarray:  # the result may have to be of its kind
        return None
    return out if type(out) is np.ndarray else communicator.last_parts.get(root)


def _prepare(communicator: Communicator, like: NDArray[Any], root: int) -> Any:
    size, rank = communicator.size, communicator.member_rank
    shape = like.shape if rank != root else (like.shape[0] // size, *like.shape[1:])
    cuts = [slice(one.start, one.stop) for one in even_chunks(like.shape[0], size)] if rank == root else []
    return (
        _request(communicator, like, root, None, None, keep=False),
        _layout(like.dtype, shape, size, rank, root),
        lambda x, out: fits_out(_blocks([x[one] for one in cuts], shape, like.dtype, out, rank), out),
        lambda x, out: _request(communicator, x, root, out, None, keep=False, is_moved=False).body,
    )


def _request(
    communicator: Communicator, x: Any, root: int, out: Any, algorithm: str | None, *, keep: bool, is_moved: bool | None = None
) -> Request:
    """Check the arguments and return the request; `keep` takes copies of the root's arrays now.

    `is_moved` is False where the ranks have found that they do not look for what the root brings; None lets the group decide.
    """
    rank = communicator.member_rank
    source = checked_root(root, communicator)
    parts: list[NDArray[Any]] = []
    skeleton = b""
    if rank == source:
        if x is None:
            raise ConfigError(f"the root (rank {source}) must pass a list of arrays, or one array, not None")
        parts = [part.copy() if keep else part for part in cut(x, communicator, "scatter")]
        skeleton = pack_object([dtype_index(parts[0].dtype), [list(part.shape) for part in parts]])

    if is_moved is None:
        is_moved = moves(communicator, "scatter", algorithm)

    def body() -> Generator[Stage, None, Any]:
        if is_moved:
            layout, blocks = UNMOVED
            like = parts[0] if parts else _likely(communicator, None, source, out)
            if like is not None and all(part.shape == like.shape for part in parts):
                layout = _layout(like.dtype, like.shape, communicator.size, rank, source)
                blocks = _blocks(parts, like.shape, like.dtype, out, rank)
            if (yield from moved(layout, blocks)):
                return deliver(blocks.made, out)
        index, shapes = unpack_object((yield from broadcast_bytes(communicator, skeleton, source)))
        dtype = dtype_from_index(index)
        counts = tuple(prod(shape) for shape in shapes)
        shape = tuple(shapes[rank])
        if rank != source:
            communicator.last_parts[source] = np.empty(shape, dtype)
        flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else None
        mine = (yield from scatter_flat(communicator, flat, dtype, counts, source, algorithm)).reshape(shape)
        return mine.copy() if out is None else deliver(mine, out)  # what it lies in has room for everything

    return Request(f"scatter(root {source})", fingerprint("scatter", source, algorithm), body())


def _layout(dtype: np.dtype[Any], shape: tuple[int, ...], size: int, rank: int, root: int) -> Layout:
    """Return how parts are moved that all have this shape and dtype."""
    takes = () if rank == root else ((root, place_of(root, rank)),)
    return Layout(detail_of(dtype, shape), dtype, shape, size - 1, takes)


def _blocks(parts: list[NDArray[Any]], shape: tuple[int, ...], dtype: np.dtype[Any], out: Any, rank: int) -> Blocks:
    """Return the arrays of a call; only the root has parts."""
    made = result_buffer(out, shape, dtype, *parts)
    return Blocks(made, (*parts[:rank], *parts[rank + 1 :]), (), parts[rank], made) if parts else Blocks(made, targets=(made,))


def cut(value: Any, communicator: Communicator, name: str) -> list[NDArray[Any]]:
    """Return one array for each rank that takes part, of a list (one for each rank) or of an array that is cut along axis 0.

    Raises:
        ConfigError: A list of another length, arrays of different dtypes, a scalar.
    """
    size = len(communicator.whole)
    if isinstance(value, list | tuple):
        if len(value) != size:
            raise ConfigError(f"{name} needs one array for each of {size} ranks, not {len(value)}; or pass one array to be cut")
        parts = [as_array(value[rank], f"part {rank}") for rank in communicator.present]
    else:
        array = as_array(value)
        if array.ndim == 0:
            raise ConfigError(f"{name} cuts along axis 0, and a scalar has none; pass a list of {size} values")
        parts = [array[chunk.start : chunk.stop] for chunk in even_chunks(array.shape[0], communicator.size)]
    if any(part.dtype != parts[0].dtype for part in parts):
        names = sorted({part.dtype.name for part in parts})
        raise ConfigError(f"the parts of {name} must have one dtype, not {', '.join(names)}: write x.astype(…)")
    return [np.ascontiguousarray(part).reshape(part.shape) for part in parts]
