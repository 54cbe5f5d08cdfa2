"""New arrays in the shared memory of a host: `sv.empty` and `sv.zeros`."""

from __future__ import annotations

import operator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.core.errors import ConfigError, SharedMemoryFull
from syncvar.shm.segment_file import bytes_in_words

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


def empty(shape: Any, dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return a new uninitialized array in the shared memory of the host. Not collective.

    Collectives read and write such arrays in place: `sv.all_reduce(x, out=x)` copies nothing if `x`
        is
    an array of `sv.empty` on every rank. Without shared memory (one rank on a host, or
    SYNCVAR_TRANSPORT=zmq) the array is an ordinary one.

    A forked child sees the same memory: its writes to such an array appear in the parent, and the
        other
    way round. A child that writes should take `x.copy()` first.

    Args:
        shape: An integer or a tuple of integers, each >= 0.
        dtype: Any dtype whose elements hold no references.

    Returns:
        A C-contiguous array. Its memory is freed when its last view is gone. It outlives
        `sv.shutdown()`.

    Raises:
        ConfigError: The shape or the dtype is wrong.
        SharedMemoryFull: There is no room in shared (or private) memory. The text names what is in
            use, and the setting `shm_bytes`.

    Cost: microseconds if freed memory is reused; else the system provides pages, 0.2 ms for each
        MiB.

    Example:
        >>> import syncvar as sv
        >>> sv.empty((2, 3), "float32").shape
        (2, 3)
    """
    lengths, kind = checked_shape_dtype(shape, dtype)
    shm = current().shm
    if shm is not None:
        return shm.empty(lengths, kind)
    try:
        return np.empty(lengths, kind)
    except (ValueError, MemoryError) as error:
        nbytes = prod(lengths) * kind.itemsize
        text = f"no room for {bytes_in_words(nbytes)} of private memory"
        raise SharedMemoryFull(f"{text} (this process shares none): {error}") from error


def zeros(shape: Any, dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return a new array of zeros in the host's shared memory; see `empty`.

    Example:
        >>> import syncvar as sv
        >>> sv.zeros(3)
        array([0., 0., 0.])
    """
    made = empty(shape, dtype)
    made[...] = 0
    return made


def checked_shape_dtype(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the lengths and the dtype; raise ConfigError if such an array cannot be shared."""
    try:
        lengths = tuple(
            operator.index(one) for one in (shape if isinstance(shape, tuple | list) else (shape,))
        )
    except TypeError:
        raise ConfigError(
            f"shape must be an integer or a tuple of integers, not {shape!r}"
        ) from None
    if any(length < 0 for length in lengths):
        raise ConfigError(f"no length of a shape may be negative: {shape!r}")
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"dtype must name a NumPy dtype, not {dtype!r} ({error})") from None
    if kind.hasobject:
        raise ConfigError(
            f"an array of {kind} cannot be shared between processes: its elements are references"
        )
    return lengths, kind
