"""The queue of a strategy's deferred writes: increments that wait, and travel together.

The queue numbers increments in the order of the program. It sends them before a read of such a
variable, before any call that may wait, at the end of `strategy.run`, and when it is full. Sending
is one call of a group of its own. The replicas first agree on the *common prefix* of their queues
and compare a digest of it; then one all-reduce carries it. So a replica that is ahead keeps what
the others have not written yet.

With `reproducible=True` each increment is reduced by itself and applied in order, so the bits are
those of single writes. Otherwise the increments of each variable are summed first.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from syncvar.collectives.buckets import reduce_together
from syncvar.collectives.reduce_args import ReduceOptions
from syncvar.collectives.stage_builders import exchange_bytes
from syncvar.core.errors import GroupBroken, MismatchError, SyncvarError
from syncvar.core.reduce_ops import quiet, reduction
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint, names_text
from syncvar.runtime.communicator import CheckedCall
from syncvar.runtime.state import send_queued
from syncvar.variables.variable_compression import CompressedUpdates, VariableUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.runtime.request import Stage
    from syncvar.runtime.work import Work
    from syncvar.variables.policy import AccessKind
    from syncvar.variables.variable_compression import VariableCompression
    from syncvar.variables.variable_owner import VariableOwner

BUCKET_BYTES = 1 << 20  # a queue of this size is sent at once; see bench/queued.py
BUCKET_WRITES = 4096
_PATIENCE_S = 0.0005
_TEXT_BYTES = 400
_CALL = "queued writes"
_RECORD = struct.Struct("<QQQQ")
_MASK = (1 << 64) - 1
_FACTOR = 0x100000001B3  # of the FNV hash


class QueuedTarget(Protocol):
    """A variable as the queue sees it."""

    name: str
    compression: VariableCompression | None

    def apply_queued(self, operation: AccessKind, total: NDArray[Any]) -> None:
        """Apply the sum of all replicas' increments to the copy."""


class Increment(NamedTuple):
    """A queued write."""

    chain: int  # digest of this write and all before it
    variable: QueuedTarget
    operation: AccessKind  # ASSIGN_ADD or ASSIGN_SUB
    op: str  # "sum" or "mean"
    x: NDArray[Any] | None  # a copy of the operand; None if this replica rejected the write
    reason: str = ""  # of the rejection

    def describe(self) -> str:
        """Return the write in words."""
        return f"{self.operation.value} of variable {self.variable.name!r}"


class Sum(NamedTuple):
    """The sum of one or several increments of a variable."""

    variable: QueuedTarget
    operation: AccessKind
    x: NDArray[Any]
    op: str


class FlushResult(NamedTuple):
    """The result of one send."""

    done: int  # writes that leave the queue; -1 for all, dropped because the replicas differ
    sums: list[tuple[Sum, NDArray[Any]]]  # to apply in order; with the combination of all replicas
    error: SyncvarError | None = None  # raised after that
    updates: CompressedUpdates | None = None  # to commit after the sums


