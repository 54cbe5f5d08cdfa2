"""Sequence numbers of calls, early frames, calls that must fail, and ranks that have left.

Pure bookkeeping for the engine: nothing here sends, waits or reads a clock.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from syncvar.core.errors import MismatchError, PeerLost, SyncvarError
from syncvar.protocol.frame import FrameType
from syncvar.protocol.unreceived_messages import ENTERED_MAX, SkippedBlocks, is_left_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from syncvar.protocol.control_messages import Message
    from syncvar.runtime.recorder import CallNumbers
    from syncvar.runtime.request import Request
    from syncvar.transports.base import Frame

_BLOCKS_MAX = 16  # per group; a peer may lag by several blocks whose calls failed here
UNKNOWN_CALL = 1 << 62  # above all call numbers
_SKIPPED_MAX = 1300  # blocks in one message, three numbers each


class Counting(Protocol):
    """Sequence counter of a group: a communicator, or the counter of a message stream."""

    identity: int
    next_call: int


class SkippedRange(Counting, Protocol):
    """A group whose calls are numbered in blocks."""

    members: tuple[int, ...]


class EpochRange:
    """Call numbers that this rank ended after call `last`; empty blocks extend the range."""

    __slots__ = ("epoch_end", "is_reported", "last", "members")

    def __init__(self, members: tuple[int, ...], last: int, epoch_end: int) -> None:
        self.members = members
        self.last = last
        self.epoch_end = epoch_end
        self.is_reported = False  # reported or refused; it is extended no more


class SkippedCall(NamedTuple):
    """A block of calls that this rank left while a peer made one more call of it."""

    members: tuple[int, ...]  # world ranks of the group
    last: int  # last call of the block made on this rank
    epoch_end: int  # last number of the block
    following: int  # first call after the block that is running or comes next


def local_decision(
    group: int, calls: tuple[int, int], text: str, table: Mapping[int, str]
) -> Message:
    """Return a "decision" of this rank itself about the first to the last of some calls."""
    return {
        "group": group,
        "call": calls[0],
        "last_call": calls[1],
        "text": text,
        "table": table,
        "has_waiting_ranks": False,
        "is_deadlock": False,
    }


class SequenceTracker:
    """The calls of all groups of a process."""

    def __init__(self, hosts: dict[int, str], numbers: CallNumbers) -> None:
        self._numbers = numbers
        self.early: dict[tuple[int, int], list[Frame]] = {}
        self.left: dict[int, dict[int, int]] = {}
        self._hosts = hosts
        self._next_call: OrderedDict[int, int] = OrderedDict()
        self._seen: dict[int, int] = {}  # numbers of counted groups when they were last looked at
        self._owned: set[int] = set()  # groups whose number an object in `counted` has
        self._decisions: list[Message] = []
        # Protects decisions and searches in blocks: the progress thread follows a peer's calls
        # while the user's thread makes its own. The user's thread ends a block without the lock,
        # in one step of the interpreter, and looks for decisions afterwards. Reentrant, because a
        # signal handler may make calls in the thread that holds it.
        self._lock = threading.RLock()
        self._skipped: dict[int, SkippedBlocks] = {}
        self._passed: dict[int, deque[EpochRange]] = {}
        self._has_skipped = False
        self.counted: weakref.WeakValueDictionary[int, Counting] = weakref.WeakValueDictionary()

    @property
    def has_refusals(self) -> bool:
        """Whether any call may have to be refused."""
        return bool(self.left) or any(
            old["last_call"] >= self.following(old["group"]) - 1 for old in self._decisions
        )

    def may_refuse(self, group: int, call: int) -> bool:
        """Return whether there is a decision on a call, or a rank has left."""
        return bool(self.left) or any(
            old["group"] == group and old["last_call"] >= call for old in self._decisions
        )

    # -- numbers -----------------------------------------------------------------------------------

    def announce(self, group: int, next_call: int) -> None:
        """Record that calls of a group below `next_call` will not begin here; drop their frames.

        Started calls announce themselves under the engine's lock. Their frames may have arrived
        before, and the progress thread must not drop them.
        """
        self._next_call[group] = next_call
        self._has_skipped = True

    def note(self, group: int, next_call: int) -> None:
        """Record the number of a group's next call."""
        self._next_call[group] = next_call
        self._next_call.move_to_end(group)  # keep groups in order of their last use

    def count_by(self, counting: Counting) -> None:
        """Read a group's next call number from `counting`, which calls in shared memory advance."""
        self._owned.add(counting.identity)
        self.counted[counting.identity] = counting

    def release(self, group: int, next_call: int) -> None:
        """Record a group's next call number, before the object that counts it ends."""
        self.note(group, next_call)
        self._owned.discard(group)

    def entered(self) -> dict[int, int]:
        """Return the last call entered in each group, for the groups used last."""
        while True:
            # Other threads may create groups meanwhile, and the finalizer of a group may record
            # its number.
            with contextlib.suppress(RuntimeError):
                for group in list(self.counted):
                    following = self.following(group)
                    if self._seen.get(group) != following:  # used since the last time
                        self._seen[group] = following
                        self._next_call.setdefault(group, 0)
                        self._next_call.move_to_end(group)
                recent = list(self._next_call)[-ENTERED_MAX:]
                return {group: self._last_entered(group) for group in recent}

    def _last_entered(self, group: int) -> int:
        is_owned = group in self._owned
        following = self.following(group)
        if is_owned and group not in self.counted:
            # The number went with its owner. A garbage collection clears the reference before it
            # runs the finalizer, which calls `release`. Until then nobody knows the number, so
            # nobody may claim that this rank has not entered a call.
            return UNKNOWN_CALL if group in self._owned else self.following(group) - 1
        return following - 1

    def skipped(self) -> list[int]:
        """Return (group, last, epoch_end) of the latest blocks ended here after `last`, flattened.

        A rank that waits in a later call of such a block waits in vain once this rank has left.
        """
        with self._lock:
            passed = [(group, list(blocks)) for group, blocks in self._passed.items()]
        found = [
            (-position, group, block)
            for group, blocks in passed
            for position, block in enumerate(reversed(blocks))
        ]
        found.sort(key=lambda one: one[0])  # the newest block of each group last
        return [
            number
            for _, group, block in found[-_SKIPPED_MAX:]
            for number in (group, block.last, block.epoch_end)
        ]

    def leave(self, rank: int, entered: dict[int, int], skipped: list[int]) -> None:
        """Record that a rank has left: its last call in each group, and its `skipped`."""
        self.left[rank] = entered
        self._skipped[rank] = SkippedBlocks(skipped)

    def following(self, group: int) -> int:
        """Return the number of the next call of a group."""
        following = self._next_call.get(group, 0)
        caller = self.counted.get(group)
        if caller is None or caller.identity != group:  # `Communicator.become` swaps identities
            return following
        return max(following, caller.next_call)

    # -- frames before their call ------------------------------------------------------------------

    def keep(self, frame: Frame) -> bool:
        """Keep a frame for a call that has not begun; return False if it is over or was skipped."""
        header = frame.header
        if header.call < self.following(header.group):
            return False
        if header.kind == FrameType.WAKE:
            # A call in shared memory may begin and end without informing the tracker.
            self._has_skipped = True
        self.early.setdefault((header.group, header.call), []).append(frame)
        return True

    def is_awaited(self, group: int, call: int) -> bool:
        """Return whether a frame has come for a call that has not begun here."""
        return (group, call) in self.early

    def take_early(self, request: Request) -> list[Frame]:
        """Return the frames kept for a call."""
        return self.early.pop((request.group, request.call), [])

    def take_skipped(self) -> Iterator[tuple[int, int, list[Frame]]]:
        """Yield (group, call, frames) of the calls that were skipped since the last time."""
        if self._has_skipped:
            self._has_skipped = any(
                frames[0].header.kind == FrameType.WAKE for frames in list(self.early.values())
            )
            for group, call in list(self.early):
                if call < self.following(group):
                    yield group, call, self.early.pop((group, call), [])

    # -- blocks of calls ---------------------------------------------------------------------------

    def blocks(self, group: int) -> deque[EpochRange]:
        """Return the ended blocks of a group's calls; a thread appends to them without the lock."""
        found = self._passed.get(group)
        return self._passed.setdefault(group, deque(maxlen=_BLOCKS_MAX)) if found is None else found

    def check_ended_blocks(
        self, groups: Iterable[SkippedRange], reason: str, rank: int
    ) -> list[SkippedRange]:
        """Check blocks that have just been ended against decisions; return the refused groups.

        There a rank is known to be in a call that this one skipped. The call after the block fails
        here, with `reason` for this `rank`, and has to fail on all ranks.
        """
        refused: list[SkippedRange] = []
        with self._lock:
            for one in groups:
                blocks = self.blocks(one.identity)
                if self._decisions and blocks and blocks[-1].epoch_end == one.next_call - 1:
                    block = blocks.pop()
                    if self._is_refused(blocks, one.identity, block, {rank: reason}):
                        refused.append(one)
                self._next_call[one.identity] = one.next_call
        self._has_skipped = True
        return refused

    def _is_refused(
        self, blocks: deque[EpochRange], group: int, block: EpochRange, table: dict[int, str]
    ) -> bool:
        """Record a block that ends while there are decisions; return if the next call fails."""
        last, epoch_end = block.last, block.epoch_end
        overlapping = [
            old
            for old in self._decisions
            if old["group"] == group and last < old["last_call"] and old["call"] <= epoch_end
        ]
        known = [old for old in overlapping if old["call"] <= last + 1]
        if not known:
            # A rank that left the block later may still be in one of the calls in between.
            block.epoch_end = min([epoch_end, *(old["call"] - 1 for old in overlapping)])
            blocks.append(block)
        else:
            block.is_reported = True
        # Otherwise the ranks have left the block, and no rank waits.
        if not any(old["has_waiting_ranks"] for old in overlapping):
            return False
        following = epoch_end + 1
        text = "another rank made a call before it that this rank did not make"
        self._decisions.append(local_decision(group, (following, following), text, table))
        return True

    def skipped_block(
        self, group: int, call: int, active: Iterable[tuple[int, int]]
    ) -> SkippedCall | None:
        """Return the block of `call`, once, if this rank left it without making that call."""
        with self._lock:
            blocks = self._passed.get(group, deque())
            block = next((one for one in list(blocks) if one.last < call <= one.epoch_end), None)
            if block is None:
                return None
            _remove(blocks, block)
        running = [
            number for other, number in active if other == group and number > block.epoch_end
        ]
        following = min(running, default=max(self.following(group), block.epoch_end + 1))
        return SkippedCall(block.members, block.last, block.epoch_end, following)

    # -- calls that cannot succeed -----------------------------------------------------------------

    def add_decision(self, decision: Message) -> None:
        """Record a decision of the coordinator; the calls that it names fail, even if not begun."""
        with self._lock:
            blocks = self._passed.get(decision["group"], deque())
            for block in list(blocks):
                if block.last < decision["last_call"] and decision["call"] <= block.epoch_end:
                    # The group knows it; later calls must not fail because of it.
                    block.epoch_end = decision["call"] - 1
                    if block.epoch_end <= block.last:
                        _remove(blocks, block)
            # Decisions on calls that are over are of no use any more.
            self._decisions = [
                old
                for old in self._decisions
                if old["last_call"] >= self.following(old["group"]) - 1
            ]
            self._decisions.append(decision)

    def refusal(self, request: Request) -> SyncvarError | None:
        """Return why a call cannot succeed, if known: a decision, or a rank that left before it."""
        for decision in self._decisions:
            if self.concerns(decision, request):
                return self.sentence(decision, request)
        for rank in self.left:
            if self.is_without(rank, request):
                call = self._numbers.text(request.label, request.group, request.call)
                return self.ended(rank, call)
        return None

    @staticmethod
    def concerns(decision: Message, request: Request) -> bool:
        """Return whether a decision concerns this call."""
        return bool(
            decision["group"] == request.group
            and decision["call"] <= request.call <= decision["last_call"]
        )

    def sentence(self, decision: Message, request: Request) -> MismatchError:
        """Return the error for a call on which there is a decision."""
        call = self._numbers.text(request.label, request.group, request.call)
        text, is_deadlock = f"{call}: {decision['text']}", decision["is_deadlock"]
        return MismatchError(text, decision["table"], is_deadlock=is_deadlock)

    def is_without(self, rank: int, request: Request) -> bool:
        """Return whether a rank left before it entered this call."""
        entered = self.left.get(rank)
        if entered is None or rank not in request.members:
            return False
        return is_left_out(entered, self._skipped[rank], request.group, request.call)

    def ended(self, rank: int, before: str) -> PeerLost:
        """Return the error for something that needs a rank that has left."""
        host = self._hosts.get(rank, "")
        return PeerLost(rank, host, "finished", f"it ended before {before}", status=0)


def _remove(blocks: deque[EpochRange], block: EpochRange) -> None:
    block.is_reported = True
    with contextlib.suppress(ValueError):  # newer blocks have pushed it out
        blocks.remove(block)
