"""Where a thread is: inside which strategy's scope, run or merge; and whose variables it makes.

The stack of places belongs to (context, thread). The strategies push to it; variables only look.
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


_CROSS, _SPMD = (
    CallContext.CROSS,
    CallContext.SPMD,
)  # to look a member up by its name takes as long as all else here

_makers: list[Callable[[], VariableOwner]] = []


def set_default(maker: Callable[[], VariableOwner]) -> None:
    """Name the function that makes a context's default strategy; the room above calls this once."""
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
    """The stack of places of each thread, in one job.

    Args:
        stack: This thread's.
    """

    def __init__(self) -> None:
        self.stack: list[ScopeEntry] = []


_before_joining = ScopeStack()


def stacks(joined: Joined) -> ScopeStack:
    """Return the stacks of a job, which stay the same objects as long as it lasts."""
    extras = joined.extras
    found: ScopeStack | None = extras.get("places")
    return extras.setdefault("places", ScopeStack()) if found is None else found


def places(joined: Joined | None = None) -> list[ScopeEntry]:
    """Return this thread's stack of places in a job (None: the one in force), to look at and to push to. Asking does not join."""
    return (stacks_here() if joined is None else stacks(joined)).stack


def stacks_here() -> ScopeStack:
    """Return the stacks of the job in force, without joining."""
    context = joined_context()
    return _before_joining if context is None else stacks(context)


def take_places_along(joined: Joined) -> None:
    """Let what this process has entered before it joined stay entered; for strategies that work without joining."""
    joined.extras["places"] = _before_joining


def current_place() -> ScopeEntry | None:
    """Return the innermost place, or None outside every scope."""
    stack = places()
    return stack[-1] if stack else None


def current_owner() -> VariableOwner:
    """Return the strategy in force."""
    place = current_place()
    return default_owner() if place is None else place.owner


def context_of(owner: VariableOwner, what: str) -> CallContext:
    """Return the context in which a call on a variable of `owner` is made.

    Raises:
        UsageError: The innermost place belongs to another explicit strategy.
    """
    context = context_here(owner)
    if context is None:
        raise UsageError(
            f"{what}: the variable belongs to another strategy than the scope it is used in; use it under "
            f"`with variable.strategy.scope():`, or outside every scope"
        )
    return context


def context_here(owner: VariableOwner) -> CallContext | None:
    """Return the context in which a call on a variable of `owner` is made; None where `context_of` raises."""
    stack = owner.places.stack  # of the job that it was made in: asking must not join another one
    if not stack:
        return _SPMD if owner.is_default else _CROSS
    place: ScopeEntry = stack[-1]
    if place.owner is owner:
        return place.context
    return _CROSS if owner.is_default else None
