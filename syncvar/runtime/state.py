"""What all parts of an engine share: whether calls may begin, whose turn it is to drive, the launcher, and the break of a generation.

Persistent calls and the C runners read `is_quiet`, `queues` and `begun` at every call, so that these are attributes of the
very object that they have.

One thread at a time drives: it holds `lock`, and the transport and the launcher's channel are its own. The others follow
it, or leave it an errand. The first loss, missed deadline or interruption breaks the generation: every running operation
fails with it, and every later call raises it.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from syncvar._native import AdmissionState
from syncvar.core.errors import GroupBroken, InternalError, UsageError
from syncvar.protocol.control_messages import pack_message
from syncvar.runtime.sequence import SequenceTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncvar._native import AsyncCall
    from syncvar.core.errors import TransportError
    from syncvar.core.settings import RuntimeConfig
    from syncvar.runtime.deferred_queues import Queued
    from syncvar.runtime.flight_recorder.call_record import PendingRecord
    from syncvar.runtime.flight_recorder.recorder import Recorder
    from syncvar.runtime.request import Request
    from syncvar.runtime.sequence import SkippedRange
    from syncvar.shm.segment import SharedSegment
    from syncvar.transports.base import Control, Transport

__all__ = ["GONE_ON", "Awaited", "Core"]

GONE_ON = "has gone on without making a call that another rank made"
_REASON_MAX = 2000  # characters
_FOLLOW_S = 1.0


class Awaited(Protocol):
    """What a thread may wait for: an operation, a question, or the first of several operations that ends."""

    what: str
    call: int
    entry: PendingRecord
    thread: int
    """The thread that waits; 0 when none does."""

    @property
    def is_over(self) -> bool:
        """Whether the caller may take the result or the error."""

    @property
    def error(self) -> BaseException | None:
        """What has failed."""

    @property
    def result(self) -> Any:
        """What the caller gets."""

    def look(self) -> bool:
        """Look for a short while whether something has changed."""


class Core(AdmissionState):
    """What all parts of an engine share.

    Args:
        rank: This process in the world.
        generation: Version of the membership.
        transport: Opened transport.
        control: Channel to the launcher.
        config: Deadlines and limits.
        hosts: Host of each rank, for messages.
        shm: The memory shared with the ranks of this host, if there is any.
        recorder: Takes down what happens.

    Attributes:
        is_quiet: Nothing is known that would refuse a call, and no writes are queued.
        failure: What broke this generation; None as long as it goes on.
        queues: Those that hold writes: calls that may wait send them first.
        before_calls: Each is told of a call, its group and its name, before it begins.
        begun: Calls that only their callers know of, and wait for later.
        book: Where the calls of each group stand.
        lock: Whoever holds it drives: see `seize`.
        driver: The thread that has it, or is about to get it; 0 where none does.
        active: The operations that run, by group and call; the driver's.
        inbox: Operations that any thread has started, and that wait to begin.
        under_way: Running operations that somebody has to look at, because no frame tells of them.
    """

    def __init__(
        self,
        rank: int,
        generation: int,
        transport: Transport,
        control: Control,
        config: RuntimeConfig,
        hosts: dict[int, str],
        shm: SharedSegment | None,
        recorder: Recorder,
    ) -> None:
        self.rank = rank
        self.generation = generation
        self.transport = transport
        self.control = control
        self.config = config
        self.hosts = hosts
        self.shm = shm
        self.recorder = recorder
        self.book = SequenceTracker(hosts, recorder.numbers)
        self.failure: TransportError | UsageError | None = None
        self.is_quiet = True
        self.queues: list[Queued] = []
        self.before_calls: list[Callable[[int, str], None]] = []
        self.begun: list[AsyncCall] = []
        self.lock = threading.Lock()
        self.driver = 0
        self.active: dict[tuple[int, int], Request] = {}
        self.inbox: collections.deque[Request] = collections.deque()
        self.under_way: list[Request] = []
        self.when_broken: list[
            Callable[[TransportError | UsageError], None]
        ] = []  # let go of what they hold
        self._adopting = (
            threading.RLock()
        )  # before a call that is queued after one of them, and by the progress thread
        self._failure_raised = False
        self._followers: list[threading.Event] = []
        self._errands: collections.deque[Callable[[], None]] = (
            collections.deque()
        )  # of threads that do not drive

    # -- whether a call may begin ------------------------------------------------------------------

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

    def allows(self, group: int, call: int) -> bool:
        """Return whether nothing is known that would refuse a call: it may run without the lock."""
        is_good = self.failure is None and not self.book.has_refusals
        self.is_quiet = is_good and not self.queues and not self.before_calls
        if self.failure is not None or self.book.has_refusals or self.queues or self.before_calls:
            self.is_quiet = False  # since another thread has looked: whatever unsettles it comes before it says so
        return is_good or (self.failure is None and not self.book.may_refuse(group, call))

    def before_each_call(self, listener: Callable[[int, str], None]) -> None:
        """Call `listener(group, name)` before each call that may wait, from now on; none takes a prepared way any more."""
        self.before_calls.append(listener)
        self.is_quiet = False

    # -- calls that have begun without the engine --------------------------------------------------

    def adopt(self, after_s: float = 0.0) -> None:
        """Go on with the calls that have begun without the engine, so long ago: somebody else than their callers has to know of them."""
        if not self._adopting.acquire(blocking=after_s == 0.0):
            return  # who looks at times does not wait: a handler that has struck in the other thread may wait for this one
        try:
            for begun in list(self.begun):
                if after_s == 0.0 or time.monotonic_ns() - begun.begin > after_s * 1e9:
                    begun.adopt()
        finally:
            self._adopting.release()

    def adopted(self, begun: AsyncCall) -> Request | None:
        """Go on with a call that has begun without the engine, and return its operation; None if it is over.

        Raises:
            TransportError: An exception has struck while the engine was about to go on with it.
        """
        with self._adopting:
            begun.adopt()
        operation: Request | None = begun.operation
        if operation is None and not begun.is_over:
            self.check()
            raise InternalError("nobody goes on with a call that has begun")
        return operation

    # -- whose turn it is to drive -----------------------------------------------------------------

    def seize(self) -> bool:
        """Take the lock without waiting; return whether it is this thread's. Who lets go of it calls `hand_over` then.

        A signal's handler that strikes in this thread finds `driver` set before the lock is taken, and until it is free again: it could not
        wait for a thread that it interrupts. Nothing comes between the look and the mark, where threads take turns at calls only.
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
        """Let go of the lock."""
        self.lock.release()
        self.driver = 0

    def leave_errand(self, errand: Callable[[], None]) -> None:
        """Let the driver do something, from any thread; do it now where nobody drives."""
        self._errands.append(errand)
        self.transport.wake()
        self.hand_over()

    def run_errands(self) -> None:
        """Do what was left for the driver, as the driver."""
        while self._errands:
            self._errands.popleft()()

    def follow(self, operation: Awaited) -> None:
        """Wait until the driver leaves, or has ended this operation."""
        event = threading.Event()
        self._followers.append(event)
        try:
            if not operation.is_over and self.lock.locked():
                event.wait(_FOLLOW_S)
        finally:
            self._followers.remove(event)

    def refuse_in_handler(self, name: str) -> None:
        """Raise where this very thread drives, or takes memory: a signal's handler has interrupted it, and nobody would drive what it calls.

        Raises:
            UsageError: It does.
        """
        if self.driver == threading.get_ident() or (
            self.shm is not None and self.shm.is_changing_here
        ):
            raise UsageError(
                f"{name} on rank {self.rank}: a signal's handler has interrupted this thread in another call, which cannot go on "
                f"before the handler returns; let the handler set a flag, and make the call after that one"
            )

    def hand_over(self) -> None:
        """Let others go on, after the lock has been released: waiting threads, and errands that came meanwhile."""
        while self._errands and self.seize():
            try:
                self.run_errands()
            finally:
                self.let_go()
        for event in list(self._followers):
            event.set()
        if self.recorder.is_due:
            self.recorder.ended()

    # -- what the launcher is told -----------------------------------------------------------------

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message to the launcher, as the driver."""
        self.control.send(pack_message(kind, **fields))

    def tell_beside(self, kind: str, **fields: Any) -> None:
        """Send a message to the launcher from any thread: the channel belongs to whoever holds the lock."""
        data = pack_message(kind, **fields)
        self.leave_errand(lambda: self.control.send(data))

    def poison(
        self, group: int, members: tuple[int, ...], call: int, what: str, reason: str
    ) -> None:
        """Tell the group that this rank's call had a bad argument: the others raise MismatchError at once."""
        self.tell_beside(
            "poison",
            group=group,
            members=list(members),
            call=call,
            what=what,
            reason=reason[:_REASON_MAX],
        )

    def left_run(
        self, group: int, members: tuple[int, ...], call: int, epoch_end: int, reason: str
    ) -> None:
        """Tell the group that this rank makes none of its calls after `call`, up to `epoch_end`; from any thread."""
        if self.begun:
            self.adopt()
        self.tell_beside(
            "left_run",
            group=group,
            members=list(members),
            call=call,
            epoch_end=epoch_end,
            reason=reason[:_REASON_MAX],
        )

    def passed_over(self, groups: Sequence[SkippedRange]) -> None:
        """Look at blocks of calls that this rank has just ended. From any thread.

        When a peer's frame of a later call of the block is seen, the group is told, and this rank's next call fails as
        well: the ranks did not make the same calls. Normally no such frame comes, and nothing is sent.
        """
        if self.begun:
            self.adopt()
        for one in self.book.passed_over(groups, GONE_ON, self.rank):
            self.is_quiet = False
            self.left_run(one.identity, one.members, one.next_call - 1, one.next_call, GONE_ON)

    # -- what breaks the generation ----------------------------------------------------------------

    def break_generation(self, failure: TransportError, but: Awaited | None = None) -> None:
        """End the generation: nothing that has begun in it goes on, and nothing more begins. The operation `but` ends by itself."""
        first = self.failure = self.failure or failure
        self.is_quiet = False
        for operation in list(self.active.values()):
            if operation is not but:
                operation.fail(first)
        self.active.clear()
        self.under_way.clear()
        for let_go in self.when_broken:
            let_go(first)
        if self.shm is not None:
            self.shm.quarantine()
        self.book.early.clear()
        self.hand_over()
        self.recorder.broke(failure)

    def interrupted(self, operation: Awaited, error: BaseException) -> None:
        """Break the generation because an exception has left a started call."""
        operation.entry.end(error)
        group = operation.entry.told.group
        place = self.recorder.numbers.text(operation.what, group, operation.call)
        self.fall(error, place, but=operation)

    def fall(self, error: BaseException, place: str, but: Awaited | None = None) -> None:
        """Break the generation because of an exception of this rank's own, and tell the others."""
        if self.failure is None:
            reason = f"interrupted by {type(error).__name__} in {place}"
            self.break_generation(GroupBroken(f"this rank was {reason}", error), but)
            self.tell_beside(
                "broke", kind_of_break="interrupted", reason=reason, group=-1, call=-1, missing=[]
            )

    def tell_accident(self, operation: Request) -> None:
        """Tell the group what has gone wrong on this rank alone, if anything has: it cannot go on without this rank."""
        error = operation.accident
        if error is None:
            return
        if operation.is_published:
            self.interrupted(operation, error)
        else:
            reason = f"{type(error).__name__}: {error}"
            self.poison(operation.group, operation.members, operation.call, operation.what, reason)
