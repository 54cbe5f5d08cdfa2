"""Adam and what was made of it: AdamW, which decays the variable itself, and LAMB, for large batches."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.exact_math import BLOCK, power, sum_of_squares
from syncvar.optimizers.hyperparameters import Options, checked_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.optimizers.hyperparameters import Rate
    from syncvar.optimizers.update_rule import SteppedVariable

__all__ = ["LAMB", "Adam", "AdamW"]


class Adam(Optimizer):
    """Adam: m and v are decaying means of g and g * g; w -= learning_rate * m' / (sqrt(v') + epsilon).

    m' = m / (1 - beta_1^t) and v' = v / (1 - beta_2^t) are free of the zeros that m and v started with. That is Algorithm 1
    of the paper, as in PyTorch and optax; Keras adds epsilon to sqrt(v), not to sqrt(v'). t counts the steps of the
    variable, not of the optimizer: a variable that had no gradient at first is corrected like any other.

    Args:
        learning_rate: A number or a function of the step.
        beta_1: Decay of m, in [0, 1).
        beta_2: Decay of v, in [0, 1).
        epsilon: Keeps the quotient finite.
        **options: As `Optimizer`.

    Source: Kingma and Ba 2015.

    Example:
        >>> import syncvar as sv
        >>> w = sv.Variable(1.0)
        >>> sv.optimizers.Adam(0.25, epsilon=0.0).apply_gradients([(3.0, w)])
        >>> round(float(w), 6)
        0.75
    """

    _slot_initials: ClassVar[dict[str, float]] = {"m": 0.0, "v": 0.0}
    _counts_steps: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        self._beta_1 = checked_number("beta_1", beta_1, 0.0, 1.0)
        self._beta_2 = checked_number("beta_2", beta_2, 0.0, 1.0)
        self._epsilon = checked_number("epsilon", epsilon)
        numbers = {"beta_1": self._beta_1, "beta_2": self._beta_2, "epsilon": self._epsilon}
        super().__init__(learning_rate, numbers, **options)

    def _numbers(self, rate: float, step: int) -> tuple[float, ...]:
        # m' / (sqrt(v') + epsilon) = (m / c1) * r / (sqrt(v) + epsilon * r), r = sqrt(c2): two operations on arrays fewer
        first, root = 1 - power(self._beta_1, step), sqrt(1 - power(self._beta_2, step))
        return rate * root / first, self._epsilon * root, 1 - rate * self._decay

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: list[NDArray[Any]],
        scratch: NDArray[Any],
        numbers: tuple[float, ...],
    ) -> None:
        factor, epsilon, kept = numbers
        self._direction(gradient, slots, scratch, epsilon)
        np.multiply(gradient, factor, out=gradient)
        if self._decays_variable and self._decay:
            np.multiply(weight, kept, out=weight)
        np.subtract(weight, gradient, out=weight)

    def _direction(
        self,
        gradient: NDArray[Any],
        slots: list[NDArray[Any]],
        scratch: NDArray[Any],
        epsilon: float,
    ) -> None:
        """Move m and v on; `gradient` becomes m / (sqrt(v) + epsilon)."""
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


class AdamW(Adam):
    """Adam with the decay taken off the variable instead of added to the gradient: w -= learning_rate * weight_decay * w.

    Args:
        learning_rate: A number or a function of the step.
        beta_1: As Adam.
        beta_2: As Adam.
        epsilon: As Adam.
        weight_decay: Decoupled; multiplied by the learning rate, as in PyTorch and optax.
        **options: As `Optimizer`.

    Source: Loshchilov and Hutter 2019.

    Example:
        >>> import syncvar as sv
        >>> w = sv.Variable(1.0)
        >>> sv.optimizers.AdamW(0.25, weight_decay=0.5).apply_gradients([(0.0, w)])
        >>> float(w)
        0.875
    """

    _decays_variable: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        options.setdefault("weight_decay", 0.01)
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **options)


class LAMB(Adam):
    """Adam's direction, scaled for each variable by its own norm: u = m' / (sqrt(v') + epsilon) + weight_decay * w.

    w -= learning_rate * (|w| / |u|) * u; the quotient is 1 where either norm is zero. The paper's function phi is the
    identity.

    Args:
        learning_rate: A number or a function of the step.
        beta_1: As Adam.
        beta_2: As Adam.
        epsilon: As Adam.
        weight_decay: Decoupled.
        **options: As `Optimizer`.

    Source: You et al. 2020, Algorithm 2.

    Example:
        >>> import syncvar as sv
        >>> w = sv.Variable([3.0, 4.0])
        >>> optimizer = sv.optimizers.LAMB(0.25, epsilon=0.0, weight_decay=0.0)
        >>> optimizer.apply_gradients([([1.0, 1.0], w)])
        >>> w.numpy().round(3)
        array([2.116, 3.116], dtype=float32)
    """

    _decays_variable: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        **options: Unpack[Options],
    ) -> None:
        options.setdefault("weight_decay", 0.01)
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **options)

    def _numbers(self, rate: float, step: int) -> tuple[float, ...]:
        first, root = 1 - power(self._beta_1, step), sqrt(1 - power(self._beta_2, step))
        return root / first, self._epsilon * root, rate

    def _update(
        self,
        weight: NDArray[Any],
        gradient: NDArray[Any],
        slots: list[NDArray[Any]],
        scratch: NDArray[Any],
        numbers: tuple[float, ...],
    ) -> None:
        """Make `gradient` the direction u; `_advance` scales it when its norm is known."""
        self._direction(gradient, slots, scratch, numbers[1])
        np.multiply(gradient, numbers[0], out=gradient)
        if self._decay:
            np.multiply(weight, self._decay, out=scratch)
            np.add(gradient, scratch, out=gradient)

    def _advance(
        self,
        weight: NDArray[Any],
        part: SteppedVariable,
        slots: list[NDArray[Any]],
        numbers: tuple[float, ...],
        room: NDArray[Any],
    ) -> None:
        super()._advance(weight, part, slots, numbers, room)
        target, direction = weight.reshape(-1), part.gradient.reshape(-1)
        ours, theirs = sqrt(sum_of_squares(target, room)), sqrt(sum_of_squares(direction, room))
        ratio = ours / theirs if ours > 0 and theirs > 0 else 1.0
        for start in range(0, target.size, BLOCK):
            piece = direction[start : start + BLOCK]
            np.multiply(piece, numbers[2] * ratio, out=piece)
            np.subtract(target[start : start + BLOCK], piece, out=target[start : start + BLOCK])
