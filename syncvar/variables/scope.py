"""The stack of entered scopes, runs and merges of each thread; it says whose variables are created.

Strategies push to it; variables only read it.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, NamedTuple

from syncvar.bootstrap.process import current
from syncvar.bootstrap.process import joined as joined_context
from syncvar.core.errors import UsageError
from syncvar.variables.policy import CallContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.bootstrap.context import ProcessContext as Joined
    from syncvar.variables.variable_owner import VariableOwner


class ScopeEntry(NamedTuple):
    """One entered scope, run or merge."""

    owner: VariableOwner
    context: CallContext


# Looking up an enum member takes as long as the rest of this module's hot path.
_CROSS, _SPMD = (CallContext.CROSS, CallContext.SPMD)

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


def stacks_of(joined: Joined) -> ScopeStack:
    """Return the scope stacks of a job, the same object as long as the job lasts."""
    extras = joined.extras
    found: ScopeStack | None = extras.get("scope_stacks")
    return extras.setdefault("scope_stacks", ScopeStack()) if found is None else found


def scope_stack(joined: Joined | None = None) -> list[ScopeEntry]:
    """Return this thread's scope stack in a job (None: the current one), without joining a job."""
    return (current_stacks() if joined is None else stacks_of(joined)).stack


def current_stacks() -> ScopeStack:
    """Return the scope stacks of the current job, without joining."""
    context = joined_context()
    return _before_joining if context is None else stacks_of(context)


def keep_scopes_when_joining(joined: Joined) -> None:
    """Keep scopes that were entered before joining; for strategies that work without joining."""
    joined.extras["scope_stacks"] = _before_joining


def current_scope() -> ScopeEntry | None:
    """Return the innermost scope, or None."""
    stack = scope_stack()
    return stack[-1] if stack else None


def current_owner() -> VariableOwner:
    """Return the current strategy."""
    place = current_scope()
    return default_owner() if place is None else place.owner


def context_of(owner: VariableOwner, what: str) -> CallContext:
    """Return the context of an access to a variable of `owner`."""
    context = context_here(owner)
    if context is None:
        raise UsageError(
            f"{what}: the variable belongs to another strategy than the scope it is used in; use "
            "it under `with variable.strategy.scope():`, or outside every scope"
        )
    return context


def context_here(owner: VariableOwner) -> CallContext | None:
    """Return the context of an access to a variable of `owner`; None where `context_of` raises."""
    stack = owner.places.stack  # of the job that it was made in: asking must not join another one
    if not stack:
        return _SPMD if owner.is_default else _CROSS
    place: ScopeEntry = stack[-1]
    if place.owner is owner:
        return place.context
    return _CROSS if owner.is_default else None
