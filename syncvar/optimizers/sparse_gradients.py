"""Gradients that name rows: (indices, values), or an object that has both, as tf.IndexedSlices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.optimizers.rules.update_rule import compute_dtype
from syncvar.variables.policy import AccessKind
from syncvar.variables.values import check_rows

if TYPE_CHECKING:
    from syncvar.variables.variable import Variable


def rows_of(gradient: Any, shape: tuple[int, ...]) -> tuple[Any, Any] | None:
    """Return the indices and values of a sparse gradient, None for a dense one.

    Example:
        >>> rows_of(([0, 2], np.ones((2, 3))), (5, 3))[0], rows_of(([1, 2], [3, 4]), (2, 2))
        ([0, 2], None)
    """
    pair = getattr(gradient, "indices", None), getattr(gradient, "values", None)
    # Tensors of PyTorch have methods of these names.
    if not any(one is None or callable(one) for one in pair):
        return pair
    if not isinstance(gradient, tuple) or len(gradient) != 2:
        return None
    is_dense = shape[:1] == (2,) and all(_has_shape(one, shape[1:]) for one in gradient)
    return None if is_dense else gradient


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    try:
        return bool(np.shape(value) == shape)
    except ValueError:  # of lists of unlike lengths
        return False


def dense_gradient(gradient: Any, variable: Variable) -> Any:
    """Return a sparse gradient as an array of the variable's shape; a dense one unchanged.

    Values of a row that is named several times are added.

    Raises:
        RowOutOfRange: An index outside [0, rows).
        ConfigError: Indices that are not integers, values of a wrong shape or dtype.
    """
    shape = variable.shape
    pair = rows_of(gradient, shape)
    if pair is None:
        return gradient
    dtype = compute_dtype(variable.dtype)
    what = f"gradient of variable {variable.name!r}"
    rows = check_rows(AccessKind.SCATTER_ADD, *pair, shape, dtype, what)
    made = np.zeros(shape, dtype)
    np.add.at(made, rows.indices, rows.values)
    return made
