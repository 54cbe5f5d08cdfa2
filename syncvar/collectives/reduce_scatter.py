"""Reduce-scatter: each rank ends with its piece of the combination of all ranks' values."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.collectives._arguments import as_array, checked_output, deliver
from syncvar.collectives._kinds import call_generally
from syncvar.collectives._moving import call_prepared, fits_out, moved, moves, place_of, result_buffer
from syncvar.collectives._reducing import contribution, described, outcome, run_plan
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request
from syncvar.engine.timeouts import is_seconds
from syncvar.errors import ConfigError, UsageError
from syncvar.execution.kernels import OPS, reduction
from syncvar.execution.moves import Blocks, Fold, Layout
from syncvar.joining import finite
from syncvar.joining.process import entered_natively
from syncvar.loading import unexpected
from syncvar.plans import even_chunks

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator
    from syncvar.engine.operation import Stage
    from syncvar.execution.kernels import Reduction

__all__ = ["reduce_scatter"]


def reduce_scatter(
    x: Any,
    op: str = "sum",
    *,
    lengths: Sequence[int] | None = None,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Combine the values of all ranks and give each rank its piece of axis 0.

    Args:
        x: Array of at least one dimension, of the same shape and dtype on every rank.
        op: As for `all_reduce`.
        lengths: Rows of axis 0 for each rank, the same on every rank; None cuts evenly, first pieces longer.
        out: Array of the piece's shape and dtype to write to.
        group: Ranks that take part; None means the world.
        async_op: Return a `Work` at once. The value of `x` is taken when the call is made.
        timeout: Seconds; None means the job's default.
        algorithm: Force one of `syncvar plan reduce_scatter`; the same on every rank.

    Returns:
        A new array: this rank's rows of the combination.

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError and the group stays usable.
        MismatchError: The ranks do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: n-1 rounds over links; in shared memory pieces in the arena are read there, others go by cells; (n-1)/n of the array sent by each rank.
    Order: lower ranks are left operands; fixed by shape and number of ranks.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.reduce_scatter(np.arange(3.0))
        array([0., 1., 2.])
    """
    if _foreign:
        raise unexpected(reduce_scatter, _foreign)
    communicator = communicator_of(group)
    is_plain = type(x) is np.ndarray and isinstance(op, str) and algorithm is None and not async_op and (timeout is None or is_seconds(timeout))
    if is_plain and lengths is None and x.ndim and x.shape[0] % communicator.size == 0:
        key = ("reduce_scatter", op, x.dtype, x.shape)
        result = call_prepared(communicator, key, x, out, timeout, _prepare, op, public=reduce_scatter)
        if result is not None:
            return result
    return call_generally(
        reduce_scatter, communicator, _request, x, out, group=group, timeout=timeout, async_op=async_op, op=op, lengths=lengths, algorithm=algorithm
    )


if not TYPE_CHECKING:
    reduce_scatter = entered_natively(reduce_scatter, second="op", usual="sum", positions=2)


def _prepare(communicator: Communicator, x: NDArray[Any], op: str) -> Any:
    if not _is_moved(op, x):
        return None
    size, rank, how = communicator.size, communicator.member_rank, reduction(op, x.dtype)
    return (
        _request(communicator, x, op, None, None, None, keep=False),
        _layout(x, how, size, rank),
        lambda x, out: fits_out(_blocks(x, how, out, size, rank), out),
        None,
    )


def _request(
    communicator: Communicator, x: Any, op: str, lengths: Any, out: Any, algorithm: str | None, *, keep: bool
) -> Request:
    """Check the arguments and return the request; `keep` takes a copy of `x` now."""
    array = as_array(x)
    finite.look(array, "reduce_scatter")
    if array.ndim == 0:
        raise ConfigError("reduce_scatter cuts along axis 0, and a scalar has none; pass np.reshape(x, (1,)), or use all_reduce")
    rows = _rows(lengths, array.shape[0], communicator)
    how, digest, what = described(array, op, "reduce_scatter", rows, algorithm)
    rank = communicator.member_rank
    if len(how.element_shape) == array.ndim:
        raise ConfigError(f"reduce_scatter cuts along axis 0, which would cut the elements of the op {how.name!r}: there is only one")
    shape = (rows[rank], *array.shape[1:])
    into = None if out is None else checked_output(out, shape, how.result)
    if len(set(rows)) == 1 and moves(communicator, "reduce_scatter", algorithm) and _is_moved(op, array):
        blocks = _blocks(array.copy() if keep else array, how, into, communicator.size, rank)

        def body() -> Generator[Stage, None, Any]:
            yield from moved(_layout(array, how, communicator.size, rank), blocks)
            return deliver(blocks.made, into)

        return Request(what, digest, body())
    work = contribution(array, how, communicator.home_rank)
    width = prod(array.shape[1:]) // prod(how.element_shape)
    counts = tuple(row * width for row in rows)
    start = list(accumulate(counts, initial=0))[rank]

    def general() -> Generator[Stage, None, Any]:
        yield from run_plan(communicator, "reduce_scatter", work, how, counts=counts, algorithm=algorithm)
        return outcome(how, work[start : start + counts[rank]], communicator.size, shape, into)

    return Request(what, digest, general())


def _is_moved(op: str, array: NDArray[Any]) -> bool:
    """Return whether a reduction is made of what lies side by side: ops that may be replaced or locate are not."""
    how = reduction(op, array.dtype)
    return how.name in OPS and not how.is_locating


def _layout(array: NDArray[Any], how: Reduction, size: int, rank: int) -> Layout:
    takes = tuple((peer, place_of(peer, rank)) for peer in range(size) if peer != rank)
    fold = Fold(how.ufunc, size if how.is_mean else 0)
    return Layout(None, how.accumulate, (array.shape[0] // size, *array.shape[1:]), size - 1, takes, fold)


def _blocks(array: NDArray[Any], how: Reduction, out: Any, size: int, rank: int) -> Blocks:
    rows = array.shape[0] // size
    made = result_buffer(out, (rows, *array.shape[1:]), how.result, array)
    blocks = [array[start : start + rows] for start in range(0, size * rows, rows)] if rows else [array] * size
    return Blocks(made, (*blocks[:rank], *blocks[rank + 1 :]), (made,), np.ascontiguousarray(blocks[rank]))


def _rows(lengths: Any, total: int, communicator: Communicator) -> tuple[int, ...]:
    if lengths is None:
        return tuple(chunk.count for chunk in even_chunks(total, communicator.size))
    size = len(communicator.whole)
    rows = tuple(lengths)
    if len(rows) != size or any(isinstance(row, bool) or not isinstance(row, int | np.integer) or row < 0 for row in rows):
        raise ConfigError(f"lengths must be {size} integers >= 0, one for each rank, not {lengths!r}")
    if sum(rows) != total:
        raise ConfigError(f"lengths {list(rows)} add up to {sum(rows)}, axis 0 has {total}")
    gone = [rank for rank in range(size) if rows[rank] and rank not in communicator.present]
    if gone:
        raise UsageError(f"lengths {list(rows)} has rows for rank {gone[0]}, which has left its loop in sv.uneven: give it 0 rows")
    return tuple(int(rows[rank]) for rank in communicator.present)
