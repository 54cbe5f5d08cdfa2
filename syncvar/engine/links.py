"""Plans over links, run round by round, as steps of an operation.

A stage is a plan with its buffers. The engine hands arrived frames in and is handed the frames to send; nothing here waits,
reads a clock or opens a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from syncvar.engine.operation import Operation, agreed_errors
from syncvar.engine.prepared_plans import INCOMING_LEFT, OVERWRITE
from syncvar.errors import InternalError
from syncvar.plans import Copy, Reduce
from syncvar.wire import Kind, pack_header

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.engine.operation import Outlet, Stage, Steps
    from syncvar.engine.prepared_plans import Incoming, LinkRound, Prepared
    from syncvar.execution.kernels import Combiner
    from syncvar.transports import Frame

__all__ = ["Links", "link_operation"]

_ROUNDS_PER_STAGE = 1 << 24
_PIECES, _PIECE_NBYTES_MIN = 16, 128 << 10


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


class Links:
    """What an operation sends and gets over links; it waits for this object, until all frames of a round have come.

    It does not know the operation that has it: what a call has brought and made is let go with its last reference.

    Attributes:
        outlet: Where frames go; whoever drives the operation sets it.
        has_heard: A frame has been used.
    """

    __slots__ = (
        "_ahead", "_buffers", "_incoming", "_pending", "_round", "_stage", "_tag", "_ufunc", "has_heard", "outlet",
    )  # fmt: skip

    need = 1
    needs_looks = False

    def __init__(self) -> None:
        self.outlet = cast("Outlet", None)
        self.has_heard = False
        self._stage = -1
        self._round = -1
        self._tag = -1  # of this round's frames; -1 between stages
        self._buffers: tuple[NDArray[Any], ...] = ()
        self._ufunc: Combiner | None = None
        self._pending: dict[int, int] = {}  # peer -> segments still missing in this round
        self._incoming: dict[int, Incoming] = {}
        self._ahead: dict[int, list[Frame]] = {}

    @property
    def is_told(self) -> bool:
        """Whether a stage has begun: others may have seen this rank in the call."""
        return self._stage >= 0

    @property
    def awaiting(self) -> tuple[int, ...]:
        """Ranks whose frames are missing in this round."""
        return tuple(self._pending)

    def is_reached(self) -> bool:
        """Return whether all frames of the round have been used."""
        return not self._pending

    def look(self) -> bool:
        """Return False: frames come by themselves."""
        return False

    # -- frames ---------------------------------------------------------------------------------------------------

    def expects(self, frame: Frame) -> bool:
        """Return whether a frame is of this round."""
        return frame.header.round == self._tag

    def put_aside(self, frame: Frame) -> None:
        """Keep a frame for a round that has not begun."""
        self._ahead.setdefault(frame.header.round, []).append(frame)

    def take_aside(self) -> list[Frame]:
        """Return frames that came for rounds which will not begin, and keep them no longer."""
        frames = [frame for frames in self._ahead.values() for frame in frames]
        self._ahead.clear()
        return frames

    def apply(self, operation: Operation, frame: Frame) -> None:
        """Use a frame of this round."""
        what = operation.what
        header, payload = frame
        source = header.source
        wanted = self._incoming.get(source)
        left = self._pending.get(source)
        if wanted is None or left is None:
            raise InternalError(f"{what}: rank {source} sent a frame that round {self._round} does not expect")
        self.has_heard = True
        array = self._buffers[wanted.buffer]
        per_segment = _per_segment(wanted.stop - wanted.start, array.itemsize, self.outlet.segment_bytes)
        start = wanted.start + header.segment * per_segment
        stop = min(wanted.stop, start + per_segment)
        if header.nbytes != max(0, stop - start) * array.itemsize:
            raise InternalError(f"{what}: rank {source} sent {header.nbytes} bytes, not {(stop - start) * array.itemsize}")
        if header.nbytes:
            value = np.frombuffer(payload, np.uint8).view(array.dtype)
            target = array[start:stop]
            own = self._buffers[wanted.operand][start:stop]
            if wanted.mode == OVERWRITE:
                target[...] = value
            elif wanted.mode == INCOMING_LEFT:
                self._combine(what, value, own, target)
            else:
                self._combine(what, own, value, target)
        if left == 1:
            del self._pending[source]
        else:
            self._pending[source] = left - 1
        self.outlet.consumed(source, operation.group, header.nbytes)

    # -- stages ---------------------------------------------------------------------------------------------------

    def steps(self, operation: Operation, body: Generator[Stage, None, Any]) -> Steps:
        """Run a body all of whose stages go over links; its return value is the result."""
        body = agreed_errors(operation, body)
        try:
            while True:
                try:
                    stage = next(body)
                except StopIteration as end:
                    return end.value
                yield from self.run(operation, stage)
        finally:
            body.close()

    def run(self, operation: Operation, stage: Stage) -> Steps:
        """Run a stage."""
        plan = cast("Prepared", stage.plan)
        scratch = np.empty(plan.scratch_count, stage.work.dtype) if plan.scratch_count else stage.work[:0]
        rounds, self._buffers, self._ufunc = plan.rounds, (stage.work, scratch), stage.ufunc
        if stage.brought is not None:
            if plan.apart is None:
                raise InternalError(f"{operation.what}: the plan needs what is brought in its work buffer")
            rounds, self._buffers = plan.apart, (*self._buffers, stage.brought)
        operation.entry.stage(plan.algorithm, stage.work.nbytes)
        self._stage += 1
        for self._round, one in enumerate(rounds):  # noqa: B020
            self._enter(operation, one)
            while self._pending:
                yield self
            for step in one.local:
                self._make(operation.what, step)
        self._tag = -1

    def _enter(self, operation: Operation, one: LinkRound) -> None:
        outlet = self.outlet
        tag = self._tag = self._stage * _ROUNDS_PER_STAGE + self._round
        itemsize, limit = self._buffers[0].itemsize, outlet.segment_bytes
        self._incoming = one.incoming
        pending = self._pending = {}
        for peer, wanted in one.incoming.items():
            count = wanted.stop - wanted.start
            per_segment = _per_segment(count, itemsize, limit)
            pending[peer] = 1 if count <= per_segment else -(-count // per_segment)
        for peer, buffer, start, stop in one.sends:
            self._send(operation, peer, self._buffers[buffer], start, stop, tag, _per_segment(stop - start, itemsize, limit))
        for frame in self._ahead.pop(tag, ()):
            self.apply(operation, frame)

    def _send(self, operation: Operation, peer: int, array: NDArray[Any], start: int, stop: int, tag: int, per_segment: int) -> None:
        outlet = self.outlet
        segment = 0
        while True:
            end = min(stop, start + per_segment)
            piece = array[start:end]
            header = pack_header(
                Kind.DATA, outlet.rank, outlet.generation, operation.group, operation.call, tag, segment, operation.fingerprint,
                piece.nbytes,
            )  # fmt: skip
            outlet.post(operation, peer, header, piece.view(np.uint8).data if end > start else None)
            segment += 1
            start = end
            if start >= stop:
                return

    def _make(self, what: str, step: Copy | Reduce) -> None:
        source = self._buffers[step.source.buffer][step.source.start : step.source.stop]
        target = self._buffers[step.target.buffer][step.target.start : step.target.stop]
        if isinstance(step, Copy):
            target[...] = source
        elif step.source_left:
            self._combine(what, source, target, target)
        else:
            self._combine(what, target, source, target)

    def _combine(self, what: str, left: NDArray[Any], right: NDArray[Any], target: NDArray[Any]) -> None:
        if self._ufunc is None:
            raise InternalError(f"{what}: the plan reduces but no op was given")
        self._ufunc(left, right, out=target)


def link_operation(
    group: int, members: tuple[int, ...], call: int, fingerprint: int, what: str, body: Generator[Stage, None, Any]
) -> Operation:
    """Return a call whose frames travel over links; the arguments are those of `Operation`, and a generator of stages."""
    operation = Operation(group, members, call, fingerprint, what)
    links = operation.links = Links()
    return operation.follow(links.steps(operation, body))
