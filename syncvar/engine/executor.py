"""The one interpreter of plans on arrays: an operation that can be advanced, blocked and resumed.

An operation is a generator of stages; a stage is a plan with its buffers. The engine hands arrived frames in and is
handed the frames to send; nothing here waits, reads a clock or opens a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from syncvar.engine.operation import BodyError, Operation, State
from syncvar.errors import InternalError, SyncvarError
from syncvar.execution.kernels import quiet
from syncvar.plans import Buffer, Copy, Plan, Recv, RecvReduce, Reduce, Send
from syncvar.wire import Kind, pack_header

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.engine.operation import Outlet, Stage
    from syncvar.execution.kernels import Combiner
    from syncvar.transports import Frame

__all__ = ["LinkOperation", "Prepared", "prepare"]

_OVERWRITE, _INCOMING_LEFT, _INCOMING_RIGHT = 0, 1, 2
_ROUNDS_PER_STAGE = 1 << 24
_BROUGHT = 2  # number of the buffer beside those of the plan
_PIECES, _PIECE_NBYTES_MIN = 16, 128 << 10


class _Incoming(NamedTuple):
    mode: int
    buffer: int
    start: int
    stop: int
    operand: int  # buffer of what is combined with the incoming value


class _Round(NamedTuple):
    sends: tuple[tuple[int, int, int, int], ...]  # peer in the world, buffer, start, stop
    incoming: dict[int, _Incoming]  # by peer in the world
    local: tuple[Copy | Reduce, ...]


class Prepared(NamedTuple):
    """A plan made ready to run: peers are ranks of the world, steps are sorted by what they do.

    `apart` has the rounds for a work buffer that holds nothing yet: what a rank brings is read where it lies, until
    something is written in its place. None where the plan reads it in another way, or leaves some of it as it is.
    """

    rounds: tuple[_Round, ...]
    work_count: int
    scratch_count: int
    algorithm: str = ""
    apart: tuple[_Round, ...] | None = None


def prepare(plan: Plan, members: Sequence[int]) -> Prepared:
    """Make a plan of a group ready to run.

    Args:
        plan: Rounds of this rank; peers are ranks of the group.
        members: Ranks of the group in the world.
    """
    rounds = []
    for steps in plan.rounds:
        sends: list[tuple[int, int, int, int]] = []
        incoming: dict[int, _Incoming] = {}
        local: list[Copy | Reduce] = []
        for step in steps:
            if isinstance(step, Copy | Reduce):
                local.append(step)
                continue
            chunk = step.chunk
            peer = members[step.peer]
            if isinstance(step, Send):
                sends.append((peer, int(chunk.buffer), chunk.start, chunk.stop))
            elif isinstance(step, Recv):
                incoming[peer] = _Incoming(_OVERWRITE, int(chunk.buffer), chunk.start, chunk.stop, int(chunk.buffer))
            elif isinstance(step, RecvReduce):
                mode = _INCOMING_LEFT if step.incoming_left else _INCOMING_RIGHT
                incoming[peer] = _Incoming(mode, int(chunk.buffer), chunk.start, chunk.stop, int(chunk.buffer))
        rounds.append(_Round(tuple(sends), incoming, tuple(local)))
    return Prepared(tuple(rounds), plan.work_count, plan.scratch_count, plan.algorithm, _apart(rounds, plan.work_count))


def _apart(rounds: Sequence[_Round], work_count: int) -> tuple[_Round, ...] | None:
    """Return the rounds with each read of what has not been written yet turned to the buffer of what is brought."""
    work = int(Buffer.WORK)
    written: list[tuple[int, int]] = []  # ranges, in order, no two of which touch
    made = []
    for sends, incoming, local in rounds:
        if any(chunk.buffer == Buffer.WORK for step in local for chunk in (step.source, step.target)):
            return None
        reads = [(start, stop) for _, buffer, start, stop in sends if buffer == work]
        reads += [(one.start, one.stop) for one in incoming.values() if one.buffer == work and one.mode != _OVERWRITE]
        homes = {}
        for start, stop in reads:
            if any(low <= start and stop <= high for low, high in written):
                homes[start, stop] = work
            elif not any(low < stop and start < high for low, high in written):
                homes[start, stop] = _BROUGHT
            else:
                return None
        made.append(_Round(
            tuple((peer, homes[start, stop] if buffer == work else buffer, start, stop) for peer, buffer, start, stop in sends),
            {
                peer: one._replace(operand=homes[one.start, one.stop]) if one.buffer == work and one.mode != _OVERWRITE else one
                for peer, one in incoming.items()
            },
            local,
        ))  # fmt: skip
        for one in incoming.values():
            if one.buffer == work and one.start < one.stop:
                written = _joined(written, one.start, one.stop)
    return tuple(made) if written == [(0, work_count)] else None


def _joined(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return ranges with one more among them, and with those put together that touch.

    Example:
        >>> _joined([(0, 2), (4, 6), (9, 10)], 2, 4)
        [(0, 6), (9, 10)]
    """
    apart = [(low, high) for low, high in ranges if high < start or stop < low]
    near = [one for one in ranges if one not in apart]
    return sorted([*apart, (min([start, *(low for low, _ in near)]), max([stop, *(high for _, high in near)]))])


