"""Initial values that a function makes part by part, for large variables."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError
from syncvar.variables.array_protocol import ArrayProtocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

_PARAMETER = "shard_info"


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The part of a variable for which a function makes the initial value.

    Args:
        shape: Shape of the part.
        offset: Where it begins in the variable, by axis; only the first may exceed 0.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2))
        >>> def numbered(shard_info):
        ...     return shard_info.offset[0] + np.arange(shard_info.shape[0])
        >>> with strategy.scope():
        ...     table = sv.Variable(numbered, shape=5, dtype="int64")
        >>> table.row_ranges, table.numpy().tolist()
        ([[0, 3], [3, 5]], [0, 1, 2, 3, 4])
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def takes_shard_info(given: Any) -> bool:
    """Return whether an initial value is a function with a parameter named `shard_info`."""
    if not callable(given) or isinstance(given, ArrayProtocol):
        return False
    try:
        return _PARAMETER in inspect.signature(given).parameters
    except (TypeError, ValueError):  # of a function that tells nothing about itself
        return False


def checked_shape(base: str, shape: Any) -> tuple[int, ...] | None:
    """Return the requested shape, or None for that of the value."""
    if shape is None:
        return None
    try:
        lengths = tuple(
            operator.index(one) for one in (shape if isinstance(shape, tuple | list) else (shape,))
        )
    except TypeError:
        raise ConfigError(
            f"variable {base!r}: shape must be an integer or a tuple of integers, not {shape!r}"
        ) from None
    if any(length < 0 for length in lengths):
        raise ConfigError(f"variable {base!r}: no length of a shape may be negative: {shape!r}")
    return lengths


def require_shape(
    base: str, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a variable that a function makes part by part."""
    if shape is None or dtype is None:
        missing = " and ".join(
            name for name, given in (("shape=", shape), ("dtype=", dtype)) if given is None
        )
        raise ConfigError(
            f"variable {base!r}: an initial_value that takes shard_info makes parts of a variable, "
            f"so {missing} must say what the whole is: sv.Variable(fn, shape=(1000000, 64), "
            "dtype='float32')"
        )
    return shape, dtype


def whole(given: Callable[..., Any], shape: tuple[int, ...]) -> Callable[[], Any]:
    """Return a function that makes the whole variable as one part."""
    return lambda: given(shard_info=ShardInfo(shape, (0,) * len(shape)))
