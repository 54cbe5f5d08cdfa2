"""Broadcast the state of modules, optimizers and models of PyTorch and Keras."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.collectives.broadcast import broadcast
from syncvar.collectives.groups import Group
from syncvar.collectives.object_collectives import broadcast_object
from syncvar.core.array_interop import library_of
from syncvar.core.errors import ConfigError
from syncvar.variables.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Sequence


def checked_modules(modules: Sequence[Any], call: str) -> tuple[Any, ...]:
    """Return the modules as a tuple; raise ConfigError for one whose state has no accessors."""
    for one in modules:
        if isinstance(one, Group):
            raise ConfigError(
                f"{call} takes modules by position, and a group by its keyword: "
                f"write {call}(group=group)"
            )
        if isinstance(one, Variable):
            raise ConfigError(
                f"{call} got the variable {one.name!r}: leave it out, {call} updates all "
                f"variables by itself"
            )
        is_torch = _has(one, "state_dict", "load_state_dict")
        if isinstance(one, type) or not (is_torch or _has(one, "get_weights", "set_weights")):
            raise ConfigError(
                f"{call} takes modules and optimizers of PyTorch and models of Keras (with "
                f"state_dict and load_state_dict, or get_weights and set_weights), not "
                f"{one!r:.80}: pass the module itself, or broadcast arrays yourself after the block"
            )
    return tuple(modules)


def _has(module: Any, read: str, write: str) -> bool:
    return callable(getattr(module, read, None)) and callable(getattr(module, write, None))


def update_modules(
    modules: Sequence[Any], root: int, group: Group | None, rank: int, timeout: float | None
) -> None:
    """Broadcast the modules' state from `root` to all ranks of a group. Collective."""
    arguments: dict[str, Any] = {"root": root, "group": group, "timeout": timeout}
    for module in modules:
        if not _has(module, "state_dict", "load_state_dict"):
            weights = broadcast(module.get_weights(), **arguments)
            if rank != root:
                module.set_weights(weights)
            continue
        state = module.state_dict()
        has_only_arrays = not hasattr(module, "param_groups") and all(
            library_of(one) is not None for one in state.values()
        )
        send: Any = broadcast if has_only_arrays else broadcast_object
        newest = send(state, **arguments)
        if rank != root:
            module.load_state_dict(newest)
