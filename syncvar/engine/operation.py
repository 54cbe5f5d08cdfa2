"""A started call as the engine sees it: it can be advanced, blocked and resumed, whatever path its bytes take."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from syncvar.engine.recorder import UNRECORDED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.engine.executor import Prepared
    from syncvar.engine.hierarchical import PreparedStages
    from syncvar.execution.kernels import Combiner
    from syncvar.execution.moves import Movement
    from syncvar.execution.reductions import Vector
    from syncvar.execution.rounds import Published
    from syncvar.transports import Frame

__all__ = ["BodyError", "Operation", "Outlet", "Stage", "State"]


class BodyError(Exception):
    """What the body of a call raised after the ranks had agreed on the call: each of them raises it.

    Args:
        error: The error itself.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class State(IntEnum):
    """Where an operation stands."""

    CREATED = 0
    RUNNING = 1
    DRAINING = 2  # the result is there; memory lent to the transport is not all back yet
    DONE = 3
    FAILED = 4


class Stage(NamedTuple):
    """A plan with what it works on.

    Args:
        plan: The prepared plan, for links, for shared memory, or for several hosts.
        work: Flat array of `plan.work_count` elements, the collective's buffer, changed in place.
        ufunc: Combines two operands; None for plans that only move data.
        vector: Of an all-reduce in shared memory: arrays that take the place of `work`, and where the result goes.
        movement: Of a call in shared memory that moves blocks side by side; it takes the place of the plan.
        brought: Of a plan over links that has rounds for it: what `work` would hold before the first round; only read.
    """

    plan: Prepared | Published | PreparedStages
    work: NDArray[Any]
    ufunc: Combiner | None = None
    vector: Vector | None = None
    movement: Movement | None = None
    brought: NDArray[Any] | None = None


class Outlet(Protocol):
    """What an operation needs of the engine."""

    rank: int
    generation: int
    segment_bytes: int

    def post(self, operation: Operation, peer: int, header: bytes, payload: memoryview | None) -> None:
        """Send a frame as soon as the link's credit allows."""

    def consumed(self, peer: int, group: int, nbytes: int) -> None:
        """Give credit back for a frame that has been used."""


class Operation:
    """A started call.

    Args:
        group: Identity of the group.
        members: Its ranks in the world.
        call: Call number within the group.
        fingerprint: Digest of what the call is.
        what: The call in words.
    """

    __slots__ = (
        "accident", "call", "deadline", "entry", "error", "fingerprint", "group", "loans", "members", "mismatch", "queued",
        "report_at", "reported", "result", "site", "started", "state", "thread", "timeout_s", "what",
    )  # fmt: skip

    is_shared = False  # its bytes go through memory that all its ranks see: no frame arrives, somebody has to look

    def __init__(self, group: int, members: tuple[int, ...], call: int, fingerprint: int, what: str) -> None:
        self.group = group
        self.members = members
        self.call = call
        self.fingerprint = fingerprint
        self.what = what
        self.state = State.CREATED
        self.result: Any = None
        self.error: BaseException | None = None
        self.accident: Exception | None = None  # the error, where it is this rank's alone and the others must be told
        self.loans: list[Any] = []
        self.queued = 0  # frames that wait for credit
        self.deadline = 0.0
        self.timeout_s = 0.0
        self.started = 0.0
        self.report_at = 0.0
        self.reported = False
        self.mismatch = False
        self.entry = UNRECORDED  # in the flight recorder
        self.site = ""  # file:line, of a call that was started and not waited for at once
        self.thread = 0  # the thread that waits for this operation; 0 when nobody does

    @property
    def is_over(self) -> bool:
        """Whether the caller may take the result or the error."""
        return self.state >= State.DONE

    @property
    def is_published(self) -> bool:
        """Whether others may have seen this rank in this call."""
        raise NotImplementedError

    @property
    def awaiting(self) -> tuple[int, ...]:
        """Ranks that this one is waiting for."""
        raise NotImplementedError

    def advance(self, outlet: Outlet) -> State:
        """Go on as far as possible without waiting."""
        raise NotImplementedError

    def accept(self, frame: Frame, outlet: Outlet) -> None:
        """Take a frame of this call; the caller has compared the fingerprints."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """End without a result."""
        raise NotImplementedError

    def unused_frames(self) -> list[Frame]:
        """Return frames that arrived and will not be looked at, to give their credit back."""
        return []
