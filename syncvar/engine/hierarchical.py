"""Calls of a group that spans several hosts: stages in the arena of each host, and stages over links between hosts.

`syncvar.plans.hierarchical` says what the stages are. One operation runs them all: in a stage on the host it publishes
and waits for words like a call in shared memory, in a stage between hosts it sends and waits for frames like a call
over links. Collectives that have no such stages go over links alone, in the same operation.

Before a rank ends, all ranks have said that they make the same call: those of its host in phase 0, those of other
hosts by the fingerprint that is in every frame. What a call writes is a buffer of its own until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from syncvar.arena.channels import check_of
from syncvar.engine.executor import LinkOperation, Prepared, prepare
from syncvar.engine.operation import Stage, State
from syncvar.errors import InternalError
from syncvar.execution.phases import DISAGREE, agreed, settled
from syncvar.execution.rounds import Published, prepare_published, run_rounds

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from syncvar.arena.channels import Channel
    from syncvar.engine.operation import Outlet
    from syncvar.plans import Part

__all__ = ["HierarchicalOperation", "Hosts", "PreparedStages", "prepare_stages"]


class Hosts(NamedTuple):
    """The hosts of a group that spans several, as this rank sees them.

    Args:
        sizes: Ranks of the group on each host, in the group's order.
        channel: Of this rank and those of its host; None where it is alone there.
    """

    sizes: tuple[int, ...]
    channel: Channel | None


class _Ready(NamedTuple):
    """A stage that is ready to run on the elements [start, stop) of the collective's buffer; None: nothing to do."""

    start: int
    stop: int
    plan: Prepared | Published | None


class PreparedStages(NamedTuple):
    """The stages of a collective over several hosts, made ready to run.

    Args:
        stages: In order, as many on every rank.
        algorithm: For the flight recorder.
    """

    stages: tuple[_Ready, ...]
    algorithm: str = "hierarchical"


_IDLE = Prepared((), 0, 0, "idle")


def prepare_stages(parts: Sequence[Part], members: Sequence[int]) -> PreparedStages:
    """Make the stages of a rank ready to run.

    Args:
        parts: Of this rank.
        members: Ranks of the group in the world.
    """
    made = []
    for part in parts:
        plan: Prepared | Published | None = None
        if part.plan is not None and part.on_host:
            plan = prepare_published(part.plans, part.plan.rank)
        elif part.plan is not None:
            plan = prepare(part.plan, [members[rank] for rank in part.members])
        elif not part.on_host:
            plan = _IDLE  # stages between hosts are counted: their number is part of the name of a frame
        made.append(_Ready(part.chunk.start, part.chunk.stop, plan))
    return PreparedStages(tuple(made))


