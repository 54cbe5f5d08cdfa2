"""Gradients that name rows: (indices, values), or an object that has both, as tf.IndexedSlices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.optimizers.slots import compute_dtype
from syncvar.variables.policy import Operation
from syncvar.variables.rows import checked_rows

if TYPE_CHECKING:
    from syncvar.variables import Variable

__all__ = ["dense_gradient", "rows_of"]


def rows_of(gradient: Any) -> tuple[Any, Any] | None:
    """Return the indices and values of a gradient that names rows, None for another gradient.

    Example:
        >>> rows_of(([0, 2], np.ones((2, 3))))[0], rows_of(np.ones(3))
        ([0, 2], None)
    """
    pair = getattr(gradient, "indices", None), getattr(gradient, "values", None)
    # Tensors of PyTorch have methods of these names.
    if not any(one is None or callable(one) for one in pair):
        return pair
    return gradient if isinstance(gradient, tuple) and len(gradient) == 2 else None


def dense_gradient(gradient: Any, variable: Variable) -> Any:
    """Return a gradient of rows as an array of the variable's shape; another one as it is.

    Values of a row that is named several times are added up.

    Args:
        gradient: As the program passed it.
        variable: Whose gradient it is.

    Raises:
        RowOutOfRange: An index outside [0, rows).
        ConfigError: Indices that are no integers, values of a wrong shape or dtype.
    """
    pair = rows_of(gradient)
    if pair is None:
        return gradient
    shape, dtype = variable.shape, compute_dtype(variable.dtype)
    if pair is gradient and shape[:1] == (2,) and np.shape(pair[0]) == shape[1:]:
        return gradient  # a tuple of two values, for the two rows
    what = f"gradient of variable {variable.name!r}"
    rows = checked_rows(Operation.SCATTER_ADD, *pair, shape, dtype, what)
    made = np.zeros(shape, dtype)
    np.add.at(made, rows.indices, rows.values)
    return made
