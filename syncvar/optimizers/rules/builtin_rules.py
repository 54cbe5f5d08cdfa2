"""The built-in update rules, one class each; a new one on servers goes here."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from syncvar.core.errors import ConfigError
from syncvar.optimizers.hyperparameters import checked_number
from syncvar.optimizers.rules.exact_math import BLOCK, power, sum_of_squares
from syncvar.optimizers.rules.update_rule import UpdateRule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.optimizers.rules.update_rule import Arrays, SteppedVariable


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


class AdamRule(UpdateRule):
    """m and v are decaying means of g and g * g; w -= rate * m' / (sqrt(v') + epsilon)."""

    slot_initials: ClassVar[dict[str, float]] = {"m": 0.0, "v": 0.0}
    counts_steps: ClassVar[bool] = True

    def __init__(self, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7) -> None:
        self._beta_1 = checked_number("beta_1", beta_1, 0.0, 1.0)
        self._beta_2 = checked_number("beta_2", beta_2, 0.0, 1.0)
        self._epsilon = checked_number("epsilon", epsilon)
        super().__init__(beta_1=self._beta_1, beta_2=self._beta_2, epsilon=self._epsilon)

    def _factors(self, rate: float, step: int) -> tuple[float, ...]:
        # m' / (sqrt(v') + epsilon) = (m / c1) * r / (sqrt(v) + epsilon * r), r = sqrt(c2): two
        # operations on arrays fewer
        first, root = 1 - power(self._beta_1, step), sqrt(1 - power(self._beta_2, step))
        return rate * root / first, self._epsilon * root, 1 - rate * self.decay

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: Arrays,
        scratch: NDArray[Any],
        factors: tuple[float, ...],
    ) -> None:
        factor, epsilon, kept = factors
        self._direction(gradient, slots, scratch, epsilon)
        np.multiply(gradient, factor, out=gradient)
        if self.decays_variable and self.decay:
            np.multiply(weight, kept, out=weight)
        np.subtract(weight, gradient, out=weight)

    def _direction(
        self, gradient: NDArray[Any], slots: Arrays, scratch: NDArray[Any], epsilon: float
    ) -> None:
        """Update m and v, and replace `gradient` by m / (sqrt(v) + epsilon)."""
        mean, squares = slots
        np.multiply(mean, self._beta_1, out=mean)
        np.multiply(gradient, 1 - self._beta_1, out=scratch)
        np.add(mean, scratch, out=mean)
        np.multiply(gradient, gradient, out=gradient)
        np.multiply(gradient, 1 - self._beta_2, out=gradient)
        np.multiply(squares, self._beta_2, out=squares)
        np.add(squares, gradient, out=squares)
        np.sqrt(squares, out=gradient)
        np.add(gradient, epsilon, out=gradient)
        np.divide(mean, gradient, out=gradient)


class AdamWRule(AdamRule):
    """Adam with weight decay of the variable itself."""

    decays_variable: ClassVar[bool] = True
    decay = 0.01


class LAMBRule(AdamRule):
    """Adam's step, scaled for each variable by the quotient of its norm and the step's."""

    decays_variable: ClassVar[bool] = True
    decay = 0.01

    def _factors(self, rate: float, step: int) -> tuple[float, ...]:
        first, root = 1 - power(self._beta_1, step), sqrt(1 - power(self._beta_2, step))
        return root / first, self._epsilon * root, rate

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: Arrays,
        scratch: NDArray[Any],
        factors: tuple[float, ...],
    ) -> None:
        """Make `gradient` the direction u; `_advance` scales it when its norm is known."""
        self._direction(gradient, slots, scratch, factors[1])
        np.multiply(gradient, factors[0], out=gradient)
        if self.decay:
            np.multiply(weight, self.decay, out=scratch)
            np.add(gradient, scratch, out=gradient)

    def _advance(
        self,
        weight: NDArray[Any],
        part: SteppedVariable,
        slots: Arrays,
        factors: tuple[float, ...],
        room: NDArray[Any],
    ) -> None:
        super()._advance(weight, part, slots, factors, room)
        target, direction = weight.reshape(-1), part.gradient.reshape(-1)
        ours, theirs = sqrt(sum_of_squares(target, room)), sqrt(sum_of_squares(direction, room))
        ratio = ours / theirs if ours > 0 and theirs > 0 else 1.0
        for start in range(0, target.size, BLOCK):
            piece = direction[start : start + BLOCK]
            np.multiply(piece, factors[2] * ratio, out=piece)
            np.subtract(target[start : start + BLOCK], piece, out=target[start : start + BLOCK])
