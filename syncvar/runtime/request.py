"""A started call: its steps, and where it stands in them.

The steps are a generator. It does as much of the call as it can, and yields what has to be reached before it goes on: a
word of the group's channel, where the bytes go through shared memory, or something else that can say whether it is reached: the
frames of a round (`links`), an answer in a box (`messages`). `stages` walks through both.

An operation never waits. Whoever has the time drives it: the caller, inline and without the engine's lock, or the engine.
"""

from __future__ import annotations

import contextlib
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from syncvar.core.errors import InternalError, MismatchError
from syncvar.core.reduce_ops import quiet
from syncvar.runtime.programs.program_runner import DISAGREE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.algorithms.compile_messages import Prepared
    from syncvar.core.reduce_ops import Combiner
    from syncvar.runtime.flight_recorder.call_record import PendingRecord
    from syncvar.runtime.links.exchange import LinkExchange
    from syncvar.runtime.links.planner import PreparedStages
    from syncvar.runtime.programs.block_transfer import Movement
    from syncvar.runtime.programs.round_runner import Published
    from syncvar.runtime.programs.shm_reduce import ReduceBuffers
    from syncvar.shm.group_channel import Channel
    from syncvar.transports.base import Frame

    Steps = Generator[int | "Wait", None, Any]

__all__ = ["BodyError", "Request", "RequestState", "Stage", "Wait"]

_START = 1  # what is reached at once: words of a channel begin at 2


