"""A call that the engine drives, and the steps of its stages in shared memory, over links, or both.

The steps are a generator. Each step works until it needs other ranks, and yields what it waits for.
That is a need in the group's channel in shared memory, or a `Wait` (frames of a round, an answer in
a message ring). A request never blocks: the caller drives it without the engine's lock, or the
engine does.

Signature check: phase 0 of a call in shared memory compares fingerprints; over links every frame
carries one. Before that, no rank uses another rank's data or changes its own: a call writes only
its own work buffer. A group over several hosts alternates stages on the host and between hosts, see
`algorithms.hierarchical`.
"""

from __future__ import annotations

import contextlib
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from syncvar._native.constants import Need
from syncvar.algorithms.compile_schedule import LinkSchedule
from syncvar.core.errors import InternalError, MismatchError, SyncvarError
from syncvar.core.reduce_ops import quiet
from syncvar.runtime.block_transfer import move_shared
from syncvar.runtime.planner import CompiledStages, run_rounds
from syncvar.runtime.program_runner import agreed, settled
from syncvar.runtime.shm_reduce import ReduceBuffers, reduce_shared, reduce_small
from syncvar.shm.channel_table import check_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.core.reduce_ops import Combiner
    from syncvar.protocol.frame import Header
    from syncvar.runtime.block_transfer import Movement
    from syncvar.runtime.call_record import PendingRecord
    from syncvar.runtime.link_exchange import LinkExchange
    from syncvar.runtime.planner import Published
    from syncvar.shm.group_channel import GroupChannel
    from syncvar.transports.base import Frame, Place

    Steps = Generator[int | "Wait", None, Any]


