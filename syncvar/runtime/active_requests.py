"""The running requests of a process, and reactions to the launcher and to lost links.

The driver of the engine calls `RunningRequests`, which begins requests, delivers their frames and
checks their deadlines, and `Verdicts`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from syncvar.core.errors import DeadlineExceeded, HandshakeError, PeerLost
from syncvar.core.process_ids import rank_list
from syncvar.core.stack_dump import current_frames
from syncvar.protocol.frame import FrameType
from syncvar.runtime.call_record import call_site
from syncvar.runtime.call_summary import CallSummary
from syncvar.runtime.request import RequestState
from syncvar.runtime.sequence import local_decision
from syncvar.runtime.state import SKIPPED_CALL

if TYPE_CHECKING:
    from syncvar.protocol.control_messages import Message
    from syncvar.runtime.link_exchange import Flow
    from syncvar.runtime.p2p_requests import GetRequests
    from syncvar.runtime.request import Request
    from syncvar.runtime.sequence import SkippedCall
    from syncvar.runtime.state import Core
    from syncvar.transports.base import Frame

_LOAN_LOOK_S = 0.0005
_FOREVER = float("inf")
_FOLLOWING_LOOK_S = 0.25
_REPORT_AGAIN_S = 1.0


class RunningRequests:
    """Requests of `core.inbox`, `core.active` and `core.under_way`, as the driver sees them."""

    def __init__(self, core: Core, flow: Flow) -> None:
        self.moved = 0.0  # when a shared-memory request last made progress, monotonic seconds
        self._core = core
        self._book = core.book
        self._flow = flow

    @property
    def all(self) -> list[Request]:
        """Requests that run or wait to begin, without those that are over."""
        started = *list(self._core.active.values()), *list(self._core.inbox)
        return [one for one in started if not one.is_over]

    # -- from the start to the end -----------------------------------------------------------------

    def begin_inbox(self) -> None:
        """Begin the requests in the inbox."""
        while self._core.inbox:
            request = self._core.inbox.popleft()
            key = (request.group, request.call)
            if self._core.failure is not None:
                request.fail(self._core.failure)
                continue
            refusal = self._book.refusal(request)
            self._book.note(request.group, request.call + 1)
            if refusal is not None:
                request.fail(refusal)
                self._flow.use_up(self._book.take_early(request))
                continue
            self._core.active[key] = request
            if request.is_shared:
                self._core.under_way.append(request)
                self.moved = time.monotonic()
            request.advance()
            self._core.report_accident(request)
            for frame in self._book.take_early(request):
                if key in self._core.active and not request.is_over:
                    self.deliver(request, frame)
                else:
                    self._flow.use_up([frame])
            if request.is_over and key in self._core.active:
                self.retire(request)

    def deliver(self, request: Request, frame: Frame) -> None:
        """Pass a frame to its request."""
        if frame.header.kind == FrameType.WAKE:
            return
        if frame.header.fingerprint != request.fingerprint:
            self._flow.consumed(frame.header.source, request.group, frame.header.nbytes)
            if not request.mismatch:
                request.mismatch = True
                self._report(request, time.monotonic())
            return
        request.accept(frame)
        self._core.report_accident(request)
        if request.is_shared:
            self.moved = time.monotonic()  # it polls the others again
        if request.state == RequestState.DRAINING:
            request.advance()
        if request.is_over:
            self.retire(request)

    def look_at_shared(self) -> None:
        """Advance the requests in shared memory."""
        for request in list(self._core.under_way):
            channel = request.channel
            first = None if channel is None else channel.first
            if (
                first is not None
                and first is not request
                and request.state == RequestState.RUNNING
                and not request.mismatch
            ):
                continue  # it is not its turn; there may be thousands of them
            before = request.need
            request.advance()
            if request.is_over:
                self.moved = time.monotonic()
                self._core.report_accident(request)
                self.retire(request)
            elif request.need != before:
                self.moved = time.monotonic()
            if request.mismatch and not request.reported and not request.is_over:
                self._report(request, time.monotonic())

    def retire(self, request: Request) -> None:
        """Remove a request that is over, and return the credit of its unused frames."""
        self._core.active.pop((request.group, request.call), None)
        if request.is_shared:
            with contextlib.suppress(ValueError):
                self._core.under_way.remove(request)
            if request.error is not None and self._core.shm is not None and request.is_under_way:
                self._core.shm.quarantine()  # other ranks may still write for this call
        self._flow.go_on(request.group)
        self._flow.use_up(request.unused_frames())
        self._end_report(request)
        if request.thread:
            self._core.hand_over()

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error, and retire it."""
        self._end_report(request)  # first: its thread may go on at once
        request.fail(error)
        self.retire(request)

    def _end_report(self, request: Request) -> None:
        if request.reported and self._core.failure is None:
            request.reported = False
            self._core.send_control("wait_end", group=request.group, call=request.call)

    # -- deadlines and long waits ------------------------------------------------------------------

    def expire(self, now: float, due: float) -> float:
        """Fail late requests and report long waits; return when the next one is due, or `due`."""
        groups: set[int] = set()
        for request in list(self._core.active.values()):
            if request.state == RequestState.DRAINING:
                request.advance()
                if request.is_over:
                    self.retire(request)
                    due = now
                    continue
                due = min(due, now + _LOAN_LOOK_S)
            if now >= request.deadline:
                self._miss_deadline(request, now)
                return now
            is_first = request.group not in groups
            groups.add(request.group)
            is_new = request.reported and request.thread not in (0, request.reported_thread)
            if is_new or (now >= request.report_at and (is_first or request.thread)):
                self._report(request, now)
            # If no thread waits, report only the first call of a group: the others cannot end
            # before it, and may be thousands.
            report_at = request.report_at
            due = min(
                due, request.deadline, report_at if report_at > now else now + _FOLLOWING_LOOK_S
            )
        return due

    def _miss_deadline(self, request: Request, now: float) -> None:
        """Break the group because a request missed its deadline."""
        missing = request.awaiting
        awaited = rank_list(missing) if missing else "its own sends"
        call = self._core.recorder.numbers.text(request.label, request.group, request.call)
        error = DeadlineExceeded(
            f"{call} did not finish within {request.timeout_s:g} s: "
            f"rank {self._core.rank} waited {now - request.started:.1f} s for {awaited}",
            missing,
            request.timeout_s,
        )
        self._core.break_generation(error)
        reason = f"gave up {call} after {request.timeout_s:g} s"
        self._core.send_control(
            "group_failure",
            failure_kind="deadline",
            reason=reason,
            group=request.group,
            call=request.call,
            missing=list(missing),
        )

    def _report(self, request: Request, now: float) -> None:
        if not request.reported and request.is_unheard:
            for peer in request.awaiting:
                if peer not in self._book.left:
                    self._flow.notify_waiting(
                        peer, request.group, request.call, request.fingerprint
                    )
        request.reported, request.reported_thread = True, request.thread
        is_active = self._has_active_threads()
        # Threads that are active now may end without a call.
        again = is_active and request.thread != 0
        request.report_at = now + max(_REPORT_AGAIN_S, now - request.started) if again else _FOREVER
        self._core.send_control(
            "wait_report",
            group=request.group,
            members=list(request.members),
            call=request.call,
            ordinal=self._core.recorder.numbers.ordinal(request.group, request.call),
            fingerprint=request.fingerprint,
            description=request.label,
            site=call_site(request.thread),
            awaiting=list(request.awaiting),
            alternatives=list(request.alternatives),
            waited_s=now - request.started,
            mismatch=request.mismatch,
            is_awaited=request.thread != 0,
            has_active_threads=is_active,
            entered=self._book.entered(),
        )

    def _has_active_threads(self) -> bool:
        """Return whether a thread may make calls: it does not wait in a call that is reported."""
        if self._core.callbacks.is_busy or any(one.has_listeners for one in self.all):
            return True
        waiting = {
            one.thread
            for one in self._core.active.values()
            if one.reported and one.thread == one.reported_thread != 0
        }
        threads = threading.enumerate()
        users = [
            thread
            for thread in threads
            if not thread.name.startswith("syncvar-")
            and not type(thread).__module__.startswith("zmq.")
        ]
        # Threads that another library has started, for instance those that run callbacks of JAX. A
        # simulated rank does not know which of them are its own.
        is_simulated = self._core.around is not contextlib.nullcontext
        running = waiting if is_simulated else current_frames().keys()
        foreign = running - {thread.ident for thread in threads}
        return len(users) + len(foreign) > len(waiting)


