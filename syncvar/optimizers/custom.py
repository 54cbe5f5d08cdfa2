"""Steps by an update rule that the program has written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.hyperparameters import Options
from syncvar.optimizers.rules.custom_rules import CustomRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncvar.optimizers.hyperparameters import Rate


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
