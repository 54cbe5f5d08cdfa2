"""Where the calls of each group stand: their numbers, frames that came early, calls that cannot succeed, ranks that left.

Bookkeeping only: nothing here sends, waits or reads a clock. The engine asks, and does what follows.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from syncvar.core.errors import MismatchError, PeerLost, SyncvarError
from syncvar.protocol.frame import FrameType
from syncvar.protocol.unreceived_messages import ENTERED_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from syncvar.protocol.control_messages import Message
    from syncvar.runtime.flight_recorder.call_numbers import CallNumbers
    from syncvar.runtime.request import Request
    from syncvar.transports.base import Frame

__all__ = ["Counting", "EpochRange", "SequenceTracker", "SkippedCall", "SkippedRange"]

_BLOCKS_MAX = 16  # of each group: a peer may be behind by some blocks whose calls failed here
_SKIPPED_MAX = 1300  # blocks named in one, each by three numbers


class Counting(Protocol):
    """Who counts the calls of a group, while it lives: a communicator, or what counts messages."""

    identity: int
    next_call: int


class SkippedRange(Counting, Protocol):
    """A group whose calls are numbered in blocks."""

    members: tuple[int, ...]


class EpochRange:
    """A block of calls that this rank ended after call `last`; it grows by the blocks after it in which no call is made.

    Args:
        members: The group.
        last: The last call that was made in it here.
        epoch_end: Its last number.
    """

    __slots__ = ("epoch_end", "is_gone", "last", "members")

    def __init__(self, members: tuple[int, ...], last: int, epoch_end: int) -> None:
        self.members = members
        self.last = last
        self.epoch_end = epoch_end
        self.is_gone = False  # it has been told, or refused, and grows no more


class SkippedCall(NamedTuple):
    """A block of calls that this rank left while a peer made one more.

    Args:
        members: The group.
        last: The last call of the block made here.
        epoch_end: The last number of the block.
        following: The first call after the block that is running or comes next.
    """

    members: tuple[int, ...]
    last: int
    epoch_end: int
    following: int


class SequenceTracker:
    """The calls of all groups of a process.

    Args:
        hosts: Host of each rank, for messages.
        numbers: The numbers of calls, for messages.
    """

    def __init__(self, hosts: dict[int, str], numbers: CallNumbers) -> None:
        self._numbers = numbers
        self.early: dict[tuple[int, int], list[Frame]] = {}
        self.left: dict[int, dict[int, int]] = {}
        self._hosts = hosts
        self._next_call: dict[int, int] = {}
        self._doomed: list[Message] = []
        # Of verdicts, and what is looked up in blocks: a peer's calls are followed while the user's thread makes its own. That
        # thread ends a block without it, by one step of the interpreter, and looks for verdicts after that. A signal's
        # handler may make calls, so that the thread which has the lock may come again.
        self._lock = threading.RLock()
        self._skipped: dict[
            int, dict[int, list[tuple[int, int]]]
        ] = {}  # by rank that left, by group
        self._passed: dict[int, deque[EpochRange]] = {}
        self._has_skipped = False
        self.counted: weakref.WeakValueDictionary[int, Counting] = weakref.WeakValueDictionary()

    @property
    def has_refusals(self) -> bool:
        """Whether any call may have to be refused."""
        return bool(self.left) or any(
            old["last_call"] >= self.following(old["group"]) - 1 for old in self._doomed
        )

    def may_refuse(self, group: int, call: int) -> bool:
        """Return whether a call may have to be refused: there is a verdict, or a rank has left."""
        return bool(self.left) or any(
            old["group"] == group and old["last_call"] >= call for old in self._doomed
        )

    # -- numbers -----------------------------------------------------------------------------------

    def announce(self, group: int, next_call: int) -> None:
        """Note that calls of a group below `next_call` will not begin here any more; their frames are dropped.

        A call that is started announces itself, under the engine's lock: its frames may have come before, and the progress
        thread must not take them for frames of a call that is over.
        """
        self._next_call[group] = next_call
        self._has_skipped = True

    def note(self, group: int, next_call: int) -> None:
        """Note the number of a group's next call."""
        self._next_call.pop(group, None)  # groups stand in the order of their last use
        self._next_call[group] = next_call

    def count_by(self, counting: Counting) -> None:
        """Take the number of a group's next call from who counts them: calls in shared memory pass this book by."""
        self.counted[counting.identity] = counting

    def entered(self) -> dict[int, int]:
        """Return the last call entered in each group, of those used last."""
        while True:
            # Other threads may make groups meanwhile, and the garbage collector run, and a group's finalizer note its number here.
            with contextlib.suppress(RuntimeError):
                for group in list(self.counted):
                    self._next_call[group] = self.following(group)
                recent = list(self._next_call.items())[-ENTERED_MAX:]
                return {group: following - 1 for group, following in recent}

    def skipped(self) -> list[int]:
        """Return (group, last, epoch_end) of the blocks that this rank ended after call `last`, one after another; the oldest are left out of many.

        Those who wait in a later call of such a block, when this rank has left, wait in vain.
        """
        with self._lock:
            passed = [(group, list(blocks)) for group, blocks in self._passed.items()]
        found = [
            (-place, group, block)
            for group, blocks in passed
            for place, block in enumerate(reversed(blocks))
        ]
        found.sort(key=lambda one: one[0])  # the last block of each group at the end
        return [
            number
            for _, group, block in found[-_SKIPPED_MAX:]
            for number in (group, block.last, block.epoch_end)
        ]

    def leave(self, rank: int, entered: dict[int, int], skipped: list[int]) -> None:
        """Note that a rank has left: the last call that it entered in each group, and its `skipped`."""
        self.left[rank] = entered
        groups = self._skipped[rank] = {}
        for group, last, epoch_end in zip(
            skipped[0::3], skipped[1::3], skipped[2::3], strict=False
        ):
            groups.setdefault(group, []).append((last, epoch_end))

    def following(self, group: int) -> int:
        """Return the number of the next call of a group; calls in shared memory are counted by their communicator."""
        following = self._next_call.get(group, 0)
        caller = self.counted.get(group)
        return following if caller is None else max(following, caller.next_call)

    # -- frames before their call ------------------------------------------------------------------

    def keep(self, frame: Frame) -> bool:
        """Keep a frame for a call that has not begun; False for one of a call that lies behind."""
        header = frame.header
        if header.call < self.following(header.group):
            return False
        if header.kind == FrameType.KNOCK:
            self._has_skipped = (
                True  # a call in shared memory may begin and end without a word to this book
            )
        self.early.setdefault((header.group, header.call), []).append(frame)
        return True

    def is_awaited(self, group: int, call: int) -> bool:
        """Return whether a frame has come for a call that has not begun here."""
        return (group, call) in self.early

    def take_early(self, operation: Request) -> list[Frame]:
        """Return the frames kept for a call."""
        return self.early.pop((operation.group, operation.call), [])

    def take_skipped(self) -> Iterator[tuple[int, int, list[Frame]]]:
        """Yield (group, call, frames) of the calls that were skipped since the last time."""
        if self._has_skipped:
            self._has_skipped = any(
                frames[0].header.kind == FrameType.KNOCK for frames in list(self.early.values())
            )
            for group, call in list(self.early):
                if call < self.following(group):
                    yield group, call, self.early.pop((group, call), [])

    # -- blocks of calls ---------------------------------------------------------------------------

    def blocks(self, group: int) -> deque[EpochRange]:
        """Return the blocks of a group's calls that have ended; who ends one adds it, without the lock."""
        found = self._passed.get(group)
        return self._passed.setdefault(group, deque(maxlen=_BLOCKS_MAX)) if found is None else found

    def passed_over(
        self, groups: Iterable[SkippedRange], reason: str, rank: int
    ) -> list[SkippedRange]:
        """Look at the blocks that have just been ended, where there are verdicts or calls over links.

        Returns:
            Those groups of which it is known already that a rank is in a call which this one has passed over: the call
            after the block is refused here then, with what this `rank` has done as its `reason`, and has to be by all.
        """
        refused: list[SkippedRange] = []
        with self._lock:
            for one in groups:
                blocks = self.blocks(one.identity)
                if self._doomed and blocks and blocks[-1].epoch_end == one.next_call - 1:
                    block = blocks.pop()
                    if self._is_refused(blocks, one.identity, block, {rank: reason}):
                        refused.append(one)
                self._next_call[one.identity] = one.next_call
        self._has_skipped = True
        return refused

    def _is_refused(
        self, blocks: deque[EpochRange], group: int, block: EpochRange, table: dict[int, str]
    ) -> bool:
        """Note a block that ends while there are verdicts; return whether the call after it is refused here."""
        last, epoch_end = block.last, block.epoch_end
        overlapping = [
            old
            for old in self._doomed
            if old["group"] == group and last < old["last_call"] and old["call"] <= epoch_end
        ]
        known = [old for old in overlapping if old["call"] <= last + 1]
        if not known:
            # Who left the block later than this rank may still be in one of the calls between.
            block.epoch_end = min([epoch_end, *(old["call"] - 1 for old in overlapping)])
            blocks.append(block)
        else:
            block.is_gone = True
        if not any(
            old["waits"] for old in overlapping
        ):  # else ranks have left the block, and wait for nothing
            return False
        following = epoch_end + 1
        text = "another rank made a call before it that this rank did not make"
        self._doomed.append(
            {
                "group": group,
                "call": following,
                "last_call": following,
                "text": text,
                "table": table,
                "waits": False,
            }
        )
        return True

    def overtaken(
        self, group: int, call: int, active: Iterable[tuple[int, int]]
    ) -> SkippedCall | None:
        """Return the block of `call`, if this rank left it without making that call; told once for each block.

        Args:
            group: Of the call.
            call: That a peer has made.
            active: (group, call) of the calls that are running.
        """
        with self._lock:
            blocks = self._passed.get(group, deque())
            block = next((one for one in list(blocks) if one.last < call <= one.epoch_end), None)
            if block is None:
                return None
            _remove(blocks, block)
        running = [
            number for other, number in active if other == group and number > block.epoch_end
        ]
        following = min(running, default=self._next_call.get(group, block.epoch_end + 1))
        return SkippedCall(block.members, block.last, block.epoch_end, following)

    # -- calls that cannot succeed -----------------------------------------------------------------

    def doom(self, verdict: Message) -> None:
        """Note a verdict: the calls it names fail, also those that have not begun."""
        with self._lock:
            blocks = self._passed.get(verdict["group"], deque())
            for block in list(blocks):
                if block.last < verdict["last_call"] and verdict["call"] <= block.epoch_end:
                    block.epoch_end = (
                        verdict["call"] - 1
                    )  # the group knows already, and later calls shall not fail for it
                    if block.epoch_end <= block.last:
                        _remove(blocks, block)
            # Verdicts on calls that lie behind are of no use any more.
            self._doomed = [
                old for old in self._doomed if old["last_call"] >= self.following(old["group"]) - 1
            ]
            self._doomed.append(verdict)

    def refusal(self, operation: Request) -> SyncvarError | None:
        """Return why a call cannot succeed, if that is known: a verdict, or a rank that left before it."""
        for verdict in self._doomed:
            if self.concerns(verdict, operation):
                return self.sentence(verdict, operation)
        for rank in self.left:
            if self.is_without(rank, operation):
                call = self._numbers.text(operation.what, operation.group, operation.call)
                return self.ended(rank, call)
        return None

    @staticmethod
    def concerns(verdict: Message, operation: Request) -> bool:
        """Return whether a verdict is on this call."""
        return bool(
            verdict["group"] == operation.group
            and verdict["call"] <= operation.call <= verdict["last_call"]
        )

    def sentence(self, verdict: Message, operation: Request) -> MismatchError:
        """Return the error of a call on which there is a verdict."""
        call = self._numbers.text(operation.what, operation.group, operation.call)
        return MismatchError(f"{call}: {verdict['text']}", verdict["table"])

    def is_without(self, rank: int, operation: Request) -> bool:
        """Return whether a rank has left before it entered this call."""
        entered = self.left.get(rank)
        if entered is None or rank not in operation.members:
            return False
        group, call = operation.group, operation.call
        return call > entered.get(group, -1) or any(
            last < call <= epoch_end for last, epoch_end in self._skipped[rank].get(group, ())
        )

    def ended(self, rank: int, before: str) -> PeerLost:
        """Return the error of something for which a rank that left would be needed."""
        return PeerLost(rank, self._hosts.get(rank, ""), "finished", f"it ended before {before}")


def _remove(blocks: deque[EpochRange], block: EpochRange) -> None:
    block.is_gone = True
    with contextlib.suppress(
        ValueError
    ):  # newer ones have come meanwhile, so that it is gone already
        blocks.remove(block)
