"""Dtypes that can be communicated. In messages a dtype is an index into this table, never text."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError, WireError

if TYPE_CHECKING:
    import numpy as np

DTYPE_NAMES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
)
_INDEX = {name: index for index, name in enumerate(DTYPE_NAMES)}


@lru_cache(maxsize=64)
def dtype_index(dtype: np.dtype[Any]) -> int:
    """Return the index of a dtype in native byte order, or raise ConfigError."""
    index = _INDEX.get(dtype.name)
    if index is None:
        raise ConfigError(
            f"dtype {dtype} cannot be communicated; use one of {', '.join(DTYPE_NAMES)}"
        )
    return index


@lru_cache(maxsize=64)
def dtype_from_index(index: int) -> np.dtype[Any]:
    """Return the dtype at an index, or raise WireError."""
    import numpy as np

    if not 0 <= index < len(DTYPE_NAMES):
        raise WireError(f"unknown dtype index {index}")
    name = DTYPE_NAMES[index]
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ConfigError(
                "bfloat16 needs the package ml_dtypes: pip install ml_dtypes"
            ) from None
        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return, unused-ignore]
    return np.dtype(name)
