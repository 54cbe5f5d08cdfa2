"""What breaks a generation: a lost rank, a missed deadline, an exception that has left a started call.

The first failure fails every running operation and is raised by every later call.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from syncvar.errors import DeadlineExceeded, GroupBroken, PeerLost
from syncvar.topology import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.engine.admission import Admission
    from syncvar.engine.call_ledger import CallLedger
    from syncvar.engine.launcher_link import LauncherLink
    from syncvar.engine.one_sided import Question
    from syncvar.engine.operation import Operation
    from syncvar.engine.recorder import Recorder
    from syncvar.errors import TransportError, UsageError

__all__ = ["Failures"]

_DETAIL_GRACE_S = 0.2  # how long a silent loss waits for the launcher to say what happened


class Failures:
    """The failures of a process.

    Args:
        rank: This process in the world.
        hosts: Host of each rank, for messages.
        admission: Refuses calls from the break on.
        link: To the launcher.
        book: Knows which ranks have left in order.
        recorder: Takes down what broke.
        drop: Lets go of what the generation holds, told what broke it first, and which operation ends by itself.
    """

    def __init__(
        self,
        rank: int,
        hosts: dict[int, str],
        admission: Admission,
        link: LauncherLink,
        book: CallLedger,
        recorder: Recorder,
        drop: Callable[[TransportError | UsageError, Operation | Question | None], None],
    ) -> None:
        self._rank = rank
        self._hosts = hosts
        self._admission = admission
        self._link = link
        self._book = book
        self._recorder = recorder
        self._drop = drop
        self._suspects: dict[int, tuple[str, float]] = {}  # peers whose link was lost: why, and when to believe it

    def break_generation(self, failure: TransportError, but: Operation | Question | None = None) -> None:
        """End the generation: nothing that has begun in it goes on, and nothing more begins."""
        self._drop(self._admission.refuse(failure), but)
        self._recorder.broke(failure)

    def interrupted(self, operation: Operation | Question, error: BaseException) -> None:
        """Break the generation because an exception has left a started call."""
        operation.entry.end(error)
        self.fall(error, f"{operation.what} (call {operation.call})", but=operation)

    def fall(self, error: BaseException, place: str, but: Operation | Question | None = None) -> None:
        """Break the generation because of an exception of this rank's own, and tell the others."""
        if self._admission.failure is None:
            reason = f"interrupted by {type(error).__name__} in {place}"
            self.break_generation(GroupBroken(f"this rank was {reason}", error), but)
            self._link.tell_beside("broke", kind_of_break="interrupted", reason=reason, group=-1, call=-1, missing=[])

    def tell_accident(self, operation: Operation) -> None:
        """Tell the group what has gone wrong on this rank alone, if anything has: it cannot go on without this rank."""
        error = operation.accident
        if error is None:
            return
        if operation.is_published:
            self.interrupted(operation, error)
        else:
            reason = f"{type(error).__name__}: {error}"
            self._link.poison(operation.group, operation.members, operation.call, operation.what, reason)

    def missed_deadline(self, operation: Operation, now: float) -> None:
        """Break the generation because an operation has not ended in time."""
        missing = operation.awaiting
        error = DeadlineExceeded(
            f"{operation.what} (call {operation.call}) did not finish within {operation.timeout_s:g} s: rank "
            f"{self._rank} waited {now - operation.started:.1f} s for {rank_list(missing) if missing else 'its own sends'}",
            missing,
            operation.timeout_s,
        )
        self.break_generation(error)
        self._link.tell(
            "broke",
            kind_of_break="deadline",
            reason=f"gave up {operation.what} (call {operation.call}) after {operation.timeout_s:g} s",
            group=operation.group,
            call=operation.call,
            missing=list(missing),
        )

    # -- lost links -----------------------------------------------------------------------------------------------

    def suspect(self, peer: int, reason: str) -> None:
        """Note that the link to a peer is lost; the launcher may say in a moment what has happened."""
        self._suspects.setdefault(peer, (reason, time.monotonic() + _DETAIL_GRACE_S))

    def expire(self, now: float, due: float) -> float:
        """Break the generation where a suspect's grace is over; return when the next one's is, or `due`."""
        for peer, (reason, until) in list(self._suspects.items()):
            if peer in self._book.left or self._admission.failure is not None:  # it left in order; or it has been told
                del self._suspects[peer]
            elif now >= until:
                self.break_generation(PeerLost(peer, self._hosts.get(peer, ""), reason))
                # Else the others would hear first that this rank ended, and take it for the lost one.
                self._link.tell("broke", kind_of_break="lost", reason=reason, group=-1, call=-1, missing=[peer])
                return now
            else:
                due = min(due, until)
        return due
