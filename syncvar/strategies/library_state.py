"""Modules, optimizers and models of other libraries: their state is read, and written from another rank's."""

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
    """Return modules whose state can be read and written.

    Args:
        modules: What the caller passed.
        call: Name of the public function, for the error.

    Raises:
        ConfigError: One has neither state_dict and load_state_dict nor get_weights and set_weights.
    """
    for one in modules:
        if isinstance(one, Group):
            raise ConfigError(
                f"{call} takes modules by position, and a group by its keyword: write {call}(group=group)"
            )
        if isinstance(one, Variable):
            raise ConfigError(
                f"{call} got the variable {one.name!r}: leave it out, for {call} brings all variables up to date by itself"
            )
        is_torch = _has(one, "state_dict", "load_state_dict")
        if isinstance(one, type) or not (is_torch or _has(one, "get_weights", "set_weights")):
            raise ConfigError(
                f"{call} takes modules and optimizers of PyTorch and models of Keras (with state_dict and load_state_dict, or "
                f"get_weights and set_weights), not {one!r:.80}: pass the module itself, or broadcast arrays yourself after the block"
            )
    return tuple(modules)


def _has(module: Any, read: str, write: str) -> bool:
    return callable(getattr(module, read, None)) and callable(getattr(module, write, None))


def update_modules(
    modules: Sequence[Any], root: int, group: Group | None, rank: int, timeout: float | None
) -> None:
    """Give every rank of a group the state that modules have on one of them. Collective.

    Args:
        modules: As `checked_modules` returned them, alike on all ranks.
        root: Rank in the group whose state counts.
        group: The ranks; None means the world.
        rank: This rank in the group.
        timeout: Seconds that each call waits; None for the job's default.
    """
    how: dict[str, Any] = {"root": root, "group": group, "timeout": timeout}
    for module in modules:
        if not _has(module, "state_dict", "load_state_dict"):
            weights = broadcast(module.get_weights(), **how)
            if rank != root:
                module.set_weights(weights)
            continue
        state = module.state_dict()
        is_of_arrays = not hasattr(module, "param_groups") and all(
            library_of(one) is not None for one in state.values()
        )
        newest = broadcast(state, **how) if is_of_arrays else broadcast_object(state, **how)
        if rank != root:
            module.load_state_dict(newest)
