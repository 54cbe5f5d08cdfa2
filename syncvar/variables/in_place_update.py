"""Changing this replica's copies directly: what an optimizer needs, whose every replica makes the same step.

A write by `assign` asks what the replicas write, because their values may differ. A step has asked already: the gradients
have been combined, so every copy changes in the same way, and nothing is sent. Nothing else may use this door.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from syncvar.variables.create import VariableSpec, make_on_replicas
from syncvar.variables.shared_copy import written_once
from syncvar.variables.variable import Variable
from syncvar.variables.variable_state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncvar.variables.variable_owner import VariableOwner


def change_copies(
    variables: Sequence[Variable], change: Callable[..., None], *arguments: Any
) -> None:
    """Let `change([array, …], *arguments)` change this replica's copies of some variables in place; sends nothing.

    Copies that the replicas of a host share are changed once: all replicas meet for it.

    A view that a program has read before does not change, and whoever reads a copy from elsewhere sees the whole change of
    it or nothing.

    Args:
        variables: Each at most once, and always in the same order (their locks are taken in it).
        change: Must do the same on every replica for variables that are kept equal. It must not keep the arrays.
        arguments: For `change`.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable([1.0, 2.0])
        >>> change_copies([v], lambda arrays: arrays[0].fill(3.0))
        >>> v.numpy()
        array([3., 3.], dtype=float32)
    """
    states = [state_of(variable) for variable in variables]
    for state in states:  # deferred writes come first
        state.flush()
    storages = [state.storage for state in states]
    shared = next((state for state in states if state.storage.is_shared), None)
    with (
        written_once(shared.owner, storages) if shared is not None else nullcontext(),
        ExitStack() as changing,
    ):
        for storage in storages:
            changing.enter_context(storage)
        change([storage.writable() for storage in storages], *arguments)


def copy_of(variable: Variable) -> NDArray[Any]:
    """Return this replica's copy itself, to look at now and not to keep; counts as no read, and exposes nothing."""
    return state_of(variable).storage.array


def replace_copy(variable: Variable, value: NDArray[Any]) -> None:
    """Make a value this replica's copy; sends nothing. For state that comes from a checkpoint or from another variable.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> v = sv.Variable([1.0, 2.0])
        >>> replace_copy(v, np.array([5.0, 6.0]))
        >>> v.numpy()
        array([5., 6.], dtype=float32)
    """
    state_of(variable).keep(value)


def are_parts(variable: Variable) -> bool:
    """Return whether the copies are parts of a whole; see `make_beside`."""
    return state_of(variable).are_parts


def make_beside(owner: VariableOwner, wish: VariableSpec, *, parts: bool = False) -> Variable:
    """Return a new variable of a strategy that need not be the one in force. Collective, except under NONE.

    Args:
        owner: The strategy.
        wish: The arguments of `Variable`.
        parts: The copies are parts of a whole: restored on another number of replicas, each takes the mean of all.

    Raises:
        ConfigError: A wrong argument.
        MismatchError: The replicas ask for different variables.
    """
    made = Variable.from_init(make_on_replicas(owner, wish, stacklevel=2))
    state_of(made).are_parts = parts
    return made
