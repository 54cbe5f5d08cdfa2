"""The state of one variable on this replica: copy, counters, cached accesses, deferral.

`Variable` is the public class. All other modules of this package work on its `VariableState`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native import VariableCounters
from syncvar.core.errors import ConfigError
from syncvar.variables.deferred_writes import WriteQueue, queue_of
from syncvar.variables.exact_split import share_of
from syncvar.variables.persistent_access import cached_look, uncached_look, uncached_write
from syncvar.variables.policy import (
    AccessKind,
    Action,
    CallContext,
    Travel,
    VariableSynchronization,
    decide,
    resolve,
)
from syncvar.variables.remote_read import publish
from syncvar.variables.scope import context_here, context_of

if TYPE_CHECKING:
    import weakref

    from numpy.typing import NDArray

    from syncvar.variables.create import VariableInit
    from syncvar.variables.persistent_access import Look, Read, Write

UFUNCS: dict[AccessKind, Any] = {
    AccessKind.ASSIGN: None,
    AccessKind.ASSIGN_ADD: np.add,
    AccessKind.ASSIGN_SUB: np.subtract,
}
UNPREPARED: dict[AccessKind, Write] = dict.fromkeys(UFUNCS, uncached_write)


class RegistryEntry:
    """The record of one variable in the registry of its strategy.

    All fields but `reference` and `counted` are equal on all replicas.
    """

    __slots__ = (
        "counted",
        "good",
        "is_auto",
        "is_pinned",
        "is_reported",
        "lot",
        "name",
        "nbytes",
        "number",
        "reference",
    )

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
        self.replicas = owner.communicator.size
        self.requested, self.aggregation = init.requested, init.aggregation
        self.synchronization, self.rule = resolve(init.requested)
        # The pair decides, together with the context, what each access does.
        self.kind = f"{self.synchronization.name} {self.aggregation.name}"
        self.shape, self.dtype = init.value.shape, init.value.dtype
        self.tally = VariableCounters()
        # Flat buckets of grouped writes that begin with this variable, by operation and number of
        # variables.
        self.groups: dict[tuple[AccessKind, int], Any] = {}
        self.pace = "eager"
        self.is_pinned = False
        self.are_parts = False  # copies are parts of a whole; see `in_place_update.make_beside`
        self.prepared: dict[AccessKind, Write] = dict(UNPREPARED)
        self.reading: dict[tuple[AccessKind, CallContext | None], Read] = {}
        self.queue: WriteQueue | None = None  # while increments are deferred
        # Deferrable increments: context, op and digest, by operation.
        self.increments: dict[str, tuple[CallContext, str, int]] = {}
        self.changes: list[tuple[int, str, str, str]] = []
        self.decided: tuple[int, str] | None = None  # step and reason of AUTO's last decision
        make = owner._create_storage  # noqa: SLF001  (part of the protocol of owners)
        self.storage = make(init.value, self.synchronization)
        self.look = self._prepared_look()
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
        """Return what the policy table says about an access here and now.

        Raises:
            UsageError: The access has no meaning, or the scope belongs to another strategy.
            NoAggregation: The access needs an aggregation.
        """
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

    def check_sum(self, what: str) -> None:
        """Raise ConfigError if the variable's dtype has no sum."""
        if self.dtype.kind == "b":
            raise ConfigError(
                f"{what}: bool has no {self.aggregation.name.lower()}; make the variable with "
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

    def _prepared_look(self) -> Look:
        """Return a cached read of the local copy, if reading never communicates."""
        actions = [
            decide(self.synchronization, self.aggregation, context, AccessKind.READ)
            for context in CallContext
        ]
        is_own = all(action.travel is Travel.NOTHING and action.error is None for action in actions)
        return cached_look(self.owner, self.storage, self.tally) if is_own else uncached_look

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

    def change_pace(self, pace: str, step: int, why: str) -> None:
        """Change to "eager" or "deferred" at the same point on all replicas, and record it."""
        self.changes.append((step, self.pace, pace, why))
        self.pace, self.decided = pace, (step, why)
        self.set_deferred(is_deferred=pace == "deferred" and self.replicas > 1)

    def set_deferred(self, *, is_deferred: bool) -> None:
        """Start or stop deferring increments, without recording it."""
        self.queue = queue_of(self.owner) if is_deferred else None
        self.prepared.update(UNPREPARED)  # deferred writes are not cached
        self.look = (
            uncached_look if is_deferred else self._prepared_look()
        )  # a read flushes the queue

    def apply_queued(self, operation: AccessKind, total: NDArray[Any]) -> None:
        """Apply the sum of all replicas' increments to the copy; called by the queue."""
        with self.storage:
            target = self.storage.writable()
            UFUNCS[operation](target, total, out=target, casting="same_kind")
        self.tally.collectives += 1


def state_of(variable: Any) -> VariableState:
    """Return the state of a variable whose copy is in this process."""
    state: VariableState = variable._state  # noqa: SLF001  (the one accessor of the state)
    return state
