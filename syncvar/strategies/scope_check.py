"""Models of other libraries that a program makes in the scope of a strategy, which would not synchronize them."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection

_BASES = (("torch.nn", "Module"), ("keras.layers", "Layer"), ("tf_keras.layers", "Layer"))
"""Module and name of the base class of all models, by library."""


def _models() -> list[Any]:
    """Return all models of this process; empty where no such library is loaded.

    Cost: looks at each object that the garbage collector knows, about 30 ms for 500 000.
    """
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in _BASES)
    bases = tuple(base for base in loaded if isinstance(base, type))
    return [one for one in gc.get_objects() if issubclass(type(one), bases)] if bases else []


def model_ids() -> set[int]:
    """Return the identities of all models of PyTorch and Keras in this process."""
    return {id(one) for one in _models()}


def refuse_new_models(known: Collection[int]) -> None:
    """Raise UsageError where this process has made a model.

    Args:
        known: What `model_ids` returned before.
    """
    kinds = {type(one) for one in _models() if id(one) not in known}
    if kinds:
        names = ", ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)[:4])
        raise UsageError(
            f"this block of strategy.scope() makes a model of another library ({names}). A strategy synchronizes "
            f"variables of sv only, so each rank would train its own copy. Make the model outside the block, and "
            f'average its gradients: "A module of PyTorch" and "A model of Keras" in docs/migrating.md'
        )
