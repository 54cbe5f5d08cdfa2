"""Orders of elements, a pure function of (count, seed, epoch)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def permutation(count: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """Return the order in which `count` elements are read in an epoch.

    The same on every machine and for every number of replicas: raw numbers of a bit generator, whose streams NumPy
    promises not to change, are sorted. (Of `Generator.permutation` no release promises that.)

    Args:
        count: Elements, at least 0.
        seed: At least 0.
        epoch: At least 0; each has another order.

    Returns:
        Every index once, intp[count].

    Cost: count log count; 0.1 s for a million.

    Example:
        >>> permutation(5, seed=0, epoch=0).tolist() == permutation(5, seed=0, epoch=0).tolist()
        True
        >>> sorted(permutation(5, seed=0, epoch=1).tolist())
        [0, 1, 2, 3, 4]
    """
    bits: Any = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(count), kind="stable")
