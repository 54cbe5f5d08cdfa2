"""The owner of variables: protocols of a strategy, and the entered scopes that name the owner.

A scope stack has the entered scopes, runs and merges of one thread. Strategies push to it;
variables only read it.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from syncvar.bootstrap.process import current
from syncvar.bootstrap.process import joined as joined_context
from syncvar.core.errors import UsageError
from syncvar.variables.policy import CallContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from syncvar._native import VariableCounters
    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.policy import VariableSynchronization


class ScopeFrames(Protocol):
    """The entered scopes of the calling thread."""

    stack: list[Any]  # the innermost last


class ReplicaRegistry(Protocol):
    """The registry of a strategy's replicated variables, as `VariableRegistry` implements it."""

    is_free: bool
    until: int
    runs: int

    @property
    def may_defer(self) -> bool:
        """Whether AUTO may defer increments on this path."""

    def enter(self, name: str, nbytes: int, *, is_auto: bool) -> None:
        """Add a name that all replicas have agreed on."""

    def attach(self, state: Any) -> Any:
        """Connect a name with its variable, and return its entry."""

    def pop_missing(self) -> list[str]:
        """Return names whose variables no longer exist in this process, each once."""

    def forget(self, names: Iterable[str]) -> None:
        """Remove names on all replicas."""

    def record_pin(self, entry: Any, counts: tuple[int, int, int], *, is_pinned: bool) -> None:
        """Record that a program has pinned or released a variable."""

    def is_due(self, tally: VariableCounters) -> bool:
        """Return whether `before_write` has to be called before a write."""

    def before_write(self, states: Iterable[Any]) -> None:
        """Compare the copies that are due before these variables are written."""

    def count(self, tally: VariableCounters) -> None:
        """Count a write outside runs."""

    def after_write(self, name: str, increments: int) -> None:
        """Let AUTO decide after an increment outside every scope, if a decision is due."""


class VariableOwner(Protocol):
    """What a variable needs from the strategy that created it."""

    is_default: bool
    strict: bool
    check_cross_writes: bool
    reproducible: bool
    timeout: float | None
    context: ProcessContext
    check_every: int
    queue: Any  # `WriteQueue` of its deferred writes, from the first one on

    @property
    def places(self) -> ScopeFrames:
        """The entered scopes of the calling thread."""

    @property
    def registry(self) -> ReplicaRegistry | None:
        """The registry of its variables; None with one replica."""

    @property
    def communicator(self) -> Communicator:
        """The communicator of the replicas' group."""

    def variable_class(self, synchronization: Any) -> type[Any] | None:
        """Return the class of its variables with a synchronization; None for `Variable`."""

    def create_storage(self, value: NDArray[Any], synchronization: VariableSynchronization) -> Any:
        """Return the memory for a variable's copy, a `Storage`."""


class RemoteOptimizer(Protocol):
    """Applies optimizer steps to variables whose values are not in this process."""

    def step(
        self,
        rule: tuple[str, dict[str, Any]],
        rate: float,
        pairs: list[tuple[Any, Any]],
        combine: str,
    ) -> None:
        """Apply one step to each variable."""

    def prepare(self, rule: tuple[str, dict[str, Any]]) -> None:
        """Check that such steps are possible."""

    def transaction(self) -> AbstractContextManager[None]:
        """Return a context manager that makes all writes in its block atomic."""


class ScopeEntry(NamedTuple):
    """One entered scope, run or merge."""

    owner: VariableOwner
    context: CallContext


# Looking up an enum member takes as long as the rest of this module's hot path.
_CROSS, _SPMD = CallContext.CROSS, CallContext.SPMD

_makers: list[Callable[[], VariableOwner]] = []


def set_default(maker: Callable[[], VariableOwner]) -> None:
    """Set the function that creates a context's default strategy; `strategies` calls this once."""
    _makers[:] = [maker]


def default_owner() -> VariableOwner:
    """Return the context's default strategy, which spans the world."""
    extras = current().extras
    owner: VariableOwner | None = extras.get("default_strategy")
    if owner is None:
        if not _makers:
            importlib.import_module("syncvar.strategies.mirrored")  # which calls set_default
        owner = extras["default_strategy"] = _makers[0]()
    return owner


class ScopeStack(threading.local):
    """The scope stacks of a job: one for each thread."""

    def __init__(self) -> None:
        self.stack: list[ScopeEntry] = []


_before_joining = ScopeStack()


def stacks_of(context: ProcessContext) -> ScopeStack:
    """Return the scope stacks of a job, the same object as long as the job lasts."""
    extras = context.extras
    found: ScopeStack | None = extras.get("scope_stacks")
    return extras.setdefault("scope_stacks", ScopeStack()) if found is None else found


def scope_stack(context: ProcessContext | None = None) -> list[ScopeEntry]:
    """Return this thread's scope stack in a job (None: the current one), without joining a job."""
    return (current_stacks() if context is None else stacks_of(context)).stack


def current_stacks() -> ScopeStack:
    """Return the scope stacks of the current job, without joining."""
    context = joined_context()
    return _before_joining if context is None else stacks_of(context)


def keep_scopes_when_joining(context: ProcessContext) -> None:
    """Keep scopes that were entered before joining; for strategies that work without joining."""
    context.extras["scope_stacks"] = _before_joining


def current_scope() -> ScopeEntry | None:
    """Return the innermost scope, or None."""
    stack = scope_stack()
    return stack[-1] if stack else None


def current_owner() -> VariableOwner:
    """Return the current strategy."""
    place = current_scope()
    return default_owner() if place is None else place.owner


def context_of(owner: VariableOwner, label: str) -> CallContext:
    """Return the context of an access to a variable of `owner`."""
    context = context_here(owner)
    if context is None:
        raise UsageError(
            f"{label}: the variable belongs to another strategy than the scope it is used in; use "
            "it under `with variable.strategy.scope():`, or outside every scope"
        )
    return context


def context_here(owner: VariableOwner) -> CallContext | None:
    """Return the context of an access to a variable of `owner`; None where `context_of` raises."""
    stack = owner.places.stack  # those of the job that made it: an access must not join a job
    if not stack:
        return _SPMD if owner.is_default else _CROSS
    place: ScopeEntry = stack[-1]
    if place.owner is owner:
        return place.context
    return _CROSS if owner.is_default else None
