"""Reduce-scatter: each rank ends with its piece of the combination of all ranks' values."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.algorithms.chunks import even_chunks
from syncvar.collectives import nan_check
from syncvar.collectives.dispatch import make_call, native_dispatch
from syncvar.collectives.reduce_args import contribution, described, outcome, run_plan
from syncvar.collectives.transfer_args import TransferArgs, fits_out, moves, place_of, result_buffer
from syncvar.core.array_arguments import as_array, checked_output, deliver
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.reduce_ops import OPS, op_name
from syncvar.runtime.block_transfer import Blocks, TransferLayout

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


@native_dispatch(second="op", usual="sum", positions=2)
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
        lengths: Rows of axis 0 for each rank, the same list on every rank. None cuts evenly; the
            first pieces are longer.
        out: Array of the piece's shape and dtype to write to.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        A new array: this rank's rows of the combination.

    Raises:
        ConfigError, MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: n-1 rounds over links, in which each rank sends (n-1)/n of the array. In shared memory
        each rank reads its pieces directly from arrays of `sv.empty`; other arrays are copied cell
        by cell.
    Order: lower ranks are left operands; fixed by shape and number of ranks.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.reduce_scatter(np.arange(3.0))
        array([0., 1., 2.])
    """
    how = (op_name(op), lengths, algorithm)
    return make_call(
        reduce_scatter, _form, _request, x, out, group, async_op, timeout, _foreign, how
    )


def _form(
    communicator: Communicator, x: Any, _out: Any, how: tuple[Any, ...]
) -> NDArray[Any] | None:
    op, lengths, algorithm = how
    is_plain = (
        type(x) is np.ndarray and isinstance(op, str) and lengths is None and algorithm is None
    )
    return x if is_plain and x.ndim and x.shape[0] % communicator.size == 0 else None


def _request(
    communicator: Communicator,
    x: Any,
    out: Any,
    keep: bool,
    op: str,
    lengths: Any,
    algorithm: str | None,
) -> TransferArgs:
    """Check the arguments and return the request; `keep` copies the input."""
    array = as_array(x)
    nan_check.look(array, "reduce_scatter")
    if array.ndim == 0:
        raise ConfigError(
            "reduce_scatter cuts along axis 0, and a scalar has none; "
            "pass np.reshape(x, (1,)), or use all_reduce"
        )
    rows = _rows(lengths, array.shape[0], communicator)
    how, digest, what = described(array, op, "reduce_scatter", rows, algorithm)
    size, rank = communicator.size, communicator.member_rank
    if len(how.element_shape) == array.ndim:
        raise ConfigError(
            f"reduce_scatter cuts along axis 0, and x is one element of the op {how.name!r}: "
            f"stack several elements along axis 0"
        )
    shape = (rows[rank], *array.shape[1:])
    into = None if out is None else checked_output(out, shape, how.result)

    def blocks_of(x: NDArray[Any], out: Any) -> Blocks:
        made = result_buffer(out, shape, how.result, x)
        length = shape[0]
        blocks = [x[length * peer : length * (peer + 1)] for peer in range(size)]
        return Blocks(
            made, (*blocks[:rank], *blocks[rank + 1 :]), (made,), np.ascontiguousarray(blocks[rank])
        )

    # Registered ops may be replaced, and locating ops need pairs: both take the slow path.
    is_moved = (
        len(set(rows)) == 1
        and moves(communicator, "reduce_scatter", algorithm)
        and how.name in OPS
        and not how.is_locating
    )
    if is_moved:
        takes = tuple((peer, place_of(peer, rank)) for peer in range(size) if peer != rank)
        operand = array.copy() if keep else array
        divisor = size if how.is_mean else 0
        layout = TransferLayout(
            None, how.accumulate, shape, size - 1, takes, ufunc=how.ufunc, divisor=divisor
        )
        return TransferArgs(
            what,
            digest,
            layout,
            arrange=lambda: blocks_of(operand, into),
            finish=lambda made: deliver(made, into),
            general=None,
            front=lambda x, out: fits_out(blocks_of(x, out), out),
        )
    work = contribution(array, how, communicator.home_rank)
    width = prod(array.shape[1:]) // prod(how.element_shape)
    counts = tuple(row * width for row in rows)
    start = list(accumulate(counts, initial=0))[rank]

    def general() -> Generator[Stage, None, Any]:
        yield from run_plan(
            communicator, "reduce_scatter", work, how, counts=counts, algorithm=algorithm
        )
        return outcome(how, work[start : start + counts[rank]], size, shape, into)

    return TransferArgs(
        what, digest, None, arrange=lambda: None, finish=lambda made: made, general=general
    )


def _rows(lengths: Any, total: int, communicator: Communicator) -> tuple[int, ...]:
    if lengths is None:
        return tuple(chunk.count for chunk in even_chunks(total, communicator.size))
    size = len(communicator.whole)
    rows = tuple(lengths)
    if len(rows) != size or any(
        isinstance(row, bool) or not isinstance(row, int | np.integer) or row < 0 for row in rows
    ):
        raise ConfigError(
            f"lengths must be {size} integers >= 0, one for each rank, not {lengths!r}"
        )
    if sum(rows) != total:
        raise ConfigError(f"lengths {list(rows)} add up to {sum(rows)}, axis 0 has {total}")
    gone = [rank for rank in range(size) if rows[rank] and rank not in communicator.present]
    if gone:
        raise UsageError(
            f"lengths {list(rows)} has rows for rank {gone[0]}, which has left its loop in "
            f"sv.uneven: give it 0 rows"
        )
    return tuple(int(rows[rank]) for rank in communicator.present)
