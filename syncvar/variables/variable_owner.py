"""The protocols of what variables need from above: strategy, registry, remote optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from syncvar._native import VariableCounters
    from syncvar.bootstrap.context import ProcessContext
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.policy import VariableSynchronization
    from syncvar.variables.storage import Storage


class ScopeFrames(Protocol):
    """The entered scopes of the calling thread, the innermost last."""

    stack: list[Any]


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

    def gone(self) -> list[str]:
        """Return names whose variables no longer exist in this process."""

    def forget(self, names: Iterable[str]) -> None:
        """Remove names on all replicas."""

    def pinned(self, entry: Any, counts: tuple[int, int, int], *, is_pinned: bool) -> None:
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

    def _variable_class(self, synchronization: Any) -> type[Any] | None:
        """Return the class of its variables with a synchronization; None for `Variable`."""

    def _create_storage(
        self, value: NDArray[Any], synchronization: VariableSynchronization
    ) -> Storage:
        """Return the memory for a variable's copy."""


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
