"""The rules of gradient descent, plain and with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from syncvar.core.errors import ConfigError
from syncvar.optimizers.hyperparameters import checked_number
from syncvar.optimizers.rules.update_rule import UpdateRule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.optimizers.rules.update_rule import Arrays


class SGDRule(UpdateRule):
    """w -= rate * g."""

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: Arrays,
        scratch: NDArray[Any],
        factors: tuple[float, ...],
    ) -> None:
        np.multiply(gradient, factors[0], out=gradient)
        np.subtract(weight, gradient, out=weight)


class MomentumRule(UpdateRule):
    """b = momentum * b + g; w -= rate * b, with `nesterov` w -= rate * (g + momentum * b)."""

    slot_initials: ClassVar[dict[str, float]] = {"momentum": 0.0}

    def __init__(self, momentum: float = 0.9, nesterov: Any = False) -> None:
        self._momentum = checked_number("momentum", momentum, 0.0, 1.0)
        if not isinstance(nesterov, bool):
            raise ConfigError(f"nesterov must be True or False, not {nesterov!r}")
        self._nesterov = nesterov
        super().__init__(momentum=self._momentum, nesterov=nesterov)

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: Arrays,
        scratch: NDArray[Any],
        factors: tuple[float, ...],
    ) -> None:
        (velocity,) = slots
        np.multiply(velocity, self._momentum, out=velocity)
        np.add(velocity, gradient, out=velocity)
        if self._nesterov:
            np.multiply(velocity, self._momentum, out=scratch)
            np.add(gradient, scratch, out=gradient)
            np.multiply(gradient, factors[0], out=gradient)
        else:
            np.multiply(velocity, factors[0], out=gradient)
        np.subtract(weight, gradient, out=weight)
