"""A group inside a block of `sv.uneven`: the active ranks make its calls without the others.

Before each call, the active ranks make the *membership all-reduce*: one bit for each rank. A rank
that leaves its loop sets its bit in one more membership all-reduce of each of its groups; that
request waits in the engine until the others join it. So all active ranks know the same members at
the same call, and no call is repeated. The group's communicator becomes that of the active ranks:
code that holds it makes their calls.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from syncvar.collectives.all_reduce import agree, agreement_call
from syncvar.core.errors import MismatchError, UsageError, error_line
from syncvar.core.process_ids import rank_list
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint, spec_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.work import Work

LEFT = "left sv.uneven: "
_LEFT_RUN = "left strategy.run inside sv.uneven: "
_MEMBERSHIP = "membership of sv.uneven"
_LAST = 1 << 40  # more membership all-reduces than a block has


class PeerExhausted(UsageError):
    """A rank has left its loop, and the block ends with the first that leaves."""


class UnevenBlock(Protocol):
    """What the groups of a block share."""

    context: ProcessContext
    number: int  # identifies the block: the same on all its ranks
    stops_at_first: bool
    is_over: str  # reason why the block makes no more calls: "rank 3 left ..."; else empty

    def end(self, reason: str, cause: str = "") -> None:
        """End the block and send `reason` to the others; `cause` if another rank ended it first."""


class ActiveGroup:
    """One group in a block, from `begin` to `restore`; its communicator has no active call."""

    def __init__(self, block: UnevenBlock, communicator: Communicator) -> None:
        self._block = block
        self.communicator = communicator
        self.identity = communicator.identity
        self.whole = self.working = communicator.members
        self.calls = 0  # calls that this rank has made in the group
        self._control: Communicator | None = None  # makes the membership all-reduces
        self._home = communicator

    def begin(self) -> None:
        """Restrict every call of the group to the ranks that still work."""
        channel = self.communicator.channel
        if channel is not None:
            channel.is_settled = (
                False  # so cached calls take the slow path, which calls `agree_on_members`
            )
        self._home = self._beside("calls")
        self._become(self._home)

    def agree_on_members(self, name: str | CollectiveSpec, timeout: float | None) -> None:
        """Make the membership all-reduce before call `name`; the active ranks then make it."""
        if self._block.is_over:
            raise UsageError(
                f"{name}: {self._block.is_over}. The ranks may be at different calls, so this "
                f"block of sv.uneven makes no more: leave it, and catch such an error inside the "
                f"function that strategy.run calls, or around the block"
            )
        if len(self.working) > 1:
            self._exchange_membership(name, timeout)
        self.calls += 1

    def _exchange_membership(self, name: str | CollectiveSpec, timeout: float | None) -> None:
        spec = CollectiveSpec(
            f"{spec_of(name).collective} inside sv.uneven",
            compared=_MEMBERSHIP,
            text=lambda spec: f"{spec.shown[0]} inside sv.uneven",
            shown=(name,),
        )
        try:
            bits = agree(self._membership(), _MEMBERSHIP, "or", self._no_bits(), timeout, spec)
        except MismatchError as error:
            self._end_with(error)
            raise
        if not bits.any():
            return
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
        left = [rank for rank, flag in zip(self.working, flags, strict=False) if flag]
        self.working = tuple(rank for rank in self.working if rank not in left)
        self._control = None
        self._become(self._beside("calls"))
        if self._block.stops_at_first:
            raise PeerExhausted(
                f"{rank_list(left)} left sv.uneven, and this block ends with the first"
            )

    def require_all(self, label: str, instead: str = "") -> None:
        """Raise UsageError if a rank has left. Collective over the active ranks."""
        self.agree_on_members(label, None)
        left = [rank for rank in self.whole if rank not in self.working]
        if left:
            raise UsageError(
                f"{label} needs every rank of the group, and in `with sv.uneven():` "
                f"{rank_list(left)} left the loop already: do it before the block or after it"
                f"{instead and ', or '}{instead}"
            )

    def leave(self, timeout: float | None) -> Work | None:
        """Start the membership all-reduce in which this rank leaves, and return its request."""
        self.restore()
        if len(self.working) == 1:
            return None
        membership, bits = self._membership(), self._no_bits()
        own = membership.member_rank
        bits[own >> 6] = np.uint64(1) << np.uint64(own & 63)
        spec = CollectiveSpec("sv.uneven: its own loop has ended", compared=_MEMBERSHIP)
        check = partial(agreement_call, membership, _MEMBERSHIP, "or", spec, bits)
        work: Work = membership.perform(_MEMBERSHIP, check, timeout, async_op=True)
        # It may wait long, and the call at the end of the block names the ranks that are missing.
        work._operation.report_at = float("inf")  # noqa: SLF001  (no public way to silence a report)
        return work

    def abort_step(self, error: BaseException) -> None:
        """End the block, because an exception has left `strategy.run` on this rank.

        The membership all-reduces cannot be skipped as the calls of a run are: a rank that has
        left its loop waits in the next one.
        """
        if not isinstance(error, PeerExhausted):  # all active ranks raise PeerExhausted together
            self._block.end(f"{_LEFT_RUN}{error_line(error)}")

    def announce(self, reason: str) -> None:
        """Let all further membership all-reduces of the others fail; does not wait."""
        engine = self.communicator.engine
        if engine is not None and len(self.working) > 1:
            following = 0 if self._control is None else self._control.next_call
            engine.abort_step(
                self._identity_of("membership"),
                self.working,
                following - 1,
                following + _LAST,
                reason,
            )

    def restore(self) -> None:
        """Restore the communicator that the group had before the block."""
        if self.communicator.uneven is self:
            self.communicator.become(self._home)

    def destroy(self) -> None:
        """Destroy the communicators of the block, so that no other block finds them."""
        self.restore()
        for communicator in (self._home, self._control):
            if communicator is not None and communicator is not self.communicator:
                communicator.destroy()
                communicator.uneven = None
        self._home, self._control = (
            self.communicator,
            None,
        )  # frees them without a garbage collection

    def _end_with(self, error: MismatchError) -> None:
        """End the block here if the error says that another rank has ended it."""
        for rank, reason in error.table.items():
            if reason.startswith((LEFT, _LEFT_RUN)):
                cause = f"rank {rank} {reason}"
                self._block.end(LEFT + cause, cause)

    def _become(self, communicator: Communicator) -> None:
        communicator.prepares = False
        communicator.whole, communicator.uneven = self.whole, self
        self.communicator.become(communicator)

    def _beside(self, purpose: str) -> Communicator:
        """Return another communicator of the active ranks."""
        return self._block.context.communicator(self._identity_of(purpose), self.working)

    def _identity_of(self, purpose: str) -> int:
        return fingerprint(purpose, self._block.number, self.identity, self.working)

    def _membership(self) -> Communicator:
        if self._control is None:
            self._control = self._beside("membership")
        return self._control

    def _no_bits(self) -> NDArray[np.uint64]:
        return np.zeros(-(-len(self.working) // 64), np.uint64)
