"""Optimizers: the gradients of all replicas become one step, the same on every copy.

Start reading in `base`: `apply_gradients` is the same for all optimizers. `builtin_optimizers` has
the public classes; `update_rules` and `custom_rules` their arithmetic, which servers use too.
`gradient_call` and `gradient_buckets` carry and clip the gradients; `slots` keeps the state.

Example:
    >>> import syncvar as sv
    >>> w = sv.Variable([3.0, 4.0])
    >>> optimizer = sv.optimizers.SGD(0.5, clip_norm=1.0)
    >>> optimizer.apply_gradients(zip([[0.0, 2.0]], [w], strict=True))
    >>> w.numpy()
    array([3. , 3.5], dtype=float32)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.builtin_optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Custom,
    Momentum,
    Nesterov,
    RMSProp,
)
from syncvar.optimizers.custom_rules import update_rule
from syncvar.optimizers.diloco import DiLoCo

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Custom",
    "DiLoCo",
    "Momentum",
    "Nesterov",
    "Optimizer",
    "RMSProp",
    "update_rule",
]

RMSprop = RMSProp  # as Keras and torch write it

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from syncvar.core.migration_hints import missing_attribute

        raise missing_attribute("sv.optimizers", name, __all__)
