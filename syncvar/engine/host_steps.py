"""The steps of a call whose bytes go through the arena of one host.

Phase 0 of every call compares what the ranks are doing. Nothing of a rank's data is used, and nothing of its own is
changed, before all have said the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.arena.channels import check_of
from syncvar.engine.operation import BodyError
from syncvar.engine.recorder import UNRECORDED
from syncvar.errors import InternalError, SyncvarError
from syncvar.execution.moves import move_shared
from syncvar.execution.phases import agreed, settled
from syncvar.execution.reductions import Vector, reduce_shared
from syncvar.execution.rounds import Published, run_rounds
from syncvar.execution.structures import reduce_fused

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncvar.arena.channel import Channel
    from syncvar.engine.operation import Stage
    from syncvar.engine.recorder import Entry

__all__ = ["host_steps"]


def host_steps(
    channel: Channel,
    call: int,
    fingerprint: int,
    body: Generator[Stage, None, Any],
    entry: Entry = UNRECORDED,
    *,
    is_begun: bool = False,
) -> Generator[int, None, Any]:
    """Run a body of stages. The first stage publishes with phase 0 where it is small, or an all-reduce.

    Args:
        channel: This rank's end of the group's channels.
        call: The call's number.
        fingerprint: What it is.
        body: Its stages.
        entry: In the flight recorder.
        is_begun: Phase 0 is over: all ranks make this call.
    """
    if not is_begun:
        yield from settled(channel)
    check = check_of(fingerprint, call)
    is_first = not is_begun
    is_read = True  # by everybody, what this rank has put in the stage before
    try:
        while True:
            try:
                stage = next(body)
            except StopIteration as end:
                if is_first:
                    yield from agreed(channel, check, channel.begin(call, check))
                return end.value
            except SyncvarError as error:
                if is_first:
                    raise
                raise BodyError(error) from error
            opening = (call, check) if is_first else None
            if not is_read:  # this stage writes where some may still be reading
                is_read = True
                yield channel.publish()
            if stage.movement is not None:
                if opening is None:
                    raise InternalError("blocks are moved side by side in the first stage of a call only")
                entry.stage("side by side", stage.movement.layout.elements * stage.movement.layout.dtype.itemsize)
                yield from move_shared(channel, opening, stage.movement)
                is_first = False
                continue
            plan = stage.plan
            if not isinstance(plan, Published):
                raise InternalError("a plan for links was given to a call in shared memory")
            if plan.reduces:
                vector = stage.vector
                if vector is None:
                    if stage.ufunc is None:
                        raise InternalError("a reduction was given no op")
                    vector = Vector([stage.work], [stage.work], stage.ufunc, stage.work.dtype, ends=plan.ends)
                entry.stage(plan.algorithm, vector.nbytes)
                reduce = reduce_fused if vector.is_split else reduce_shared
                is_read = yield from reduce(channel, opening, vector)
            else:
                entry.stage(plan.algorithm, stage.work.nbytes)
                yield from run_rounds(channel, opening, plan, stage.work, stage.ufunc)
            is_first = False
    finally:
        body.close()