VERDICT_GRACE_S = 0.03  # time for a peer to hear the same from the launcher
_DETAIL_GRACE_S = 0.2  # time for the launcher to explain a silent disconnection


class Verdicts:
    """What this process knows from others about its calls."""

    def __init__(
        self, core: Core, started: RunningRequests, questions: GetRequests, flow: Flow
    ) -> None:
        self.late: dict[tuple[int, int], float] = {}  # skipped calls of peers: when to report them
        self._core = core
        self._book = core.book
        self._started = started
        self._questions = questions
        self._flow = flow
        self._summary = CallSummary(core.recorder)
        # Disconnected peers: reason, and when to believe it.
        self._suspects: dict[int, tuple[str, float]] = {}
        self._cut: dict[int, str] = {}  # disconnected peers that had finished: reason

    # -- messages of the launcher ------------------------------------------------------------------

    def handle_message(self, message: Message) -> None:
        """Act on a message of the launcher."""
        kind = message["kind"]
        if kind == "abort":
            self._aborted(message)
        elif kind == "decision":
            self._apply_decision(message)
        elif kind == "leave_notice":
            self._peer_left(message["rank"], message["entered"], message["skipped"])
        elif kind == "ping":
            self._core.send_control("status", **self._core.recorder.whereabouts())
        elif kind == "observe":
            fields = self._summary.fields(message, self._book.entered(), self._flow.nbytes_sent)
            self._core.send_control("observation", **fields)

    def _call(self, request: Request) -> str:
        return self._core.recorder.numbers.text(request.label, request.group, request.call)

    def _aborted(self, message: Message) -> None:
        active = self._core.active
        request = active.get((message["group"], message["call"]))
        rank = message["rank"]
        host = message["host"] or self._core.hosts.get(rank, "")
        if rank == self._core.rank:  # this process was stopped and runs again
            self._core.break_generation(
                HandshakeError(
                    f"the job continues without this rank, or ends: rank {rank} was given up, "
                    f"{message['reason']}"
                )
            )
            return
        if message["failure_kind"] == "deadline" and request is not None:
            others = tuple(rank for rank in message["missing"] if rank != self._core.rank)
            missing = others or request.awaiting
            self._core.break_generation(
                DeadlineExceeded(
                    f"{self._call(request)} ended: rank {rank} {message['reason']}, waiting for "
                    f"{rank_list(missing)}",
                    missing,
                    request.timeout_s,
                )
            )
            return
        waiting = next(iter(active.values()), None)
        detail = f"while in {self._call(waiting)}" if waiting is not None else ""
        status = next(iter(message["status"]), None)
        kind = message["failure_kind"]
        self._core.break_generation(
            PeerLost(rank, host, message["reason"], detail, status=status, kind=kind)
        )

    def _apply_decision(self, decision: Message) -> None:
        self._core.recorder.note("verdict", decision["text"])
        group = decision["group"]
        if decision["has_waiting_ranks"]:  # the deadlock detector saw this call first
            block = self._book.skipped_block(group, decision["call"], self._core.active)
            if block is not None:
                self._refuse_following(
                    group, block, block.epoch_end, self._activity_text(group, block)
                )
        self._book.add_decision(decision)
        self._core.is_quiet = False
        for request in list(self._core.active.values()):
            if self._book.concerns(decision, request):
                self._started.fail(request, self._book.sentence(decision, request))

    def _peer_left(self, rank: int, entered: dict[int, int], skipped: list[int]) -> None:
        book = self._book
        book.leave(rank, entered, skipped)
        self._core.is_quiet = False
        self._core.recorder.note("left", f"rank {rank}")
        self._questions.fail(book.ended(rank, "it answered a question"), rank)
        for request in list(self._core.active.values()):
            if book.is_without(rank, request):
                self._started.fail(request, book.ended(rank, self._call(request)))

    # -- lost links --------------------------------------------------------------------------------

    def suspect(self, peer: int, reason: str) -> None:
        """Record that the link to a peer is lost; the launcher may explain it in a moment."""
        self._suspects.setdefault(peer, (reason, time.monotonic() + _DETAIL_GRACE_S))

    def _expire_suspects(self, now: float, due: float) -> float:
        """Break the group if a suspect's grace period is over; return when the next one ends."""
        core = self._core
        for peer, (reason, until) in list(self._suspects.items()):
            if core.failure is not None:  # the launcher has explained it
                del self._suspects[peer]
            elif now < until:
                due = min(due, until)
            elif peer in self._book.left:
                del self._suspects[peer]
                self._cut[peer] = reason
            else:
                core.break_generation(PeerLost(peer, core.hosts.get(peer, ""), reason))
                # Otherwise the others would first hear that this rank ended, and blame it.
                core.send_control(
                    "group_failure",
                    failure_kind="lost",
                    reason=reason,
                    group=-1,
                    call=-1,
                    missing=[peer],
                )
                return now
        return now if self._cut and self._fail_without_cut_peers() else due

    def _fail_without_cut_peers(self) -> bool:
        """Fail calls that wait for frames of finished ranks with lost links; return if any did."""
        core, has_failed = self._core, False
        for request in list(core.active.values()):
            awaited = () if request.links is None else request.links.awaiting
            for peer in self._cut.keys() & set(awaited):
                label = self._call(request)
                detail = (
                    f"{label} waits for what it sent, and its link was lost before that arrived: "
                    f"{self._cut[peer]}"
                )
                host = core.hosts.get(peer, "")
                lost = PeerLost(peer, host, "finished", detail, status=0)
                self._started.fail(request, lost)
                has_failed = True
                break
        return has_failed

    # -- calls that this rank skipped --------------------------------------------------------------

    def passed(self, group: int, call: int) -> None:
        """Check, a little later, whether a peer waits in a call that this rank skipped.

        The peer may learn it meanwhile: news of other ranks take longer, through the launcher.
        """
        if self._core.failure is None:
            self.late.setdefault((group, call), time.monotonic() + VERDICT_GRACE_S)

    def expire(self, now: float, due: float) -> float:
        """Report skipped calls and believe losses after a grace period; return the next end."""
        for (group, call), late in list(self.late.items()):
            if now >= late:
                del self.late[group, call]
                self._report_skipped(group, call)
                due = now
            else:
                due = min(due, late)
        return self._expire_suspects(now, due)

    def _report_skipped(self, group: int, call: int) -> None:
        """Report a peer that waits in a call which this rank skipped at a begin or end of a run."""
        block = (
            None
            if self._core.failure is not None
            else self._book.skipped_block(group, call, self._core.active)
        )
        if block is None:
            return
        self._refuse_following(group, block, block.last, self._activity_text(group, block))

    def _activity_text(self, group: int, block: SkippedCall) -> str:
        activity = "computes"
        request = self._core.active.get((group, block.following))
        if request is not None:
            activity = f"is in {self._call(request)} at {call_site(request.thread)}"
        return f"{SKIPPED_CALL}, and {activity}"

    def _refuse_following(self, group: int, block: SkippedCall, last: int, reason: str) -> None:
        """Fail all calls after `last` on the other ranks, and here the call after the block.

        The others learn both at once. A rank that knew only of the failed call would make the next
        one. That one might succeed, because this rank is already in it.
        """
        self._core.abort_step(group, block.members, last, block.following, reason)
        rank = self._core.rank
        text = f"another rank made a call before it that rank {rank} did not make"
        calls = block.epoch_end + 1, block.following
        self._apply_decision(local_decision(group, calls, text, {rank: reason}))