class WriteQueue:
    """The queue of one strategy."""

    def __init__(self, owner: VariableOwner) -> None:
        main = owner.communicator
        self.identity = fingerprint(_CALL, main.identity)
        self.writer = threading.current_thread()
        self.calls = owner.context.communicator(self.identity, main.members)
        self._owner = owner
        self._waiting: list[Increment] = []
        self._nbytes = 0
        self._sent = 0  # number of the last write that has left the queue
        self._chain = 0
        self._refused = False
        self._started: Work | None = None
        self._awaited_since = 0.0
        self._resets = 0  # drops of the queue since the run began
        # The queues have differed: later writes would be combined with the wrong ones.
        self._broken: MismatchError | None = None
        self._lock = threading.RLock()  # other threads send too, before their calls
        self.sends = 0  # since it was created

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self, variable: QueuedTarget) -> int:
        """Return the number of queued writes of a variable."""
        return sum(one.variable is variable for one in self._waiting)

    def flush(self, variable: QueuedTarget) -> None:
        """Send all queues if a write of this variable is queued."""
        if any(one.variable is variable for one in self._waiting):
            engine = self.calls.engine
            assert engine is not None
            send_queued(engine.queues, self)

    # -- writes ------------------------------------------------------------------------------------

    def add(
        self, variable: QueuedTarget, operation: AccessKind, op: str, digest: int, x: NDArray[Any]
    ) -> None:
        """Queue a write; `x` has the variable's shape and dtype, and is copied."""
        with self._lock:
            chain = self._chain = extend_chain(self._chain, digest)
            self._put(Increment(chain, variable, operation, op, x.copy()))
            self._nbytes += x.nbytes
            is_full = self._nbytes >= BUCKET_BYTES or len(self._waiting) >= BUCKET_WRITES
            if is_full or self._is_late():
                self.send()

    def refuse(
        self, variable: QueuedTarget, operation: AccessKind, op: str, digest: int, reason: str
    ) -> None:
        """Queue a rejected write: the others will raise MismatchError, and no copy changes."""
        with self._lock:
            chain = self._chain = extend_chain(self._chain, digest)
            self._put(Increment(chain, variable, operation, op, None, reason))
            self._refused = True

    def _is_late(self) -> bool:
        """Return whether another replica has been waiting for this queue for a while."""
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
                f"{one.describe()}: queued writes of the replicas did not match, so later ones "
                "would be combined with the wrong writes. The next strategy.run starts with an "
                f"empty queue; v.pin('eager') writes at once. The error was: {self._broken}",
                self._broken,
            )
        if not self._waiting:
            engine.queues.append(self)
        engine.is_quiet = False
        self.writer = threading.current_thread()
        self._waiting.append(one)

    # -- sending -----------------------------------------------------------------------------------

    def send(self) -> None:
        """Send the common prefix, and apply it."""
        with self._lock:
            if self._started is not None:
                self.finish(self._started)
            elif self._waiting:
                timeout = self._owner.timeout
                check = partial(_QueueSend, self, self._waiting)
                perform = partial(self.calls.perform, _CALL, check, timeout)
                self._take(partial(perform, after_queued=False))

    def begin_beside(self) -> None:
        """Start to send from a thread other than the writer's, unless that one is sending."""
        if self._lock.acquire(blocking=False):
            try:
                self.start()
            finally:
                self._lock.release()

    def start(self) -> Work | None:
        """Start to send the common prefix; None if the queue is empty."""
        with self._lock:
            if self._started is None and self._waiting:
                check = partial(_QueueSend, self, self._waiting)
                self._started = self.calls.perform(
                    _CALL, check, self._owner.timeout, async_op=True, after_queued=False
                )
            return self._started

    def finish(self, work: Work) -> None:
        """Wait for a send that was started, and apply its result."""
        with self._lock:
            if self._started is work:
                self._started = None
                self._take(work.wait)

    def begin(self) -> None:
        """Empty the queue and restart the numbers; all replicas do so at the same point.

        A run that an exception has left may have started a send. Replicas that did so have the
        writes too.
        """
        with self._lock:
            if self._started is not None:
                with contextlib.suppress(SyncvarError):
                    self.finish(self._started)
            self._drop(len(self._waiting))
            self._sent = self._chain = self._resets = 0
            self._broken = None

    def _break(self, error: MismatchError) -> None:
        """Drop the queue, and reject writes until a run begins: the replicas differ.

        Replicas that have not noticed it yet learn of it by the number of resets.
        """
        resets = self._resets
        self.begin()
        self._resets, self._broken = resets + 1, error

    def stages(self, waiting: list[Increment]) -> Generator[Stage, None, FlushResult]:
        """Yield the stages of a send of these writes."""
        sent, calls, mine = self._sent, self.calls, self._prefix(waiting)
        packed = yield from exchange_bytes(calls, pack_prefix(mine))
        queues = [unpack_prefix(data) for data in packed]
        if any(one.block != mine.block for one in queues):
            self._resets = max(one.block for one in queues) & ((1 << 20) - 1)
            text = "some replicas had dropped queued writes; now all have dropped them"
            drops = mine.block & ((1 << 20) - 1)
            own = f"has dropped queued writes {drops} times in this run"
            return (yield from self._drop_all(text, own))
        last, is_refused = common_prefix(sent, queues)
        count = last - sent
        if not count:
            return FlushResult(0, [])
        if any(one.last != last or one.chain != queues[0].chain for one in queues):
            chains = np.array([one.chain for one in waiting[:count]], np.uint64).tobytes()
            everyone = yield from exchange_bytes(calls, chains)
            number = first_difference(
                sent, [np.frombuffer(data, np.uint64).tolist() for data in everyone]
            )
            if number:
                text = (
                    f"queued write {number - sent} of {count} is not the same on all replicas; all "
                    "queued writes were dropped"
                )
                return (yield from self._drop_all(text, waiting[number - sent - 1].describe()))
        if is_refused:
            return (yield from self._drop_refused(waiting[0]))
        return (yield from self._reduce(self._sums(waiting[:count]), count))

    def _prefix(self, waiting: list[Increment]) -> QueuePrefix:
        rejected = (place for place, one in enumerate(waiting, 1) if one.x is None)
        refused = self._sent + next(rejected, -self._sent) if self._refused else 0
        block = (self.calls.epoch << 20) + self._resets
        return QueuePrefix(self._sent + len(waiting), refused, waiting[-1].chain, block)

    def _reduce(self, sums: list[Sum], count: int) -> Generator[Stage, None, FlushResult]:
        plain = [one for one in sums if one.variable.compression is None]
        rules = [reduction(one.op, one.x.dtype) for one in plain]
        arrays = [one.x for one in plain]
        options = ReduceOptions(self._owner.reproducible)
        outs = [None] * len(plain)
        results = yield from reduce_together(self.calls, arrays, rules, outs, options)
        together = list(zip(plain, results, strict=True))
        if len(plain) == len(sums):
            return FlushResult(count, together)
        compressed = [one for one in sums if one.variable.compression is not None]
        states: Any = [one.variable for one in compressed]
        updates = CompressedUpdates(
            self.calls,
            [
                VariableUpdate(state, one.operation, one.x, one.op)
                for state, one in zip(states, compressed, strict=True)
            ],
        )
        yield from updates.stages()
        return FlushResult(count, together, updates=updates)

    def _drop_all(self, text: str, mine: str) -> Generator[Stage, None, FlushResult]:
        """Return the result of a send in which the queues differ; `mine` describes this one."""
        table = yield from self._table(mine)
        return FlushResult(-1, [], MismatchError(text, table))

    def _drop_refused(self, one: Increment) -> Generator[Stage, None, FlushResult]:
        table = yield from self._table(one.reason if one.x is None else "passes a value")
        text = f"{one.describe()}: another replica rejected it; no copy was changed"
        return FlushResult(1, [], None if one.x is None else MismatchError(text, table))

    def _table(self, text: str) -> Generator[Stage, None, dict[int, str]]:
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        everyone = yield from exchange_bytes(self.calls, data)
        return {
            member: one.decode(errors="ignore").rstrip()
            for member, one in zip(self.calls.members, everyone, strict=True)
        }

    def _sums(self, waiting: Sequence[Increment]) -> list[Sum]:
        """Return what is reduced: each increment by itself, or the sums by variable."""
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
        except MismatchError as error:  # the others have continued without these writes
            self._break(error)
            raise
        with quiet():
            for one, total in outcome.sums:
                one.variable.apply_queued(one.operation, total)
        for state in () if outcome.updates is None else outcome.updates.commit():
            state.tally.collectives += 1
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