class BodyError(Exception):
    """What the body of a call raised after the ranks had agreed on the call: each of them raises it.

    Args:
        error: The error itself.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class RequestState(IntEnum):
    """Where an operation stands."""

    CREATED = 0
    RUNNING = 1
    DRAINING = 2  # the result is there; memory lent to the transport is not all back yet
    DONE = 3
    FAILED = 4


class Stage(NamedTuple):
    """A plan with what it works on.

    Args:
        plan: The prepared plan, for links, for shared memory, or for several hosts.
        work: Flat array of `plan.work_count` elements, the collective's buffer, changed in place.
        ufunc: Combines two operands; None for plans that only move data.
        vector: Of an all-reduce in shared memory: arrays that take the place of `work`, and where the result goes.
        movement: Of a call in shared memory that moves blocks side by side; it takes the place of the plan.
        brought: Of a plan over links that has rounds for it: what `work` would hold before the first round; only read.
        several: Small vectors of several kinds in shared memory, beside `vector` or in its place.
    """

    plan: Prepared | Published | PreparedStages
    work: NDArray[Any]
    ufunc: Combiner | None = None
    vector: ReduceBuffers | None = None
    movement: Movement | None = None
    brought: NDArray[Any] | None = None
    several: Sequence[ReduceBuffers] = ()


class Wait(Protocol):
    """What an operation waits for, where it is no word of its channel."""

    @property
    def need(self) -> int:
        """A number that changes whenever the call has gone on."""

    @property
    def needs_looks(self) -> bool:
        """Whether nothing tells when it is reached, so that somebody has to look."""

    @property
    def is_told(self) -> bool:
        """Whether others may have seen this rank in this call."""

    @property
    def awaiting(self) -> tuple[int, ...]:
        """Ranks that this one is waiting for."""

    def is_reached(self) -> bool:
        """Return whether the call can go on."""

    def look(self) -> bool:
        """Look for a short while whether something has changed."""


class Request:
    """A started call.

    Args:
        entry: The call, in the flight recorder.
        steps: What it does; None of a call that is over when it is made.
        channel: This rank's end of the group's channels, where its bytes go through shared memory: it waits there for its turn.
        links: What it sends and gets in frames, where it may.
        wait: What has to be reached before its next step.
    """

    def __init__(
        self,
        entry: PendingRecord,
        steps: Steps | None,
        channel: Channel | None = None,
        links: LinkExchange | None = None,
        wait: int | Wait = _START,
    ) -> None:
        told = entry.told
        self.entry = entry
        self.group = told.group
        self.members = told.members
        self.call = entry.call
        self.fingerprint = told.fingerprint
        self.what = told.what
        self.channel = channel
        self.links = links
        self.is_shared = (
            channel is not None
        )  # its bytes go through memory, where somebody has to look: no frame arrives
        self.state = RequestState.CREATED
        self.result: Any = None
        self.error: BaseException | None = None
        self.accident: Exception | None = (
            None  # the error, where it is this rank's alone and the others must be told
        )
        self.held: Any = None  # what others may read as long as the call is under way
        self.abandon: Callable[[], None] | None = None  # called when it fails
        self.deadline = 0.0
        self.timeout_s = 0.0
        self.started = 0.0
        self.report_at = 0.0
        self.reported = False
        self.mismatch = False
        self.site = ""  # file:line, of a call that was started and not waited for at once
        self.thread = 0  # the thread that waits for this operation; 0 when nobody does
        self._steps = steps
        self._wait = wait
        if channel is not None:
            channel.queue.append(self)

    # -- what the engine asks ----------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the caller may take the result or the error."""
        return self.state >= RequestState.DONE

    @property
    def is_published(self) -> bool:
        """Whether others may have seen this rank in this call."""
        if self.channel is not None and self.channel.last >= (self.call + 1) << 1:
            return True
        if self.links is not None and self.links.is_told:
            return True
        return not isinstance(self._wait, int) and self._wait.is_told

    @property
    def is_under_way(self) -> bool:
        """Whether other ranks may be reading and writing this rank's memory for this call."""
        channel, need = self.channel, self._wait
        if channel is None:
            return False
        if self.links is not None or not isinstance(need, int):
            return self.is_published
        return need < 0 or (need > _START and channel.is_reached(need))

    @property
    def need(self) -> int:
        """What the others have to reach, a word of the channel or minus a phase; or a number that changes when the call goes on."""
        wait = self._wait
        return wait if isinstance(wait, int) else wait.need

    @property
    def awaiting(self) -> tuple[int, ...]:
        """Ranks that this one is waiting for."""
        channel, wait = self.channel, self._wait
        first: Request | None = None if channel is None else channel.first
        if channel is not None and first is not None:
            if first is not self and self in channel.queue:
                return first.awaiting
            if not channel.is_open:
                return channel.missing(_START)
        if not isinstance(wait, int):
            return wait.awaiting
        if channel is None:
            return ()
        if wait == DISAGREE:  # who is past this call has to hear of it
            return tuple(channel.members[rank] for rank in channel.passed())
        return channel.missing(wait)

    @property
    def may_look(self) -> bool:
        """Whether it is this call's turn, and looking at the others' words can end the wait."""
        return (
            self._is_first and isinstance(self._wait, int) and self._wait not in (DISAGREE, _START)
        )

    @property
    def needs_looks(self) -> bool:
        """Whether nothing tells of what this call waits for, so that somebody has to look."""
        if not self.is_shared or self.state >= RequestState.DRAINING:
            return False
        wait = self._wait
        return (
            wait != DISAGREE or not self._is_first
            if isinstance(wait, int)
            else not self._is_first or wait.needs_looks
        )

    @property
    def is_unheard(self) -> bool:
        """Whether nothing tells others that this call waits: it does so in the channel, where no frames go."""
        return self.channel is not None and (isinstance(self._wait, int) or not self._is_first)

    def look(self) -> bool:
        """Look for a short while whether the others have come as far as this call needs."""
        channel, wait = self.channel, self._wait
        if self.is_over:
            return False
        if not isinstance(wait, int):
            return self._is_first and wait.look()
        return (
            channel is not None
            and self.may_look
            and channel.wait(channel.others, wait, channel.last + 2)
        )

    @property
    def _is_first(self) -> bool:
        channel = self.channel
        return channel is None or (channel.first is self and channel.is_open)

    # -- going on ----------------------------------------------------------------------------------

    def advance(self) -> RequestState:
        """Go on as far as possible without waiting."""
        if self.state == RequestState.CREATED:
            self.state = RequestState.RUNNING
        if self.state == RequestState.RUNNING:
            self._go_on()
        if self.state == RequestState.DRAINING:
            self._drain()
        return self.state

    def accept(self, frame: Frame) -> None:
        """Take a frame of this call; the caller has compared the fingerprints."""
        links = self.links
        if links is None:
            raise InternalError(f"{self.what}: a frame came to a call that sends none")
        if self.state != RequestState.RUNNING or not links.expects(frame):
            links.put_aside(frame)
        else:
            self._go_on(frame)

    def fail(self, error: BaseException) -> None:
        """End without a result. What this rank has published stays; its next call is past it.

        Any thread may come, also while another one is in a step: that step ends, and nothing follows it.
        """
        self._end(error)

    def unused_frames(self) -> list[Frame]:
        """Return frames that arrived and will not be looked at, to give their credit back."""
        return [] if self.links is None else self.links.take_aside()

    def _go_on(self, frame: Frame | None = None) -> None:
        """Use a frame of this round, if there is one, and take the steps that can be taken now."""
        steps, links = self._steps, self.links
        if steps is None:
            raise InternalError(f"{self.what}: a call without steps was begun")
        try:
            if frame is None and not self._is_its_turn():
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
        except BodyError as wrapped:  # all ranks came to it, from what they have told each other
            self._end(wrapped.error, is_agreed=True)
        except Exception as error:  # this rank alone; the engine tells the others
            if not self.is_over:
                self.accident = error
                self._end(error)
        if self.is_over:
            steps.close()
        self.mismatch = self.mismatch or self._wait == DISAGREE

    def _is_its_turn(self) -> bool:
        """Return whether no other call has the channel, which all ranks have opened."""
        channel = self.channel
        return channel is None or (
            channel.first is self and (channel.is_open or not channel.open())
        )

    def _is_reached(self) -> bool:
        wait, channel = self._wait, self.channel
        if not isinstance(wait, int):
            return wait.is_reached()
        return wait == _START or (
            wait != DISAGREE and channel is not None and channel.is_reached(wait)
        )

    def _drain(self) -> None:
        if self.links is None or self.links.is_drained:
            self.state = RequestState.DONE
            self.entry.end()

    def _end(self, error: BaseException, *, is_agreed: bool = False) -> None:
        if self.is_over:
            return
        self.error = error
        channel = self.channel
        if channel is not None and not (is_agreed and self.links is None):
            channel.is_settled = False
            if self.held is not None and not isinstance(error, MismatchError):
                channel.keep(
                    self.held
                )  # others may still read it; of calls that the ranks do not make alike nobody reads anything
        self._leave_queue()
        self.state = RequestState.FAILED
        self.entry.end(error)
        if self.abandon is not None:
            self.abandon()
        if self._steps is not None:
            with contextlib.suppress(
                ValueError
            ):  # another thread is in a step, and closes them after it
                self._steps.close()

    def _leave_queue(self) -> None:
        if self.channel is not None and self in self.channel.queue:
            with contextlib.suppress(ValueError):  # another thread has ended it meanwhile
                self.channel.queue.remove(self)
