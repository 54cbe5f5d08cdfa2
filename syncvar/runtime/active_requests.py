"""The running operations of a process: begin, deliver frames, end.

Deadlines and reports of long waits.

The driver of the engine calls `StartedCalls`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from syncvar.core.errors import DeadlineExceeded
from syncvar.core.rank_text import rank_list
from syncvar.protocol.frame import FrameType
from syncvar.runtime.flight_recorder.call_sites import call_site
from syncvar.runtime.request import RequestState

if TYPE_CHECKING:
    from syncvar.runtime.links.flow_control import Flow
    from syncvar.runtime.request import Request
    from syncvar.runtime.state import Core
    from syncvar.transports.base import Frame

_LOAN_LOOK_S = 0.0005
_FOREVER = float("inf")
_FOLLOWING_LOOK_S = 0.25


class StartedCalls:
    """Operations of `core.inbox`, `core.active` and `core.under_way`, as the driver handles them.

    Attributes:
        moved: When a shared-memory operation last made progress, monotonic seconds.
    """

    def __init__(self, core: Core, flow: Flow) -> None:
        self.moved = 0.0
        self._core = core
        self._book = core.book
        self._flow = flow

    @property
    def all(self) -> list[Request]:
        """Operations that run or wait to begin. Without those that are over.

        Their waiters know, before they are removed here.
        """
        return [
            one
            for one in (*list(self._core.active.values()), *list(self._core.inbox))
            if not one.is_over
        ]

    # -- from the start to the end -----------------------------------------------------------------

    def begin_waiting(self) -> None:
        """Begin the operations in the inbox."""
        while self._core.inbox:
            operation = self._core.inbox.popleft()
            key = (operation.group, operation.call)
            if self._core.failure is not None:
                operation.fail(self._core.failure)
                continue
            refusal = self._book.refusal(operation)
            self._book.note(operation.group, operation.call + 1)
            if refusal is not None:
                operation.fail(refusal)
                self._flow.use_up(self._book.take_early(operation))
                continue
            self._core.active[key] = operation
            if operation.is_shared:
                self._core.under_way.append(operation)
                self.moved = time.monotonic()
            operation.advance()
            self._core.report_accident(operation)
            for frame in self._book.take_early(operation):
                if key in self._core.active and not operation.is_over:
                    self.deliver(operation, frame)
                else:
                    self._flow.use_up([frame])
            if operation.is_over and key in self._core.active:
                self.retire(operation)

    def deliver(self, operation: Request, frame: Frame) -> None:
        """Pass a frame to its operation."""
        if frame.header.kind == FrameType.WAKE:
            return
        if frame.header.fingerprint != operation.fingerprint:
            self._flow.consumed(frame.header.source, operation.group, frame.header.nbytes)
            if not operation.mismatch:
                operation.mismatch = True
                self._report(operation, time.monotonic())
            return
        operation.accept(frame)
        self._core.report_accident(operation)
        if operation.is_shared:
            self.moved = time.monotonic()  # it polls the others again
        if operation.state == RequestState.DRAINING:
            operation.advance()
        if operation.is_over:
            self.retire(operation)

    def look_at_shared(self) -> None:
        """Advance the operations in shared memory."""
        for operation in list(self._core.under_way):
            channel = operation.channel
            first = None if channel is None else channel.first
            if (
                first is not None
                and first is not operation
                and operation.state == RequestState.RUNNING
                and not operation.mismatch
            ):
                continue  # it is not its turn; there may be thousands of them
            before = operation.need
            operation.advance()
            if operation.is_over:
                self.moved = time.monotonic()
                self._core.report_accident(operation)
                self.retire(operation)
            elif operation.need != before:
                self.moved = time.monotonic()
            if operation.mismatch and not operation.reported:
                self._report(operation, time.monotonic())

    def retire(self, operation: Request) -> None:
        """Remove an operation that is over, and return the credit of its unused frames."""
        self._core.active.pop((operation.group, operation.call), None)
        if operation.is_shared:
            with contextlib.suppress(ValueError):
                self._core.under_way.remove(operation)
            if (
                operation.error is not None
                and self._core.shm is not None
                and operation.is_under_way
            ):
                self._core.shm.quarantine()  # other ranks may still write for this call
        self._flow.go_on(operation.group)
        self._flow.use_up(operation.unused_frames())
        if operation.reported and self._core.failure is None:
            self._core.tell("wait_end", group=operation.group, call=operation.call)
        if operation.thread:
            self._core.hand_over()

    # -- deadlines and long waits ------------------------------------------------------------------

    def expire(self, now: float, due: float) -> float:
        """Fail operations past their deadline and report long waits.

        Return when the next one is due, or `due`.
        """
        groups: set[int] = set()
        for operation in list(self._core.active.values()):
            if operation.state == RequestState.DRAINING:
                operation.advance()
                if operation.is_over:
                    self.retire(operation)
                    due = now
                    continue
                due = min(due, now + _LOAN_LOOK_S)
            if now >= operation.deadline:
                self._miss_deadline(operation, now)
                return now
            is_first = operation.group not in groups
            groups.add(operation.group)
            if now >= operation.report_at and (is_first or operation.thread):
                self._report(operation, now)
            # If no thread waits, report only the first call of a group: the others cannot end
            # before it, and may be thousands.
            due = min(
                due,
                operation.deadline,
                operation.report_at if operation.report_at > now else now + _FOLLOWING_LOOK_S,
            )
        return due

    def _miss_deadline(self, operation: Request, now: float) -> None:
        """Break the group because an operation missed its deadline."""
        missing = operation.awaiting
        awaited = rank_list(missing) if missing else "its own sends"
        call = self._core.recorder.numbers.text(operation.what, operation.group, operation.call)
        error = DeadlineExceeded(
            f"{call} did not finish within {operation.timeout_s:g} s: "
            f"rank {self._core.rank} waited {now - operation.started:.1f} s for {awaited}",
            missing,
            operation.timeout_s,
        )
        self._core.break_generation(error)
        reason = f"gave up {call} after {operation.timeout_s:g} s"
        self._core.tell(
            "group_failure",
            failure_kind="deadline",
            reason=reason,
            group=operation.group,
            call=operation.call,
            missing=list(missing),
        )

    def _report(self, operation: Request, now: float) -> None:
        operation.report_at = _FOREVER
        operation.reported = True
        threads = sum(
            1
            for thread in threading.enumerate()
            if not thread.name.startswith("syncvar-")
            and not type(thread).__module__.startswith("zmq.")
        )
        waiting = len({other.thread for other in self._core.active.values() if other.thread})
        if operation.is_unheard:
            for peer in operation.awaiting:
                if peer not in self._book.left:
                    self._flow.notify_waiting(operation, peer)
        self._core.tell(
            "wait_report",
            group=operation.group,
            members=list(operation.members),
            call=operation.call,
            ordinal=self._core.recorder.numbers.ordinal(operation.group, operation.call),
            fingerprint=operation.fingerprint,
            description=operation.what,
            site=call_site(operation.thread),
            awaiting=list(operation.awaiting),
            waited_s=now - operation.started,
            mismatch=operation.mismatch,
            has_active_threads=operation.thread == 0 or threads > waiting,
            entered=self._book.entered(),
        )
