"""Steps of variables that live on servers: made there, by the same rule, with slots that live beside the variables."""

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
    """What an optimizer knows of the variables on servers that it steps.

    Args:
        name: Of its class.
        settings: Its numbers and choices.

    Attributes:
        steps: How many this worker has made.
        variables: Those that it has stepped, by name.
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
        """Let servers make a step.

        Args:
            stepper: Who sends it.
            pairs: Gradients and variables.
            rate: Learning rate.
            reduce: "sum" or "mean" of the workers' gradients; None as the mean.
            is_plain: Gradients have no weights, and are of no shards.

        Raises:
            ConfigError: Servers do not make such steps.
        """
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


def stepper_of(pairs: list[Any]) -> RemoteOptimizer | None:
    """Return who makes the steps of these variables, where their values are elsewhere.

    Raises:
        ConfigError: Those of some are, those of others not.
    """
    steppers = [
        getattr(pair[1], "stepper", None)
        if isinstance(pair, tuple | list) and len(pair) == 2
        else None
        for pair in pairs
    ]
    found = next((one for one in steppers if one is not None), None)
    if found is not None and any(one is not found for one in steppers):
        raise ConfigError(
            "variables on servers and others are in one call of apply_gradients; make an optimizer "
            "and a call for each"
        )
    return found
