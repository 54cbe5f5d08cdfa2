"""Driving: take what has arrived, advance what it concerns, look at clocks, hear the launcher, and wait for more.

Whoever waits for a call drives; a progress thread does when nobody waits, so that started calls go on and the launcher
is heard while the program computes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from syncvar.arena.waiting import pause_after
from syncvar.engine.verdicts import VERDICT_GRACE_S
from syncvar.transports import Lost
from syncvar.wire import Kind

if TYPE_CHECKING:
    from syncvar.engine.admission import Admission
    from syncvar.engine.call_ledger import CallLedger
    from syncvar.engine.failures import Failures
    from syncvar.engine.flow import Flow
    from syncvar.engine.launcher_link import LauncherLink
    from syncvar.engine.one_sided import Question, Questions
    from syncvar.engine.operation import Operation
    from syncvar.engine.started import StartedCalls
    from syncvar.engine.turns import Turns
    from syncvar.engine.verdicts import Verdicts
    from syncvar.transports import Transport

__all__ = ["Driver"]

_CALLER_RECENT_S = 0.005
_HEAR_S = 0.005  # a call that has to wait hears the launcher at once; others at this interval
_IDLE_S = 1.0
_KEPT_S = 0.1  # so long a call that has begun is its caller's alone, who may be about to end it
_IDLE_SHARED_S = 0.002  # while started calls go through shared memory, where nothing tells of an arrival
_LOOK_S = 0.005  # so long a wait in shared memory looks, before it sleeps
_SLEEP_MIN_S = 0.001  # shorter waits are no business of the transport


class Driver:
    """What a thread does while it is its turn, and the progress thread, which `start` begins.

    Args:
        transport: Opened transport.
        turns: Whose turn it is.
        link: To the launcher.
        admission: Has the calls that have begun without the engine.
        book: Where the calls of each group stand.
        flow: The links' credit.
        questions: Between two processes.
        started: The started calls.
        failures: Hears of lost links.
        verdicts: Hears of the launcher's messages, and of calls that this rank has passed.
    """

    def __init__(
        self,
        transport: Transport,
        turns: Turns,
        link: LauncherLink,
        admission: Admission,
        book: CallLedger,
        flow: Flow,
        questions: Questions,
        started: StartedCalls,
        failures: Failures,
        verdicts: Verdicts,
    ) -> None:
        self._transport = transport
        self._turns = turns
        self._link = link
        self._admission = admission
        self._book = book
        self._flow = flow
        self._questions = questions
        self._started = started
        self._failures = failures
        self._verdicts = verdicts
        self._heard = 0.0  # when the launcher was heard last
        self._last_caller = 0.0  # when a caller drove last: it may come again at once
        self._stopped = threading.Event()
        self._progress = threading.Thread(target=self._serve, name=f"syncvar-progress-{flow.rank}", daemon=True)

    # -- the progress thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to drive when nobody else does."""
        self._progress.start()

    def disown(self) -> None:
        """Drive no more: in a forked copy there is no progress thread to wait for."""
        self._stopped.set()

    def stop(self) -> None:
        """End the progress thread. Idempotent."""
        self._stopped.set()
        self._transport.wake()
        if self._progress is not threading.current_thread():
            self._progress.join()
        self._turns.hand_over()

    def _serve(self) -> None:
        transport, lock = self._transport, self._turns.lock
        while not self._stopped.is_set():
            transport.wait_idle(self._idle_s())
            if self._stopped.is_set():
                return
            if not self._started.active and time.monotonic() - self._last_caller < _CALLER_RECENT_S:
                time.sleep(_CALLER_RECENT_S)
                continue
            if not lock.acquire(blocking=False):
                time.sleep(_CALLER_RECENT_S)
                continue
            try:
                self._hear()
                self._admission.adopt(_KEPT_S)
                self.look()
                self.timers(time.monotonic())
            except Exception as error:  # of no call in particular: those end with their own
                self._failures.fall(error, "the progress thread")
            finally:
                lock.release()
            self._turns.hand_over()

    def _idle_s(self) -> float:
        if self._started.shared:
            return _IDLE_SHARED_S
        return VERDICT_GRACE_S if self._verdicts.late or self._admission.begun else _IDLE_S

    # -- callers --------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Drive once, if nobody else does."""
        lock = self._turns.lock
        if lock.acquire(blocking=False):
            try:
                self.look()
                self.timers(time.monotonic())
            finally:
                lock.release()
            self._turns.hand_over()

    def wait(self, operation: Operation | Question) -> None:
        """Drive, or follow who drives, until an operation or question is over."""
        turns = self._turns
        while not operation.is_over:
            if turns.lock.acquire(blocking=False):
                try:
                    self._drive(operation)
                finally:
                    self._last_caller = time.monotonic()
                    turns.lock.release()
                    turns.hand_over()
            else:
                turns.follow(operation)

    def _drive(self, operation: Operation | Question) -> None:
        look, timers, wait, started = self.look, self.timers, self._transport.wait, self._started
        if time.monotonic() - self._heard > _HEAR_S:
            self._hear()
        while True:
            look(operation)
            if operation.is_over:
                return
            now = time.monotonic()
            due = timers(now)
            if due <= now:
                continue
            pause = due - now
            if started.shared and any(one.needs_looks for one in started.shared):
                waited = now - started.moved
                if waited < _LOOK_S and operation.look():
                    continue
                pause = min(pause, pause_after(waited))
                if pause < _SLEEP_MIN_S:
                    time.sleep(pause)
                    if now - self._heard > _HEAR_S:
                        self._hear()
                    continue
            if wait(pause):
                self._hear()

    # -- one round ------------------------------------------------------------------------------------------------

    def look(self, until: Operation | Question | None = None) -> None:
        """Take what has arrived and advance what it concerns: everything, or until this operation is over."""
        started = self._started
        if started.inbox:
            started.begin_waiting()
        while self._questions.asked:
            self._put(self._questions.asked.popleft())
        self._flow.settle()
        for group, call, frames in self._book.take_skipped():
            self._flow.use_up(frames)
            self._verdicts.passed(group, call)
        receive = self._transport.receive
        while True:
            arrival = receive()
            if arrival is None:
                break
            if isinstance(arrival, Lost):
                self._failures.suspect(arrival.peer, arrival.reason)
                continue
            header = arrival.header
            if header.kind in (Kind.DATA, Kind.KNOCK):  # a peer that knocks waits in a call: this rank may have gone on without it
                operation = started.active.get((header.group, header.call))
                if operation is None:
                    if not self._book.keep(arrival):
                        self._flow.use_up([arrival])
                        self._verdicts.passed(header.group, header.call)
                else:
                    started.deliver(operation, arrival)
                    if operation is until and operation.is_over:
                        return
            elif header.kind == Kind.CREDIT:
                self._flow.credited(header.source, header.group, header.nbytes)
            elif header.kind == Kind.ASK:
                self._questions.answer(header)
            elif header.kind == Kind.ANSWER and self._questions.accept(arrival):
                self._turns.hand_over()
        if started.shared:
            started.look_at_shared()

    def timers(self, now: float) -> float:
        """Do what is due; return when the next thing is (`now` when something has changed)."""
        due = self._started.expire(now, now + _IDLE_S)
        due = self._verdicts.expire(now, due)
        due = self._questions.expire(now, due)
        return self._failures.expire(now, due)

    def _put(self, question: Question) -> None:
        """Send a question, unless it cannot be answered any more."""
        if self._admission.failure is not None:
            question.fail(self._admission.failure)
        elif question.peer in self._book.left:
            question.fail(self._book.ended(question.peer, question.what))
        else:
            self._questions.ask(question)

    def _hear(self) -> None:
        self._turns.run_errands()
        self._heard = time.monotonic()
        while True:
            message = self._link.receive()
            if message is None:
                return
            self._verdicts.hear(message)