class HierarchicalOperation(LinkOperation):
    """A call of a group that spans several hosts.

    Args:
        hosts: The hosts of the group.
        group: Identity of the group.
        members: Its ranks in the world.
        call: Call number within the group.
        fingerprint: Digest of what the call is.
        what: The call in words.
        body: Generator of stages; its return value is the result.
    """

    __slots__ = ("_need", "channel")

    is_shared = True

    def __init__(
        self,
        hosts: Hosts,
        group: int,
        members: tuple[int, ...],
        call: int,
        fingerprint: int,
        what: str,
        body: Generator[Stage, None, Any],
    ) -> None:
        super().__init__(group, members, call, fingerprint, what, body)
        self._body = cast("Generator[Stage, None, Any]", self._stages(self._body))
        self._need: int | None = None  # what the ranks of this host have to reach
        self.channel = hosts.channel
        if self.channel is not None:
            self.channel.queue.append(self)

    # -- what the engine asks -------------------------------------------------------------------------------------

    @property
    def need(self) -> int:
        """What the ranks of this host have to reach; changes whenever the call goes on there."""
        return 1 if self._need is None else self._need

    @property
    def _is_first(self) -> bool:
        channel = self.channel
        return channel is None or bool(channel.queue and channel.queue[0] is self and channel.is_open)

    @property
    def may_look(self) -> bool:
        """Whether looking at words can end the wait: else frames are waited for, or the launcher's verdict."""
        return self._need not in (None, DISAGREE) and self._is_first

    @property
    def needs_looks(self) -> bool:
        """Whether nothing tells of what this call waits for, so that somebody has to look."""
        return self.state < State.DRAINING and (not self._is_first or self.may_look)

    @property
    def is_unheard(self) -> bool:
        """Whether nothing tells others that this call waits: it does so on the host, where no frames go."""
        return not self._is_first or self._need is not None

    def look(self) -> bool:
        """Look for a short while whether the ranks of this host have come as far as this call needs."""
        channel = self.channel
        if self.is_over or channel is None or self._need is None or not self.may_look:
            return False
        return channel.wait(channel.others, self._need, channel.last + 2)

    @property
    def awaiting(self) -> tuple[int, ...]:
        """Ranks that have not published what this one waits for, or whose frames are missing."""
        channel = self.channel
        if channel is not None and self in channel.queue:
            first = channel.queue[0]
            if first is not self:
                ranks: tuple[int, ...] = first.awaiting
                return ranks
            if not channel.is_open:
                return channel.missing(1)
            if self._need == DISAGREE:
                return tuple(channel.members[rank] for rank in channel.passed())
            if self._need is not None:
                return channel.missing(self._need)
        return super().awaiting

    @property
    def is_published(self) -> bool:
        """Whether others may have seen this rank in this call."""
        return super().is_published or (self.channel is not None and self.channel.last >= (self.call + 1) << 1)

    @property
    def is_under_way(self) -> bool:
        """Whether other ranks may be reading this rank's memory for this call."""
        return self.is_published

    # -- going on -------------------------------------------------------------------------------------------------

    def advance(self, outlet: Outlet) -> State:
        """Go on as far as possible without waiting."""
        if self.state == State.CREATED:
            self.state = State.RUNNING
        if self.state == State.RUNNING:
            self._go_on(outlet)
        if self.state == State.DRAINING:
            self._drain()
        return self.state

    def fail(self, error: BaseException) -> None:
        """End without a result. What this rank has published stays; its next call is past it."""
        if not self.is_over:
            super().fail(error)
            if self.channel is not None:
                self.channel.is_settled = False
            self._leave_queue()

    def _run(self, outlet: Outlet) -> None:
        channel = self.channel
        if channel is not None and (channel.queue[0] is not self or (not channel.is_open and channel.open())):
            return
        super()._run(outlet)

    def _may_go_on(self) -> bool:
        need, channel = self._need, self.channel
        if need is None or channel is None:
            return True
        if need == DISAGREE or not channel.is_reached(need):
            return False
        self._need = None
        return True

    def _next_stage(self, outlet: Outlet) -> None:
        super()._next_stage(outlet)
        if self.state >= State.DRAINING:
            self._leave_queue()

    def _begin(self, stage: Stage | int, outlet: Outlet) -> None:
        if isinstance(stage, int):
            self._need = stage
            self.mismatch = self.mismatch or stage == DISAGREE
        else:
            super()._begin(stage, outlet)

    def _leave_queue(self) -> None:
        if self.channel is not None and self in self.channel.queue:
            self.channel.queue.remove(self)

    def _stages(self, body: Generator[Stage, None, Any]) -> Generator[Stage | int, None, Any]:
        """Yield stages over links, and between them the words to wait for."""
        channel = self.channel
        opening = None if channel is None else (self.call, check_of(self.fingerprint, self.call))
        try:
            while True:
                try:
                    stage = next(body)
                except StopIteration as end:
                    if opening is not None and channel is not None and self._stage < 0:  # nothing has been sent either
                        yield from settled(channel, to_its_end=False)
                        yield from agreed(channel, opening[1], channel.begin(*opening))
                    return end.value
                if not isinstance(stage.plan, PreparedStages):
                    yield stage
                    continue
                if opening is not None and channel is not None and stage.work.nbytes:
                    channel.reserve_segments()  # where there is no room, nothing has been said yet
                for ready in stage.plan.stages:
                    work = stage.work[ready.start : ready.stop]
                    if isinstance(ready.plan, Prepared):
                        yield Stage(ready.plan, work, stage.ufunc)
                    elif ready.plan is not None:
                        if channel is None:
                            raise InternalError("a stage on the host was given to a rank that is alone there")
                        self.entry.stage(stage.plan.algorithm, stage.work.nbytes)
                        if opening is not None:  # not before: a call over links alone says nothing in the channel
                            yield from settled(channel, to_its_end=False)
                        yield from run_rounds(channel, opening, ready.plan, work, stage.ufunc)
                        opening = None
        finally:
            body.close()
