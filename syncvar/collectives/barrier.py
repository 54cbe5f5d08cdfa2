"""Barrier: no rank continues before all ranks have entered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.dispatch import Persistable, make_call, native_dispatch, never_persistent
from syncvar.collectives.stage_builders import barrier_stages
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.persistent_reduce import persist_barrier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.collectives.dispatch import Make
    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator, Persistent

_NOTHING = np.empty(0, np.uint8)


@native_dispatch(no_input=_NOTHING, positions=0)
def barrier(
    *, group: Group | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Wait until every rank of the group has called this.

    Args:
        group, timeout, async_op: See `syncvar.collectives`.

    Returns:
        None, or a `Work` whose result is None.

    Raises:
        MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: ceil(log2 n) rounds of empty frames; in shared memory one look at each rank's word.
    Source: Hensgen, Finkel, Manber 1988 (dissemination barrier).

    Example:
        >>> import syncvar as sv
        >>> sv.barrier()
    """
    work = make_call(barrier, None, _checked, _NOTHING, None, group, async_op, timeout, {})
    # Without the C extension the persistent call returns an empty array.
    return None if isinstance(work, np.ndarray) else work


def _checked(communicator: Communicator, _x: Any, _out: None, **_keep: bool) -> _BarrierCall:
    return _BarrierCall(CollectiveSpec("barrier"), barrier_stages(communicator))


class _BarrierCall(Persistable):
    """A checked barrier."""

    __slots__ = ()

    def persistent(
        self, communicator: Communicator, like: NDArray[Any], make: Make
    ) -> Persistent | None:
        if communicator.forced("barrier") is None:
            return persist_barrier(communicator, self.spec)
        return never_persistent


register(
    Collective(
        (barrier,),
        CollectiveKind.WAIT,
        gives="nothing",
        gets="None, after all ranks have entered",
        cost="a look at each rank's word; over links ceil(log2 n) rounds of empty frames",
        arguments=lambda *_: (),
    ),
)
