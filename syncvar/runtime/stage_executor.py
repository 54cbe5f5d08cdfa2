"""Runs the stages of a call in shared memory, over links, or both.

Signature check: phase 0 of a call in shared memory compares signatures; over links every frame
carries the signature. Before that, no rank uses another rank's data or changes its own.

A group over several hosts alternates stages on the host (words of the channel) and between hosts
(frames), see `algorithms.hierarchical`. Until the check is complete, a call writes only its own
work buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.algorithms.compile_schedule import LinkSchedule
from syncvar.core.errors import InternalError, SyncvarError
from syncvar.runtime.links.planner import PreparedStages
from syncvar.runtime.programs.block_transfer import move_shared
from syncvar.runtime.programs.program_runner import agreed, settled
from syncvar.runtime.programs.round_runner import run_rounds
from syncvar.runtime.programs.shm_reduce import ReduceBuffers, reduce_shared, reduce_small
from syncvar.runtime.request import BodyError
from syncvar.shm.channel_table import check_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncvar.runtime.flight_recorder.call_record import PendingRecord
    from syncvar.runtime.links.exchange import LinkExchange
    from syncvar.runtime.request import Stage, Steps
    from syncvar.shm.group_channel import GroupChannel


def stage_steps(
    entry: PendingRecord,
    body: Generator[Stage, None, Any],
    channel: GroupChannel | None,
    links: LinkExchange | None,
    *,
    is_begun: bool = False,
) -> Steps:
    """Return the steps of a call: they run its stages, and return the result of the body.

    Args:
        entry: Record of the call.
        body: Generator of stages. If it raises a SyncvarError after this rank has published, all
            ranks raise it.
        channel: This rank's end of its host's channel; None if the call has no stage there.
        links: Exchange of frames; None if the call has no stage over links.
        is_begun: Phase 0 is over.
    """
    check = check_of(entry.info.fingerprint, entry.call)
    # Arguments of phase 0, which the first stage on the host executes.
    opening = None if channel is None or is_begun else (entry.call, check)
    is_read = True  # all ranks have read what this rank published in the stage before
    try:
        if channel is not None and opening is not None and links is None:
            yield from settled(channel)
        while True:
            try:
                stage = next(body)
            except StopIteration as end:
                if (
                    channel is not None
                    and opening is not None
                    and (links is None or not links.is_published)
                ):
                    if links is not None:
                        yield from settled(channel, to_its_end=False)
                    yield from agreed(channel, check, channel.begin(*opening))
                return end.value
            except SyncvarError as error:
                has_spoken = (channel is not None and opening is None) or (
                    links is not None and links.is_published
                )
                if not has_spoken:
                    raise
                raise BodyError(error) from error
            if isinstance(stage.plan, PreparedStages) and links is not None:
                opening = yield from _over_hosts(entry, stage, stage.plan, channel, links, opening)
            elif isinstance(stage.plan, LinkSchedule):
                if links is None:
                    raise InternalError("a call in shared memory has a schedule for links")
                yield from links.run(stage.plan, stage.work, stage.ufunc, stage.brought)
            elif channel is None:
                raise InternalError("a call over links has a schedule for shared memory")
            else:
                if not is_read:  # this stage overwrites data that others may still read
                    yield channel.publish()
                is_read = yield from _on_host(entry, stage, channel, opening)
                opening = None
    finally:
        body.close()


def _on_host(
    entry: PendingRecord, stage: Stage, channel: GroupChannel, opening: tuple[int, int] | None
) -> Generator[int, None, bool]:
    """Run a stage in shared memory; return whether all ranks have read what this rank published."""
    if stage.movement is not None:
        if opening is None:
            raise InternalError(
                "blocks can be moved concurrently in the first stage of a call only"
            )
        entry.stage(
            "side by side", stage.movement.layout.elements * stage.movement.layout.dtype.itemsize
        )
        yield from move_shared(channel, opening, stage.movement)
        return True
    plan: Any = stage.plan
    if not plan.reduces:
        entry.stage(plan.algorithm, stage.work.nbytes)
        yield from run_rounds(channel, opening, plan, stage.work, stage.ufunc)
        return True
    vector, several = stage.vector, stage.several
    if several and opening is None:
        raise InternalError(
            "vectors of several dtypes can be reduced in the first stage of a call only"
        )
    if vector is None and opening is not None and several:
        entry.stage(plan.algorithm, sum([one.nbytes for one in several]))
        yield from reduce_small(channel, opening, several)
        return True
    if vector is None:
        if stage.ufunc is None:
            raise InternalError("a reduction has no op")
        vector = ReduceBuffers.of(
            [stage.work], [stage.work], stage.ufunc, stage.work.dtype, ends=plan.ends
        )
    entry.stage(plan.algorithm, vector.nbytes + sum([one.nbytes for one in several]))
    return (yield from reduce_shared(channel, opening, vector, several))


def _over_hosts(
    entry: PendingRecord,
    stage: Stage,
    plan: PreparedStages,
    channel: GroupChannel | None,
    links: LinkExchange,
    opening: tuple[int, int] | None,
) -> Generator[Any, None, tuple[int, int] | None]:
    """Run the stages on this host and between hosts; return what is left of the opening."""
    if channel is not None and opening is not None and stage.work.nbytes:
        channel.reserve_segments()  # may raise, so before anything is published
    for ready in plan.stages:
        work = stage.work[ready.start : ready.stop]
        if isinstance(ready.plan, LinkSchedule):
            yield from links.run(ready.plan, work, stage.ufunc)
        elif ready.plan is not None:
            if channel is None:
                raise InternalError("the only rank of a host has a stage in shared memory")
            entry.stage(plan.algorithm, stage.work.nbytes)
            if opening is not None:  # only here: a call over links alone publishes nothing
                yield from settled(channel, to_its_end=False)
            yield from run_rounds(channel, opening, ready.plan, work, stage.ufunc)
            opening = None
    return opening
