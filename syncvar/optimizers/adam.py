"""Adam and its descendants: AdamW (decoupled weight decay) and LAMB (for large batches)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Unpack

from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.rules.builtin_rules import AdamRule, AdamWRule, LAMBRule

if TYPE_CHECKING:
    from syncvar.optimizers.hyperparameters import Options, Rate


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

    u = m' / (sqrt(v') + epsilon) + weight_decay * w; w -= learning_rate * (|w| / |u|) * u. The
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
