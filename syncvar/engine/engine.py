"""The engine of a process: one lock, one driver at a time, every group advanced by every wait.

A caller that waits takes the engine lock and drives: it drains the transport, hands frames to operations, and looks at
deadlines. Other waiting threads follow; when the driver leaves, one of them takes over. A progress thread drives when
nobody waits, so that started operations go on and the launcher is heard while the program computes.

Failure is by generation: the first loss, missed deadline or interruption fails every running operation and is raised
by every later call.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar.arena.waiting import pause_after
from syncvar.engine.call_ledger import CallLedger, Overtaken
from syncvar.engine.call_sites import call_site
from syncvar.engine.flow import Flow
from syncvar.engine.hierarchical import HierarchicalOperation
from syncvar.engine.messages import Receiving, Sending
from syncvar.engine.one_sided import Answer, Question, Questions
from syncvar.engine.operation import Operation, State
from syncvar.engine.recorder import Recorder, Told
from syncvar.engine.shared_operation import SharedOperation
from syncvar.errors import (
    DeadlineExceeded,
    GroupBroken,
    HandshakeError,
    InternalError,
    PeerLost,
    SyncvarError,
    TransportError,
    UsageError,
)
from syncvar.execution.gil import crowd
from syncvar.topology import rank_list
from syncvar.transports import Frame, Lost
from syncvar.wire import Kind, Message, pack_header, pack_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.arena.mapping import Arena
    from syncvar.config import RuntimeConfig
    from syncvar.engine.group import Communicator
    from syncvar.engine.queued import Queued
    from syncvar.kernel import Begun, Count
    from syncvar.transports import Control, Transport

__all__ = ["Engine"]

_log = logging.getLogger("syncvar")
_DETAIL_GRACE_S = 0.2  # how long a silent loss waits for the launcher to say what happened
_VERDICT_GRACE_S = 0.03  # what a peer may have been told already
_CALLER_RECENT_S = 0.005
_HEAR_S = 0.005  # a call that has to wait hears the launcher at once; others at this interval
_IDLE_S = 1.0
_KEPT_S = 0.1  # so long a call that has begun is its caller's alone, who may be about to end it
_GONE_ON = "has gone on without making a call that another rank made"
_IDLE_SHARED_S = 0.002  # while started calls go through shared memory, where nothing tells of an arrival
_LOOK_S = 0.005  # so long a wait in shared memory looks, before it sleeps
_SLEEP_MIN_S = 0.001  # shorter waits are no business of the transport
_LOAN_LOOK_S = 0.0005
_APPEAR_S = 2.0  # how long a question for what is not there is repeated
_APPEAR_LOOK_S = 0.001
_FOREVER = float("inf")
_LOOKED_AT = (SharedOperation, HierarchicalOperation, Receiving, Sending)  # nothing tells of an arrival in shared memory


class Engine:
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
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.segment_bytes = config.segment_bytes
        self.failure: TransportError | UsageError | None = None
        self.recorder = recorder or Recorder(rank, world_size, generation)
        self._transport = transport
        self._control = control
        self._config = config
        self._hosts = hosts
        self._arena = arena
        self._lock = threading.Lock()
        self._active: dict[tuple[int, int], Operation] = {}
        self._book = CallLedger(hosts)
        self._flow = Flow(rank, generation, transport, config.window_bytes, self._is_oldest)
        self._words: collections.deque[bytes] = collections.deque()  # to the launcher, of threads that do not drive
        self._questions = Questions(rank, generation, transport, config.segment_bytes)
        self._asked: collections.deque[Question] = collections.deque()
        self._suspects: dict[int, tuple[str, float]] = {}
        self._resting: collections.deque[tuple[int, int]] = collections.deque()  # (group, peer) of pairs that are let go
        self._late: dict[tuple[int, int], float] = {}  # calls of peers that this rank has passed: when to tell
        self._inbox: collections.deque[Operation] = collections.deque()
        self._shared: list[SharedOperation | HierarchicalOperation | Receiving | Sending] = []  # those of the started calls that somebody has to look at
        self._followers: list[threading.Event] = []
        self.begun: list[Begun] = []  # calls that only their callers know of, and wait for later
        self._adopting = threading.RLock()  # before a call that is queued after one of them, and by the progress thread
        self._failure_raised = False
        self._last_caller = 0.0
        self._heard = 0.0
        self.is_quiet = True  # nothing is known that would refuse a call, and no writes are queued
        self.queues: list[Queued] = []  # queues that hold writes: calls that may wait send them first
        self.before_calls: list[Callable[[int, str], None]] = []  # each is told of a call, its group and its name, first
        self._moved = 0.0  # when a call in shared memory began or went on
        self._stopped = threading.Event()
        self._progress = threading.Thread(target=self._serve, name=f"syncvar-progress-{rank}", daemon=True)
        self._progress.start()

    @property
    def frames_sent(self) -> int:
        """How many data frames this process has sent, questions and answers included."""
        return self._flow.frames_sent + self._questions.frames_sent

    # -- calls ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what broke this generation, if anything did.

        Raises:
            TransportError: The first call after the break raises the failure itself; later ones GroupBroken.
            UsageError: This process was forked from the one that joined.
        """
        failure = self.failure
        if failure is None:
            return
        if not self._failure_raised or isinstance(failure, UsageError):
            self._failure_raised = True
            raise failure
        raise GroupBroken(f"this group broke earlier: {failure}", failure)

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
            self._inbox.append(operation)
            if self._lock.acquire(blocking=False):
                try:
                    self._start_waiting()
                finally:
                    self._lock.release()
                self._hand_over()
            else:
                self._transport.wake()
        except BaseException as error:
            self.interrupted(operation, error)
            raise

    def adopt(self, after_s: float = 0.0) -> None:
        """Go on with the calls that have begun without the engine, so long ago: somebody else than their callers has to know of them."""
        with self._adopting:
            for begun in list(self.begun):
                if after_s == 0.0 or time.monotonic_ns() - begun.begin > after_s * 1e9:
                    begun.adopt()

    def adopted(self, begun: Begun) -> Operation | None:
        """Go on with a call that has begun without the engine, and return its operation; None if it is over.

        Raises:
            TransportError: An exception has struck while the engine was about to go on with it.
        """
        with self._adopting:
            begun.adopt()
        operation: Operation | None = begun.operation
        if operation is None and not begun.is_over:
            self.check()
            raise InternalError("nobody goes on with a call that has begun")
        return operation

    def wait(self, operation: Operation | Question) -> Any:
        """Drive until an operation or question is over; return its result or raise its error.

        Raises:
            SyncvarError: What failed. Any other exception that interrupts the wait (KeyboardInterrupt, an alarm
                handler's) breaks the generation and is passed on.
        """
        operation.thread = threading.get_ident()
        try:
            while not operation.is_over:
                if self._lock.acquire(blocking=False):
                    try:
                        self._drive(operation)
                    finally:
                        self._last_caller = time.monotonic()
                        self._lock.release()
                        self._hand_over()
                else:
                    self._follow(operation)
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
        if is_allowed and isinstance(operation, SharedOperation) and self._inline(operation):
            if operation.error is not None:
                self.recorder.failed(operation.error)
                raise operation.error
            return operation.result
        self.start(operation, timeout_s)
        return self.wait(operation)

    def before_each_call(self, listener: Callable[[int, str], None]) -> None:
        """Call `listener(group, name)` before each call that may wait, from now on; none takes a prepared way any more."""
        self.before_calls.append(listener)
        self.is_quiet = False

    def allows(self, group: int, call: int) -> bool:
        """Return whether nothing is known that would refuse a call: it may run without the lock."""
        is_good = self.failure is None and not self._book.has_refusals
        self.is_quiet = is_good and not self.queues and not self.before_calls
        return is_good or (self.failure is None and not self._book.may_refuse(group, call))

    @property
    def under_way(self) -> list[Any]:
        """The started calls that go through shared memory: whoever waits without the engine does not help them on."""
        return self._shared

    def is_awaited(self, group: int, call: int) -> bool:
        """Return whether a frame has come for a call that has not begun here."""
        return (group, call) in self._book.early

    def take_over(self, operation: Operation, timeout_s: float | None) -> Any:
        """Go on with an operation that its caller has begun without the lock."""
        operation.thread = threading.get_ident()
        self.start(operation, timeout_s)
        return self.wait(operation)

    def _inline(self, operation: SharedOperation) -> bool:
        """Run an operation in shared memory without the lock; False when it takes long, for the engine to go on."""
        channel = operation.channel
        wait = channel.hold if crowd.holds() else channel.wait
        try:
            while True:
                operation.advance(self)
                if operation.is_over:
                    self._tell_accident(operation)
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
            self._asked.append(question)
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
        if self._lock.acquire(blocking=False):
            try:
                self._look()
                self._timers(time.monotonic())
            finally:
                self._lock.release()
            self._hand_over()

    def poison(self, group: int, members: tuple[int, ...], call: int, what: str, reason: str) -> None:
        """Tell the group that this rank's call had a bad argument: the others raise MismatchError at once."""
        self._tell_beside("poison", group=group, members=list(members), call=call, what=what, reason=reason[:2000])

    def left_run(self, group: int, members: tuple[int, ...], call: int, epoch_end: int, reason: str) -> None:
        """Tell the group that an exception left `strategy.run` on this rank after `call`."""
        if self.begun:
            self.adopt()
        self._tell_beside(
            "left_run", group=group, members=list(members), call=call, epoch_end=epoch_end, reason=reason[:2000]
        )

    def passed_over(self, group: int, members: tuple[int, ...], last: int, epoch_end: int) -> None:
        """Note that this rank ends a block of calls after `last`; the next block begins after `epoch_end`.

        When a peer's frame of a later call of the block is seen, the group is told, and this rank's next call fails as
        well: the ranks did not make the same calls. Normally no such frame comes, and nothing is sent.
        """
        if self.begun:
            self.adopt()
        if self._book.passed_over(group, members, last, epoch_end, _GONE_ON, self.rank):
            self.is_quiet = False
            self.left_run(group, members, epoch_end, epoch_end + 1, _GONE_ON)

    def count(self, group: int, next_call: int) -> None:
        """Note where a group stood whose communicator is gone."""
        self._book.note(group, next_call)

    def following(self, group: int) -> int:
        """Return the number of a group's next call here, as far as its calls have been started."""
        return self._book.following(group)

    def is_idle(self, group: int) -> bool:
        """Return whether no call of a group is running or waits to be started."""
        self.adopt()
        return not any(other == group for other, _ in list(self._active)) and not any(
            operation.group == group for operation in list(self._inbox)
        )

    def settle(self, group: int) -> None:
        """Wait until no call of a group is running or waits to be started; who waits for it hears of its errors."""
        self.adopt()
        for operation in [*list(self._active.values()), *list(self._inbox)]:
            if operation.group == group:
                with contextlib.suppress(SyncvarError):
                    self.wait(operation)

    def rest(self, group: int, peer: int) -> None:
        """Keep of a pair's calls no more than their number: they may go on after a long time, or never."""
        self._resting.append((group, peer))
        self._transport.wake()

    def count_by(self, counting: Communicator | Count) -> None:
        """Take the number of a group's next call from who counts them: calls in shared memory pass the book by."""
        self._book.counted[counting.identity] = counting

    def entered(self) -> dict[int, int]:
        """Return the last call entered in each group."""
        return self._book.entered()

    # -- the operations' outlet -----------------------------------------------------------------------------------

    def post(self, operation: Operation, peer: int, header: bytes, payload: memoryview | None) -> None:
        """Send a frame now, or when the link's credit allows."""
        self._flow.post(operation, peer, header, payload)

    def consumed(self, peer: int, group: int, nbytes: int) -> None:
        """Give credit back for a frame that has been used."""
        self._flow.consumed(peer, group, nbytes)

    # -- ends -----------------------------------------------------------------------------------------------------

    def leave(self, deadline: float) -> None:
        """Finish started operations until `deadline` (monotonic seconds), then tell the others that this rank leaves.

        Raises:
            SyncvarError: A started operation failed.
        """
        self.adopt()
        left = [f"{one.what} started at {one.site}" for one in [*self._active.values(), *self._inbox] if one.site]
        if left and self.failure is None:
            _log.warning(
                "%d started call%s not waited for, and so waited for now: %s%s",
                len(left), " was" if len(left) == 1 else "s were", "; ".join(left[:5]), "; …" if len(left) > 5 else "",
            )  # fmt: skip
        while self.failure is None and time.monotonic() < deadline:
            started = [*self._active.values(), *self._inbox]
            if not started:
                break
            self.wait(started[0])
        if self.failure is None:
            self._tell_beside("leaving", entered=self.entered(), skipped=self._book.skipped())

    def disown(self, failure: UsageError) -> None:
        """Make every later call raise `failure`: this process is a forked copy and owns neither sockets nor threads."""
        self.failure = failure
        self.is_quiet = False
        self._stopped.set()

    def stop(self) -> None:
        """End the progress thread. Idempotent."""
        self.is_quiet = False
        self._stopped.set()
        self._transport.wake()
        if self._progress is not threading.current_thread():
            self._progress.join()
        self._hand_over()

    # -- driving --------------------------------------------------------------------------------------------------

    def _drive(self, operation: Operation | Question) -> None:
        look, timers, wait = self._look, self._timers, self._transport.wait
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
            if self._shared and any(one.needs_looks for one in self._shared):
                waited = now - self._moved
                if waited < _LOOK_S and isinstance(operation, _LOOKED_AT) and operation.look():
                    continue
                pause = min(pause, pause_after(waited))
                if pause < _SLEEP_MIN_S:
                    time.sleep(pause)
                    if now - self._heard > _HEAR_S:
                        self._hear()
                    continue
            if wait(pause):
                self._hear()

    def _follow(self, operation: Operation | Question) -> None:
        event = threading.Event()
        self._followers.append(event)
        try:
            if not operation.is_over and self._lock.locked():
                event.wait(1.0)
        finally:
            self._followers.remove(event)

    def _hand_over(self) -> None:
        """Let others go on, after the lock has been released: waiting threads, and words that came meanwhile."""
        while self._words and self._lock.acquire(blocking=False):
            try:
                self._speak()
            finally:
                self._lock.release()
        for event in list(self._followers):
            event.set()
        if self.recorder.is_due:
            self.recorder.ended()

    def _serve(self) -> None:
        transport = self._transport
        while not self._stopped.is_set():
            transport.wait_idle(_IDLE_SHARED_S if self._shared else _VERDICT_GRACE_S if self._late or self.begun else _IDLE_S)
            if self._stopped.is_set():
                return
            if not self._active and time.monotonic() - self._last_caller < _CALLER_RECENT_S:
                time.sleep(_CALLER_RECENT_S)
                continue
            if not self._lock.acquire(blocking=False):
                time.sleep(_CALLER_RECENT_S)
                continue
            try:
                self._hear()
                self.adopt(_KEPT_S)
                self._look()
                self._timers(time.monotonic())
            except Exception as error:  # of no call in particular: those end with their own
                self._fall(error, "the progress thread")
            finally:
                self._lock.release()
            self._hand_over()

    def _look(self, until: Operation | Question | None = None) -> None:
        """Take what has arrived and advance what it concerns: everything, or until this operation is over."""
        if self._inbox:
            self._start_waiting()
        while self._asked:
            self._put(self._asked.popleft())
        while self._resting:
            self._flow.settle(*self._resting.popleft())
        for group, call, frames in self._book.take_skipped():
            self._use_up(frames)
            self._check_passed(group, call)
        receive = self._transport.receive
        while True:
            arrival = receive()
            if arrival is None:
                break
            if isinstance(arrival, Lost):
                self._suspects.setdefault(arrival.peer, (arrival.reason, time.monotonic() + _DETAIL_GRACE_S))
                continue
            header = arrival.header
            if header.kind == Kind.DATA:
                operation = self._active.get((header.group, header.call))
                if operation is None:
                    if not self._book.keep(arrival):
                        self._use_up([arrival])
                        self._check_passed(header.group, header.call)
                else:
                    self._deliver(operation, arrival)
                    if operation is until and operation.is_over:
                        return
            elif header.kind == Kind.CREDIT:
                self._flow.credited(header.source, header.group, header.nbytes)
            elif header.kind == Kind.ASK:
                self._questions.answer(header)
            elif header.kind == Kind.KNOCK:
                self._knocked(arrival)
            elif header.kind == Kind.ANSWER and self._questions.accept(arrival):
                self._hand_over()
        if self._shared:
            self._look_at_shared()

    def _look_at_shared(self) -> None:
        """Advance the calls in shared memory."""
        for operation in list(self._shared):
            before = operation.need
            operation.advance(self)
            if operation.is_over:
                self._moved = time.monotonic()
                self._tell_accident(operation)
                self._retire(operation)
            elif operation.need != before:
                self._moved = time.monotonic()
            if operation.mismatch and not operation.reported:
                self._report(operation, time.monotonic())

    def _tell_accident(self, operation: Operation) -> None:
        """Tell the group what has gone wrong on this rank alone: it cannot go on without this rank."""
        error = operation.accident
        if error is None:
            return
        if operation.is_published:
            self.interrupted(operation, error)
        else:
            reason = f"{type(error).__name__}: {error}"
            self.poison(operation.group, operation.members, operation.call, operation.what, reason)

    def _knocked(self, frame: Frame) -> None:
        """Note that a peer waits in a call: this rank may have gone on without it."""
        header = frame.header
        if (header.group, header.call) not in self._active and not self._book.keep(frame):
            self._check_passed(header.group, header.call)

    def _put(self, question: Question) -> None:
        """Send a question, unless it cannot be answered any more."""
        if self.failure is not None:
            question.fail(self.failure)
        elif question.peer in self._book.left:
            question.fail(self._book.ended(question.peer, question.what))
        else:
            self._questions.ask(question)

    def _deliver(self, operation: Operation, frame: Frame) -> None:
        if frame.header.kind == Kind.KNOCK:
            return
        if frame.header.fingerprint != operation.fingerprint:
            self.consumed(frame.header.source, operation.group, frame.header.nbytes)
            if not operation.mismatch:
                operation.mismatch = True
                self._report(operation, time.monotonic())
            return
        operation.accept(frame, self)
        self._tell_accident(operation)
        if operation.is_shared:
            self._moved = time.monotonic()  # it may look for its neighbours again
        if operation.state == State.DRAINING:
            operation.advance(self)
        if operation.is_over:
            self._retire(operation)

    def _start_waiting(self) -> None:
        while self._inbox:
            operation = self._inbox.popleft()
            key = (operation.group, operation.call)
            if self.failure is not None:
                operation.fail(self.failure)
                continue
            refusal = self._book.refusal(operation)
            self._book.begin(operation)
            if refusal is not None:
                operation.fail(refusal)
                self._use_up(self._book.take_early(operation))
                continue
            self._active[key] = operation
            if isinstance(operation, _LOOKED_AT):
                self._shared.append(operation)
                self._moved = time.monotonic()
            operation.advance(self)
            self._tell_accident(operation)
            for frame in self._book.take_early(operation):
                if key in self._active and not operation.is_over:
                    self._deliver(operation, frame)
                else:
                    self._use_up([frame])
            if operation.is_over and key in self._active:
                self._retire(operation)

    def _is_oldest(self, operation: Operation) -> bool:
        group, call = operation.group, operation.call
        return not any(number < call for other, number in self._active if other == group)

    def _retire(self, operation: Operation) -> None:
        self._active.pop((operation.group, operation.call), None)
        if isinstance(operation, _LOOKED_AT):
            with contextlib.suppress(ValueError):
                self._shared.remove(operation)
            if operation.error is not None and self._arena is not None and operation.is_under_way:
                self._arena.quarantine()  # others may still write what this call began
        self._flow.go_on(operation.group)
        self._use_up(operation.unused_frames())
        if operation.reported and self.failure is None:
            self._tell("resumed", group=operation.group, call=operation.call)
        if operation.thread:
            self._hand_over()

    def _use_up(self, frames: list[Frame]) -> None:
        """Give credit back for frames that nobody will look at."""
        for frame in frames:
            if frame.header.kind == Kind.KNOCK:
                continue
            self.consumed(frame.header.source, frame.header.group, frame.header.nbytes)

    def _check_passed(self, group: int, call: int) -> None:
        """Look, a little later, whether a peer makes a call that this rank has gone on without.

        The peer may know by then: what other ranks tell comes by way of the launcher, and its frame came straight.
        """
        if self.failure is None:
            self._late.setdefault((group, call), time.monotonic() + _VERDICT_GRACE_S)

    def _tell_passed(self, group: int, call: int) -> None:
        """Tell the group if a peer makes a call that this rank has gone on without, past the end or begin of a run."""
        block = None if self.failure is not None else self._book.overtaken(group, call, self._active)
        if block is None:
            return
        self._refuse_following(group, block, block.last, self._gone_on(group, block))

    def _gone_on(self, group: int, block: Overtaken) -> str:
        place = "computes"
        operation = self._active.get((group, block.following))
        if operation is not None:
            place = f"is in {operation.what} (call {block.following}) at {call_site(operation.thread)}"
        return f"{_GONE_ON}, and {place}"

    def _refuse_following(self, group: int, block: Overtaken, last: int, reason: str) -> None:
        """Let all calls after `last` fail on the other ranks, and here the call after the block.

        The others hear of both at once: who knew only that its call in the block has failed would make the next one, which
        might succeed there, because this rank is in it already.
        """
        self.left_run(group, block.members, last, block.following, reason)
        self._judged(
            {
                "group": group,
                "call": block.epoch_end + 1,
                "last_call": block.following,
                "text": f"another rank made a call before it that rank {self.rank} did not make",
                "table": {self.rank: reason},
                "waits": False,
            }
        )

    # -- clock ----------------------------------------------------------------------------------------------------

    def _timers(self, now: float) -> float:
        """Do what is due; return when the next thing is (`now` when something has changed)."""
        due = now + _IDLE_S
        changed = False
        for operation in list(self._active.values()):
            if operation.state == State.DRAINING:
                operation.advance(self)
                if operation.is_over:
                    self._retire(operation)
                    changed = True
                    continue
                due = min(due, now + _LOAN_LOOK_S)
            if now >= operation.deadline:
                self._deadline(operation, now)
                return now
            if now >= operation.report_at:
                self._report(operation, now)
            due = min(due, operation.deadline, operation.report_at)
        for (group, call), late in list(self._late.items()):
            if now >= late:
                del self._late[group, call]
                self._tell_passed(group, call)
                changed = True
            else:
                due = min(due, late)
        due = self._questions.expire(now, due)
        if self._suspects:
            for peer, (reason, until) in list(self._suspects.items()):
                if peer in self._book.left:
                    del self._suspects[peer]
                elif self.failure is not None:
                    del self._suspects[peer]  # it has been told
                elif now >= until:
                    self._break(PeerLost(peer, self._hosts.get(peer, ""), reason))
                    # Else the others would hear first that this rank ended, and take it for the lost one.
                    self._tell("broke", kind_of_break="lost", reason=reason, group=-1, call=-1, missing=[peer])
                    return now
                else:
                    due = min(due, until)
        return now if changed else due

    def _deadline(self, operation: Operation, now: float) -> None:
        missing = operation.awaiting
        error = DeadlineExceeded(
            f"{operation.what} (call {operation.call}) did not finish within {operation.timeout_s:g} s: rank "
            f"{self.rank} waited {now - operation.started:.1f} s for {rank_list(missing) if missing else 'its own sends'}",
            missing,
            operation.timeout_s,
        )
        self._break(error)
        self._tell(
            "broke",
            kind_of_break="deadline",
            reason=f"gave up {operation.what} (call {operation.call}) after {operation.timeout_s:g} s",
            group=operation.group,
            call=operation.call,
            missing=list(missing),
        )

    def _report(self, operation: Operation, now: float) -> None:
        operation.report_at = _FOREVER
        operation.reported = True
        threads = sum(
            1
            for thread in threading.enumerate()
            if not thread.name.startswith("syncvar-") and not type(thread).__module__.startswith("zmq.")
        )
        waiting = len({other.thread for other in self._active.values() if other.thread})
        if isinstance(operation, _LOOKED_AT) and operation.is_unheard:
            self._knock(operation)
        self._tell(
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
            entered=self.entered(),
        )

    def _knock(self, operation: Operation) -> None:
        """Tell the ranks that have not come: shared memory says nothing to those who are not looking."""
        header = pack_header(
            Kind.KNOCK, self.rank, self.generation, operation.group, operation.call, fingerprint=operation.fingerprint
        )
        for peer in operation.awaiting:
            if peer not in self._book.left:
                self._transport.send(peer, header)

    # -- the launcher's word --------------------------------------------------------------------------------------

    def _tell(self, kind: str, **fields: Any) -> None:
        """Send the launcher a message, as the driver."""
        self._control.send(pack_message(kind, **fields))

    def _tell_beside(self, kind: str, **fields: Any) -> None:
        """Send the launcher a message from any thread: the channel belongs to whoever holds the lock."""
        self._words.append(pack_message(kind, **fields))
        self._transport.wake()
        self._hand_over()

    def _speak(self) -> None:
        while self._words:
            self._control.send(self._words.popleft())

    def _hear(self) -> None:
        if self._words:
            self._speak()
        self._heard = time.monotonic()
        while True:
            message = self._control.receive()
            if message is None:
                return
            kind = message["kind"]
            if kind == "abort":
                self._aborted(message)
            elif kind == "verdict":
                self._judged(message)
            elif kind == "left":
                self._peer_left(message["rank"], message["entered"], message["skipped"])
            elif kind == "are_you_there":
                self._tell("here", **self.recorder.whereabouts())

    def _aborted(self, message: Message) -> None:
        operation = self._active.get((message["group"], message["call"]))
        rank = message["rank"]
        host = message["host"] or self._hosts.get(rank, "")
        if rank == self.rank:  # it was stopped, and is awake again
            self._break(HandshakeError(f"the job goes on without this rank, or ends: rank {rank} was given up, {message['reason']}"))
            return
        if message["kind_of_break"] == "deadline" and operation is not None:
            missing = tuple(rank for rank in message["missing"] if rank != self.rank) or operation.awaiting
            self._break(
                DeadlineExceeded(
                    f"{operation.what} (call {operation.call}) ended: rank {rank} {message['reason']}, waiting for "
                    f"{rank_list(missing)}",
                    missing,
                    operation.timeout_s,
                )
            )
            return
        waiting = next(iter(self._active.values()), None)
        detail = f"while in {waiting.what} (call {waiting.call})" if waiting is not None else ""
        self._break(PeerLost(rank, host, message["reason"], detail))

    def _judged(self, verdict: Message) -> None:
        self.is_quiet = False
        self.recorder.note("verdict", verdict["text"])
        group = verdict["group"]
        if verdict["waits"]:  # a rank is in that call, and the arbiter has seen it first
            block = self._book.overtaken(group, verdict["call"], self._active)
            if block is not None:
                self._refuse_following(group, block, block.epoch_end, self._gone_on(group, block))
        self._book.doom(verdict)
        for operation in list(self._active.values()):
            if self._book.concerns(verdict, operation):
                operation.reported = False
                operation.fail(self._book.sentence(verdict, operation))
                self._retire(operation)

    def _peer_left(self, rank: int, entered: dict[int, int], skipped: list[int]) -> None:
        book = self._book
        self.is_quiet = False
        book.leave(rank, entered, skipped)
        self.recorder.note("left", f"rank {rank}")
        self._questions.fail(book.ended(rank, "it answered a question"), rank)
        for operation in list(self._active.values()):
            if book.is_without(rank, operation):
                operation.fail(book.ended(rank, f"{operation.what} (call {operation.call})"))
                self._retire(operation)

    # -- failure --------------------------------------------------------------------------------------------------

    def interrupted(self, operation: Operation | Question, error: BaseException) -> None:
        """Break the generation because an exception has left a started call."""
        operation.entry.end(error)
        self._fall(error, f"{operation.what} (call {operation.call})", but=operation)

    def _fall(self, error: BaseException, place: str, but: Operation | Question | None = None) -> None:
        """Break the generation because of an exception of this rank's own, and tell the others."""
        if self.failure is None:
            reason = f"interrupted by {type(error).__name__} in {place}"
            self._break(GroupBroken(f"this rank was {reason}", error), but=but)
            self._tell_beside("broke", kind_of_break="interrupted", reason=reason, group=-1, call=-1, missing=[])

    def _break(self, failure: TransportError, but: Operation | Question | None = None) -> None:
        self.is_quiet = False
        if self.failure is None:
            self.failure = failure
        for operation in list(self._active.values()):
            if operation is not but:
                operation.fail(self.failure)
        self._questions.fail(self.failure)
        self._active.clear()
        self._shared.clear()
        if self._arena is not None:
            self._arena.quarantine()
        self._book.early.clear()
        self._flow.clear()
        self._hand_over()
        self.recorder.broke(failure)
