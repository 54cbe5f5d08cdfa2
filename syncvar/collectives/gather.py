"""Gather: the root ends with the values of all ranks, in rank order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Never

from syncvar.collectives._kinds import call_generally
from syncvar.collectives.all_gather import gather_prepared, gather_request
from syncvar.collectives.groups import communicator_of
from syncvar.joining.process import entered_natively
from syncvar.loading import unexpected

if TYPE_CHECKING:
    from syncvar.collectives.groups import Group

__all__ = ["gather"]


def gather(
    x: Any,
    *,
    root: int = 0,
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
        x: As for `all_gather`: lengths along `axis` may differ between ranks and may be 0.
        root: Rank of the group that gets the result.
        axis: Where to concatenate; may be negative.
        out: On the root, an array of the result's shape and dtype to write to; not for structures.
        group: Ranks that take part; None means the world.
        async_op: Return a `Work` at once. The value of `x` is taken when the call is made.
        timeout: Seconds; None means the job's default.
        algorithm: Force one of `syncvar plan gather`; the same on every rank.

    Returns:
        On the root the concatenation (or the same structure of concatenations), None on the other ranks.

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError.
        MismatchError: The ranks' arrays do not fit together, or they do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: where the ranks share memory and bring one shape, one copy of each block where it lies (small blocks: one in, one
        out). Else a header round of small frames, then the blocks once to the root.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.gather(np.arange(3))
        array([0, 1, 2])
    """
    if _foreign:
        raise unexpected(gather, _foreign)
    communicator = communicator_of(group)
    if algorithm is None and not async_op:
        result = gather_prepared(communicator, x, out, timeout, axis, root, public=gather)
        if result is not None:
            return result if communicator.member_rank == root else None
    request = partial(gather_request, name="gather")
    return call_generally(
        gather, communicator, request, x, out, group=group, timeout=timeout, async_op=async_op, root=root, axis=axis, algorithm=algorithm
    )


if not TYPE_CHECKING:
    gather = entered_natively(gather, second="root", usual=0)
