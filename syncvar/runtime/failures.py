"""What others say of this rank's calls: verdicts and losses that the launcher tells, lost links, calls that this rank has gone on without."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from syncvar.core.errors import DeadlineExceeded, HandshakeError, PeerLost
from syncvar.core.rank_text import rank_list
from syncvar.runtime.flight_recorder.call_sites import call_site
from syncvar.runtime.state import GONE_ON

if TYPE_CHECKING:
    from syncvar.protocol.control_messages import Message
    from syncvar.runtime.active_requests import StartedCalls
    from syncvar.runtime.request import Request
    from syncvar.runtime.rma_get import GetRequests
    from syncvar.runtime.sequence import SkippedCall
    from syncvar.runtime.state import Core

__all__ = ["VERDICT_GRACE_S", "Verdicts"]

VERDICT_GRACE_S = 0.03  # what a peer may have been told already
_DETAIL_GRACE_S = 0.2  # how long a silent loss waits for the launcher to say what happened


class Verdicts:
    """What is known from others about the calls of this process.

    Args:
        core: Has the running operations, and breaks where a rank is lost.
        started: Lets go of operations that are over.
        questions: Those to a rank that left are not answered.
    """

    def __init__(self, core: Core, started: StartedCalls, questions: GetRequests) -> None:
        self.late: dict[
            tuple[int, int], float
        ] = {}  # calls of peers that this rank has passed: when to tell
        self._core = core
        self._book = core.book
        self._started = started
        self._questions = questions
        self._suspects: dict[
            int, tuple[str, float]
        ] = {}  # peers whose link was lost: why, and when to believe it
        self._cut: dict[int, str] = {}  # peers that have left and whose link was lost: why

    # -- the launcher's word -----------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Do what a message of the launcher's says."""
        kind = message["kind"]
        if kind == "abort":
            self._aborted(message)
        elif kind == "verdict":
            self._judged(message)
        elif kind == "left":
            self._peer_left(message["rank"], message["entered"], message["skipped"])
        elif kind == "are_you_there":
            self._core.tell("here", **self._core.recorder.whereabouts())

    def _call(self, operation: Request) -> str:
        """Return a call in words, with its number as the program counts."""
        return self._core.recorder.numbers.text(operation.what, operation.group, operation.call)

    def _aborted(self, message: Message) -> None:
        active = self._core.active
        operation = active.get((message["group"], message["call"]))
        rank = message["rank"]
        host = message["host"] or self._core.hosts.get(rank, "")
        if rank == self._core.rank:  # it was stopped, and is awake again
            self._core.break_generation(
                HandshakeError(
                    f"the job goes on without this rank, or ends: rank {rank} was given up, {message['reason']}"
                )
            )
            return
        if message["kind_of_break"] == "deadline" and operation is not None:
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

    def _judged(self, verdict: Message) -> None:
        self._core.recorder.note("verdict", verdict["text"])
        group = verdict["group"]
        if verdict["waits"]:  # a rank is in that call, and the arbiter has seen it first
            block = self._book.overtaken(group, verdict["call"], self._core.active)
            if block is not None:
                self._refuse_following(group, block, block.epoch_end, self._gone_on(group, block))
        self._book.doom(verdict)
        self._core.is_quiet = False
        for operation in list(self._core.active.values()):
            if self._book.concerns(verdict, operation):
                operation.reported = False
                operation.fail(self._book.sentence(verdict, operation))
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

    # -- lost links --------------------------------------------------------------------------------

    def suspect(self, peer: int, reason: str) -> None:
        """Note that the link to a peer is lost; the launcher may say in a moment what has happened."""
        self._suspects.setdefault(peer, (reason, time.monotonic() + _DETAIL_GRACE_S))

    def _expire_suspects(self, now: float, due: float) -> float:
        """Break the generation where a suspect's grace is over; return when the next one's is, or `due`."""
        core = self._core
        for peer, (reason, until) in list(self._suspects.items()):
            if core.failure is not None:  # it has been told
                del self._suspects[peer]
            elif now < until:
                due = min(due, until)
            elif peer in self._book.left:
                del self._suspects[peer]
                self._cut[peer] = reason
            else:
                core.break_generation(PeerLost(peer, core.hosts.get(peer, ""), reason))
                # Else the others would hear first that this rank ended, and take it for the lost one.
                core.tell(
                    "broke", kind_of_break="lost", reason=reason, group=-1, call=-1, missing=[peer]
                )
                return now
        return now if self._cut and self._fail_without_cut_peers() else due

    def _fail_without_cut_peers(self) -> bool:
        """Fail the calls that wait for frames of a rank that has left and whose link is lost; return whether there were any."""
        core, has_failed = self._core, False
        for operation in list(core.active.values()):
            awaited = () if operation.links is None else operation.links.awaiting
            for peer in self._cut.keys() & set(awaited):
                what = self._call(operation)
                detail = f"{what} waits for what it sent, and its link was lost before that arrived: {self._cut[peer]}"
                operation.fail(PeerLost(peer, core.hosts.get(peer, ""), "finished", detail))
                self._started.retire(operation)
                has_failed = True
                break
        return has_failed

    # -- calls that this rank has gone on without --------------------------------------------------

    def passed(self, group: int, call: int) -> None:
        """Look, a little later, whether a peer makes a call that this rank has gone on without.

        The peer may know by then: what other ranks tell comes by way of the launcher, and its frame came straight.
        """
        if self._core.failure is None:
            self.late.setdefault((group, call), time.monotonic() + VERDICT_GRACE_S)

    def expire(self, now: float, due: float) -> float:
        """Tell of the calls, and believe the losses, whose grace is over; return when the next one's is, or `due`."""
        for (group, call), late in list(self.late.items()):
            if now >= late:
                del self.late[group, call]
                self._tell_passed(group, call)
                due = now
            else:
                due = min(due, late)
        return self._expire_suspects(now, due)

    def _tell_passed(self, group: int, call: int) -> None:
        """Tell the group if a peer makes a call that this rank has gone on without, past the end or begin of a run."""
        block = (
            None
            if self._core.failure is not None
            else self._book.overtaken(group, call, self._core.active)
        )
        if block is None:
            return
        self._refuse_following(group, block, block.last, self._gone_on(group, block))

    def _gone_on(self, group: int, block: SkippedCall) -> str:
        place = "computes"
        operation = self._core.active.get((group, block.following))
        if operation is not None:
            place = f"is in {self._call(operation)} at {call_site(operation.thread)}"
        return f"{GONE_ON}, and {place}"

    def _refuse_following(self, group: int, block: SkippedCall, last: int, reason: str) -> None:
        """Let all calls after `last` fail on the other ranks, and here the call after the block.

        The others hear of both at once: who knew only that its call in the block has failed would make the next one, which
        might succeed there, because this rank is in it already.
        """
        self._core.left_run(group, block.members, last, block.following, reason)
        self._judged(
            {
                "group": group,
                "call": block.epoch_end + 1,
                "last_call": block.following,
                "text": f"another rank made a call before it that rank {self._core.rank} did not make",
                "table": {self._core.rank: reason},
                "waits": False,
            }
        )
