"""Barrier: nobody goes on before everybody has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.dispatch import Cacheable, entered, make_call, never
from syncvar.collectives.sync_points import meeting
from syncvar.runtime.communicator import fingerprint
from syncvar.runtime.persistent.persistent_reduce import prepare_barrier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.collectives.dispatch import Make
    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator, PreparedCall

__all__ = ["barrier"]

_NOTHING = np.empty(0, np.uint8)


@entered(nothing=_NOTHING, positions=0)
def barrier(
    *, group: Group | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Wait until every rank of the group has called this.

    Args:
        group, timeout, async_op: As in every collective, see `syncvar.collectives`.

    Returns:
        None, or a `Work` whose result is None.

    Raises:
        MismatchError, PeerLost, DeadlineExceeded: As every collective.

    Cost: ceil(log2 n) rounds of empty frames; in shared memory one look at each rank's word.
    Source: Hensgen, Finkel, Manber 1988 (dissemination barrier).

    Example:
        >>> import syncvar as sv
        >>> sv.barrier()
    """
    work = make_call(barrier, None, _request, _NOTHING, None, group, async_op, timeout, {})
    return (
        None if isinstance(work, np.ndarray) else work
    )  # a persistent call that Python runs returns an array without elements


def _request(communicator: Communicator, _x: Any, _out: None, _keep: bool) -> _BarrierCall:
    return _BarrierCall("barrier", fingerprint("barrier"), meeting(communicator))


class _BarrierCall(Cacheable):
    """A checked barrier."""

    __slots__ = ()

    def prepared(
        self, communicator: Communicator, like: NDArray[Any], make: Make
    ) -> PreparedCall | None:
        """Return what makes calls that are alike; see `Cacheable`."""
        return (
            prepare_barrier(communicator, self.digest, self.what)
            if communicator.forced("barrier") is None
            else never
        )
