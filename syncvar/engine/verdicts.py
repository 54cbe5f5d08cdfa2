"""What others say of this rank's calls: verdicts and losses that the launcher tells, calls of peers that it has gone on without."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from syncvar.engine.call_sites import call_site
from syncvar.errors import DeadlineExceeded, HandshakeError, PeerLost
from syncvar.topology import rank_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar.engine.admission import Admission
    from syncvar.engine.call_ledger import CallLedger, Overtaken, Passing
    from syncvar.engine.failures import Failures
    from syncvar.engine.launcher_link import LauncherLink
    from syncvar.engine.one_sided import Questions
    from syncvar.engine.recorder import Recorder
    from syncvar.engine.started import StartedCalls
    from syncvar.wire import Message

__all__ = ["VERDICT_GRACE_S", "Verdicts"]

VERDICT_GRACE_S = 0.03  # what a peer may have been told already
_GONE_ON = "has gone on without making a call that another rank made"


class Verdicts:
    """What is known from others about the calls of this process.

    Args:
        rank: This process in the world.
        hosts: Host of each rank, for messages.
        admission: Calls are looked at before they begin, once there is a verdict.
        book: Where the calls of each group stand.
        started: The calls that run.
        questions: The questions that wait for answers.
        failures: Hears of losses.
        link: To the launcher.
        recorder: Takes down what is told.
    """

    def __init__(
        self,
        rank: int,
        hosts: dict[int, str],
        admission: Admission,
        book: CallLedger,
        started: StartedCalls,
        questions: Questions,
        failures: Failures,
        link: LauncherLink,
        recorder: Recorder,
    ) -> None:
        self.late: dict[tuple[int, int], float] = {}  # calls of peers that this rank has passed: when to tell
        self._rank = rank
        self._hosts = hosts
        self._admission = admission
        self._book = book
        self._started = started
        self._questions = questions
        self._failures = failures
        self._link = link
        self._recorder = recorder

    # -- the launcher's word --------------------------------------------------------------------------------------

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
            self._link.tell("here", **self._recorder.whereabouts())

    def _aborted(self, message: Message) -> None:
        active = self._started.active
        operation = active.get((message["group"], message["call"]))
        rank = message["rank"]
        host = message["host"] or self._hosts.get(rank, "")
        if rank == self._rank:  # it was stopped, and is awake again
            self._failures.break_generation(
                HandshakeError(f"the job goes on without this rank, or ends: rank {rank} was given up, {message['reason']}")
            )
            return
        if message["kind_of_break"] == "deadline" and operation is not None:
            missing = tuple(rank for rank in message["missing"] if rank != self._rank) or operation.awaiting
            self._failures.break_generation(
                DeadlineExceeded(
                    f"{operation.what} (call {operation.call}) ended: rank {rank} {message['reason']}, waiting for "
                    f"{rank_list(missing)}",
                    missing,
                    operation.timeout_s,
                )
            )
            return
        waiting = next(iter(active.values()), None)
        detail = f"while in {waiting.what} (call {waiting.call})" if waiting is not None else ""
        self._failures.break_generation(PeerLost(rank, host, message["reason"], detail))

    def _judged(self, verdict: Message) -> None:
        self._admission.is_quiet = False
        self._recorder.note("verdict", verdict["text"])
        group = verdict["group"]
        if verdict["waits"]:  # a rank is in that call, and the arbiter has seen it first
            block = self._book.overtaken(group, verdict["call"], self._started.active)
            if block is not None:
                self._refuse_following(group, block, block.epoch_end, self._gone_on(group, block))
        self._book.doom(verdict)
        for operation in list(self._started.active.values()):
            if self._book.concerns(verdict, operation):
                operation.reported = False
                operation.fail(self._book.sentence(verdict, operation))
                self._started.retire(operation)

    def _peer_left(self, rank: int, entered: dict[int, int], skipped: list[int]) -> None:
        book = self._book
        self._admission.is_quiet = False
        book.leave(rank, entered, skipped)
        self._recorder.note("left", f"rank {rank}")
        self._questions.fail(book.ended(rank, "it answered a question"), rank)
        for operation in list(self._started.active.values()):
            if book.is_without(rank, operation):
                operation.fail(book.ended(rank, f"{operation.what} (call {operation.call})"))
                self._started.retire(operation)

    # -- blocks of calls ------------------------------------------------------------------------------------------

    def left_run(self, group: int, members: tuple[int, ...], call: int, epoch_end: int, reason: str) -> None:
        """Tell the group that this rank makes none of its calls after `call`, up to `epoch_end`; from any thread."""
        if self._admission.begun:
            self._admission.adopt()
        self._link.left_run(group, members, call, epoch_end, reason)

    def passed_over(self, groups: Sequence[Passing]) -> None:
        """Look at blocks of calls that this rank has just ended. From any thread.

        When a peer's frame of a later call of the block is seen, the group is told, and this rank's next call fails as
        well: the ranks did not make the same calls. Normally no such frame comes, and nothing is sent.
        """
        if self._admission.begun:
            self._admission.adopt()
        for one in self._book.passed_over(groups, _GONE_ON, self._rank):
            self._admission.is_quiet = False
            self.left_run(one.identity, one.members, one.next_call - 1, one.next_call, _GONE_ON)

    def passed(self, group: int, call: int) -> None:
        """Look, a little later, whether a peer makes a call that this rank has gone on without.

        The peer may know by then: what other ranks tell comes by way of the launcher, and its frame came straight.
        """
        if self._admission.failure is None:
            self.late.setdefault((group, call), time.monotonic() + VERDICT_GRACE_S)

    def expire(self, now: float, due: float) -> float:
        """Tell of the calls whose grace is over; return when the next one's is, or `due`."""
        for (group, call), late in list(self.late.items()):
            if now >= late:
                del self.late[group, call]
                self._tell_passed(group, call)
                due = now
            else:
                due = min(due, late)
        return due

    def _tell_passed(self, group: int, call: int) -> None:
        """Tell the group if a peer makes a call that this rank has gone on without, past the end or begin of a run."""
        block = None if self._admission.failure is not None else self._book.overtaken(group, call, self._started.active)
        if block is None:
            return
        self._refuse_following(group, block, block.last, self._gone_on(group, block))

    def _gone_on(self, group: int, block: Overtaken) -> str:
        place = "computes"
        operation = self._started.active.get((group, block.following))
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
                "text": f"another rank made a call before it that rank {self._rank} did not make",
                "table": {self._rank: reason},
                "waits": False,
            }
        )
