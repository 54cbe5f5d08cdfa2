"""Optimizers: gradients of all replicas become one step, which every replica makes on its own copies.

    optimizer = sv.optimizers.Adam(1e-3, clip_norm=1.0)
    optimizer.apply_gradients(zip(gradients, weights))

* `base`: `apply_gradients`, the same for all; start reading there.
* `rule`: the step of one variable. `momentum`, `adaptive`, `adam`: the rules, arithmetic on arrays
  and nothing else. `custom`: those that programs write.
* `call`: what one call names, and its request. `plan`: its gradients, packed into one array that
  travels. `clipping`: what is done to them before the step. `slots`: the state, as variables.
* `arguments`, `arithmetic`: checks; powers and norms with the same bits on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.optimizers.adam import LAMB, Adam, AdamW
from syncvar.optimizers.adaptive import Adagrad, RMSProp
from syncvar.optimizers.base import Optimizer
from syncvar.optimizers.custom import Custom
from syncvar.optimizers.rules.custom_rules import update_rule
from syncvar.optimizers.sgd import SGD, Momentum, Nesterov

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Custom",
    "Momentum",
    "Nesterov",
    "Optimizer",
    "RMSProp",
    "update_rule",
]

RMSprop = RMSProp  # as Keras and torch write it

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from syncvar.core.migration_hints import missing

        raise missing("sv.optimizers", name, __all__)
