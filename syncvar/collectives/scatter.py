"""Scatter: each rank ends with its part of the root's value."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.algorithms.chunks import even_chunks
from syncvar.collectives.dispatch import make_call, native_dispatch
from syncvar.collectives.groups import checked_root
from syncvar.collectives.stage_builders import broadcast_bytes, scatter_flat
from syncvar.collectives.transfer_args import (
    UNMOVED,
    TransferArgs,
    detail_of,
    fits_out,
    moves,
    place_of,
    result_buffer,
)
from syncvar.core.array_arguments import as_array, deliver
from syncvar.core.dtypes import dtype_from_index, dtype_index
from syncvar.core.errors import ConfigError
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.block_transfer import Blocks, TransferLayout
from syncvar.runtime.call_record import CallFields, CallLabel
from syncvar.runtime.communicator import fingerprint

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


@native_dispatch(second="root", usual=0, positions=2)
def scatter(
    x: Any = None,
    root: int = 0,
    *,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Give each rank its part of the root's input.

    Args:
        x: On the root, a list of one array for each rank, of one dtype and any shapes. Or one
            array, which is cut along axis 0; the first parts are longer. Arguments of other ranks
            are ignored.
        root: Rank of the group whose input is sent.
        out: Array of the part's shape and dtype to write to.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        A new array: this rank's part.

    Raises:
        ConfigError, MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory, with parts of one shape, one direct copy of each part. The other ranks
        must know the shape: from `out`, or from the last call. Else a broadcast of the shapes, then
            each part
        once.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.scatter([np.arange(3)])
        array([0, 1, 2])
    """
    return make_call(
        scatter, _form, _request, x, out, group, async_op, timeout, _foreign, (root, algorithm)
    )


def _form(
    communicator: Communicator, x: Any, out: Any, how: tuple[Any, ...]
) -> NDArray[Any] | None:
    """Return the array of a call that may be persistent, else None.

    Only the root knows its input. The other ranks expect a part like `out`, or like the last one
    they got. If the part differs, the slow path sends its shape.
    """
    root, algorithm = how
    if type(root) is not int or algorithm is not None:
        return None
    if communicator.rank == root:
        return (
            x if type(x) is np.ndarray and x.ndim and x.shape[0] % communicator.size == 0 else None
        )
    if x is not None and type(x) is not np.ndarray:  # the result may have to be a tensor like it
        return None
    return out if type(out) is np.ndarray else communicator.last_parts.get(root)


def _request(
    communicator: Communicator, x: Any, out: Any, keep: bool, root: int, algorithm: str | None
) -> TransferArgs:
    """Check the arguments and return the request; `keep` copies the root's arrays."""
    size, rank = communicator.size, communicator.member_rank
    source = checked_root(root, communicator)
    parts: list[NDArray[Any]] = []
    skeleton = b""
    if rank == source:
        if x is None:
            raise ConfigError(
                f"the root (rank {source}) must pass a list of arrays, or one array, not None"
            )
        parts = [part.copy() if keep else part for part in cut(x, communicator, "scatter")]
        skeleton = pack_object([dtype_index(parts[0].dtype), [list(part.shape) for part in parts]])

    def general() -> Generator[Stage, None, Any]:
        index, shapes = unpack_object((yield from broadcast_bytes(communicator, skeleton, source)))
        dtype = dtype_from_index(index)
        counts = tuple(prod(shape) for shape in shapes)
        shape = tuple(shapes[rank])
        if rank != source:
            communicator.last_parts[source] = np.empty(shape, dtype)
        flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else None
        mine = (
            yield from scatter_flat(communicator, flat, dtype, counts, source, algorithm)
        ).reshape(shape)
        # The part is a view of a buffer for all parts, which must not outlive the call.
        return mine.copy() if out is None else deliver(mine, out)

    like = out if type(out) is np.ndarray else communicator.last_parts.get(source)
    like = parts[0] if parts else like
    if like is None or not like.dtype.isnative or any(part.shape != like.shape for part in parts):
        layout = UNMOVED
    else:
        takes = () if rank == source else ((source, place_of(source, rank)),)
        layout = TransferLayout(
            detail_of(like.dtype, like.shape), like.dtype, like.shape, size - 1, takes
        )

    def blocks_of(parts: list[NDArray[Any]], out: Any) -> Blocks:
        made = result_buffer(out, layout.shape, layout.dtype, *parts)
        if parts:
            return Blocks(made, (*parts[:rank], *parts[rank + 1 :]), (), parts[rank], made)
        return Blocks(made, targets=(made,))

    def front(x: NDArray[Any], out: Any) -> Blocks | None:
        rows = x.shape[0] // size if parts else 0
        return fits_out(
            blocks_of([x[place * rows : (place + 1) * rows] for place in range(len(parts))], out),
            out,
        )

    return TransferArgs(
        CallLabel(f"scatter(root {source})", CallFields("scatter", root=source)),
        fingerprint("scatter", source, algorithm),
        layout if moves(communicator, "scatter", algorithm) else None,
        arrange=lambda: blocks_of(parts, out),
        finish=lambda made: deliver(made, out),
        general=general,
        front=front,
    )


def cut(value: Any, communicator: Communicator, name: str) -> list[NDArray[Any]]:
    """Return the parts of the ranks that take part, from a list of them or from an array to be cut.

    Raises:
        ConfigError: The list has the wrong length, the dtypes differ, or the value is a scalar.
    """
    size = len(communicator.whole)
    if isinstance(value, list | tuple):
        if len(value) != size:
            raise ConfigError(
                f"{name} needs one array for each of {size} ranks, not {len(value)}; "
                f"or pass one array to be cut"
            )
        parts = [as_array(value[rank], f"part {rank}") for rank in communicator.present]
    else:
        array = as_array(value)
        if array.ndim == 0:
            raise ConfigError(
                f"{name} cuts along axis 0, and a scalar has none; pass a list of {size} values"
            )
        parts = [
            array[chunk.start : chunk.stop]
            for chunk in even_chunks(array.shape[0], communicator.size)
        ]
    if any(part.dtype != parts[0].dtype for part in parts):
        names = sorted({part.dtype.name for part in parts})
        raise ConfigError(
            f"the parts of {name} must have one dtype, not {', '.join(names)}: write x.astype(…)"
        )
    return [np.ascontiguousarray(part).reshape(part.shape) for part in parts]
