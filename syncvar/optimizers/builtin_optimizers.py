"""The public optimizers: each names its hyperparameters and its update rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.custom_rules import CustomRule
from syncvar.optimizers.update_rules import (
    AdagradRule,
    AdamRule,
    AdamWRule,
    LAMBRule,
    MomentumRule,
    Options,
    RMSPropRule,
    SGDRule,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.optimizers.update_rules import Rate


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
        nesterov: bool = False,  # noqa: FBT001, FBT002  (public signature)
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, MomentumRule(momentum, nesterov=nesterov), **options)


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
        centered: bool = False,  # noqa: FBT001, FBT002  (public signature)
        **options: Unpack[Options],
    ) -> None:
        rule = RMSPropRule(rho, momentum, epsilon, centered=centered)
        super().__init__(learning_rate, rule, **options)


class Adam(Optimizer):
    """Adam: w -= learning_rate * m' / (sqrt(v') + epsilon).

    m and v are decaying means of g and g * g. m' = m / (1 - beta_1^t) and v' = v / (1 - beta_2^t)
    correct for the zeros that m and v start with. That is Algorithm 1 of the paper, as in PyTorch
    and optax; Keras adds epsilon to sqrt(v), not to sqrt(v'). t counts the steps of the variable,
    not of the optimizer, so a variable that had no gradient at first is corrected like any other.

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

    _rule_class: ClassVar[type[AdamRule]] = AdamRule

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        rule = self._rule_class(beta_1, beta_2, epsilon)
        super().__init__(learning_rate, rule, **options)


class AdamW(Adam):
    """Adam with decoupled weight decay: w -= learning_rate * weight_decay * w.

    Args:
        learning_rate: A number or a function of the step.
        beta_1: Decay of m, in [0, 1).
        beta_2: Decay of v, in [0, 1).
        epsilon: Keeps the quotient finite.
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

    _rule_class: ClassVar[type[AdamRule]] = AdamWRule

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
    """LAMB: Adam's direction, scaled for each variable by its own norm.

    `u = m' / (sqrt(v') + epsilon) + weight_decay * w; w -= learning_rate * (|w| / |u|) * u`. The
    quotient is 1 if either norm is zero. The paper's function phi is the identity.

    Args:
        learning_rate: A number or a function of the step.
        beta_1: Decay of m, in [0, 1).
        beta_2: Decay of v, in [0, 1).
        epsilon: Keeps the quotient finite.
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

    _rule_class: ClassVar[type[AdamRule]] = LAMBRule

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


class Custom(Optimizer):
    """Optimizer with an update rule of the program; see `update_rule`.

    For variables on servers the rule is in a module beside the script, or installed: servers import
    that module, and do not run the script. If the rule raises on a server, the server applies
    nothing of that push, and the worker that pushed gets ConfigError with the traceback.

    Args:
        rule: The function, or "module:name" of it.
        learning_rate: A number or a function of the step.
        **options: As `Optimizer`; all others are numbers for the rule.

    Raises:
        ConfigError: The rule is not registered, or cannot be imported.

    Example:
        >>> import syncvar as sv
        >>> @sv.optimizers.update_rule
        ... def sign(value, slots, gradient, numbers):
        ...     return value - numbers["learning_rate"] * numbers["scale"] * (gradient > 0)
        >>> w = sv.Variable([1.0, 2.0])
        >>> sv.optimizers.Custom(sign, 0.5, scale=2.0).apply_gradients([([3.0, -3.0], w)])
        >>> w.numpy()
        array([0., 2.], dtype=float32)
    """

    def __init__(
        self, rule: Callable[..., Any] | str, learning_rate: Rate = 0.01, **options: Any
    ) -> None:
        chosen: Any = {one: options.pop(one) for one in Options.__annotations__ if one in options}
        super().__init__(learning_rate, CustomRule(rule, **options), **chosen)
