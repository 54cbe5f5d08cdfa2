"""Gather: the root ends with the values of all ranks, in rank order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Never

from syncvar.collectives._arguments import checked_output, checked_root, fresh, unflatten
from syncvar.collectives._kinds import in_kind, is_foreign
from syncvar.collectives.all_gather import along_axis, gathered
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request, fingerprint
from syncvar.loading import unexpected

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncvar.collectives.groups import Group
    from syncvar.engine.operation import Stage

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

    Cost: a header round of small frames, then the blocks once to the root.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.gather(np.arange(3))
        array([0, 1, 2])
    """
    if _foreign:
        raise unexpected(gather, _foreign)
    communicator = communicator_of(group)
    if is_foreign(x, out):
        call = partial(
            gather, root=root, axis=axis, group=group, async_op=async_op, timeout=timeout, algorithm=algorithm
        )
        return in_kind(call, x, out)

    def check() -> Request:
        target = checked_root(root, communicator)
        structure, arrays, axes, kinds = along_axis(x, axis, out)
        is_root = communicator.member_rank == target
        like = x
        if async_op:
            arrays, like = [array.copy() for array in arrays], fresh(structure, x)

        def body() -> Generator[Stage, None, Any]:
            results = []
            for array, place in zip(arrays, axes, strict=True):
                results.append((yield from gathered(communicator, array, place, "gather", target, algorithm)))
            if not is_root:
                return None
            if structure is not None:
                return unflatten(structure, results, like)
            if out is not None:
                into = checked_output(out, results[0].shape, results[0].dtype)
                into[...] = results[0]
                return into
            return results[0]

        digest = fingerprint("gather", int(axis), target, structure, algorithm)
        return Request(f"gather({kinds}, axis {axis}, root {target})", digest, body())

    return communicator.perform("gather", check, timeout, async_op=async_op)
