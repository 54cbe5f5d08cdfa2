"""Scatter: each rank ends with its part of the root's value."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives._arguments import as_array, checked_output, checked_root
from syncvar.collectives._kinds import in_kind, is_foreign
from syncvar.collectives.broadcast import broadcast_bytes
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request, fingerprint
from syncvar.engine.operation import Stage
from syncvar.errors import ConfigError
from syncvar.loading import unexpected
from syncvar.plans import even_chunks
from syncvar.wire import dtype_from_index, dtype_index, pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator

__all__ = ["cut", "scatter", "scatter_flat"]


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

    Cost: a broadcast of the shapes, then each part once.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.scatter([np.arange(3)])
        array([0, 1, 2])
    """
    if _foreign:
        raise unexpected(scatter, _foreign)
    communicator = communicator_of(group)
    if is_foreign(x, out):
        call = partial(
            scatter, root=root, group=group, async_op=async_op, timeout=timeout, algorithm=algorithm
        )
        return in_kind(call, x, out)

    def check() -> Request:
        source = checked_root(root, communicator)
        parts: list[NDArray[Any]] = []
        skeleton = b""
        if communicator.member_rank == source:
            if x is None:
                raise ConfigError(f"the root (rank {source}) must pass a list of arrays, or one array, not None")
            parts = [part.copy() if async_op else part for part in cut(x, communicator, "scatter")]
            skeleton = pack_object([dtype_index(parts[0].dtype), [list(part.shape) for part in parts]])

        def body() -> Generator[Stage, None, Any]:
            index, shapes = unpack_object((yield from broadcast_bytes(communicator, skeleton, source)))
            dtype = dtype_from_index(index)
            counts = tuple(prod(shape) for shape in shapes)
            shape = tuple(shapes[communicator.member_rank])
            flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else None
            mine = (yield from scatter_flat(communicator, flat, dtype, counts, source, algorithm)).reshape(shape)
            if out is None:
                return mine.copy()  # what it lies in has room for everything
            into = checked_output(out, shape, dtype)
            into[...] = mine
            return into

        return Request(f"scatter(root {source})", fingerprint("scatter", source, algorithm), body())

    return communicator.perform("scatter", check, timeout, async_op=async_op)


def scatter_flat(
    communicator: Communicator,
    whole: NDArray[Any] | None,
    dtype: np.dtype[Any],
    counts: tuple[int, ...],
    root: int,
    algorithm: str | None = None,
) -> Generator[Stage, None, NDArray[Any]]:
    """Scatter a flat array whose counts all ranks know; returns a view of this rank's block."""
    work = np.empty(sum(counts), dtype) if whole is None else whole
    start = list(accumulate(counts, initial=0))[communicator.member_rank]
    yield Stage(communicator.plan("scatter", counts, work.itemsize, root=root, algorithm=algorithm), work)
    return work[start : start + counts[communicator.member_rank]]


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
