"""Calls of a group that spans several hosts: stages in the arena of each host, and stages over links between hosts.

`syncvar.plans.hierarchical` says what the stages are. One operation takes the steps of all: in a stage on the host it
publishes and waits for words like a call in shared memory, in a stage between hosts it sends and waits for frames like a
call over links. Collectives that have no such stages go over links alone, in the same operation.

Before a rank ends, all ranks have said that they make the same call: those of its host in phase 0, those of other
hosts by the fingerprint that is in every frame. What a call writes is a buffer of its own until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.arena.channels import check_of
from syncvar.engine.links import Links
from syncvar.engine.operation import Operation, Stage, agreed_errors
from syncvar.engine.prepared_plans import Prepared, PreparedStages
from syncvar.errors import InternalError
from syncvar.execution.phases import agreed, settled
from syncvar.execution.rounds import run_rounds

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncvar.arena.channel import Channel
    from syncvar.engine.operation import Steps

__all__ = ["Hosts", "hierarchical_operation"]


class Hosts(NamedTuple):
    """The hosts of a group that spans several, as this rank sees them.

    Args:
        sizes: Ranks of the group on each host, in the group's order.
        channel: Of this rank and those of its host; None where it is alone there.
    """

    sizes: tuple[int, ...]
    channel: Channel | None


def hierarchical_operation(
    hosts: Hosts, group: int, members: tuple[int, ...], call: int, fingerprint: int, what: str, body: Generator[Stage, None, Any]
) -> Operation:
    """Return a call of a group that spans several hosts: `hosts`, the arguments of `Operation`, and a generator of stages."""
    operation = Operation(group, members, call, fingerprint, what, hosts.channel)
    operation.links = Links()
    return operation.follow(_steps(operation, operation.links, hosts.channel, body))


def _steps(operation: Operation, links: Links, channel: Channel | None, body: Generator[Stage, None, Any]) -> Steps:
    """Run stages over links, and between them stages on the host."""
    body = agreed_errors(operation, body)
    opening = None if channel is None else (operation.call, check_of(operation.fingerprint, operation.call))
    try:
        while True:
            try:
                stage = next(body)
            except StopIteration as end:
                if opening is not None and channel is not None and not links.is_told:  # nothing has been sent either
                    yield from settled(channel, to_its_end=False)
                    yield from agreed(channel, opening[1], channel.begin(*opening))
                return end.value
            if not isinstance(stage.plan, PreparedStages):
                yield from links.run(operation, stage)
                continue
            if opening is not None and channel is not None and stage.work.nbytes:
                channel.reserve_segments()  # where there is no room, nothing has been said yet
            for ready in stage.plan.stages:
                work = stage.work[ready.start : ready.stop]
                if isinstance(ready.plan, Prepared):
                    yield from links.run(operation, Stage(ready.plan, work, stage.ufunc))
                elif ready.plan is not None:
                    if channel is None:
                        raise InternalError("a stage on the host was given to a rank that is alone there")
                    operation.entry.stage(stage.plan.algorithm, stage.work.nbytes)
                    if opening is not None:  # not before: a call over links alone says nothing in the channel
                        yield from settled(channel, to_its_end=False)
                    yield from run_rounds(channel, opening, ready.plan, work, stage.ufunc)
                    opening = None
    finally:
        body.close()