class _QueueSend(CheckedCall):
    """A call that sends the common prefix of the queues."""

    def __init__(self, queue: WriteQueue, waiting: Sequence[Increment]) -> None:
        names = names_text(list(dict.fromkeys(one.variable.name for one in waiting)))
        super().__init__(
            CollectiveSpec(_CALL, variable=names, access=_CALL, text=_label, shown=(len(waiting),))
        )
        self._queue, self._waiting = queue, list(waiting)

    def stages(self) -> Generator[Stage, None, FlushResult]:
        return self._queue.stages(self._waiting)


def _label(spec: CollectiveSpec) -> str:
    return f"{spec.collective} ({spec.shown[0]})"


def _wide(one: Increment) -> NDArray[Any]:
    """Return an increment in the dtype of its sum: half types are rounded once, when applied."""
    assert one.x is not None
    return one.x.astype(reduction(one.op, one.x.dtype).accumulate, copy=False)


def queue_of(owner: VariableOwner) -> WriteQueue:
    """Return the queue of a strategy; all replicas create it at the same point."""
    queue: WriteQueue | None = owner.queue
    if queue is None:
        queue = owner.queue = WriteQueue(owner)
    return queue


# -- the common prefix of the replicas' queues: pure arithmetic ------------------------------------


class QueuePrefix(NamedTuple):
    """The state of one replica's queue."""

    last: int  # number of its last write
    refused: int  # number of its first rejected write that the others do not know; 0 for none
    chain: int  # digest of its writes up to the last
    block: int = 0  # number of resets; writes of different blocks have nothing in common


def pack_prefix(prefix: QueuePrefix) -> bytes:
    """Return the record as bytes of fixed length."""
    return _RECORD.pack(*prefix)


def unpack_prefix(data: bytes) -> QueuePrefix:
    """Return the record in some bytes."""
    return QueuePrefix(*_RECORD.unpack(data))


def extend_chain(chain: int, digest: int) -> int:
    """Return the chain after one more write; it depends on the order.

    Example:
        >>> extend_chain(extend_chain(0, 1), 2) == extend_chain(extend_chain(0, 2), 1)
        False
    """
    return ((chain ^ digest) * _FACTOR + 1) & _MASK


def common_prefix(sent: int, queues: Sequence[QueuePrefix]) -> tuple[int, bool]:
    """Return (number of the last write to send now, whether all drop that write).

    A rejected write is handled alone, after those before it.

    Example:
        >>> common_prefix(2, [QueuePrefix(5, 0, 0), QueuePrefix(4, 0, 0)])
        (4, False)
        >>> rejected = [QueuePrefix(5, 0, 0), QueuePrefix(5, 4, 0)]
        >>> common_prefix(2, rejected), common_prefix(3, rejected)
        ((3, False), (4, True))
    """
    last = min(one.last for one in queues)
    refused = min((one.refused for one in queues if one.refused), default=0)
    if not refused or refused > last:
        return last, False
    return (refused, True) if refused == sent + 1 else (refused - 1, False)


def first_difference(sent: int, chains: Sequence[Sequence[int]]) -> int:
    """Return the number of the first write in which replicas differ, or 0.

    Example:
        >>> first_difference(4, [[1, 2, 3], [1, 9, 8]])
        6
    """
    for place, row in enumerate(zip(*chains, strict=True)):
        if any(chain != row[0] for chain in row):
            return sent + place + 1
    return 0
