"""The state of one variable on this replica: copy, counters, persistent accesses, deferral.

`Variable` is the public class. All other modules of this package work on its `VariableState`.

Persistent writes and reads are the fast path of an access that all replicas have made before. They
keep what cannot change for a variable: the collective, its description and its signature, and the
memory. Each one still checks what can change: scope, form of the operand, channel of the group, a
due comparison of the copies, views of the copy.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from syncvar._native import AccessScope, LocalCopy, VariableCounters, access, which
from syncvar._native.constants import WRITES_PER_DECISION, StoreResult
from syncvar.core.array_types import dtype_index
from syncvar.core.errors import ConfigError, UsageError
from syncvar.protocol.object_codec import pack_object
from syncvar.runtime.collective_spec import fingerprint
from syncvar.variables.create import share_of
from syncvar.variables.deferred_writes import WriteQueue, queue_of
from syncvar.variables.policy import (
    AccessKind,
    Action,
    CallContext,
    Travel,
    VariableSynchronization,
    decide,
    resolve,
)
from syncvar.variables.variable_owner import context_here, context_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from syncvar._native import CheckGate
    from syncvar.runtime.communicator import Persistent
    from syncvar.variables.create import VariableInit
    from syncvar.variables.storage import Storage
    from syncvar.variables.variable_compression import VariableCompression
    from syncvar.variables.variable_owner import VariableOwner

    Look = Callable[[bool], NDArray[Any] | None]
    Read = Callable[[bool], NDArray[Any] | None]
    Write = Callable[..., int]

_FALLBACK, _STORED, _SAMPLE = (int(result) for result in StoreResult)


def plain_write(_x: Any, *, is_seen: bool = False) -> int:
    """Stand for a write that is not cached."""
    del is_seen
    return _FALLBACK


def plain_look(_copy: object) -> None:
    """Stand for a local read that is not cached."""


class LocalLook:
    """A persistent local read in Python; its result is None if the policy table has to decide."""

    def __init__(self, owner: VariableOwner, storage: Storage, tally: VariableCounters) -> None:
        self._owner, self._storage, self._tally = owner, storage, tally

    def __call__(self, copy: bool) -> NDArray[Any] | None:  # noqa: FBT001  (as in C)
        """Return the copy, or a copy of it."""
        owner, tally = self._owner, self._tally
        stack = owner.places.stack
        if stack and stack[-1].owner is not owner and not owner.is_default:
            return None
        added = tally.added
        if added != tally.turned:
            tally.turned = added
            tally.turns += 1
        tally.reads += 1
        return self._storage.expose() if copy else self._storage.view


def persistent_look(owner: VariableOwner, storage: Storage, tally: VariableCounters) -> Look:
    """Return a persistent local read, in C if possible."""
    look = LocalLook(owner, storage, tally)
    if storage.is_shared or which(owner.context.config.call_runner) == "python":
        return look
    local_copy = LocalCopy(storage, tally, storage.array.dtype, storage.array.shape)
    scope = AccessScope(owner.places, owner, owner.is_default)
    result: Look = access("Look", look, scope, local_copy)
    return result


class PersistentWrite:
    """A persistent write in Python: a function of the operand that returns a `StoreResult`.

    Args:
        owner: Owner of the variable.
        storage: This replica's copy.
        tally: Its counters.
        call: The persistent all-reduce, which applies its result to the copy.
        counts: Whether it is an increment of an AUTO variable.
    """

    def __init__(
        self,
        owner: VariableOwner,
        storage: Storage,
        tally: VariableCounters,
        call: Persistent,
        *,
        counts: bool,
    ) -> None:
        self._owner, self._storage, self._tally, self._counts = owner, storage, tally, counts
        self._call, self._communicator = call, owner.communicator
        self._channel = self._communicator.channel
        self._dtype, self._shape = storage.array.dtype, storage.array.shape

    def __call__(self, x: NDArray[Any], *, is_seen: bool = False) -> int:
        """Write; with `is_seen` the caller has checked whether a comparison of copies is due."""
        owner, storage, tally = self._owner, self._storage, self._tally
        if type(x) is not np.ndarray or x.shape != self._shape or x.dtype != self._dtype:
            return _FALLBACK
        stack, registry = owner.places.stack, owner.registry
        is_here = (
            stack[-1].owner is owner and stack[-1].context is CallContext.REPLICA
            if stack
            else owner.is_default
        )
        # The channel is another one in a block of sv.uneven, and after shutdown.
        if not is_here or self._communicator.channel is not self._channel:
            return _FALLBACK
        compared = None if registry is None or registry.is_free else registry
        is_unsure = compared is not None and not is_seen and tally.steps >= compared.until
        if is_unsure or not storage.mark():  # another thread is writing
            return _FALLBACK
        try:
            result = self._call(x, storage.writable(), None, owner.timeout)
        finally:
            storage.is_being_written = False
        if result is None:
            return _FALLBACK
        if compared is not None:
            compared.count(tally)
        tally.writes += 1
        tally.collectives += 1
        if self._counts:
            tally.added += 1
            if not stack and not tally.added % WRITES_PER_DECISION:
                return _SAMPLE
        return _STORED

    def build(self) -> Write:
        """Return the write in C if possible, else this one."""
        owner = self._owner
        if which(owner.context.config.call_runner) == "python":
            return self
        replica = CallContext.REPLICA
        scope = AccessScope(
            owner.places, owner, owner.is_default, self._communicator, self._channel, replica
        )
        local_copy = LocalCopy(self._storage, self._tally, self._dtype, self._shape)
        gate = cast("CheckGate | None", owner.registry)
        native: Write = access(
            "Write",
            self,
            scope,
            local_copy,
            call=self._call,
            watch=gate,
            is_increment=self._counts,
        )
        return native


class PersistentRead:
    """A persistent collective read in Python for a known context; None if nothing was done."""

    def __init__(
        self,
        owner: VariableOwner,
        storage: Storage,
        tally: VariableCounters,
        call: Persistent,
    ) -> None:
        self._owner, self._storage, self._tally, self._call = owner, storage, tally, call
        self._communicator = owner.communicator
        self._channel = self._communicator.channel

    def __call__(self, _copy: object) -> NDArray[Any] | None:
        """Return the combined copies of all replicas."""
        communicator = self._communicator
        if communicator.channel is not self._channel or communicator.uneven is not None:
            return None
        array, held = self._storage.held()  # as long as the second lives, nobody writes the first
        value = self._call(array, None, None, self._owner.timeout)
        del held
        if value is None:
            return None
        self._tally.collectives += 1
        return read_only(value)


def persistent_reads(
    owner: VariableOwner, storage: Storage, tally: VariableCounters, call: Persistent
) -> tuple[Read, Look]:
    """Return two persistent collective reads; each returns None if nothing was done.

    The first is for a known context; the second checks the scope of the thread, and counts the
    read.
    """
    communicator = owner.communicator
    scope = AccessScope(
        owner.places,
        owner,
        communicator=communicator,
        channel=communicator.channel,
        replica=CallContext.REPLICA,
    )
    local_copy = LocalCopy(storage, tally, storage.array.dtype, storage.array.shape)
    read = PersistentRead(owner, storage, tally, call)
    known: Read = access("Read", read, scope._replace(places=None), local_copy, call=call)
    look: Look = access("Read", plain_look, scope, local_copy, call=call)
    return known, look


def read_only(value: NDArray[Any]) -> NDArray[Any]:
    """Return a value as reads return it: nobody can make the view writable."""
    value.setflags(write=False)
    return value.view()


UFUNCS: dict[AccessKind, Any] = {
    AccessKind.ASSIGN: None,
    AccessKind.ASSIGN_ADD: np.add,
    AccessKind.ASSIGN_SUB: np.subtract,
}
PLAIN_WRITES: dict[AccessKind, Write] = dict.fromkeys(UFUNCS, plain_write)


class RegistryEntry:
    """The record of one variable in the registry of its strategy.

    All fields but `reference` and `counted` are equal on all replicas.
    """

    def __init__(
        self, name: str, number: int, nbytes: int, lot: int, good: str, *, is_auto: bool
    ) -> None:
        self.name, self.number, self.nbytes, self.lot = name, number, nbytes, lot
        self.is_auto, self.is_pinned = is_auto, False
        # A difference was reported: the next write, which may repair it, is not preceded by a
        # comparison.
        self.is_reported = False
        self.reference: weakref.ref[VariableState] | None = None
        self.counted = (0, 0, 0)  # the counters at the last agreement of the replicas
        self.good = good

    @property
    def is_open(self) -> bool:
        """Whether AUTO decides about it."""
        return self.is_auto and not self.is_pinned

    def state(self) -> VariableState | None:
        """Return the state of the variable, if it still exists in this process."""
        return None if self.reference is None else self.reference()


class VariableState:
    """The copy, the counters and the deferral of one variable on this replica."""

    def __init__(self, init: VariableInit) -> None:
        owner = init.owner
        self.owner, self.namespace, self.name = owner, init.namespace, init.name
        self.context = owner.context
        self.replicas = owner.communicator.size
        self.requested, self.aggregation = init.requested, init.aggregation
        self.synchronization, self.rule = resolve(init.requested)
        self.compression: VariableCompression | None = None  # of what travels in its sums
        if init.compressor is not None:
            self.rule += f"; its sums travel as {init.compressor.name}"
        # The pair decides, together with the context, what each access does.
        self.kind = f"{self.synchronization.name} {self.aggregation.name}"
        self.shape, self.dtype = init.value.shape, init.value.dtype
        self.tally = VariableCounters()
        # Flat buckets of grouped writes that begin with this variable, by operation and number of
        # variables.
        self.groups: dict[tuple[AccessKind, int], Any] = {}
        self.pace = "eager"
        self.is_pinned = False
        self.are_parts = False  # copies are parts of a whole; see `create_for_strategy`
        self.persistent_writes: dict[AccessKind, Write] = dict(PLAIN_WRITES)
        self.reading: dict[tuple[AccessKind, CallContext | None], Read] = {}
        self.queue: WriteQueue | None = None  # while increments are deferred
        # Deferrable increments: context, op and digest, by operation.
        self.increments: dict[str, tuple[CallContext, str, int]] = {}
        self.changes: list[tuple[int, str, str, str]] = []
        self.decided: tuple[int, str] | None = None  # step and reason of AUTO's last decision
        self.storage: Storage = owner.create_storage(init.value, self.synchronization)
        self.look = self._persistent_look()
        action = decide(
            self.synchronization, self.aggregation, CallContext.CROSS, AccessKind.READ_FROM
        )
        if action.travel is Travel.QUESTION:
            publish(owner, init.namespace, self)
        is_registered = self.synchronization is VariableSynchronization.ON_WRITE
        registry = owner.registry if is_registered else None
        self.entry: RegistryEntry | None = None if registry is None else registry.attach(self)
        self.is_counted = self.entry is not None and self.entry.is_auto

    # -- policy ------------------------------------------------------------------------------------

    def decide(self, operation: AccessKind) -> Action:
        """Return what the policy table says about an access here and now."""
        if self.context is not self.owner.context and operation is not AccessKind.LOCAL:
            raise UsageError(
                f"{self.describe(operation)}: its strategy has moved to a job with other members, "
                "and the variable has not: it is not part of the state. Write "
                "sv.elastic.State(…, name=variable), or make the variable inside the function of "
                "sv.elastic.run. `v.local_value()` still gives this replica's copy"
            )
        context = context_here(self.owner)
        if context is None:
            context = context_of(self.owner, self.describe(operation))  # raises
        action = decide(self.synchronization, self.aggregation, context, operation)
        if action.error is not None:
            call = f"{self.name}.{operation.value}(…)"
            raise action.error(
                f"{self.describe(operation)} ({self.synchronization.name}, aggregation "
                f"{self.aggregation.name}) in {context.value} context: {action.rule}. "
                "Write instead:\n    " + action.fix.format(name=self.name, call=call)
            )
        return action

    def describe(self, operation: AccessKind) -> str:
        """Return an access in words, for errors and call records."""
        return f"{operation.value} of variable {self.name!r}"

    def check_sum(self, label: str) -> None:
        """Raise ConfigError if the variable's dtype has no sum."""
        if self.dtype.kind == "b":
            raise ConfigError(
                f"{label}: bool has no {self.aggregation.name.lower()}; make the variable with "
                "dtype='int64', or with aggregation=sv.VariableAggregation.ONLY_FIRST_REPLICA"
            )

    # -- the copy ----------------------------------------------------------------------------------

    def keep(self, value: NDArray[Any]) -> None:
        """Make `value` this replica's copy."""
        with self.storage:
            self.storage.writable(keep=False)[...] = value

    def share(self, value: NDArray[Any]) -> NDArray[Any]:
        """Return this replica's share of a value that is split over the replicas."""
        communicator = self.owner.communicator
        return share_of(value, communicator.size, communicator.member_rank)

    def _persistent_look(self) -> Look:
        """Return a persistent read of the local copy, if reading never communicates."""
        mode = self.synchronization, self.aggregation
        actions = [decide(*mode, context, AccessKind.READ) for context in CallContext]
        is_own = all(action.travel is Travel.NOTHING and action.error is None for action in actions)
        return persistent_look(self.owner, self.storage, self.tally) if is_own else plain_look

    # -- counters and comparisons ------------------------------------------------------------------

    def count_read(self) -> None:
        """Count a read, also as one that follows an increment."""
        tally = self.tally
        if tally.added != tally.turned:
            tally.turned = tally.added
            tally.turns += 1
        tally.reads += 1

    def count_write(self) -> None:
        """Count a write that was a collective."""
        self.tally.writes += 1
        self.tally.collectives += 1

    def count_step(self) -> None:
        """Count a write for the schedule of replica checks."""
        registry = self.owner.registry
        if registry is not None and not registry.is_free:
            registry.count(self.tally)

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of increments, of reads after one, and of other writes."""
        return self.tally.added, self.tally.turns, self.tally.writes - self.tally.added

    def check_replicas(self) -> None:
        """Compare the copies before a write, if a comparison is due."""
        registry = self.owner.registry
        if registry is not None and not registry.is_free and registry.is_due(self.tally):
            registry.before_write((self,))

    # -- deferral ----------------------------------------------------------------------------------

    @property
    def is_deferred(self) -> bool:
        """Whether increments wait in the queue."""
        return self.queue is not None

    def flush(self) -> None:
        """Send the queued writes of this variable, if there are any."""
        if self.queue is not None:
            self.queue.flush(self)

    def sample_deferral(self) -> None:
        """Let AUTO decide after an increment outside every scope, if a decision is due."""
        if self.owner.registry is not None:
            self.owner.registry.after_write(self.name, self.tally.added)

    def change_pace(self, pace: str, step: int, reason: str) -> None:
        """Change to "eager" or "deferred" at the same point on all replicas, and record it."""
        self.changes.append((step, self.pace, pace, reason))
        self.pace, self.decided = pace, (step, reason)
        self.set_deferred(is_deferred=pace == "deferred" and self.replicas > 1)

    def set_deferred(self, *, is_deferred: bool) -> None:
        """Start or stop deferring increments, without recording it."""
        self.queue = queue_of(self.owner) if is_deferred else None
        self.persistent_writes.update(PLAIN_WRITES)  # deferred writes are not persistent
        # A read flushes the queue.
        self.look = plain_look if is_deferred else self._persistent_look()

    def set_pin(self, pace: str | None, step: int) -> None:
        """Fix the pace of an AUTO variable, or let AUTO decide again; on all replicas alike."""
        self.is_pinned = pace is not None
        self.change_pace(pace or "eager", step, "pinned" if pace else "pin taken off")
        registry = self.owner.registry
        if self.is_counted and registry is not None and self.entry is not None:
            registry.record_pin(self.entry, self.counts(), is_pinned=self.is_pinned)

    @property
    def pin(self) -> str | None:
        """The pace that the program has fixed; None if AUTO decides."""
        return self.pace if self.is_pinned else None

    def apply(self, operation: AccessKind, total: NDArray[Any]) -> None:
        """Apply an increment to the copy."""
        with self.storage:
            target = self.storage.writable()
            UFUNCS[operation](target, total, out=target, casting="same_kind")

    def apply_queued(self, operation: AccessKind, total: NDArray[Any]) -> None:
        """Apply the sum of all replicas' increments to the copy; called by the queue."""
        self.apply(operation, total)
        self.tally.collectives += 1


