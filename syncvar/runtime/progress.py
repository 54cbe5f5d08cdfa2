"""The progress engine of a process: one lock, one driver at a time; every wait advances all groups.

A caller that waits takes the engine's lock and drives: it drains the transport, passes frames to
requests and checks deadlines. Other threads wait for it; when it leaves, one of them takes over. A
progress thread drives when no caller waits.

`state` holds the shared state. `active_requests` handles requests, decisions and losses,
`link_exchange` credit, `p2p_requests` remote reads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import GroupBroken, SyncvarError
from syncvar.protocol.frame import FrameType
from syncvar.protocol.unreceived_messages import pack_counts
from syncvar.runtime.active_requests import VERDICT_GRACE_S, RunningRequests, Verdicts
from syncvar.runtime.arithmetic import gil_monitor
from syncvar.runtime.call_record import CallInfo
from syncvar.runtime.link_exchange import Flow
from syncvar.runtime.p2p_requests import Answer, GetRequest, GetRequests, SentMessages
from syncvar.runtime.state import Awaited, Core
from syncvar.shm.channel_table import pause_after
from syncvar.transports.base import PeerDisconnected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncvar.core.errors import UsageError
    from syncvar.core.settings import RuntimeConfig
    from syncvar.protocol.frame import Header
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.recorder import Recorder
    from syncvar.runtime.request import Request
    from syncvar.shm.segment import SharedSegment
    from syncvar.transports.base import Arrival, Control, Place, Transport

_log = logging.getLogger("syncvar")
_APPEAR_S = 2.0  # how long `ask` retries while the key is not published
_APPEAR_LOOK_S = 0.001
_CALLER_RECENT_S = 0.005
_CONTROL_POLL_S = 0.005  # interval at which waiting calls poll the launcher
_IDLE_S = 1.0
_IDLE_MIN_S = 0.001
_DRIVEN_IDLE_S = 0.25
_PERSISTENT_OWN_S = 0.1  # a persistent call belongs to its caller for this long
_IDLE_SHARED_S = 0.002  # polling interval while started calls use shared memory
_IDLE_MOVING_S = 0.0002  # polling interval while one of them makes progress
_STARTED_OWN_S = 0.001  # a started call belongs to its caller for this long
_MOVES_S = 0.02
_LOOK_S = 0.005  # spin time of a wait in shared memory, before it sleeps
_SLEEP_MIN_S = 0.001  # shorter waits do not use the transport


class ProgressEngine(Core):
    """Everything that runs in a process of a world larger than one, with a progress thread."""

    def __init__(
        self,
        recorder: Recorder,
        transport: Transport,
        control: Control,
        config: RuntimeConfig,
        hosts: dict[int, str],
        shm: SharedSegment | None = None,
        early: Sequence[Arrival] = (),
    ) -> None:
        """`early`: what has arrived before."""
        super().__init__(recorder, transport, control, config, hosts, shm)
        self.flow = Flow(self.rank, self.generation, transport, config, self.active)
        self.when_broken.append(lambda _: self.flow.forget())
        self.sent = SentMessages()
        self._questions = GetRequests(self)
        self._started = RunningRequests(self, self.flow)
        self._verdicts = Verdicts(self, self._started, self._questions, self.flow)
        transport.placer = self.place
        self._heard = 0.0  # when the launcher's channel was last polled
        self._last_caller = 0.0  # when a caller last drove; it may come again at once
        self._stopped = threading.Event()
        self._is_disowned = False
        self._progress = threading.Thread(
            target=self._serve, name=f"syncvar-progress-{self.rank}", daemon=True
        )
        self._due = 0.0  # when the progress thread has to check the timers again
        for arrival in early:
            self._take(arrival)
        self._progress.start()

    @property
    def frames_sent(self) -> int:
        """Number of data frames sent, including remote gets and their answers."""
        return self.flow.frames_sent + self._questions.frames_sent

    # -- calls -------------------------------------------------------------------------------------

    def start(self, request: Request, timeout_s: float | None, began: float | None = None) -> None:
        """Start a request; it advances whenever a thread drives.

        A persistent call that continues here began at `began`, in monotonic seconds.
        """
        try:
            self._put(request, timeout_s, began)
            if self.seize():
                try:
                    self._started.begin_inbox()
                finally:
                    self.let_go()
                self.hand_over()
            else:
                self.transport.wake()
        except BaseException as error:
            self.interrupted(request, error)
            raise

    def _put(self, request: Request, timeout_s: float | None, began: float | None = None) -> None:
        """Put a request into the inbox: whoever drives next begins it."""
        now = time.monotonic() if began is None else began
        request.started = now
        request.timeout_s = self.config.collective_timeout_s if timeout_s is None else timeout_s
        request.deadline = now + request.timeout_s
        request.report_at = now + self.config.report_after_s
        self.inbox.append(request)

    def wait(self, request: Awaited) -> Any:
        """Drive until a request is over; return its result or raise its error.

        Any other exception that interrupts the wait (KeyboardInterrupt, an alarm handler's) breaks
        the group and is passed on. A forked copy raises UsageError.
        """
        if not request.is_over:
            self.require_own()
            if not request.entry.waited:
                request.entry.waited = time.monotonic_ns()
        me = request.thread = threading.get_ident()  # several threads may wait for one request
        try:
            while not request.is_over:
                if self.seize():
                    try:
                        self._started.begin_inbox()  # first: the others wait for what it sends
                        self._drive(request)
                    finally:
                        self._last_caller = time.monotonic()
                        self.let_go()
                        self.hand_over()
                else:
                    self.refuse_in_handler(request.label)
                    if self.inbox:
                        self.transport.wake()
                    self.follow(request)
        except BaseException as error:
            self.interrupted(request, error)
            raise
        finally:
            if request.thread == me:
                request.thread = 0
        if request.error is not None:
            if request.error is self.failure:
                self._failure_raised = True
            self.recorder.failed(request.error)
            raise request.error
        return request.result

    def run(self, request: Request, timeout_s: float | None) -> Any:
        """Start a request and wait for it."""
        request.thread = threading.get_ident()
        request.entry.waited = request.entry.began
        if not (
            self.allows(request.group, request.call)
            and request.links is None
            and self._inline(request)
        ):
            self._put(request, timeout_s)
        return self.wait(request)

    def take_over(self, request: Request, timeout_s: float | None) -> Any:
        """Continue a request that its caller has begun without the lock, and wait for it."""
        request.thread = threading.get_ident()
        request.entry.waited = request.entry.began
        self.start(request, timeout_s)
        return self.wait(request)

    def _inline(self, request: Request) -> bool:
        """Run a request in shared memory without the lock; return False if it has to wait."""
        channel = request.channel
        if channel is None:
            return False
        wait = channel.hold if gil_monitor.holds() else channel.wait
        try:
            while True:
                request.advance()
                if request.is_over:
                    self.report_accident(request)
                    return True
                if not request.may_look or not wait(channel.others, request.need, channel.last + 2):
                    return False
        except BaseException as error:
            self.interrupted(request, error)
            raise

    def ask(
        self, peer: int, key: int, spec: CollectiveSpec, timeout_s: float | None
    ) -> tuple[bytes, bytes] | None:
        """Read the description and bytes that another process publishes under a key.

        Its engine answers. None: the key was not published within a short grace period.

        Raises:
            DeadlineExceeded: No answer in time. Only this call fails; the group stays usable.
            PeerLost: The rank is gone.
        """
        now = time.monotonic()
        allowed = self.config.collective_timeout_s if timeout_s is None else timeout_s
        deadline, appears, pause = now + allowed, now + min(_APPEAR_S, allowed / 2), _APPEAR_LOOK_S
        while True:
            self.check()
            question = GetRequest(peer, key, spec.label, deadline, allowed)
            question.entry = self.recorder.begin(
                CallInfo(spec, path=f"question to rank {peer}"), -1
            )
            self._questions.waiting.append(question)
            self.transport.wake()
            answer: tuple[bytes, bytes] | None = self.wait(question)
            if answer is not None or time.monotonic() >= appears:
                return answer
            time.sleep(pause)
            pause = min(2 * pause, _APPEAR_S / 20)

    def publish(self, find: Callable[[int], Answer | None]) -> None:
        """Set the function that finds published data by key; the driver calls it."""
        self._questions.find = find

    def is_idle(self, group: int) -> bool:
        """Return whether no call of a group runs or waits to begin."""
        self.continue_async_calls()
        return all(request.group != group for request in self._started.all)

    def settle(self, group: int) -> None:
        """Wait until no call of a group runs or waits to begin; their waiters get the errors."""
        self.continue_async_calls()
        for request in self._started.all:
            if request.group == group:
                with contextlib.suppress(SyncvarError):
                    self.wait(request)

    # -- shutdown ----------------------------------------------------------------------------------

    def leave(self, deadline: float) -> None:
        """Complete started requests or raise their error, then announce that this rank leaves."""
        self.continue_async_calls()
        left = [f"{one.label} started at {one.site}" for one in self._started.all if one.site]
        if left and self.failure is None:
            _log.warning(
                "%d started call%s not waited for; waiting for them now: %s%s",
                len(left),
                " was" if len(left) == 1 else "s were",
                "; ".join(left[:5]),
                "; …" if len(left) > 5 else "",
            )
        try:
            while self.failure is None and time.monotonic() < deadline:
                started = self._started.all
                if not started:
                    break
                self.wait(started[0])
        finally:
            if self.failure is None:
                counts = pack_counts(self.sent.counts(self.book.following))
                self.send_control_async(
                    "leave", entered=self.book.entered(), skipped=self.book.skipped(), **counts
                )

    def disown(self, failure: UsageError) -> None:
        """Make every later call raise `failure`: this forked copy has no sockets and threads."""
        self.failure = failure
        self.is_quiet = False
        self._is_disowned = True
        self._stopped.set()

    def require_own(self) -> None:
        """Raise in a forked copy: running requests and sockets belong to the parent."""
        if self._is_disowned:
            assert self.failure is not None
            raise self.failure

    def stop(self) -> None:
        """End the progress thread. Idempotent."""
        self.is_quiet = False
        self._stopped.set()
        self.transport.wake()
        if self._progress is not threading.current_thread():
            self._progress.join()
        for request in self._started.all:
            request.fail(
                self.failure
                or GroupBroken(
                    f"rank {self.rank} left the job before {request.label} had ended: wait for "
                    "it before sv.shutdown()"
                )
            )
        self.callbacks.stop()
        self.transport.placer = None
        self.around = contextlib.nullcontext
        self.hand_over()

    # -- driving -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        transport = self.transport
        while not self._stopped.is_set():
            if self.under_way and time.monotonic() - self._started.moved < _MOVES_S:
                time.sleep(_IDLE_MOVING_S)
            else:
                idled = not self.under_way
                transport.wait_idle(self._idle_s())
                if idled and self.under_way:
                    time.sleep(_STARTED_OWN_S)
            if self._stopped.is_set():
                return
            if not self.active and time.monotonic() - self._last_caller < _CALLER_RECENT_S:
                time.sleep(_CALLER_RECENT_S)
                self._due = time.monotonic() + _IDLE_S
                continue
            if not self.seize():
                time.sleep(_CALLER_RECENT_S)
                self._due = time.monotonic() + _DRIVEN_IDLE_S  # the driver may leave before
                continue
            try:
                with self.around():
                    self._poll_control()
                    self.look()
                    self._due = self.timers(time.monotonic())
            except Exception as error:  # no call's own error: those fail their call
                self.fall(error, "the progress thread")
            finally:
                self.let_go()
            self.hand_over()

    def _idle_s(self) -> float:
        if self.under_way:
            return _IDLE_SHARED_S
        if self._verdicts.late or self.async_calls:
            return VERDICT_GRACE_S
        # perhaps nobody else checks the deadlines
        return min(max(self._due - time.monotonic(), _IDLE_MIN_S), _IDLE_S)

    def poll(self) -> None:
        """Drive once, if no other thread drives."""
        self.require_own()
        if self.seize():
            try:
                self.look()
                self.timers(time.monotonic())
            finally:
                self.let_go()
            self.hand_over()

    def _drive(self, request: Awaited) -> None:
        look, timers, wait, started = self.look, self.timers, self.transport.wait, self._started
        if time.monotonic() - self._heard > _CONTROL_POLL_S:
            self._poll_control()
        while True:
            look(request)
            if request.is_over:
                return
            now = time.monotonic()
            due = timers(now)
            if due <= now:
                continue
            pause = due - now
            if self.under_way and any(one.needs_looks for one in self.under_way):
                waited = now - started.moved
                if waited < _LOOK_S and request.look():
                    continue
                pause = min(pause, pause_after(waited))
                if pause < _SLEEP_MIN_S:
                    time.sleep(pause)
                    if now - self._heard > _CONTROL_POLL_S:
                        self._poll_control()
                    continue
            if wait(pause):
                self._poll_control()

    def look(self, until: Awaited | None = None) -> None:
        """Handle arrived frames and advance their requests: all, or until `until` is over."""
        started = self._started
        if self.async_calls:  # others may need more than what they have published
            self.continue_async_calls(_PERSISTENT_OWN_S)
        if self.inbox:
            started.begin_inbox()
        self._questions.send_requests()
        self.flow.settle()
        for group, call, frames in self.book.take_skipped():
            self.flow.use_up(frames)
            self._verdicts.passed(group, call)
        receive = self.transport.receive
        while True:
            arrival = receive()
            if arrival is None:
                break
            self._take(arrival)
            if until is not None and until.is_over:
                return
        if self.under_way:
            started.look_at_shared()

    def _take(self, arrival: Arrival) -> None:
        if isinstance(arrival, PeerDisconnected):
            self._verdicts.suspect(arrival.peer, arrival.reason)
            return
        frame, header = arrival, arrival.header
        # A peer that knocks waits in a call that this rank may have skipped.
        if header.kind in (FrameType.DATA, FrameType.WAKE):
            request = self.active.get((header.group, header.call))
            if request is not None:
                self._started.deliver(request, frame)
            elif not self.book.keep(frame):
                self.flow.use_up([frame])
                self._verdicts.passed(header.group, header.call)
        elif header.kind == FrameType.CREDIT:
            self.flow.credited(header.source, header.group, header.nbytes)
        elif header.kind == FrameType.ASK:
            self._questions.answer(header)
        elif header.kind == FrameType.ANSWER and self._questions.accept(frame):
            self.hand_over()

    def place(self, header: Header) -> Place | None:
        """Return where the payload of a frame under way belongs, if its call waits for it."""
        request = self.active.get((header.group, header.call))
        if (
            request is None
            or header.kind != FrameType.DATA
            or header.fingerprint != request.fingerprint
        ):
            return None
        return request.place(header)

    def timers(self, now: float) -> float:
        """Do what is due; return when the next thing is due (`now` if something has changed)."""
        due = self._started.expire(now, now + _IDLE_S)
        due = self._verdicts.expire(now, due)
        return self._questions.expire(now, due)

    def _poll_control(self) -> None:
        self.run_posted()
        self._heard = time.monotonic()
        while True:
            message = self.control.receive()
            if message is None:
                return
            if message["kind"] == "abort" and message["rank"] != self.rank:
                self.look()  # a call completes if all that it needs has arrived
            self._verdicts.handle_message(message)
