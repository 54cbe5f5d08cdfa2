"""Shuffled orders of elements, a pure function of (count, seed, epoch)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def permutation(count: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """Return every index below `count` once, in the order of an epoch.

    The order is the same on every machine: it sorts raw numbers of a bit generator, whose streams
    NumPy promises not to change. For `Generator.permutation` NumPy promises nothing.

    Cost: count log count; 0.1 s for a million.
    """
    bits: Any = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(count), kind="stable")
