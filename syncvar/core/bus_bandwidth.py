"""By which factor the rate of a collective becomes one that can be compared with that of a link, as nccl-tests has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "2(n-1)/n": lambda size: 2 * (size - 1) / size,
    "(n-1)/n": lambda size: (size - 1) / size,
    "1": lambda _: 1.0,
}
"""What turns size / time into the rate at the bottleneck, by its formula; n is the number of ranks."""

_FORMULAS = {
    **dict.fromkeys(("all_reduce", "all_reduce_shards"), "2(n-1)/n"),
    **dict.fromkeys(("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"), "(n-1)/n"),
    **dict.fromkeys(("reduce", "broadcast", "scan", "exscan", "send", "recv"), "1"),
}


def bus_factor(collective: str, size: int) -> float:
    """Return by what the algorithm bandwidth of a call is multiplied; 0 where nobody knows, or no bytes are moved.

    Example:
        >>> bus_factor("all_reduce", 4), bus_factor("barrier", 4)
        (1.5, 0.0)
    """
    formula = _FORMULAS.get(collective)
    return BUS_FACTORS[formula](size) if formula is not None and size > 0 else 0.0