class BodyError(Exception):
    """Error of a call after all ranks had agreed on the call: every rank raises it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class RequestState(IntEnum):
    """State of a request."""

    CREATED = 0
    RUNNING = 1
    DRAINING = 2  # the result is there, but the transport still reads some of our memory
    DONE = 3
    FAILED = 4


class Stage(NamedTuple):
    """A schedule with its buffers."""

    # Compiled schedule for links, for shared memory, or for several hosts
    plan: LinkSchedule | Published | CompiledStages
    work: NDArray[Any]  # flat array of `plan.work_count` elements, changed in place
    ufunc: Combiner | None = None  # combines two operands; None for schedules that only move data
    # Input and output buffers of an all-reduce in shared memory, instead of `work`
    vector: ReduceBuffers | None = None
    # Blocks to move concurrently in shared memory, instead of the schedule
    movement: Movement | None = None
    # Input that a schedule over links reads, instead of a copy of it in `work`
    send_buffer: NDArray[Any] | None = None
    # Small vectors of other dtypes in shared memory, besides `vector` or instead of it
    several: Sequence[ReduceBuffers] = ()


class Wait(Protocol):
    """Condition that a request waits for, if it is no word of a channel."""

    @property
    def need(self) -> int:
        """Number that changes with each progress in shared memory; constant over links."""

    @property
    def needs_looks(self) -> bool:
        """Whether the wait needs polling, because nothing signals its end."""

    @property
    def is_published(self) -> bool:
        """Whether other ranks may have seen this rank in this call."""

    @property
    def awaiting(self) -> tuple[int, ...]:
        """World ranks that this rank waits for."""

    def is_reached(self) -> bool:
        """Return whether the call can continue."""

    def look(self) -> bool:
        """Spin for a short while; return whether something has changed."""


class Request:
    """A call that the engine drives, or its caller inline.

    Args:
        entry: Record of the call in the flight recorder.
        steps: Generator of the call's steps; None for a call that is already over.
        channel: Channel of a call in shared memory; calls wait there for their turn.
        links: Exchange of frames, for calls that use links.
        wait: Condition of the next step: a need, see `Need`, or a `Wait`.
    """

    def __init__(
        self,
        entry: PendingRecord,
        steps: Steps | None,
        channel: GroupChannel | None = None,
        links: LinkExchange | None = None,
        wait: int | Wait = Need.AT_ONCE,
    ) -> None:
        info = entry.info
        self.entry = entry
        self.group = info.group
        self.members = info.members
        self.call = entry.call
        self.fingerprint = info.fingerprint
        self.channel = channel
        self.links = links
        # No frame arrives for calls in shared memory, so they need polling.
        self.is_shared = channel is not None
        self.state = RequestState.CREATED
        self.result: Any = None
        self.error: BaseException | None = None
        # An error of this rank only, to report to the others.
        self.accident: Exception | None = None
        self.held: Any = None  # buffers that others may read until the call is over
        self.abandon: Callable[[], None] | None = None
        self.deadline = 0.0
        self.timeout_s = 0.0
        self.started = 0.0
        self.report_at = 0.0
        self.reported = False
        self.reported_thread = 0  # `thread` in the latest report
        # (rank, group, call), flattened: one of these calls of others ends the wait. Empty: all
        # ranks of the group have to make this call.
        self.alternatives: tuple[int, ...] = ()
        self.mismatch = False
        self.site = ""  # file:line where an asynchronous call was started
        self.thread = 0  # identity of the waiting thread; 0 for none
        self._listeners: list[Callable[[], None]] = []  # see `when_over`
        self._steps = steps
        self._wait = wait
        if channel is not None:
            channel.queue.append(self)

    # -- state, as the engine asks for it ----------------------------------------------------------

    @property
    def label(self) -> str:
        """The text of the call for people."""
        return self.entry.info.spec.label

    @property
    def is_over(self) -> bool:
        """Whether the result or the error is there."""
        return self.state >= RequestState.DONE

    @property
    def has_listeners(self) -> bool:
        """Whether the end of this call lets a task or a callback run."""
        return bool(self._listeners)

    @property
    def is_published(self) -> bool:
        """Whether other ranks may have seen this rank in this call."""
        if self.channel is not None and self.channel.last >= (self.call + 1) << 1:
            return True
        if self.links is not None and self.links.is_published:
            return True
        return not isinstance(self._wait, int) and self._wait.is_published

    @property
    def is_under_way(self) -> bool:
        """Whether other ranks may be accessing this rank's memory for this call."""
        channel, need = self.channel, self._wait
        if channel is None:
            return False
        if self.links is not None or not isinstance(need, int):
            return self.is_published
        if need in (Need.DISAGREE, Need.AT_ONCE):
            return False
        return need < 0 or channel.is_reached(need)

    @property
    def need(self) -> int:
        """What the others have to publish, see `Need`; or a number that changes with progress."""
        wait = self._wait
        return wait if isinstance(wait, int) else wait.need

    @property
    def awaiting(self) -> tuple[int, ...]:
        """World ranks that this rank waits for."""
        channel, wait = self.channel, self._wait
        first: Request | None = None if channel is None else channel.first
        if channel is not None and first is not None:
            if first is not self and self in channel.queue:
                return first.awaiting
            if not channel.is_open:
                return channel.missing(Need.AT_ONCE)
        if not isinstance(wait, int):
            return wait.awaiting
        if channel is None:
            return ()
        if wait == Need.DISAGREE:  # ranks that are past this call have to report too
            return tuple(channel.members[rank] for rank in channel.passed())
        return channel.missing(wait)

    @property
    def may_look(self) -> bool:
        """Whether it is this call's turn, and polling the words of the others can end the wait."""
        wait = self._wait
        return (
            self._is_first and isinstance(wait, int) and wait not in (Need.DISAGREE, Need.AT_ONCE)
        )

    @property
    def needs_looks(self) -> bool:
        """Whether this call needs polling, because nothing signals the end of its wait."""
        if not self.is_shared or self.state >= RequestState.DRAINING:
            return False
        wait = self._wait
        if not self._is_first:
            return True
        return wait != Need.DISAGREE if isinstance(wait, int) else wait.needs_looks

    @property
    def is_unheard(self) -> bool:
        """Whether this call waits in the channel: it sends no frames, so others do not know."""
        return self.channel is not None and (isinstance(self._wait, int) or not self._is_first)

    def look(self) -> bool:
        """Spin for a short while; return whether the others have come as far as this call needs."""
        channel, wait = self.channel, self._wait
        if self.is_over:
            return False
        if not isinstance(wait, int):
            return self._is_first and wait.look()
        if channel is None or not self.may_look:
            return False
        return channel.wait(channel.others, wait, channel.last + 2)

    @property
    def _is_first(self) -> bool:
        channel = self.channel
        return channel is None or (channel.first is self and channel.is_open)

    # -- progress ----------------------------------------------------------------------------------

    def advance(self) -> RequestState:
        """Make as much progress as possible without waiting."""
        if self.state == RequestState.CREATED:
            self.state = RequestState.RUNNING
        if self.state == RequestState.RUNNING:
            self._go_on()
        if self.state == RequestState.DRAINING:
            self._drain()
        return self.state

    def accept(self, frame: Frame) -> None:
        """Use a frame of this call; the caller has compared the fingerprints."""
        links = self.links
        if links is None:
            raise InternalError(
                f"{self.label}: a frame arrived for a call that uses shared memory only"
            )
        if self.state != RequestState.RUNNING or not links.expects(frame):
            links.put_aside(frame)
        else:
            self._go_on(frame)

    def place(self, header: Header) -> Place | None:
        """Return where the payload of a frame of this call belongs that is under way."""
        if self.links is None or self.state != RequestState.RUNNING:
            return None
        return self.links.place(header)

    def fail(self, error: BaseException) -> None:
        """End with an error. What this rank has published stays; its next call is past it.

        Any thread may call this. If another one executes a step, that step ends, and none follows.
        """
        self._end(error)

    def complete(self, result: Any) -> None:
        """End with a result that no step has returned."""
        self.result = result
        self.state = RequestState.DONE
        self._notify()

    def when_over(self, listener: Callable[[], None]) -> None:
        """Call a function once the call is over, in the thread that ends it; now if it is over.

        That thread may hold the engine's lock, so the function must neither block nor raise.
        """
        self._listeners.append(listener)
        if self.is_over:  # perhaps since the line before: then both threads look, and one finds it
            self._notify()

    def _notify(self) -> None:
        while self._listeners:
            try:
                listener = self._listeners.pop(0)
            except IndexError:  # another thread has found it
                return
            listener()

    def unused_frames(self) -> list[Frame]:
        """Return frames that will never be used, so that the caller can return their credit."""
        return [] if self.links is None else self.links.take_aside()

    def _go_on(self, frame: Frame | None = None) -> None:  # noqa: C901  (hot path)
        """Use a frame of this round, if there is one, and take all steps that are possible now."""
        steps, links = self._steps, self.links
        if steps is None:
            raise InternalError(f"{self.label}: the engine began a call that has no steps")
        try:
            if frame is None and not self._take_turn():
                return
            with quiet():
                if frame is not None and links is not None:
                    links.apply(frame)
                while self.state == RequestState.RUNNING and self._is_reached():
                    self._wait = next(steps)
        except StopIteration as end:
            if not self.is_over:
                self.result = end.value
                self.state = RequestState.DRAINING
                self._leave_queue()
                self._drain()
        except BodyError as wrapped:
            # all ranks raise it, because it follows from data that all have
            self._end(wrapped.error, is_agreed=True)
        except Exception as error:  # only this rank; the engine reports it
            if not self.is_over:
                self.accident = error
                self._end(error)
        if self.is_over:
            steps.close()
        self.mismatch = self.mismatch or self._wait == Need.DISAGREE

    def _take_turn(self) -> bool:
        """Return whether this call is first in the queue of its channel, and the channel is open.

        The first call opens the channel, if all ranks have made their entries.
        """
        channel = self.channel
        if channel is None:
            return True
        return channel.first is self and (channel.is_open or channel.try_open())

    def _is_reached(self) -> bool:
        wait, channel = self._wait, self.channel
        if not isinstance(wait, int):
            return wait.is_reached()
        return wait == Need.AT_ONCE or (channel is not None and channel.is_reached(wait))

    def _drain(self) -> None:
        if self.links is None or self.links.is_drained:
            self.state = RequestState.DONE
            self.entry.end()
            self._notify()

    def _end(self, error: BaseException, *, is_agreed: bool = False) -> None:
        """End with an error, `is_agreed` by all ranks or of this one; does nothing twice."""
        if self.is_over:
            return
        self.error = error
        channel = self.channel
        if channel is not None and not (is_agreed and self.links is None):
            channel.is_settled = False
            if self.held is not None and not isinstance(error, MismatchError):
                # Others may still read it; after a mismatch no rank reads anything.
                channel.keep(self.held)
        self._leave_queue()
        if self.links is not None:
            self.links.close()
        self.state = RequestState.FAILED
        self.entry.end(error)
        if self.abandon is not None:
            self.abandon()
        if self._steps is not None:
            # Another thread executes a step and closes them after it.
            with contextlib.suppress(ValueError):
                self._steps.close()
        self._notify()

    def _leave_queue(self) -> None:
        if self.channel is not None and self in self.channel.queue:
            with contextlib.suppress(ValueError):  # another thread has removed it meanwhile
                self.channel.queue.remove(self)


