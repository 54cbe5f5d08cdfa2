"""Arrays in the memory that the processes of one host share."""

from __future__ import annotations

import operator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.core.errors import ConfigError, SharedMemoryFull
from syncvar.shm.segment_layout import bytes_in_words

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = ["checked_kind", "empty", "zeros"]


def empty(shape: Any, dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return a new array in the host's shm, with any content.

    Collectives read and write such arrays where they lie: `sv.all_reduce(x, out=x)` of arrays of `sv.empty` on every
    rank copies nothing. Where there is no shm (one rank on a host, SYNCVAR_TRANSPORT=zmq) it is an ordinary array. Not collective.

    A process that is forked from a rank shares shared memory's memory with it: what the child writes into such an array, the
    parent sees, and the other way round; an ordinary array would be the child's own. A child that writes takes `x.copy()` first.

    Args:
        shape: An integer or a tuple of integers, each >= 0.
        dtype: Any dtype whose elements hold no references.

    Returns:
        A C-contiguous array; its memory goes back to the shm when the last view of it is gone. It outlives `sv.shutdown()`.

    Raises:
        ConfigError: A wrong shape or dtype.
        SharedMemoryFull: There is no room, in the shm or in private memory; the text names what is in use, and `shm_bytes`.

    Cost: microseconds where freed memory is used again; else pages are asked of the system, 0.2 ms for each MiB.

    Example:
        >>> import syncvar as sv
        >>> sv.empty((2, 3), "float32").shape
        (2, 3)
    """
    lengths, kind = checked_kind(shape, dtype)
    shm = current().shm
    if shm is not None:
        return shm.empty(lengths, kind)
    try:
        return np.empty(lengths, kind)
    except (ValueError, MemoryError) as error:
        nbytes = prod(lengths) * kind.itemsize
        raise SharedMemoryFull(
            f"{bytes_in_words(nbytes)} of private memory asked for (this process shares none): {error}"
        ) from error


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


def checked_kind(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the lengths and the dtype that are asked for; raise ConfigError unless processes can share such an array."""
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
