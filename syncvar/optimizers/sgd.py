"""Gradient descent, plain and with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.rules.builtin_rules import MomentumRule, SGDRule

if TYPE_CHECKING:
    from syncvar.optimizers.hyperparameters import Options, Rate


class SGD(Optimizer):
    """Gradient descent: w -= learning_rate * g.

    Args:
        learning_rate: A number or a function of the step.
        **options: As `Optimizer`.

    Source: Robbins and Monro 1951.

    Example:
        >>> import syncvar as sv
        >>> w = sv.Variable([1.0, 2.0])
        >>> optimizer = sv.optimizers.SGD(learning_rate=lambda step: 0.5 / (step + 1))
        >>> for _ in range(2):
        ...     optimizer.apply_gradients([([1.0, 1.0], w)])
        >>> w.numpy(), optimizer.iterations
        (array([0.25, 1.25], dtype=float32), 2)
    """

    def __init__(self, learning_rate: Rate = 0.01, **options: Unpack[Options]) -> None:
        super().__init__(learning_rate, SGDRule(), **options)


class Momentum(Optimizer):
    """Gradient descent with momentum: b = momentum * b + g; w -= learning_rate * b.

    With `nesterov` w -= learning_rate * (g + momentum * b). The learning rate stands outside the
    velocity, as in Polyak's heavy ball and in PyTorch, so that a change of it acts at once. Keras
    has it inside, which is the same while the learning rate does not change.

    Args:
        learning_rate: A number or a function of the step.
        momentum: In [0, 1).
        nesterov: Look ahead.
        **options: As `Optimizer`.

    Source: Polyak 1964; Nesterov 1983; Sutskever et al. 2013.

    Example:
        >>> import syncvar as sv
        >>> w = sv.Variable(1.0)
        >>> optimizer = sv.optimizers.Momentum(0.25, momentum=0.5)
        >>> for _ in range(2):
        ...     optimizer.apply_gradients([(1.0, w)])
        >>> float(w)
        0.375
    """

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, MomentumRule(momentum, nesterov), **options)


class Nesterov(Momentum):
    """`Momentum` with nesterov=True, under its own name.

    Args:
        learning_rate: A number or a function of the step.
        momentum: In [0, 1).
        **options: As `Optimizer`.

    Source: Nesterov 1983; Sutskever et al. 2013.

    Example:
        >>> import syncvar as sv
        >>> w = sv.Variable(1.0)
        >>> sv.optimizers.Nesterov(0.25, momentum=0.5).apply_gradients([(1.0, w)])
        >>> float(w)
        0.625
    """

    def __init__(
        self, learning_rate: Rate = 0.01, momentum: float = 0.9, **options: Unpack[Options]
    ) -> None:
        super().__init__(learning_rate, momentum, nesterov=True, **options)
