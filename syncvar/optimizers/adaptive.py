"""Step sizes by the size of past gradients: Adagrad and RMSProp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.rules.builtin_rules import AdagradRule, RMSPropRule

if TYPE_CHECKING:
    from syncvar.optimizers.hyperparameters import Options, Rate


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
        rule = AdagradRule(initial_accumulator_value, epsilon)
        super().__init__(learning_rate, rule, **options)


class RMSProp(Optimizer):
    """RMSProp: w -= learning_rate * u, where u = g / (sqrt(s) + epsilon).

    s = rho * s + (1 - rho) * g * g. epsilon stands outside the root, as in PyTorch; Keras and optax
    have it inside. `centered` subtracts the square of the mean gradient from s (Graves 2013,
    section 4.2, where epsilon is inside). With `momentum` b = momentum * b + u; w -= learning_rate
    * b.

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
        rule = RMSPropRule(rho, momentum, epsilon, centered)
        super().__init__(learning_rate, rule, **options)
