"""Reactions to the launcher's messages, to lost links, and to calls that this rank skipped.

The driver of the engine calls `Verdicts`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from syncvar.core.errors import DeadlineExceeded, HandshakeError, PeerLost
from syncvar.core.rank_text import rank_list
from syncvar.runtime.flight_recorder.call_sites import call_site
from syncvar.runtime.state import SKIPPED_CALL

if TYPE_CHECKING:
    from syncvar.protocol.control_messages import Message
    from syncvar.runtime.active_requests import StartedCalls
    from syncvar.runtime.request import Request
    from syncvar.runtime.rma_get import GetRequests
    from syncvar.runtime.sequence import SkippedCall
    from syncvar.runtime.state import Core

VERDICT_GRACE_S = 0.03  # time for a peer to hear the same from the launcher
_DETAIL_GRACE_S = 0.2  # time for the launcher to explain a silent disconnection


class Verdicts:
    """What this process knows from others about its calls."""

    def __init__(self, core: Core, started: StartedCalls, questions: GetRequests) -> None:
        self.late: dict[tuple[int, int], float] = {}  # skipped calls of peers: when to report them
        self._core = core
        self._book = core.book
        self._started = started
        self._questions = questions
        # Disconnected peers: reason, and when to believe it.
        self._suspects: dict[int, tuple[str, float]] = {}
        self._cut: dict[int, str] = {}  # disconnected peers that had finished: reason

    # -- messages of the launcher
    # --------------------------------------------------------------------

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
            self._core.tell("status", **self._core.recorder.whereabouts())

    def _call(self, operation: Request) -> str:
        return self._core.recorder.numbers.text(operation.what, operation.group, operation.call)

    def _aborted(self, message: Message) -> None:
        active = self._core.active
        operation = active.get((message["group"], message["call"]))
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
        if message["failure_kind"] == "deadline" and operation is not None:
            missing = (
                tuple(rank for rank in message["missing"] if rank != self._core.rank)
                or operation.awaiting
            )
            self._core.break_generation(
                DeadlineExceeded(
                    f"{self._call(operation)} ended: rank {rank} {message['reason']}, waiting for "
                    f"{rank_list(missing)}",
                    missing,
                    operation.timeout_s,
                )
            )
            return
        waiting = next(iter(active.values()), None)
        detail = f"while in {self._call(waiting)}" if waiting is not None else ""
        self._core.break_generation(PeerLost(rank, host, message["reason"], detail))

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
        for operation in list(self._core.active.values()):
            if self._book.concerns(decision, operation):
                operation.reported = False
                operation.fail(self._book.sentence(decision, operation))
                self._started.retire(operation)

    def _peer_left(self, rank: int, entered: dict[int, int], skipped: list[int]) -> None:
        book = self._book
        book.leave(rank, entered, skipped)
        self._core.is_quiet = False
        self._core.recorder.note("left", f"rank {rank}")
        self._questions.fail(book.ended(rank, "it answered a question"), rank)
        for operation in list(self._core.active.values()):
            if book.is_without(rank, operation):
                operation.fail(book.ended(rank, self._call(operation)))
                self._started.retire(operation)

    # -- lost links
    # --------------------------------------------------------------------------------

    def suspect(self, peer: int, reason: str) -> None:
        """Record that the link to a peer is lost; the launcher may explain it in a moment."""
        self._suspects.setdefault(peer, (reason, time.monotonic() + _DETAIL_GRACE_S))

    def _expire_suspects(self, now: float, due: float) -> float:
        """Break the group if a suspect's grace period is over.

        Return when the next one ends, or `due`.
        """
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
                core.tell(
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
        """Fail the calls that wait for frames of a finished rank whose link is lost.

        Return whether there were any.
        """
        core, has_failed = self._core, False
        for operation in list(core.active.values()):
            awaited = () if operation.links is None else operation.links.awaiting
            for peer in self._cut.keys() & set(awaited):
                what = self._call(operation)
                detail = (
                    f"{what} waits for what it sent, and its link was lost before that arrived: "
                    f"{self._cut[peer]}"
                )
                operation.fail(PeerLost(peer, core.hosts.get(peer, ""), "finished", detail))
                self._started.retire(operation)
                has_failed = True
                break
        return has_failed

    # -- calls that this rank skipped
    # -------------------------------------------------------------

    def passed(self, group: int, call: int) -> None:
        """Check, a little later, whether a peer waits in a call that this rank skipped.

        The peer may learn it meanwhile: frames arrive directly, but news of other ranks travel
        through the launcher.
        """
        if self._core.failure is None:
            self.late.setdefault((group, call), time.monotonic() + VERDICT_GRACE_S)

    def expire(self, now: float, due: float) -> float:
        """Report skipped calls and believe losses whose grace period is over.

        Return when the next one ends, or `due`.
        """
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
        operation = self._core.active.get((group, block.following))
        if operation is not None:
            activity = f"is in {self._call(operation)} at {call_site(operation.thread)}"
        return f"{SKIPPED_CALL}, and {activity}"

    def _refuse_following(self, group: int, block: SkippedCall, last: int, reason: str) -> None:
        """Fail all calls after `last` on the other ranks, and here the call after the block.

        The others learn both at once. A rank that knew only of the failed call would make the next
        one. That one might succeed, because this rank is already in it.
        """
        self._core.abort_step(group, block.members, last, block.following, reason)
        rank = self._core.rank
        self._apply_decision(
            {
                "group": group,
                "call": block.epoch_end + 1,
                "last_call": block.following,
                "text": f"another rank made a call before it that rank {rank} did not make",
                "table": {rank: reason},
                "has_waiting_ranks": False,
            }
        )
