"""A group inside a block of `sv.uneven`: its calls are made by the ranks that still work, as if it had no others.

Before each call those who work make a small one, the roll: an all-reduce of one bit for each of them. A rank that leaves its
loop makes one roll more in each of its groups, which says so, and has no part in that group from then on; its last roll
waits in the engine until the others make theirs. So all know of the same ranks at the same call, and nothing is ever
repeated. The group's communicator becomes that of those who still work: whoever holds it makes their calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from syncvar.collectives.all_reduce import agree, agreement_request
from syncvar.core.errors import MismatchError, UsageError
from syncvar.core.rank_text import rank_list
from syncvar.runtime.communicator import fingerprint
from syncvar.runtime.flight_recorder.call_record import CallFields, CallLabel, collective_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.work import Work

__all__ = ["LEFT", "ActiveGroup", "PeerExhausted"]

LEFT = "left sv.uneven: "
_LEFT_RUN = "left strategy.run inside sv.uneven: "

_ROLL = "roll of sv.uneven"
_DIGEST = fingerprint(_ROLL)
_LAST = 1 << 40  # more rolls than a block has


class PeerExhausted(UsageError):
    """A rank has left its loop, and the block ends with the first."""


class UnevenBlock(Protocol):
    """What the groups of a block have in common."""

    context: ProcessContext
    number: int  # the same on all its ranks, and of no other block
    stops_at_first: bool
    is_over: str  # why no more calls are made in it: "rank 3 left ..."; empty while they are

    def end(self, reason: str, why: str = "") -> None:
        """Make no more calls in the block, and tell the others.

        Args:
            reason: For them; what this rank did.
            why: What another rank did, where it began there.
        """


class ActiveGroup:
    """One group in a block, from `begin` to `give_back`.

    Args:
        block: The block.
        communicator: The group's, with no call under way.
    """

    def __init__(self, block: UnevenBlock, communicator: Communicator) -> None:
        self._block = block
        self.communicator = communicator
        self.identity = communicator.identity
        self.whole = self.working = communicator.members
        self.calls = 0  # that this rank has made here while it worked
        self._rolls: Communicator | None = None
        self._home = communicator

    def begin(self) -> None:
        """Let every call of the group be one of those who still work.

        Raises:
            SharedMemoryFull: The memory that the ranks share has no room for it.
        """
        channel = self.communicator.channel
        if channel is not None:
            channel.is_settled = (
                False  # so calls that have been prepared take the long way, and the roll
            )
        self._home = self._beside("calls")
        self._take(self._home)

    def roll(self, name: str, timeout: float | None) -> None:
        """Learn which ranks still work; the communicator is theirs afterwards. Collective over them.

        Args:
            name: The call that follows, for messages.
            timeout: Seconds; None means the job's default.

        Raises:
            PeerExhausted: A rank has left, and the block ends with the first.
            MismatchError: A rank has left by an exception.
            UsageError: That is known here already.

        Cost: an all-reduce of 8 bytes for each 64 ranks.
        """
        if self._block.is_over:
            raise UsageError(
                f"{name}: {self._block.is_over}. The ranks may be at different calls, so this block of sv.uneven makes no more: leave "
                f"it, and catch such an error inside the function that strategy.run calls, or around the block"
            )
        if len(self.working) > 1:
            collective = f"{collective_of(name)} inside sv.uneven"
            said = CallLabel(f"{name} inside sv.uneven", CallFields(collective)), _DIGEST
            try:
                left = agree(
                    self._rolls_now(), _ROLL, "or", self._nobody(), timeout, said
                )  # a bit for each that has left
            except MismatchError as error:
                self._heed(error)
                raise
            if left.any():
                bits = np.unpackbits(left.view(np.uint8), bitorder="little")
                gone = [rank for rank, bit in zip(self.working, bits, strict=False) if bit]
                self.working = tuple(rank for rank in self.working if rank not in gone)
                self._rolls = None
                self._take(self._beside("calls"))
                if self._block.stops_at_first:
                    raise PeerExhausted(
                        f"{rank_list(gone)} left sv.uneven, and this block ends with the first"
                    )
        self.calls += 1

    def require_all(self, what: str, instead: str = "") -> None:
        """Raise UsageError if a rank has left; collective over those who work."""
        self.roll(what, None)
        gone = [rank for rank in self.whole if rank not in self.working]
        if gone:
            raise UsageError(
                f"{what} needs every rank of the group, and in `with sv.uneven():` {rank_list(gone)} left the loop already: do it before "
                f"the block or after it{instead and ', or '}{instead}"
            )

    def leave(self, timeout: float | None) -> Work | None:
        """Tell the others, in the roll of their next call, that this rank works no more; returns that roll."""
        self.give_back()
        if len(self.working) == 1:
            return None
        rolls = self._rolls_now()
        left = self._nobody()
        place = rolls.member_rank
        left[place >> 6] = np.uint64(1) << np.uint64(place & 63)
        said = "sv.uneven: its own loop has ended", _DIGEST
        work: Work = rolls.perform(
            _ROLL, lambda: agreement_request(rolls, _ROLL, "or", left, said), timeout, async_op=True
        )
        work._operation.report_at = float("inf")  # noqa: SLF001  (it may wait long, and the end of the block tells whom this rank waits for)
        return work

    def left_run(self, error: BaseException) -> None:
        """End the block, because an exception has left `strategy.run` here: rolls cannot be skipped as a run's calls are.

        The next roll of a rank that has left its loop waits at its number.
        """
        if not isinstance(error, PeerExhausted):  # which all who work raise at the same roll
            self._block.end(f"{_LEFT_RUN}{type(error).__name__}: {error}")

    def tell(self, reason: str) -> None:
        """Let all further rolls of the others fail: an exception has ended the block here. Sends, but waits for nothing."""
        engine = self.communicator.engine
        if engine is not None and len(self.working) > 1:
            following = 0 if self._rolls is None else self._rolls.next_call
            engine.left_run(
                self._identity_of("rolls"), self.working, following - 1, following + _LAST, reason
            )

    def give_back(self) -> None:
        """Let the communicator be what it was, if it has become another."""
        if self.communicator.uneven is self:
            self.communicator.become(self._home)

    def let_go(self) -> None:
        """Let go of the communicators that were made for the block, which is over: they are no groups that another block takes in."""
        self.give_back()
        for made in (self._home, self._rolls):
            if made is not None and made is not self.communicator:
                made.destroy()
                made.uneven = None
        self._home, self._rolls = (
            self.communicator,
            None,
        )  # so that these need not wait for the collector of garbage

    def _heed(self, error: MismatchError) -> None:
        """End the block here if another rank has."""
        for rank, reason in error.table.items():
            if reason.startswith((LEFT, _LEFT_RUN)):
                why = f"rank {rank} {reason}"
                self._block.end(LEFT + why, why)

    def _take(self, made: Communicator) -> None:
        made.prepares = False
        made.whole, made.uneven = self.whole, self
        self.communicator.become(made)

    def _beside(self, kind: str) -> Communicator:
        """Return another communicator of those who still work."""
        return self._block.context.communicator(self._identity_of(kind), self.working)

    def _identity_of(self, kind: str) -> int:
        return fingerprint(kind, self._block.number, self.identity, self.working)

    def _rolls_now(self) -> Communicator:
        if self._rolls is None:
            self._rolls = self._beside("rolls")
        return self._rolls

    def _nobody(self) -> NDArray[np.uint64]:
        return np.zeros(-(-len(self.working) // 64), np.uint64)
