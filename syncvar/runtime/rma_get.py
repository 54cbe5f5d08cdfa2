"""Remote gets between two processes, outside all groups.

One asks by key, the other's engine answers.

The target process takes no part: the driver of its engine, at worst the progress thread, answers
from published data. A get has a number of its own. If no answer comes in time, only the get fails.

An answer of k frames carries k in the header's `round` and the index in `segment`: first a
description, then the bytes. k = 0 means that the key is not published.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING

from syncvar.core.errors import DeadlineExceeded
from syncvar.protocol.frame import FrameType, Header
from syncvar.runtime.flight_recorder.call_record import UNRECORDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.core.errors import SyncvarError
    from syncvar.runtime.state import Core
    from syncvar.transports.base import Frame

Answer = tuple[bytes, memoryview]  # description, and bytes that are never written again


class GetRequest:
    """A remote get that waits for its answer; it is an `Awaited`."""

    __slots__ = (
        "_parts",
        "call",
        "deadline",
        "entry",
        "error",
        "is_over",
        "key",
        "peer",
        "result",
        "thread",
        "timeout_s",
        "what",
    )

    def __init__(self, peer: int, key: int, what: str, deadline: float, timeout_s: float) -> None:
        self.peer = peer
        self.key = key
        self.what = what
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.call = -1
        self.entry = UNRECORDED
        self.thread = 0
        self.is_over = False
        self.error: BaseException | None = None
        self.result: tuple[bytes, bytes] | None = None
        self._parts: dict[int, bytes | memoryview] = {}

    def look(self) -> bool:
        """Return False: answers arrive through the engine."""
        return False

    def fail(self, error: BaseException) -> None:
        """End without an answer."""
        if not self.is_over:
            self.error = error
            self.is_over = True
            self.entry.end(error)

    def accept(self, frame: Frame) -> None:
        """Use a frame of the answer; frames may come in any order."""
        count = frame.header.round
        if frame.header.segment < count:
            self._parts[frame.header.segment] = frame.payload
        if len(self._parts) < count:
            return
        if count:
            self.result = (
                bytes(self._parts[0]),
                b"".join(self._parts[index] for index in range(1, count)),
            )
        self._parts.clear()
        self.is_over = True
        self.entry.end()


class GetRequests:
    """The remote gets of a process: its own, and those that it answers.

    Attributes:
        find: Finds published data by key; the driver calls it.
    """

    def __init__(self, core: Core) -> None:
        self.frames_sent = 0
        self.find: Callable[[int], Answer | None] = _nothing
        # Appended by any thread, sent by the driver.
        self.asked: collections.deque[GetRequest] = collections.deque()
        self._core = core
        self._segment_bytes = core.config.segment_bytes
        self._numbers = itertools.count()
        self._open: dict[int, GetRequest] = {}
        core.when_broken.append(self.fail)

    def send_requests(self) -> None:
        """Send the waiting requests, and fail those that cannot be answered any more."""
        core = self._core
        while self.asked:
            question = self.asked.popleft()
            if core.failure is not None:
                question.fail(core.failure)
            elif question.peer in core.book.left:
                question.fail(core.book.ended(question.peer, question.what))
            else:
                question.call = next(self._numbers)
                self._open[question.call] = question
                self._send(FrameType.ASK, question.peer, question.call, question.key, 0, 0, None)

    def answer(self, header: Header) -> None:
        """Answer a request of another rank."""
        source, call, key = header.source, header.call, header.fingerprint
        found = self.find(key)
        if found is None:
            self._send(FrameType.ANSWER, source, call, key, 0, 0, None)
            return
        description, data = found
        starts = range(0, data.nbytes, self._segment_bytes)
        count = 1 + len(starts)
        self._send(FrameType.ANSWER, source, call, key, count, 0, memoryview(description))
        for segment, start in enumerate(starts, 1):
            piece = data[start : start + self._segment_bytes]
            self._send(FrameType.ANSWER, source, call, key, count, segment, piece)

    def accept(self, frame: Frame) -> bool:
        """Use a frame of an answer; return whether it completed a request.

        Late answers are dropped.
        """
        question = self._open.get(frame.header.call)
        if question is None or question.key != frame.header.fingerprint:
            return False
        question.accept(frame)
        if question.is_over:
            del self._open[frame.header.call]
        return question.is_over

    def expire(self, now: float, due: float) -> float:
        """Fail the requests past their deadline; return when the next one is due, or `due`."""
        for number, question in list(self._open.items()):
            if now >= question.deadline:
                del self._open[number]
                question.fail(
                    DeadlineExceeded(
                        f"{question.what} was not answered within {question.timeout_s:g} s by "
                        f"rank {question.peer}; the group is not affected",
                        (question.peer,),
                        question.timeout_s,
                    )
                )
                due = now
            else:
                due = min(due, question.deadline)
        return due

    def fail(self, error: SyncvarError, peer: int | None = None) -> None:
        """Fail the requests to a rank, or all."""
        for number, question in list(self._open.items()):
            if peer is None or question.peer == peer:
                del self._open[number]
                question.fail(error)

    def _send(
        self,
        kind: FrameType,
        peer: int,
        call: int,
        key: int,
        count: int,
        segment: int,
        payload: memoryview | None,
    ) -> None:
        nbytes = 0 if payload is None else payload.nbytes
        header = Header(
            kind, self._core.rank, self._core.generation, 0, call, count, segment, key, nbytes
        ).pack()
        self.frames_sent += 1
        self._core.transport.send(peer, header, payload if nbytes else None, borrow=True)


def _nothing(_key: int) -> None:
    pass
