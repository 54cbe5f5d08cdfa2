"""The rules of Adagrad and RMSProp: step sizes from the size of past gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import ConfigError
from syncvar.optimizers.hyperparameters import checked_number
from syncvar.optimizers.rules.update_rule import UpdateRule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.optimizers.rules.update_rule import Arrays


class AdagradRule(UpdateRule):
    """s += g * g; w -= rate * g / (sqrt(s) + epsilon)."""

    def __init__(self, initial_accumulator_value: float = 0.0, epsilon: float = 1e-10) -> None:
        self._initial = checked_number("initial_accumulator_value", initial_accumulator_value)
        self._epsilon = checked_number("epsilon", epsilon)
        super().__init__(initial_accumulator_value=self._initial, epsilon=self._epsilon)

    def initials(self) -> dict[str, float]:
        """Return the initial values of the slots, by name."""
        return {"squares": self._initial}

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: Arrays,
        scratch: NDArray[Any],
        factors: tuple[float, ...],
    ) -> None:
        (squares,) = slots
        np.multiply(gradient, gradient, out=scratch)
        np.add(squares, scratch, out=squares)
        np.sqrt(squares, out=scratch)
        np.add(scratch, self._epsilon, out=scratch)
        np.divide(gradient, scratch, out=gradient)
        np.multiply(gradient, factors[0], out=gradient)
        np.subtract(weight, gradient, out=weight)


class RMSPropRule(UpdateRule):
    """s = rho * s + (1 - rho) * g * g; u = g / (sqrt(s) + epsilon); w -= rate * u."""

    def __init__(
        self, rho: float = 0.9, momentum: float = 0.0, epsilon: float = 1e-7, centered: Any = False
    ) -> None:
        self._rho = checked_number("rho", rho, 0.0, 1.0)
        self._momentum = checked_number("momentum", momentum, 0.0, 1.0)
        self._epsilon = checked_number("epsilon", epsilon)
        if not isinstance(centered, bool):
            raise ConfigError(f"centered must be True or False, not {centered!r}")
        self._centered = centered
        super().__init__(
            rho=self._rho, momentum=self._momentum, epsilon=self._epsilon, centered=centered
        )

    def initials(self) -> dict[str, float]:
        """Return the initial values of the slots, by name."""
        names = ["squares"]
        names += ["mean"] if self._centered else []
        names += ["momentum"] if self._momentum else []
        return dict.fromkeys(names, 0.0)

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: Arrays,
        scratch: NDArray[Any],
        factors: tuple[float, ...],
    ) -> None:
        squares, *others = slots
        np.multiply(gradient, gradient, out=scratch)
        np.multiply(scratch, 1 - self._rho, out=scratch)
        np.multiply(squares, self._rho, out=squares)
        np.add(squares, scratch, out=squares)
        if self._centered:
            mean = others[0]
            np.multiply(gradient, 1 - self._rho, out=scratch)
            np.multiply(mean, self._rho, out=mean)
            np.add(mean, scratch, out=mean)
            np.multiply(mean, mean, out=scratch)
            np.subtract(squares, scratch, out=scratch)
            np.maximum(scratch, 0, out=scratch)  # rounding may leave less than 0
            np.sqrt(scratch, out=scratch)
        else:
            np.sqrt(squares, out=scratch)
        np.add(scratch, self._epsilon, out=scratch)
        np.divide(gradient, scratch, out=gradient)
        if self._momentum:
            velocity = others[-1]
            np.multiply(velocity, self._momentum, out=velocity)
            np.add(velocity, gradient, out=velocity)
            np.multiply(velocity, factors[0], out=gradient)
        else:
            np.multiply(gradient, factors[0], out=gradient)
        np.subtract(weight, gradient, out=weight)
