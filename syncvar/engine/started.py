"""The started calls of a process: they wait to begin, run, and end; each has a deadline, and is told of when it waits long."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import TYPE_CHECKING

from syncvar.engine.call_sites import call_site
from syncvar.engine.operation import Operation, State
from syncvar.wire import Kind

if TYPE_CHECKING:
    from syncvar.arena.mapping import Arena
    from syncvar.engine.admission import Admission
    from syncvar.engine.call_ledger import CallLedger
    from syncvar.engine.failures import Failures
    from syncvar.engine.flow import Flow
    from syncvar.engine.launcher_link import LauncherLink
    from syncvar.engine.turns import Turns
    from syncvar.transports import Frame

__all__ = ["StartedCalls"]

_LOAN_LOOK_S = 0.0005
_FOREVER = float("inf")


class StartedCalls:
    """The started calls of a process. All but `inbox` is the driver's.

    Args:
        admission: Refuses calls after a break.
        book: Where the calls of each group stand.
        flow: Sends the operations' frames.
        failures: Hears of missed deadlines and accidents.
        link: To the launcher.
        turns: Lets threads go on whose operation is over.
        arena: The memory shared with the ranks of this host, if there is any.
    """

    def __init__(
        self,
        admission: Admission,
        book: CallLedger,
        flow: Flow,
        failures: Failures,
        link: LauncherLink,
        turns: Turns,
        arena: Arena | None,
    ) -> None:
        self.active: dict[tuple[int, int], Operation] = {}  # that run, by group and call
        self.inbox: collections.deque[Operation] = collections.deque()  # that any thread has started
        self.shared: list[Operation] = []  # those that somebody has to look at
        self.moved = 0.0  # when one of these began or went on
        self._admission = admission
        self._book = book
        self._flow = flow
        self._failures = failures
        self._link = link
        self._turns = turns
        self._arena = arena

    @property
    def all(self) -> list[Operation]:
        """Those that run, and those that wait to begin; not one that is over, whom its waiter has heard before it is let go of here."""
        return [one for one in (*list(self.active.values()), *list(self.inbox)) if not one.is_over]

    def is_oldest(self, operation: Operation) -> bool:
        """Return whether no older operation of its group is running here."""
        group, call = operation.group, operation.call
        return not any(number < call for other, number in self.active if other == group)

    # -- from the start to the end --------------------------------------------------------------------------------

    def begin_waiting(self) -> None:
        """Begin those in the inbox."""
        while self.inbox:
            operation = self.inbox.popleft()
            key = (operation.group, operation.call)
            if self._admission.failure is not None:
                operation.fail(self._admission.failure)
                continue
            refusal = self._book.refusal(operation)
            self._book.begin(operation)
            if refusal is not None:
                operation.fail(refusal)
                self._flow.use_up(self._book.take_early(operation))
                continue
            self.active[key] = operation
            if operation.is_shared:
                self.shared.append(operation)
                self.moved = time.monotonic()
            operation.advance(self._flow)
            self._failures.tell_accident(operation)
            for frame in self._book.take_early(operation):
                if key in self.active and not operation.is_over:
                    self.deliver(operation, frame)
                else:
                    self._flow.use_up([frame])
            if operation.is_over and key in self.active:
                self.retire(operation)

    def deliver(self, operation: Operation, frame: Frame) -> None:
        """Hand a frame to its operation."""
        if frame.header.kind == Kind.KNOCK:
            return
        if frame.header.fingerprint != operation.fingerprint:
            self._flow.consumed(frame.header.source, operation.group, frame.header.nbytes)
            if not operation.mismatch:
                operation.mismatch = True
                self._report(operation, time.monotonic())
            return
        operation.accept(frame, self._flow)
        self._failures.tell_accident(operation)
        if operation.is_shared:
            self.moved = time.monotonic()  # it may look for its neighbours again
        if operation.state == State.DRAINING:
            operation.advance(self._flow)
        if operation.is_over:
            self.retire(operation)

    def look_at_shared(self) -> None:
        """Advance the calls in shared memory."""
        for operation in list(self.shared):
            before = operation.need
            operation.advance(self._flow)
            if operation.is_over:
                self.moved = time.monotonic()
                self._failures.tell_accident(operation)
                self.retire(operation)
            elif operation.need != before:
                self.moved = time.monotonic()
            if operation.mismatch and not operation.reported:
                self._report(operation, time.monotonic())

    def retire(self, operation: Operation) -> None:
        """Let go of an operation that is over, and give back what it has not used."""
        self.active.pop((operation.group, operation.call), None)
        if operation.is_shared:
            with contextlib.suppress(ValueError):
                self.shared.remove(operation)
            if operation.error is not None and self._arena is not None and operation.is_under_way:
                self._arena.quarantine()  # others may still write what this call began
        self._flow.go_on(operation.group)
        self._flow.use_up(operation.unused_frames())
        if operation.reported and self._admission.failure is None:
            self._link.tell("resumed", group=operation.group, call=operation.call)
        if operation.thread:
            self._turns.hand_over()

    def drop(self, failure: BaseException, but: object) -> None:
        """End all that run because the generation broke, but for one that ends by itself."""
        for operation in list(self.active.values()):
            if operation is not but:
                operation.fail(failure)
        self.active.clear()
        self.shared.clear()

    # -- deadlines and long waits ---------------------------------------------------------------------------------

    def expire(self, now: float, due: float) -> float:
        """Give up those whose deadline has passed, and report those that wait long; return when the next is due, or `due`."""
        for operation in list(self.active.values()):
            if operation.state == State.DRAINING:
                operation.advance(self._flow)
                if operation.is_over:
                    self.retire(operation)
                    due = now
                    continue
                due = min(due, now + _LOAN_LOOK_S)
            if now >= operation.deadline:
                self._failures.missed_deadline(operation, now)
                return now
            if now >= operation.report_at:
                self._report(operation, now)
            due = min(due, operation.deadline, operation.report_at)
        return due

    def _report(self, operation: Operation, now: float) -> None:
        operation.report_at = _FOREVER
        operation.reported = True
        threads = sum(
            1
            for thread in threading.enumerate()
            if not thread.name.startswith("syncvar-") and not type(thread).__module__.startswith("zmq.")
        )
        waiting = len({other.thread for other in self.active.values() if other.thread})
        if operation.is_unheard:
            for peer in operation.awaiting:
                if peer not in self._book.left:
                    self._flow.knock(operation, peer)
        self._link.tell(
            "report",
            group=operation.group,
            members=list(operation.members),
            call=operation.call,
            fingerprint=operation.fingerprint,
            what=operation.what,
            site=call_site(operation.thread),
            awaiting=list(operation.awaiting),
            waited_s=now - operation.started,
            mismatch=operation.mismatch,
            may_move=operation.thread == 0 or threads > waiting,
            entered=self._book.entered(),
        )
