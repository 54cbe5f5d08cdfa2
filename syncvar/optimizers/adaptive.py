"""Step sizes by the size of past gradients: Adagrad and RMSProp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from syncvar.core.errors import ConfigError
from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.hyperparameters import Options, checked_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.optimizers.hyperparameters import Rate

__all__ = ["Adagrad", "RMSProp"]


class Adagrad(Optimizer):
    """Adagrad: s += g * g; w -= learning_rate * g / (sqrt(s) + epsilon).

    epsilon stands outside the root, as in PyTorch; Keras and optax have it inside.

    Args:
        learning_rate: A number or a function of the step.
        initial_accumulator_value: Of s.
        epsilon: Keeps the quotient finite.
        **options: As `Optimizer`.

    Source: Duchi, Hazan, Singer 2011.

    Example:
        >>> import syncvar as sv
        >>> w = sv.Variable(1.0)
        >>> sv.optimizers.Adagrad(0.25, epsilon=0.0).apply_gradients([(3.0, w)])
        >>> float(w)
        0.75
    """

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        self._initial = checked_number("initial_accumulator_value", initial_accumulator_value)
        self._epsilon = checked_number("epsilon", epsilon)
        numbers = {"initial_accumulator_value": self._initial, "epsilon": self._epsilon}
        super().__init__(learning_rate, numbers, **options)

    def _initials(self) -> dict[str, float]:
        return {"squares": self._initial}

    def _numbers(self, rate: float, step: int) -> tuple[float, ...]:
        return (rate,)

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: list[NDArray[Any]],
        scratch: NDArray[Any],
        numbers: tuple[float, ...],
    ) -> None:
        (squares,) = slots
        np.multiply(gradient, gradient, out=scratch)
        np.add(squares, scratch, out=squares)
        np.sqrt(squares, out=scratch)
        np.add(scratch, self._epsilon, out=scratch)
        np.divide(gradient, scratch, out=gradient)
        np.multiply(gradient, numbers[0], out=gradient)
        np.subtract(weight, gradient, out=weight)


class RMSProp(Optimizer):
    """RMSProp: s = rho * s + (1 - rho) * g * g; u = g / (sqrt(s) + epsilon); w -= learning_rate * u.

    epsilon stands outside the root, as in PyTorch; Keras and optax have it inside. `centered` takes the square of the mean
    gradient off s (Graves 2013, section 4.2, where epsilon is inside). With `momentum` b = momentum * b + u;
    w -= learning_rate * b.

    Args:
        learning_rate: A number or a function of the step.
        rho: Decay of the mean of squares, in [0, 1).
        momentum: In [0, 1); 0 for none.
        epsilon: Keeps the quotient finite.
        centered: Divide by the deviation instead of the root mean square.
        **options: As `Optimizer`.

    Source: Tieleman and Hinton 2012, lecture 6.5; Graves 2013.

    Example:
        >>> import syncvar as sv
        >>> w = sv.Variable(1.0)
        >>> sv.optimizers.RMSProp(0.25, rho=0.75, epsilon=0.0).apply_gradients([(3.0, w)])
        >>> float(w)
        0.5
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._rho = checked_number("rho", rho, 0.0, 1.0)
        self._momentum = checked_number("momentum", momentum, 0.0, 1.0)
        self._epsilon = checked_number("epsilon", epsilon)
        if not isinstance(centered, bool):
            raise ConfigError(f"centered must be True or False, not {centered!r}")
        self._centered = centered
        numbers = {
            "rho": self._rho,
            "momentum": self._momentum,
            "epsilon": self._epsilon,
            "centered": centered,
        }
        super().__init__(learning_rate, numbers, **options)

    def _initials(self) -> dict[str, float]:
        names = ["squares"]
        names += ["mean"] if self._centered else []
        names += ["momentum"] if self._momentum else []
        return dict.fromkeys(names, 0.0)

    def _numbers(self, rate: float, step: int) -> tuple[float, ...]:
        return (rate,)

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: list[NDArray[Any]],
        scratch: NDArray[Any],
        numbers: tuple[float, ...],
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
            np.maximum(scratch, 0, out=scratch)  # rounding may leave a little less than nothing
            np.sqrt(scratch, out=scratch)
        else:
            np.sqrt(squares, out=scratch)
        np.add(scratch, self._epsilon, out=scratch)
        np.divide(gradient, scratch, out=gradient)
        if self._momentum:
            velocity = others[-1]
            np.multiply(velocity, self._momentum, out=velocity)
            np.add(velocity, gradient, out=velocity)
            np.multiply(velocity, numbers[0], out=gradient)
        else:
            np.multiply(gradient, numbers[0], out=gradient)
        np.subtract(weight, gradient, out=weight)
