"""Rows given by indices: the operand of the scatter operations, and how it is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import ConfigError, RowOutOfRange
from syncvar.core.reduce_ops import reduction
from syncvar.variables.coercion import operand_array, plain_array
from syncvar.variables.policy import AccessKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UFUNCS: dict[AccessKind, np.ufunc] = {
    AccessKind.SCATTER_ADD: np.add,
    AccessKind.SCATTER_SUB: np.subtract,
    AccessKind.SCATTER_MUL: np.multiply,
    AccessKind.SCATTER_DIV: np.divide,
    AccessKind.SCATTER_MIN: np.minimum,
    AccessKind.SCATTER_MAX: np.maximum,
}
_OF_BOOLS = (AccessKind.SCATTER_UPDATE, AccessKind.SCATTER_MIN, AccessKind.SCATTER_MAX)


class RowSelection(NamedTuple):
    """Rows of a variable.

    Args:
        indices: int64[k], each in [0, rows).
        values: The variable's dtype, shape (k, *row).
    """

    indices: NDArray[Any]
    values: NDArray[Any]


def check_rows(
    operation: AccessKind,
    indices: Any,
    values: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    what: str,
) -> RowSelection:
    """Return the checked operand of a scatter operation.

    Raises:
        RowOutOfRange: An index outside [0, rows); negative ones too.
        ConfigError: A scalar variable, indices that are not integers, values of a wrong shape or
            dtype.
    """
    if not shape:
        raise ConfigError(
            f"{what}: a scalar has no rows; write v.assign(x), v.assign_add(x) or v.assign_sub(x)"
        )
    if dtype.kind == "b" and operation not in _OF_BOOLS:
        raise ConfigError(
            f"{what}: bool has no sum or product; use scatter_update, scatter_min or scatter_max"
        )
    if dtype.kind == "c" and operation in (AccessKind.SCATTER_MIN, AccessKind.SCATTER_MAX):
        raise ConfigError(f"{what}: complex numbers have no order")
    try:
        rows = plain_array(indices, f"{what}: indices")
    except ConfigError:
        if (row := _beyond(indices)) is None:
            raise
        raise RowOutOfRange(
            f"{what}: row {row} is outside the variable's {_inside(shape[0])}"
        ) from None
    if rows.dtype.kind not in "iu" and rows.size:
        raise ConfigError(f"{what}: indices must be integers, not {rows.dtype.name}")
    parts = operand_array(values, (*rows.shape, *shape[1:]), dtype, f"{what}: values")
    given = rows.reshape(-1)
    outside = given[(given < 0) | (given >= shape[0])]
    flat = given.astype(np.int64)
    if outside.size:
        row, count = int(outside[0]), shape[0]
        fix = (
            f"Negative rows do not count from the end: write rows % {count}"
            if row < 0 < count
            else (
                f"Leave such rows out: keep = rows < {count}; v.{operation.value}(rows[keep], "
                "values[keep])"
            )
        )
        raise RowOutOfRange(f"{what}: row {row} is outside the variable's {_inside(count)}. {fix}")
    return RowSelection(flat, np.ascontiguousarray(parts).reshape((flat.size, *shape[1:])))


def _inside(count: int) -> str:
    return f"rows 0 to {count - 1}" if count else "rows: it has none"


def _beyond(indices: Any) -> int | None:
    """Return the first index that no integer dtype holds; NumPy would make an array of objects."""
    if isinstance(indices, list | tuple):
        return next((found for item in indices if (found := _beyond(item)) is not None), None)
    return indices if isinstance(indices, int) and not -(1 << 63) <= indices < 1 << 64 else None


def apply_rows(
    operation: AccessKind, copy: NDArray[Any], rows: RowSelection, divisor: int = 1
) -> NDArray[Any]:
    """Return a copy with the rows applied one by one; half types are rounded once."""
    half = copy.dtype.itemsize == 2 and copy.dtype.kind in "fV"
    dtype = reduction("sum", copy.dtype).accumulate if half else copy.dtype
    made = np.array(copy, dtype=dtype, copy=True)
    values = rows.values.astype(dtype)
    if divisor > 1:
        values = values / np.asarray(divisor, dtype)
    if operation is AccessKind.SCATTER_UPDATE:
        made[rows.indices] = values  # of rows named twice, the last remains
    elif operation is AccessKind.SCATTER_DIV and dtype.kind in "iu":
        for row, value in zip(rows.indices, values, strict=True):
            made[row] = _truncated(made[row], value)
    else:
        _UFUNCS[operation].at(made, rows.indices, values)
    return made if made.dtype == copy.dtype else made.astype(copy.dtype)


def _truncated(dividend: NDArray[Any], divisor: NDArray[Any]) -> NDArray[Any]:
    quotient = dividend // divisor
    inexact = (dividend % divisor != 0) & ((dividend < 0) != (divisor < 0))
    return np.asarray(quotient + inexact.astype(quotient.dtype))
