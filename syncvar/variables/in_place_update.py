"""Local changes of copies, for optimizers: the same on all replicas, without communication.

`assign` compares or combines what the replicas pass, because it may differ. A step has combined the
gradients already, so every copy changes in the same way. Only optimizers and checkpoints use this
module.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from syncvar.variables.create import VariableSpec, agree_on_variable
from syncvar.variables.shared_copy import write_once
from syncvar.variables.variable import Variable
from syncvar.variables.variable_state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncvar.variables.variable_owner import VariableOwner


def change_copies(
    variables: Sequence[Variable], change: Callable[..., None], *arguments: Any
) -> None:
    """Call `change([array, …], *arguments)` to change this replica's copies in place.

    This sends nothing; if the replicas of a host share copies, they meet, and each shared copy
    changes once. A view that a program has read before does not change; a one-sided read sees the
    whole change or nothing.

    Args:
        variables: Each at most once, always in the same order (their locks are taken in it).
        change: Must do the same on every replica for replicated variables, and must not keep the
            arrays.
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
        write_once(shared.owner, storages) if shared is not None else nullcontext(),
        ExitStack() as changing,
    ):
        for storage in storages:
            changing.enter_context(storage)
        change([storage.writable() for storage in storages], *arguments)


def copy_of(variable: Variable) -> NDArray[Any]:
    """Return this replica's copy itself, to read now and not to keep; does not count as a read."""
    return state_of(variable).storage.array


def replace_copy(variable: Variable, value: NDArray[Any]) -> None:
    """Replace this replica's copy, for restored or copied state; sends nothing."""
    state_of(variable).keep(value)


def are_parts(variable: Variable) -> bool:
    """Return whether the copies are parts of a whole; see `create_for_strategy`."""
    return state_of(variable).are_parts


def create_for_strategy(
    owner: VariableOwner, spec: VariableSpec, *, parts: bool = False
) -> Variable:
    """Create a variable of any strategy. Collective, except under NONE.

    With `parts` the copies are parts of a whole: restored on another number of replicas, each takes
    the mean.
    """
    made = Variable.from_init(agree_on_variable(owner, spec, stacklevel=2))
    state_of(made).are_parts = parts
    return made
