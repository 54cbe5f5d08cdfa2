"""State that all parts of the engine share: admission of calls, the driver's lock, the failure.

Persistent calls and C code read `is_quiet` and `driver` at every call. So these are attributes of
one C object.

One thread at a time drives: it holds `lock` and owns the transport and the launcher's channel.
Other threads wait for it, or post callbacks to it. The first lost rank, missed deadline or
interruption breaks the group: every running request fails, and every later call raises the same
failure.

A call that may wait first sends the queues of deferred writes. So a replica that waits in any call
has sent its writes before, and a replica that needs the writes of all others gets them.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from syncvar._native import AdmissionState
from syncvar.core.errors import GroupBroken, InternalError, UsageError, error_line, error_message
from syncvar.protocol.control_messages import pack_message
from syncvar.runtime.sequence import SequenceTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from syncvar._native import AsyncCall
    from syncvar.core.errors import TransportError
    from syncvar.core.settings import RuntimeConfig
    from syncvar.runtime.call_record import PendingRecord
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.recorder import Recorder
    from syncvar.runtime.request import Request
    from syncvar.runtime.sequence import SkippedRange
    from syncvar.shm.segment import SharedSegment
    from syncvar.transports.base import Control, Transport

SKIPPED_CALL = "has gone on without making a call that another rank made"
_REASON_MAX = 2000  # characters
_FOLLOW_S = 1.0
_CALLBACKS_END_S = 10.0  # how long the end of the engine waits for callbacks

_log = logging.getLogger("syncvar")


class Awaited(Protocol):
    """Something that a thread waits for: a request, a remote get, or the first of several."""

    call: int
    entry: PendingRecord
    thread: int  # identity of the waiting thread; 0 for none

    @property
    def label(self) -> str:
        """Its text for people."""

    @property
    def is_over(self) -> bool:
        """Whether the result or the error is there."""

    @property
    def error(self) -> BaseException | None:
        """The error, or None."""

    @property
    def result(self) -> Any:
        """The result for the caller."""

    def look(self) -> bool:
        """Spin for a short while; return whether something has changed."""


class CallbackThread:
    """Runs the done-callbacks of calls, in a thread that starts with the first of them.

    A thread that drives the engine does not run them: it has a call of its own to complete.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._posted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._unfinished: collections.deque[Callable[[], None]] = collections.deque()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a callback runs, or waits for its turn."""
        return bool(self._unfinished)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"syncvar-callbacks-{self._core.rank}", daemon=True
                )
                self._thread.start()

    def post(self, run: Callable[[], None]) -> None:
        """Let the thread call a function, which must not raise; from any thread."""
        self._unfinished.append(run)
        self._posted.put(run)

    def stop(self) -> None:
        """Wait for the posted functions, and end the thread. Idempotent."""
        thread = self._thread
        if thread is None:
            return
        self._posted.put(None)
        if thread is threading.current_thread():
            return
        thread.join(_CALLBACKS_END_S)
        if thread.is_alive():
            _log.warning(
                "a done-callback still runs after %g s; this rank ends without it", _CALLBACKS_END_S
            )

    def _serve(self) -> None:
        while True:
            run = self._posted.get()
            if run is None:
                return
            try:
                with self._core.around():
                    run()
            finally:
                self._unfinished.popleft()
                del run  # and the call, which may hold large arrays


class Core(AdmissionState):
    """State that all parts of the engine share."""

    def __init__(
        self,
        recorder: Recorder,
        transport: Transport,
        control: Control,
        config: RuntimeConfig,
        hosts: dict[int, str],
        shm: SharedSegment | None,
    ) -> None:
        self.rank = recorder.identity.rank
        self.generation = recorder.identity.generation
        self.transport = transport
        self.control = control
        self.config = config
        self.hosts = hosts
        self.shm = shm
        self.recorder = recorder
        # Sequence numbers of the calls of each group
        self.book = SequenceTracker(hosts, recorder.numbers)
        # Error that broke the group; None while it works
        self.failure: TransportError | UsageError | None = None
        # No call can be refused, and no writes are queued: persistent calls may skip the engine
        self.is_quiet = True
        # Queues with deferred writes. A call that may wait sends them first.
        self.queues: list[Queued] = []
        # Functions called with group and name before each call
        self.before_calls: list[Callable[[int, str], None]] = []
        # Persistent calls that wait for other ranks, and that only their callers know
        self.async_calls: list[AsyncCall] = []
        self.lock = threading.Lock()  # held by the driver, see `seize`
        self.driver = 0  # identity of the driving thread; 0 for none
        # Running requests by group and call; only the driver changes it
        self.active: dict[tuple[int, int], Request] = {}
        # Requests that any thread has started and the driver has not begun
        self.inbox: collections.deque[Request] = collections.deque()
        # Running requests that need polling, because no frame announces their progress
        self.under_way: list[Request] = []
        # Context manager for threads of the engine; a simulated rank binds its context to them
        self.around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self.callbacks = CallbackThread(self)
        self.when_broken: list[Callable[[TransportError | UsageError], None]] = []
        self._continuing = threading.RLock()
        self._failure_raised = False
        self._followers: list[threading.Event] = []
        self._posted: collections.deque[Callable[[], None]] = collections.deque()

    # -- whether a call may begin ------------------------------------------------------------------

    def check(self) -> None:
        """Raise the failure that broke the group, if there is one.

        Only the first call raises the failure itself; later calls raise GroupBroken. In a forked
        copy all raise UsageError.
        """
        failure = self.failure
        if failure is None:
            return
        if not self._failure_raised or isinstance(failure, UsageError):
            self._failure_raised = True
            raise failure
        raise GroupBroken(f"this group broke earlier: {error_message(failure)}", failure)

    def allows(self, group: int, call: int) -> bool:
        """Return whether a call may run without the lock: nothing is known that would refuse it.

        Also bring `is_quiet` up to date.
        """
        is_good = self.failure is None and not self.book.has_refusals
        self.is_quiet = is_good and not self.queues and not self.before_calls
        if self.failure is not None or self.book.has_refusals or self.queues or self.before_calls:
            # Another thread may have looked in between. It sets the state first and `is_quiet`
            # after.
            self.is_quiet = False
        return is_good or (self.failure is None and not self.book.may_refuse(group, call))

    def before_each_call(self, listener: Callable[[int, str], None]) -> None:
        """Call `listener(group, name)` before each call that may wait; no call is cached then."""
        self.before_calls.append(listener)
        self.is_quiet = False

    # -- calls that have begun without the engine --------------------------------------------------

    def continue_async_calls(self, after_s: float = 0.0) -> None:
        """Continue in the engine all persistent calls that have waited for `after_s` seconds."""
        if not self._continuing.acquire(blocking=after_s == 0.0):
            # Do not block here: a signal handler in the other thread may be waiting for this
            # thread.
            return
        try:
            for call in list(self.async_calls):
                if after_s == 0.0 or time.monotonic_ns() - call.began > after_s * 1e9:
                    call.give_to_engine()
        finally:
            self._continuing.release()

    def request_of(self, call: AsyncCall) -> Request | None:
        """Continue a persistent call in the engine; return its request, or None if it is over."""
        with self._continuing:
            call.give_to_engine()
        request: Request | None = call.request
        if request is None and not call.is_over:
            self.check()
            raise InternalError("a persistent call waits, but the engine has not taken it over")
        return request

    # -- whose turn it is to drive -----------------------------------------------------------------

    def seize(self) -> bool:
        """Try to take the driver's lock without waiting; after `let_go` the caller hands over.

        `driver` is set before the lock is taken and until after it is free. So a signal handler in
        this thread knows that it must not wait. No other thread can run between the check and the
        assignment, because threads switch at calls only.
        """
        me = threading.get_ident()
        if self.driver:
            return False
        self.driver = me
        if self.lock.acquire(blocking=False):
            return True
        if self.driver == me:
            self.driver = 0
        return False

    def let_go(self) -> None:
        """Release the driver's lock."""
        self.lock.release()
        self.driver = 0

    def post_to_driver(self, callback: Callable[[], None]) -> None:
        """Let the driver call a function, from any thread; call it now if no thread drives."""
        self._posted.append(callback)
        self.transport.wake()
        self.hand_over()

    def run_posted(self) -> None:
        """Call the posted functions, as the driver."""
        while self._posted:
            self._posted.popleft()()

    def follow(self, request: Awaited) -> None:
        """Wait until the driver stops driving or has completed this request."""
        event = threading.Event()
        self._followers.append(event)
        try:
            if not request.is_over and self.lock.locked():
                event.wait(_FOLLOW_S)
        finally:
            self._followers.remove(event)

    def refuse_in_handler(self, name: str | CollectiveSpec) -> None:
        """Raise UsageError in a signal handler that interrupted this thread in the engine.

        This thread drives or allocates memory, so no thread would progress the handler's call.
        """
        if self.driver == threading.get_ident() or (
            self.shm is not None and self.shm.is_changing_here
        ):
            raise UsageError(
                f"{name} on rank {self.rank}: a signal's handler has interrupted this thread in "
                f"another call, which cannot continue before the handler returns; let the handler "
                f"set a flag, and make the call after that one"
            )

    def hand_over(self) -> None:
        """Wake waiting threads and run posted callbacks, after the lock has been released."""
        while self._posted and self.seize():
            try:
                self.run_posted()
            finally:
                self.let_go()
        for event in list(self._followers):
            event.set()
        if self.recorder.is_due:
            self.recorder.ended()

    # -- messages to the launcher ------------------------------------------------------------------

    def send_control(self, kind: str, **fields: Any) -> None:
        """Send a message to the launcher, as the driver."""
        self.control.send(pack_message(kind, **fields))

    def send_control_async(self, kind: str, **fields: Any) -> None:
        """Send a message to the launcher from any thread; only the driver may use the channel."""
        data = pack_message(kind, **fields)
        self.post_to_driver(lambda: self.control.send(data))

    def reject_call(
        self, group: int, members: tuple[int, ...], call: int, label: str, reason: str
    ) -> None:
        """Report that this rank's call had a bad argument: the others raise MismatchError."""
        self.send_control_async(
            "reject_call",
            group=group,
            members=list(members),
            call=call,
            description=label,
            reason=reason[:_REASON_MAX],
        )

    def abort_step(
        self, group: int, members: tuple[int, ...], call: int, epoch_end: int, reason: str
    ) -> None:
        """Report that this rank makes no calls after `call`, up to `epoch_end`; from any thread."""
        if self.async_calls:
            self.continue_async_calls()
        self.send_control_async(
            "abort_step",
            group=group,
            members=list(members),
            call=call,
            last_call=epoch_end,
            reason=reason[:_REASON_MAX],
        )

    def check_ended_blocks(self, groups: Sequence[SkippedRange]) -> None:
        """Check blocks of calls that this rank has just ended, from any thread.

        If a peer has already sent a frame of a later call of the block, the ranks did not make the
        same calls. Then the group is informed, and this rank's next call fails too. Otherwise
        nothing is sent.
        """
        if self.async_calls:
            self.continue_async_calls()
        for one in self.book.check_ended_blocks(groups, SKIPPED_CALL, self.rank):
            self.is_quiet = False
            self.abort_step(
                one.identity, one.members, one.next_call - 1, one.next_call, SKIPPED_CALL
            )

    # -- failure of the group ----------------------------------------------------------------------

    def break_generation(self, failure: TransportError) -> None:
        """Fail all running requests, and refuse all later calls."""
        first = self.failure = self.failure or failure
        self.is_quiet = False
        for request in list(self.active.values()):
            request.fail(first)
        self.active.clear()
        self.under_way.clear()
        for callback in self.when_broken:
            callback(first)
        if self.shm is not None:
            self.shm.quarantine()
        self.book.early.clear()
        self.hand_over()
        self.recorder.broke(failure)

    def interrupted(self, request: Awaited, error: BaseException) -> None:
        """Break the group because an exception interrupted a started call."""
        request.entry.end(error)
        group = request.entry.info.group
        location = self.recorder.numbers.text(request.label, group, request.call)
        self.fall(error, location)

    def fall(self, error: BaseException, location: str) -> None:
        """Break the group because of an exception on this rank, and inform the other ranks."""
        if self.failure is None:
            reason = f"interrupted by {type(error).__name__} in {location}"
            self.break_generation(GroupBroken(f"this rank was {reason}", error))
            self.send_control_async(
                "group_failure",
                failure_kind="interrupted",
                reason=reason,
                group=-1,
                call=-1,
                missing=[],
            )

    def report_accident(self, request: Request) -> None:
        """Report an error of this rank alone to the group, if the request has one."""
        error = request.accident
        if error is None:
            return
        if request.is_published:
            self.interrupted(request, error)
        else:
            reason = error_line(error)
            self.reject_call(request.group, request.members, request.call, request.label, reason)


