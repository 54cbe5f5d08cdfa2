"""Reduce-scatter: each rank ends with its piece of the combination of all ranks' values."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives._arguments import as_array, checked_output
from syncvar.collectives._reducing import contribution, described, outcome, run_plan
from syncvar.collectives.groups import communicator_of
from syncvar.errors import ConfigError
from syncvar.plans import even_chunks
from syncvar.runtime.group import Request

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from syncvar.collectives.groups import Group
    from syncvar.runtime.operation import Stage

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

    Cost: n-1 rounds over links, one in shared memory; (n-1)/n of the array sent by each rank.
    Order: lower ranks are left operands; fixed by shape and number of ranks.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.reduce_scatter(np.arange(3.0))
        array([0., 1., 2.])
    """
    communicator = communicator_of(group)

    def check() -> Request:
        array = as_array(x)
        if array.ndim == 0:
            raise ConfigError("reduce_scatter cuts along axis 0, and a scalar has none; pass np.reshape(x, (1,)), or use all_reduce")
        rows = _rows(lengths, array.shape[0], communicator.size)
        how, digest, what = described(array, op, "reduce_scatter", rows, algorithm)
        rank = communicator.member_rank
        shape = (rows[rank], *array.shape[1:])
        into = None if out is None else checked_output(out, shape, how.result)
        work = contribution(array, how, rank)
        width = prod(array.shape[1:])
        counts = tuple(row * width for row in rows)
        start = list(accumulate(counts, initial=0))[rank]

        def body() -> Generator[Stage, None, Any]:
            yield from run_plan(communicator, "reduce_scatter", work, how, counts=counts, algorithm=algorithm)
            return outcome(how, work[start : start + counts[rank]], communicator.size, shape, into)

        return Request(what, digest, body())

    return communicator.perform("reduce_scatter", check, timeout, async_op=async_op)


def _rows(lengths: Any, total: int, size: int) -> tuple[int, ...]:
    if lengths is None:
        return tuple(chunk.count for chunk in even_chunks(total, size))
    rows = tuple(lengths)
    if len(rows) != size or any(isinstance(row, bool) or not isinstance(row, int | np.integer) or row < 0 for row in rows):
        raise ConfigError(f"lengths must be {size} integers >= 0, one for each rank, not {lengths!r}")
    if sum(rows) != total:
        raise ConfigError(f"lengths {list(rows)} add up to {sum(rows)}, axis 0 has {total}")
    return tuple(int(row) for row in rows)