def copy_key(namespace: Any, name: str) -> int:
    """Return the key under which a process publishes its copy of a variable."""
    return fingerprint("copy", namespace, name)


def publish(owner: VariableOwner, namespace: Any, state: Any) -> None:
    """Let other replicas read this process's copy of a variable for as long as its state exists."""
    context = owner.context
    if context.engine is None:
        return
    published: weakref.WeakValueDictionary[int, Any] | None = context.extras.get("published_copies")
    if published is None:
        published = context.extras["published_copies"] = weakref.WeakValueDictionary()
        context.engine.publish(_finder(published))
    published[copy_key(namespace, state.name)] = state


def _finder(published: weakref.WeakValueDictionary[int, Any]) -> Any:
    def find(key: int) -> tuple[bytes, memoryview] | None:
        state = published.get(key)
        if state is None:
            return None
        storage: Storage = state.storage
        copy = storage.expose().copy()  # it may be under way for longer than the memory is mapped
        return pack_object([dtype_index(copy.dtype), list(copy.shape)]), copy.reshape(-1).view(
            np.uint8
        ).data

    return find


def state_of(variable: Any) -> VariableState:
    """Return the state of a variable whose copy is in this process."""
    state: VariableState = variable._state  # noqa: SLF001  (the one accessor of the state)
    return state