def stage_steps(  # noqa: C901, PLR0912  (hot path)
    entry: PendingRecord,
    body: Generator[Stage, None, Any],
    channel: GroupChannel | None,
    links: LinkExchange | None,
    *,
    has_published: bool = False,
) -> Steps:
    """Return the steps of a call: they run its stages, and return the result of the body.

    If the body raises a SyncvarError after this rank has published, all ranks raise it. A call
    without a stage on this host has no `channel`, one without a stage over links no `links`.
    `has_published`: phase 0 is over.
    """
    check = check_of(entry.info.fingerprint, entry.call)
    # Arguments of phase 0, which the first stage on the host executes.
    opening = None if channel is None or has_published else (entry.call, check)
    is_read = True  # all ranks have read what this rank published in the stage before
    try:
        if channel is not None and opening is not None and links is None:
            yield from settled(channel)
        while True:
            try:
                stage = next(body)
            except StopIteration as end:
                is_published = links is not None and links.is_published
                if channel is not None and opening is not None and not is_published:
                    if links is not None:
                        yield from settled(channel, to_its_end=False)
                    yield from agreed(channel, check, channel.begin(*opening))
                return end.value
            except SyncvarError as error:
                is_published = links is not None and links.is_published
                if is_published or (channel is not None and opening is None):
                    raise BodyError(error) from error
                raise
            if isinstance(stage.plan, CompiledStages) and links is not None:
                opening = yield from _over_hosts(entry, stage, stage.plan, channel, links, opening)
            elif isinstance(stage.plan, LinkSchedule):
                if links is None:
                    raise InternalError("a call in shared memory has a schedule for links")
                yield from links.run(stage.plan, stage.work, stage.ufunc, stage.send_buffer)
            elif channel is None:
                raise InternalError("a call over links has a schedule for shared memory")
            else:
                is_read = yield from _on_host(entry, stage, channel, opening, was_read=is_read)
                opening = None
    finally:
        body.close()


