"""Find models of PyTorch and Keras made in a strategy's scope: no strategy synchronizes them."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection

# Module and name of the base class of all models, by library.
_BASES = (("torch.nn", "Module"), ("keras.layers", "Layer"), ("tf_keras.layers", "Layer"))


def _models() -> list[Any]:
    """Return all models of this process. It visits every object of the garbage collector."""
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in _BASES)
    bases = tuple(base for base in loaded if isinstance(base, type))
    return [one for one in gc.get_objects() if issubclass(type(one), bases)] if bases else []


def model_ids() -> set[int]:
    """Return the identities of all models of PyTorch and Keras in this process."""
    return {id(one) for one in _models()}


def refuse_new_models(known: Collection[int]) -> None:
    """Raise UsageError if this process has made a model since `model_ids` returned `known`."""
    kinds = {type(one) for one in _models() if id(one) not in known}
    if kinds:
        names = ", ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)[:4])
        raise UsageError(
            f"this block of strategy.scope() makes a model of another library ({names}). A "
            f"strategy synchronizes variables of sv only, so each rank would train its own copy. "
            f"Make the model outside the block, and average its gradients: "
            f'"A module of PyTorch" and "A model of Keras" in docs/migrating.md'
        )
