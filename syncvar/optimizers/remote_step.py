"""Optimizer steps of server-side variables: servers run the same rule, and keep the slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from syncvar.variables.variable import Variable
    from syncvar.variables.variable_owner import RemoteOptimizer

_ONLY_HERE: dict[str, Any] = {
    "clip_norm": None,
    "clip_value": None,
    "accumulate": 1,
    "nonfinite": "allow",
}


class RemoteStep:
    """State of an optimizer for server-side variables.

    Attributes:
        steps: Number of steps of this worker.
        variables: The variables that it has stepped, by name.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._extra = [option for option, usual in _ONLY_HERE.items() if settings[option] != usual]
        self.rule = (
            name,
            {option: given for option, given in settings.items() if option not in _ONLY_HERE},
        )
        self.steps = 0
        self.variables: dict[str, Variable] = {}

    def step(
        self,
        stepper: RemoteOptimizer,
        pairs: list[Any],
        rate: float,
        reduce: str | None,
        *,
        is_plain: bool,
    ) -> None:
        """Send one step to the servers."""
        if self._extra or not is_plain:
            raise ConfigError(
                "servers make the steps of variables by their own gradients: leave out "
                f"{', '.join(self._extra) or 'weight and shards'}"
            )
        stepper.step(self.rule, rate, pairs, "sum" if reduce == "sum" else "mean")
        for gradient, variable in pairs:
            if gradient is not None:
                self.variables.setdefault(variable.name, variable)
        self.steps += 1


def remote_optimizer_of(pairs: list[Any]) -> RemoteOptimizer | None:
    """Return the remote optimizer of these variables, None for local ones."""
    steppers = [
        getattr(pair[1], "stepper", None)
        if isinstance(pair, tuple | list) and len(pair) == 2
        else None
        for pair in pairs
    ]
    found = next((one for one in steppers if one is not None), None)
    if found is not None and any(one is not found for one in steppers):
        raise ConfigError(
            "variables on servers and others are in one call of apply_gradients; make an "
            "optimizer and a call for each"
        )
    return found
