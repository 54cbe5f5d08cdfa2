"""Barrier: nobody goes on before everybody has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.groups import communicator_of
from syncvar.collectives.sync_points import meet
from syncvar.engine.group import fingerprint
from syncvar.engine.timeouts import is_seconds
from syncvar.joining.process import entered_natively
from syncvar.kernel import remember

if TYPE_CHECKING:
    from syncvar.collectives.groups import Group

__all__ = ["barrier"]

_NOTHING = np.empty(0, np.uint8)
_BARRIER = ("barrier",)


def barrier(*, group: Group | None = None, timeout: float | None = None, async_op: bool = False) -> Any:
    """Wait until every rank of the group has called this.

    Args:
        group: Ranks that take part; None means the world.
        timeout: Seconds; None means the job's default.
        async_op: Return a `Work` at once.

    Returns:
        None, or a `Work` whose result is None.

    Raises:
        MismatchError: Another rank made another call.
        PeerLost: A rank is gone.
        DeadlineExceeded: A rank did not come in time.

    Cost: ceil(log2 n) rounds of empty frames; in shared memory one look at each rank's word.
    Source: Hensgen, Finkel, Manber 1988 (dissemination barrier).

    Example:
        >>> import syncvar as sv
        >>> sv.barrier()
    """
    communicator = communicator_of(group)
    is_plain = communicator.channel is not None and not async_op and (timeout is None or is_seconds(timeout))
    if is_plain:
        ready = communicator.prepared_calls.get(_BARRIER)
        if ready is not None and ready(_NOTHING, None, None, timeout) is not None:
            return None
    work = meet(communicator, "barrier", _BARRIER, timeout, async_op=async_op)
    if is_plain and communicator.prepares and _BARRIER not in communicator.prepared_calls and communicator.forced("barrier") is None:
        from syncvar.engine.prepared_reductions import prepare_barrier

        made = communicator.keep_prepared(_BARRIER, prepare_barrier(communicator, fingerprint(*_BARRIER), "barrier"))
        remember(barrier, None, made, communicator.prepared_calls)
    return work


if not TYPE_CHECKING:
    barrier = entered_natively(barrier, nothing=_NOTHING, positions=0)
