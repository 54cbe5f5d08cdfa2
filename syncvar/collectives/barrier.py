"""Barrier: no rank continues before all ranks have entered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.dispatch import Persistable, make_call, native_dispatch, never_persistent
from syncvar.collectives.stage_builders import MeetingCall
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.persistent_reduce import persist_barrier

if TYPE_CHECKING:
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
    work = make_call(barrier, _BarrierCall, _NOTHING, None, group, async_op, timeout, {})
    # Without the C extension the persistent call returns an empty array.
    return None if isinstance(work, np.ndarray) else work


class _BarrierCall(MeetingCall, Persistable):
    """A barrier."""

    def __init__(self, communicator: Communicator, _x: Any, _out: None, **_keep: bool) -> None:
        super().__init__(communicator, CollectiveSpec("barrier"))

    @staticmethod
    def persistent_input(_communicator: Communicator, x: Any, _out: None, _rest: Any) -> Any:
        return x

    def persistent(self, _like: Any) -> Persistent | None:
        if self.communicator.forced("barrier") is None:
            return persist_barrier(self.communicator, self.spec)
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