def _per_segment(count: int, itemsize: int, nbytes_max: int) -> int:
    """Return how many elements of a chunk go in one frame; both ends of a transfer come to the same.

    A frame is encrypted before its first byte leaves, and used when its last one is there. So a chunk goes in some
    frames, of which one travels while others are worked on, if they are not so short that they cost more than that saves.

    Example:
        >>> [_per_segment(count, 4, 1 << 20) * 4 >> 10 for count in (1 << 14, 1 << 17, 1 << 21, 1 << 24)]  # KiB
        [64, 128, 512, 1024]
    """
    if 0 < count * itemsize <= _PIECE_NBYTES_MIN <= nbytes_max:
        return count
    return max(1, min(nbytes_max, max(_PIECE_NBYTES_MIN, -(-count // _PIECES) * itemsize)) // itemsize)


class LinkOperation(Operation):
    """A call whose frames travel over links.

    Args:
        group: Identity of the group.
        members: Its ranks in the world.
        call: Call number within the group.
        fingerprint: Digest of what the call is.
        what: The call in words.
        body: Generator of stages; its return value is the result.
    """

    __slots__ = (
        "_ahead", "_body", "_buffers", "_counts", "_local", "_pending", "_plan", "_round", "_rounds", "_stage", "_tag", "_ufunc",
    )  # fmt: skip

    def __init__(
        self,
        group: int,
        members: tuple[int, ...],
        call: int,
        fingerprint: int,
        what: str,
        body: Generator[Stage, None, Any],
    ) -> None:
        super().__init__(group, members, call, fingerprint, what)
        self._body = self._told(body)
        self._stage = -1
        self._round = -1
        self._tag = -1
        self._plan: Prepared | None = None
        self._rounds: tuple[_Round, ...] = ()
        self._buffers: tuple[NDArray[Any], ...] = (_NOTHING, _NOTHING)
        self._ufunc: Combiner | None = None
        self._pending: dict[int, int] = {}  # peer -> segments still missing in this round
        self._counts: dict[int, _Incoming] = {}
        self._local: tuple[Copy | Reduce, ...] = ()
        self._ahead: dict[int, list[Frame]] = {}

    @property
    def is_published(self) -> bool:
        """Whether others may have seen this rank in this call."""
        return self._stage >= 0

    @property
    def awaiting(self) -> tuple[int, ...]:
        """Ranks whose frames are missing in this round."""
        return tuple(self._pending)

    def advance(self, outlet: Outlet) -> State:
        """Go on as far as possible without waiting."""
        if self.state == State.CREATED:
            self.state = State.RUNNING
            self._go_on(outlet)
        if self.state == State.DRAINING:
            self._drain()
        return self.state

    def accept(self, frame: Frame, outlet: Outlet) -> None:
        """Take a frame of this call; the caller has compared the fingerprints."""
        if frame.header.round != self._tag or self.state != State.RUNNING:
            self._ahead.setdefault(frame.header.round, []).append(frame)
            return
        self._go_on(outlet, frame)

    def fail(self, error: BaseException) -> None:
        """End without a result."""
        if not self.is_over:
            self.error = error
            self.state = State.FAILED
            self.entry.end(error)
            self._body.close()

    def unused_frames(self) -> list[Frame]:
        """Return frames that arrived for rounds which will not come, to give their credit back."""
        frames = [frame for frames in self._ahead.values() for frame in frames]
        self._ahead.clear()
        return frames

    # -- inside ---------------------------------------------------------------------------------------------------

    def _go_on(self, outlet: Outlet, frame: Frame | None = None) -> None:
        """Take a frame of this round, if there is one, and go on as far as possible."""
        try:
            with quiet():
                if frame is not None:
                    self._apply(frame, outlet)
                if not self._pending:
                    self._run(outlet)
        except Exception as error:  # this rank alone; the engine tells the others
            self.accident = error
            self.fail(error)

    def _told(self, body: Generator[Stage, None, Any]) -> Generator[Stage, None, Any]:
        """Yield the stages of a body; errors of ours, once the ranks have spoken, are what all of them come to."""
        try:
            return (yield from body)
        except SyncvarError as error:
            if self.is_published:
                raise BodyError(error) from error
            raise

    def _run(self, outlet: Outlet) -> None:
        while self.state == State.RUNNING and self._may_go_on():
            if self._plan is None:
                self._next_stage(outlet)
            elif self._pending:
                return
            else:
                self._end_round(outlet)

    def _may_go_on(self) -> bool:
        """Return whether nothing but frames is waited for."""
        return True

    def _next_stage(self, outlet: Outlet) -> None:
        try:
            stage = next(self._body)
        except StopIteration as end:
            self.result = end.value
            self.state = State.DRAINING
            self._drain()
        except BodyError as wrapped:  # all ranks come to it, from what they have told each other
            self.fail(wrapped.error)
        else:
            self._begin(stage, outlet)

    def _begin(self, stage: Stage, outlet: Outlet) -> None:
        plan = cast("Prepared", stage.plan)
        scratch = np.empty(plan.scratch_count, stage.work.dtype) if plan.scratch_count else stage.work[:0]
        self._plan, self._rounds, self._buffers, self._ufunc = plan, plan.rounds, (stage.work, scratch), stage.ufunc
        if stage.brought is not None:
            if plan.apart is None:
                raise InternalError(f"{self.what}: the plan needs what is brought in its work buffer")
            self._rounds, self._buffers = plan.apart, (*self._buffers, stage.brought)
        self.entry.stage(plan.algorithm, stage.work.nbytes)
        self._stage += 1
        self._round = -1
        self._enter_round(outlet)

    def _enter_round(self, outlet: Outlet) -> None:
        plan = self._plan
        if plan is None:
            raise InternalError("an operation entered a round without a plan")
        self._round += 1
        if self._round == len(self._rounds):
            self._plan = None
            self._tag = -1
            return
        sends, incoming, self._local = self._rounds[self._round]
        tag = self._tag = self._stage * _ROUNDS_PER_STAGE + self._round
        itemsize, limit = self._buffers[0].itemsize, outlet.segment_bytes
        self._counts = incoming
        pending = self._pending = {}
        for peer, wanted in incoming.items():
            count = wanted.stop - wanted.start
            per_segment = _per_segment(count, itemsize, limit)
            pending[peer] = 1 if count <= per_segment else -(-count // per_segment)
        for peer, buffer, start, stop in sends:
            self._send(outlet, peer, self._buffers[buffer], start, stop, tag, _per_segment(stop - start, itemsize, limit))
        early = self._ahead.pop(tag, None)
        if early:
            for frame in early:
                self._apply(frame, outlet)

    def _send(
        self, outlet: Outlet, peer: int, array: NDArray[Any], start: int, stop: int, tag: int, per_segment: int
    ) -> None:
        segment = 0
        while True:
            end = min(stop, start + per_segment)
            piece = array[start:end]
            header = pack_header(
                Kind.DATA, outlet.rank, outlet.generation, self.group, self.call, tag, segment, self.fingerprint,
                piece.nbytes,
            )  # fmt: skip
            outlet.post(self, peer, header, piece.view(np.uint8).data if end > start else None)
            segment += 1
            start = end
            if start >= stop:
                return

    def _apply(self, frame: Frame, outlet: Outlet) -> None:
        header, payload = frame
        source = header.source
        wanted = self._counts.get(source)
        left = self._pending.get(source)
        if wanted is None or left is None:
            raise InternalError(f"{self.what}: rank {source} sent a frame that round {self._round} does not expect")
        array = self._buffers[wanted.buffer]
        per_segment = _per_segment(wanted.stop - wanted.start, array.itemsize, outlet.segment_bytes)
        start = wanted.start + header.segment * per_segment
        stop = min(wanted.stop, start + per_segment)
        if header.nbytes != max(0, stop - start) * array.itemsize:
            raise InternalError(f"{self.what}: rank {source} sent {header.nbytes} bytes, not {(stop - start) * array.itemsize}")
        if header.nbytes:
            value = np.frombuffer(payload, np.uint8).view(array.dtype)
            target = array[start:stop]
            own = self._buffers[wanted.operand][start:stop]
            if wanted.mode == _OVERWRITE:
                target[...] = value
            elif self._ufunc is None:
                raise InternalError(f"{self.what}: the plan reduces but no op was given")
            elif wanted.mode == _INCOMING_LEFT:
                self._ufunc(value, own, out=target)
            else:
                self._ufunc(own, value, out=target)
        if left == 1:
            del self._pending[source]
        else:
            self._pending[source] = left - 1
        outlet.consumed(source, self.group, header.nbytes)

    def _end_round(self, outlet: Outlet) -> None:
        for step in self._local:
            source = self._buffers[step.source.buffer][step.source.start : step.source.stop]
            target = self._buffers[step.target.buffer][step.target.start : step.target.stop]
            if isinstance(step, Copy):
                target[...] = source
            elif self._ufunc is None:
                raise InternalError(f"{self.what}: the plan reduces but no op was given")
            elif step.source_left:
                self._ufunc(source, target, out=target)
            else:
                self._ufunc(target, source, out=target)
        self._enter_round(outlet)

    def _drain(self) -> None:
        if self.loans:
            self.loans = [loan for loan in self.loans if not loan.is_done()]
        if not self.loans and not self.queued:
            self.state = State.DONE
            self.entry.end()


_NOTHING: NDArray[Any] = np.empty(0, np.uint8)
