"""Factors from algorithm bandwidth (bytes / time) to bus bandwidth, as nccl-tests defines them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Factor by its formula; n is the number of ranks.
BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "2(n-1)/n": lambda size: 2 * (size - 1) / size,
    "(n-1)/n": lambda size: (size - 1) / size,
    "1": lambda _: 1.0,
}

_FORMULAS = {
    **dict.fromkeys(("all_reduce", "all_reduce_shards"), "2(n-1)/n"),
    **dict.fromkeys(("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"), "(n-1)/n"),
    **dict.fromkeys(("reduce", "broadcast", "scan", "exscan", "send", "recv"), "1"),
}


def bus_factor(collective: str, size: int) -> float:
    """Return a collective's factor; 0 if it is unknown or moves no bytes."""
    formula = _FORMULAS.get(collective)
    return BUS_FACTORS[formula](size) if formula is not None and size > 0 else 0.0