class Queued(Protocol):
    """The queue of one group."""

    identity: int
    writer: threading.Thread  # the thread that wrote last

    def begin_beside(self) -> None:
        """Start to send from a thread other than the writer, unless the writer is sending."""

    def start(self) -> Any:
        """Start to send; return the `Work`, or None if the queue is empty."""

    def finish(self, work: Any) -> None:
        """Wait for the work, and apply the received writes."""

    def send(self) -> None:
        """Start and finish."""


def send_queued(waiting: list[Queued], also: Queued | None = None) -> None:
    """Send everything that this thread has deferred; all groups at once, so their order is free.

    Writes of other threads are started, but not waited for: on another rank, the thread that writes
    there may wait for this one. Queue `also` is waited for, whichever thread has written. A queue
    that becomes empty removes itself. Raises MismatchError if replicas have made different writes.
    """
    me = threading.current_thread()
    while waiting:
        queues = []
        for queue in sorted(waiting, key=lambda queue: queue.identity):
            if queue is also or queue.writer is me or not queue.writer.is_alive():
                queues.append(queue)
            else:
                queue.begin_beside()
        if not queues:
            return
        if len(queues) == 1:
            queues[0].send()
            continue
        started = [(queue, queue.start()) for queue in queues]
        for queue, work in started:
            if work is not None:
                queue.finish(work)
