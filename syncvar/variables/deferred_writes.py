"""The queue of a strategy's deferred writes: increments that wait, and travel together.

Increments of deferred variables are numbered and kept as they were made. They are sent when somebody reads such a
variable, when any call is made that may wait, at the end of `strategy.run`, and when they have become many. Sending is
one call of a group that is the queue's own: the replicas first agree how many writes they have in common, and compare
what these are (`prefix`), then one all-reduce carries them. So some replicas may read between two writes and others
not, and a replica that is ahead keeps what the others have not made yet.

Under `reproducible=True` every increment is reduced by itself, side by side with the others, and applied in order: the
bits are those of writes that go one by one. Otherwise each variable's increments are summed first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.buckets import reduce_together
from syncvar.collectives.stage_builders import exchange_bytes
from syncvar.core.errors import GroupBroken, MismatchError, SyncvarError
from syncvar.core.reduce_ops import quiet, reduction
from syncvar.runtime.communicator import CollectiveSpec, fingerprint
from syncvar.runtime.deferred_queues import send_queued
from syncvar.runtime.flight_recorder.call_record import CallFields, CallLabel
from syncvar.variables.queue_prefix import (
    QueuePrefix,
    chained,
    common_prefix,
    first_difference,
    pack_told,
    unpack_told,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.runtime.request import Stage
    from syncvar.runtime.work import Work
    from syncvar.variables.policy import AccessKind
    from syncvar.variables.scope import Owner
    from syncvar.variables.variable import Variable

__all__ = ["BUCKET_BYTES", "BUCKET_WRITES", "WriteQueue", "queue_of"]

BUCKET_BYTES = 1 << 20  # so much is sent at once, whoever has asked or not: see bench/queued.py
BUCKET_WRITES = 4096
_PATIENCE_S = 0.0005
_TEXT_BYTES = 400
_WHAT = "queued writes"


class Increment(NamedTuple):
    """A write that waits.

    Args:
        chain: Digest of this write and all before it.
        variable: Which is written.
        operation: ASSIGN_ADD or ASSIGN_SUB.
        op: "sum" or "mean".
        x: What this replica adds, its own copy; None of a write that was refused here.
        reason: Why it was refused.
    """

    chain: int
    variable: Variable
    operation: AccessKind
    op: str
    x: NDArray[Any] | None
    reason: str = ""

    def describe(self) -> str:
        """Return the write in words."""
        return f"{self.operation.value} of variable {self.variable.name!r}"


class Sum(NamedTuple):
    """What one or several increments of a variable have come to."""

    variable: Variable
    operation: AccessKind
    x: NDArray[Any]
    op: str


class FlushResult(NamedTuple):
    """What a round has brought.

    Args:
        done: How many writes of the queue are done with; -1 for all, which are dropped: the replicas differ.
        sums: What is applied, in order; each with the combination of all replicas.
        error: Raised after that.
    """

    done: int
    sums: list[tuple[Sum, NDArray[Any]]]
    error: SyncvarError | None = None


class WriteQueue:
    """The queue of one strategy.

    Args:
        owner: The strategy.
    """

    def __init__(self, owner: Owner) -> None:
        main = owner.communicator
        self.identity = fingerprint(_WHAT, main.identity)
        self.writer = threading.current_thread()
        self.calls = owner.context.communicator(self.identity, main.members)
        self._owner = owner
        self._waiting: list[Increment] = []
        self._nbytes = 0
        self._sent = 0  # number of the last write that is done with
        self._chain = 0
        self._refused = False
        self._started: Work | None = None
        self._awaited_since = 0.0
        self._resets = 0  # how often writes were dropped since the run began
        self._broken: MismatchError | None = (
            None  # since then writes of the replicas would be crossed
        )
        self._lock = threading.RLock()  # a thread that makes a call elsewhere sends as well
        self.sends = 0  # since it was made

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self, variable: Variable) -> int:
        """Return how many writes of a variable wait."""
        return sum(one.variable is variable for one in self._waiting)

    def settle(self, variable: Variable) -> None:
        """Send if writes of a variable wait, those of all queues."""
        if any(one.variable is variable for one in self._waiting):
            engine = self.calls.engine
            assert engine is not None
            send_queued(engine.queues, self)

    # -- writes ------------------------------------------------------------------------------------

    def add(
        self, variable: Variable, operation: AccessKind, op: str, digest: int, x: NDArray[Any]
    ) -> None:
        """Take a write; `x` is of the variable's shape and dtype, and copied."""
        with self._lock:
            chain = self._chain = chained(self._chain, digest)
            self._put(Increment(chain, variable, operation, op, x.copy()))
            self._nbytes += x.nbytes
            if (
                self._nbytes >= BUCKET_BYTES
                or len(self._waiting) >= BUCKET_WRITES
                or self._is_late()
            ):
                self.send()

    def refuse(
        self, variable: Variable, operation: AccessKind, op: str, digest: int, reason: str
    ) -> None:
        """Take note that this replica's write was refused: the others will raise MismatchError, and no copy changes."""
        with self._lock:
            chain = self._chain = chained(self._chain, digest)
            self._put(Increment(chain, variable, operation, op, None, reason))
            self._refused = True

    def _is_late(self) -> bool:
        """Return whether another replica waits for this one's writes for a while; most come to the same read at once."""
        if self._started is not None or not self.calls.is_awaited:
            self._awaited_since = 0.0
            return False
        now = time.monotonic()
        if not self._awaited_since:
            self._awaited_since = now
        elif now - self._awaited_since > _PATIENCE_S:
            self._awaited_since = 0.0
            return True
        return False

    def _put(self, one: Increment) -> None:
        engine = self.calls.engine
        assert engine is not None
        engine.check()
        if self._broken is not None:
            raise GroupBroken(
                f"{one.describe()}: queued writes of the replicas did not match, and what follows would be crossed; the next "
                f"strategy.run begins anew, and v.pin('eager') writes at once. It was: {self._broken}",
                self._broken,
            )
        if not self._waiting:
            engine.queues.append(self)
        engine.is_quiet = False
        self.writer = threading.current_thread()
        self._waiting.append(one)

    # -- sending -----------------------------------------------------------------------------------

    def send(self) -> None:
        """Send what the replicas have in common, and write it.

        Raises:
            MismatchError: Another replica has made other writes, or refused one; nothing is written of these.
        """
        with self._lock:
            if self._started is not None:
                self.finish(self._started)
            elif self._waiting:
                self._take(
                    lambda: self.calls.perform(
                        _WHAT, self._request, self._owner.timeout, after_queued=False
                    )
                )

    def begin_beside(self) -> None:
        """Start to send from another thread than the writer's, unless that one is sending."""
        if self._lock.acquire(blocking=False):
            try:
                self.start()
            finally:
                self._lock.release()

    def start(self) -> Work | None:
        """Start to send what the replicas have in common; None where nothing waits."""
        with self._lock:
            if self._started is None and self._waiting:
                self._started = self.calls.perform(
                    _WHAT, self._request, self._owner.timeout, async_op=True, after_queued=False
                )
            return self._started

    def finish(self, work: Work) -> None:
        """Wait for what was started, and write what has come."""
        with self._lock:
            if self._started is work:
                self._started = None
                self._take(work.wait)

    def begin(self) -> None:
        """Begin to count anew, with nothing in the queue: all replicas do it at the same point of their programs.

        A run that an exception left may have started to send; who else did so has the writes as well.
        """
        with self._lock:
            if self._started is not None:
                with contextlib.suppress(SyncvarError):
                    self.finish(self._started)
            self._drop(len(self._waiting))
            self._sent = self._chain = self._resets = 0
            self._broken = None

    def _break(self, error: MismatchError) -> None:
        """Drop what waits, and refuse writes until a run begins: the replicas differ, and count no longer alike.

        Those that have not seen it yet are told by the number of resets.
        """
        resets = self._resets
        self.begin()
        self._resets, self._broken = resets + 1, error

    def _request(self) -> CollectiveSpec:
        waiting = list(self._waiting)
        label = CallLabel(f"{_WHAT} ({len(waiting)})", CallFields(_WHAT))
        return CollectiveSpec(label, fingerprint(_WHAT), self._body(waiting))

    def _body(self, waiting: list[Increment]) -> Generator[Stage, None, FlushResult]:
        sent, calls = self._sent, self.calls
        refused = (
            next((sent + place for place, one in enumerate(waiting, 1) if one.x is None), 0)
            if self._refused
            else 0
        )
        mine = QueuePrefix(
            sent + len(waiting), refused, waiting[-1].chain, (calls.epoch << 20) + self._resets
        )
        told = [unpack_told(data) for data in (yield from exchange_bytes(calls, pack_told(mine)))]
        if any(one.block != mine.block for one in told):
            self._resets = max(one.block for one in told) & ((1 << 20) - 1)
            table = yield from self._table(
                f"has dropped queued writes {mine.block & ((1 << 20) - 1)} times in this run"
            )
            text = "some replicas had to drop queued writes that others have not dropped; these were dropped now"
            return FlushResult(-1, [], MismatchError(text, table))
        last, is_refused = common_prefix(sent, told)
        count = last - sent
        if not count:
            return FlushResult(0, [])
        if any(one.made != last for one in told) or any(one.chain != told[0].chain for one in told):
            chains = np.array([one.chain for one in waiting[:count]], np.uint64).tobytes()
            everyone = yield from exchange_bytes(calls, chains)
            number = first_difference(
                sent, [np.frombuffer(data, np.uint64).tolist() for data in everyone]
            )
            if number:
                table = yield from self._table(waiting[number - sent - 1].describe())
                text = f"write {number - sent} of the {count} that were queued is not the same on all replicas; these were dropped"
                return FlushResult(-1, [], MismatchError(text, table))
        if is_refused:
            one = waiting[0]
            table = yield from self._table(one.reason if one.x is None else "brings a value")
            text = f"{one.describe()}: refused on another replica; no copy was changed"
            return FlushResult(1, [], None if one.x is None else MismatchError(text, table))
        sums = self._sums(waiting[:count])
        hows = [reduction(one.op, one.x.dtype) for one in sums]
        arrays = [one.x for one in sums]
        results = yield from reduce_together(
            calls, arrays, hows, [None] * len(sums), self._owner.reproducible
        )
        return FlushResult(count, list(zip(sums, results, strict=True)))

    def _table(self, text: str) -> Generator[Stage, None, dict[int, str]]:
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        everyone = yield from exchange_bytes(self.calls, data)
        return {
            member: one.decode(errors="ignore").rstrip()
            for member, one in zip(self.calls.members, everyone, strict=True)
        }

    def _sums(self, waiting: Sequence[Increment]) -> list[Sum]:
        """Return what is reduced: each increment by itself, or those of each variable summed."""
        if self._owner.reproducible:
            return [Sum(one.variable, one.operation, _wide(one), one.op) for one in waiting]
        sums: dict[int, Sum] = {}
        with quiet():
            for one in waiting:
                found = sums.get(id(one.variable))
                wide = _wide(one)
                if found is None:
                    sums[id(one.variable)] = Sum(one.variable, one.operation, wide, one.op)
                elif found.operation is one.operation:
                    np.add(found.x, wide, out=found.x)
                else:
                    np.subtract(found.x, wide, out=found.x)
        return list(sums.values())

    def _take(self, wait: Callable[[], FlushResult]) -> None:
        self.sends += 1
        try:
            outcome = wait()
        except MismatchError as error:  # the others have gone on without these writes
            self._break(error)
            raise
        with quiet():
            for one, total in outcome.sums:
                one.variable.apply_queued(one.operation, total)
        if outcome.done < 0 and isinstance(outcome.error, MismatchError):
            self._break(outcome.error)
        else:
            self._drop(outcome.done)
        if outcome.error is not None:
            raise outcome.error

    def _drop(self, count: int) -> None:
        if not count:
            return
        self._sent += count
        del self._waiting[:count]
        self._nbytes = sum(one.x.nbytes for one in self._waiting if one.x is not None)
        self._refused = any(one.x is None for one in self._waiting)
        engine = self.calls.engine
        if not self._waiting and engine is not None and self in engine.queues:
            engine.queues.remove(self)


def _wide(one: Increment) -> NDArray[Any]:
    """Return an increment in the dtype in which it is combined: half types are rounded once, when they are applied."""
    assert one.x is not None
    return one.x.astype(reduction(one.op, one.x.dtype).accumulate, copy=False)


def queue_of(owner: Owner) -> WriteQueue:
    """Return the queue of a strategy, made when it is first needed: at the same moment on all its replicas."""
    if owner.queue is None:
        owner.queue = WriteQueue(owner)
    return owner.queue