def _on_host(
    entry: PendingRecord,
    stage: Stage,
    channel: GroupChannel,
    opening: tuple[int, int] | None,
    *,
    was_read: bool,
) -> Generator[int, None, bool]:
    """Run a stage in shared memory; return whether all ranks have read what this rank published.

    `was_read` is the same of the stage before.
    """
    if not was_read:  # this stage overwrites data that others may still read
        yield channel.publish()
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
    plan: CompiledStages,
    channel: GroupChannel | None,
    links: LinkExchange,
    opening: tuple[int, int] | None,
) -> Generator[Any, None, tuple[int, int] | None]:
    """Run the stages on this host and between hosts; return what is left of the opening."""
    if channel is not None and opening is not None and stage.work.nbytes:
        channel.reserve_segments()  # may raise, so before anything is published
    counted = entry.nbytes
    whole = stage.work
    if plan.room:
        whole = np.empty(stage.work.size + plan.room, stage.work.dtype)
        whole[: stage.work.size] = stage.work
    for part in plan.stages:
        entry.nbytes = counted  # all parts work on the same bytes
        work = whole[part.start : part.stop]
        if isinstance(part.plan, LinkSchedule):
            yield from links.run(part.plan, work, stage.ufunc)
        elif part.plan is not None:
            if channel is None:
                raise InternalError("the only rank of a host has a stage in shared memory")
            entry.stage(plan.algorithm, stage.work.nbytes)
            if opening is not None:  # only here: a call over links alone publishes nothing
                yield from settled(channel, to_its_end=False)
            yield from run_rounds(channel, opening, part.plan, work, stage.ufunc)
            opening = None
    if plan.room:
        stage.work[...] = whole[: stage.work.size]
    entry.nbytes = counted + stage.work.nbytes
    return opening
