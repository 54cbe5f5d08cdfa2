"""The engine of a process: one lock, one driver at a time, every group advanced by every wait.

A caller that waits takes the engine's lock and drives: it drains the transport, hands frames to operations, and looks at
deadlines. Other waiting threads follow; when the driver leaves, one of them takes over. A progress thread drives when
nobody waits, so that started operations go on and the launcher is heard while the program computes.

Failure is by generation: the first loss, missed deadline or interruption fails every running operation and is raised
by every later call.

What a call looks at first is `admission`'s. The rest has one owner each: whose turn it is to drive `turns`, what a turn
does `driver`, the calls that run `started`, where each group stands `call_ledger`, credit `flow`, questions `one_sided`, what
breaks a generation `failures`, what others say of calls `verdicts`, the channel to the launcher `launcher_link`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar.engine.admission import Admission
from syncvar.engine.call_ledger import CallLedger
from syncvar.engine.driver import Driver
from syncvar.engine.failures import Failures
from syncvar.engine.flow import Flow
from syncvar.engine.launcher_link import LauncherLink
from syncvar.engine.one_sided import Answer, Question, Questions
from syncvar.engine.recorder import Recorder, Told
from syncvar.engine.started import StartedCalls
from syncvar.engine.turns import Turns
from syncvar.engine.verdicts import Verdicts
from syncvar.errors import SyncvarError
from syncvar.execution.gil import crowd

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.arena.mapping import Arena
    from syncvar.config import RuntimeConfig
    from syncvar.engine.call_ledger import Counting
    from syncvar.engine.operation import Operation
    from syncvar.errors import TransportError, UsageError
    from syncvar.transports import Control, Transport

__all__ = ["Engine"]

_log = logging.getLogger("syncvar")
_APPEAR_S = 2.0  # how long a question for what is not there is repeated
_APPEAR_LOOK_S = 0.001


class Engine(Admission):
    """Everything that runs in a process of a world larger than one.

    Args:
        rank: This process in the world.
        world_size: Ranks of the world.
        generation: Version of the membership.
        transport: Opened transport.
        control: Channel to the launcher.
        config: Deadlines and limits.
        hosts: Host of each rank, for messages.
        arena: The memory shared with the ranks of this host, if there is any.
        recorder: Takes down what happens.

    Attributes:
        under_way: The started calls that go through shared memory: whoever waits without the engine does not help them on.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        generation: int,
        transport: Transport,
        control: Control,
        config: RuntimeConfig,
        hosts: dict[int, str],
        arena: Arena | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        book = CallLedger(hosts)
        super().__init__(book)
        self.recorder = recorder = recorder or Recorder(rank, world_size, generation)
        self._transport = transport
        self._config = config
        self._arena = arena
        self._turns = turns = Turns(transport.wake, recorder)
        self._link = link = LauncherLink(control, turns)
        self._flow = flow = Flow(rank, generation, transport, config.segment_bytes, config.window_bytes, self._is_oldest)
        self._questions = questions = Questions(rank, generation, transport, config.segment_bytes)
        self._failures = failures = Failures(rank, hosts, self, link, book, recorder, self._drop)
        self._started = started = StartedCalls(self, book, flow, failures, link, turns, arena)
        self._verdicts = verdicts = Verdicts(rank, hosts, self, book, started, questions, failures, link, recorder)
        self.left_run = verdicts.left_run
        self.passed_over = verdicts.passed_over
        self.blocks = book.blocks
        self._driver = Driver(transport, turns, link, self, book, flow, questions, started, failures, verdicts)
        self.under_way: list[Any] = started.shared
        self._driver.start()

    @property
    def frames_sent(self) -> int:
        """How many data frames this process has sent, questions and answers included."""
        return self._flow.frames_sent + self._questions.frames_sent

    # -- calls ----------------------------------------------------------------------------------------------------

    def announce(self, group: int, next_call: int) -> None:
        """Note that calls of a group below `next_call` will not be started here any more.

        Their frames are dropped. A call that is started announces itself, under the lock: its frames may have come
        before, and the progress thread must not take them for frames of a call that is over.
        """
        self._book.announce(group, next_call)

    def start(self, operation: Operation, timeout_s: float | None, began: float | None = None) -> None:
        """Start an operation, which may have begun a while ago; it advances whenever somebody drives."""
        now = time.monotonic() if began is None else began
        allowed = self._config.collective_timeout_s if timeout_s is None else timeout_s
        operation.started = now
        operation.timeout_s = allowed
        operation.deadline = now + allowed
        operation.report_at = now + self._config.report_after_s
        try:
            self._started.inbox.append(operation)
            if self._turns.lock.acquire(blocking=False):
                try:
                    self._started.begin_waiting()
                finally:
                    self._turns.lock.release()
                self._turns.hand_over()
            else:
                self._transport.wake()
        except BaseException as error:
            self.interrupted(operation, error)
            raise

    def wait(self, operation: Operation | Question) -> Any:
        """Drive until an operation or question is over; return its result or raise its error.

        Raises:
            SyncvarError: What failed. Any other exception that interrupts the wait (KeyboardInterrupt, an alarm
                handler's) breaks the generation and is passed on.
        """
        operation.thread = threading.get_ident()
        try:
            self._driver.wait(operation)
        except BaseException as error:
            self.interrupted(operation, error)
            raise
        finally:
            operation.thread = 0
        if operation.error is not None:
            if operation.error is self.failure:
                self._failure_raised = True
            self.recorder.failed(operation.error)
            raise operation.error
        return operation.result

    def run(self, operation: Operation, timeout_s: float | None) -> Any:
        """Start an operation and wait for it."""
        operation.thread = threading.get_ident()
        is_allowed = self.allows(operation.group, operation.call)
        if is_allowed and operation.links is None and self._inline(operation):
            if operation.error is not None:
                self.recorder.failed(operation.error)
                raise operation.error
            return operation.result
        self.start(operation, timeout_s)
        return self.wait(operation)

    def take_over(self, operation: Operation, timeout_s: float | None) -> Any:
        """Go on with an operation that its caller has begun without the lock."""
        operation.thread = threading.get_ident()
        self.start(operation, timeout_s)
        return self.wait(operation)

    def _inline(self, operation: Operation) -> bool:
        """Run an operation in shared memory without the lock; False when it takes long, for the engine to go on."""
        channel = operation.channel
        if channel is None:
            return False
        wait = channel.hold if crowd.holds() else channel.wait
        try:
            while True:
                operation.advance(self._flow)
                if operation.is_over:
                    self._failures.tell_accident(operation)
                    return True
                if not operation.may_look or not wait(channel.others, operation.need, channel.last + 2):
                    return False
        except BaseException as error:
            self.interrupted(operation, error)
            raise

    def ask(self, peer: int, key: int, what: str, timeout_s: float | None) -> tuple[bytes, bytes] | None:
        """Ask another process for what it publishes under a key; it takes no part, its engine answers.

        Args:
            peer: The rank that is asked, not this one.
            key: Under which it was published.
            what: The call in words.
            timeout_s: Seconds, or None for the job's default.

        Returns:
            The description and the bytes; None when there is no such thing there, and none came up within a short
            grace: processes that do not meet reach the same line at different times.

        Raises:
            DeadlineExceeded: No answer in time. Only this call fails; the group stays usable.
            PeerLost: The rank is gone.
        """
        now = time.monotonic()
        allowed = self._config.collective_timeout_s if timeout_s is None else timeout_s
        deadline, appears, pause = now + allowed, now + min(_APPEAR_S, allowed / 2), _APPEAR_LOOK_S
        while True:
            self.check()
            question = Question(peer, key, what, deadline, allowed)
            question.entry = self.recorder.begin(Told(what, -1, (), 0, 0, f"question to rank {peer}"), -1)
            self._questions.asked.append(question)
            self._transport.wake()
            answer: tuple[bytes, bytes] | None = self.wait(question)
            if answer is not None or time.monotonic() >= appears:
                return answer
            time.sleep(pause)
            pause = min(2 * pause, _APPEAR_S / 20)

    def publish(self, find: Callable[[int], Answer | None]) -> None:
        """Name the function that finds what this process publishes, by key; the engine's driver calls it."""
        self._questions.find = find

    def poll(self) -> None:
        """Drive once, if nobody else does."""
        self._driver.poll()

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def interrupted(self, operation: Operation | Question, error: BaseException) -> None:
        """Break the generation because an exception has left a started call."""
        self._failures.interrupted(operation, error)

    def poison(self, group: int, members: tuple[int, ...], call: int, what: str, reason: str) -> None:
        """Tell the group that this rank's call had a bad argument: the others raise MismatchError at once."""
        self._link.poison(group, members, call, what, reason)

    def _drop(self, failure: TransportError | UsageError, but: Operation | Question | None) -> None:
        """Let go of what this generation holds, because it broke; an operation that was interrupted ends by itself."""
        self._started.drop(failure, but)
        self._questions.fail(failure)
        if self._arena is not None:
            self._arena.quarantine()
        self._book.early.clear()
        self._flow.clear()
        self._turns.hand_over()

    # -- where a group's calls stand ------------------------------------------------------------------------------

    def count(self, group: int, next_call: int) -> None:
        """Note where a group stood whose communicator is gone."""
        self._book.note(group, next_call)

    def count_by(self, counting: Counting) -> None:
        """Take the number of a group's next call from who counts them: calls in shared memory pass the book by."""
        self._book.counted[counting.identity] = counting

    def following(self, group: int) -> int:
        """Return the number of a group's next call here, as far as its calls have been started."""
        return self._book.following(group)

    def is_awaited(self, group: int, call: int) -> bool:
        """Return whether a frame has come for a call that has not begun here."""
        return (group, call) in self._book.early

    def is_idle(self, group: int) -> bool:
        """Return whether no call of a group is running or waits to be started."""
        self.adopt()
        return all(operation.group != group for operation in self._started.all)

    def settle(self, group: int) -> None:
        """Wait until no call of a group is running or waits to be started; who waits for it hears of its errors."""
        self.adopt()
        for operation in self._started.all:
            if operation.group == group:
                with contextlib.suppress(SyncvarError):
                    self.wait(operation)

    def rest(self, group: int, peer: int) -> None:
        """Keep of a pair's calls no more than their number: they may go on after a long time, or never."""
        self._flow.rest(group, peer)

    def _is_oldest(self, operation: Operation) -> bool:
        return self._started.is_oldest(operation)

    # -- ends -----------------------------------------------------------------------------------------------------

    def leave(self, deadline: float) -> None:
        """Finish started operations until `deadline` (monotonic seconds), then tell the others that this rank leaves.

        Raises:
            SyncvarError: A started operation failed.
        """
        self.adopt()
        left = [f"{one.what} started at {one.site}" for one in self._started.all if one.site]
        if left and self.failure is None:
            _log.warning(
                "%d started call%s not waited for, and so waited for now: %s%s",
                len(left), " was" if len(left) == 1 else "s were", "; ".join(left[:5]), "; …" if len(left) > 5 else "",
            )  # fmt: skip
        while self.failure is None and time.monotonic() < deadline:
            started = self._started.all
            if not started:
                break
            self.wait(started[0])
        if self.failure is None:
            self._link.tell_beside("leaving", entered=self._book.entered(), skipped=self._book.skipped())

    def disown(self, failure: UsageError) -> None:
        """Make every later call raise `failure`: this process is a forked copy and owns neither sockets nor threads."""
        self.failure = failure
        self.is_quiet = False
        self._driver.disown()

    def stop(self) -> None:
        """End the progress thread. Idempotent."""
        self.is_quiet = False
        self._driver.stop()
