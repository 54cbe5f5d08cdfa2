"""A call whose bytes go through the arena: an operation made of waits.

What runs is a generator that publishes, and yields the word which the other ranks have to reach before it goes on. It
can be driven by whoever has the time: the caller, inline and without the engine's lock, or the engine.

Phase 0 of every call compares what the ranks are doing. Nothing of a rank's data is used, and nothing of its own is
changed, before all have said the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.arena.channels import check_of
from syncvar.engine.operation import BodyError, Operation, State
from syncvar.engine.recorder import UNRECORDED
from syncvar.errors import InternalError, MismatchError, SyncvarError
from syncvar.execution.kernels import quiet
from syncvar.execution.moves import move_shared
from syncvar.execution.phases import DISAGREE, agreed, settled
from syncvar.execution.reductions import Vector, reduce_shared
from syncvar.execution.rounds import Published, run_rounds
from syncvar.execution.structures import reduce_fused

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncvar.arena.channels import Channel
    from syncvar.engine.operation import Outlet, Stage
    from syncvar.engine.recorder import Entry

__all__ = ["SharedOperation", "staged"]

_START = 1  # nothing: words begin at 2


class SharedOperation(Operation):
    """A call that goes through the arena.

    Args:
        channel: This rank's end of the group's channels.
        call: Call number within the group.
        fingerprint: Digest of what the call is.
        group: Identity of the group.
        what: The call in words.
        steps: Yields the words to wait for; its return value is the result.
    """

    __slots__ = ("_need", "_steps", "channel", "held")

    is_shared = True
    needs_looks = True  # nothing tells of what it waits for
    is_unheard = True  # nothing tells others that it waits

    def __init__(
        self,
        channel: Channel,
        group: int,
        members: tuple[int, ...],
        call: int,
        fingerprint: int,
        what: str,
        steps: Generator[int, None, Any],
        need: int = _START,
    ) -> None:
        super().__init__(group, members, call, fingerprint, what)
        self.channel = channel
        self._steps = steps
        self._need = need
        self.held: Any = None  # what others may read as long as the call is under way
        channel.queue.append(self)

    @property
    def need(self) -> int:
        """What the others have to reach: a word, or minus a phase."""
        return self._need

    @property
    def awaiting(self) -> tuple[int, ...]:
        """Ranks that have not published what this one waits for."""
        channel = self.channel
        if channel.queue and channel.queue[0] is not self:
            first: tuple[int, ...] = channel.queue[0].awaiting
            return first
        if self._need == DISAGREE:  # who is past this call has to hear of it
            return tuple(channel.members[rank] for rank in channel.passed())
        return channel.missing(self._need)

    @property
    def may_look(self) -> bool:
        """Whether it is this call's turn, and looking at the others' words can end the wait."""
        channel = self.channel
        return channel.is_open and channel.queue[0] is self and self._need not in (DISAGREE, _START)

    def look(self) -> bool:
        """Look for a short while whether the others have come as far as this call needs."""
        channel = self.channel
        return not self.is_over and self.may_look and channel.wait(channel.others, self._need, channel.last + 2)

    @property
    def is_published(self) -> bool:
        """Whether the others have seen this rank in this call."""
        return self.channel.last >= (self.call + 1) << 1

    @property
    def is_under_way(self) -> bool:
        """Whether other ranks may be reading and writing this rank's memory for this call."""
        return self._need < 0 or (self._need > 1 and self.channel.is_reached(self._need))

    def advance(self, outlet: Outlet | None = None) -> State:
        """Go on as far as possible without waiting."""
        del outlet
        channel = self.channel
        if not self.is_over and channel.queue[0] is self and (channel.is_open or not channel.open()):
            self._go_on(channel)
        return self.state

    def _go_on(self, channel: Channel) -> None:
        self.state = State.RUNNING
        with quiet():
            while self._need != DISAGREE and (self._need == _START or channel.is_reached(self._need)):
                try:
                    self._need = next(self._steps)
                except StopIteration as end:
                    self.result = end.value
                    self._end(State.DONE)
                    break
                except BodyError as wrapped:  # all ranks came to it, from what they have told each other
                    self.error = wrapped.error
                    self._end(State.FAILED)
                    break
                except Exception as error:  # this rank alone; the engine tells the others
                    self.error = self.accident = error
                    self._keep()
                    self._end(State.FAILED)
                    break
        self.mismatch = self._need == DISAGREE

    def fail(self, error: BaseException) -> None:
        """End without a result. What this rank has published stays; its next call is past it."""
        if not self.is_over:
            self.error = error
            self._keep()
            self._steps.close()
            self.channel.is_settled = False
            self._end(State.FAILED)

    def _keep(self) -> None:
        """Keep what others may still read; of calls that the ranks do not make alike nobody reads anything."""
        if self.held is not None and not isinstance(self.error, MismatchError):
            self.channel.keep(self.held)

    def _end(self, state: State) -> None:
        self.channel.queue.remove(self)
        self.state = state
        self.entry.end(self.error)


def staged(
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
                        raise InternalError("an all-reduce was given no op")
                    vector = Vector([stage.work], [stage.work], stage.ufunc, stage.work.dtype)
                entry.stage(plan.algorithm, vector.nbytes)
                reduce = reduce_fused if vector.is_split else reduce_shared
                is_read = yield from reduce(channel, opening, vector)
            else:
                entry.stage(plan.algorithm, stage.work.nbytes)
                yield from run_rounds(channel, opening, plan, stage.work, stage.ufunc)
            is_first = False
    finally:
        body.close()
