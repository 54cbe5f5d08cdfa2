"""Who writes which part of the values that all replicas have."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ElementRange", "shares"]


class ElementRange(NamedTuple):
    """A range of a value's elements, counted through in C order, and the rank that writes it."""

    key: str
    rank: int
    start: int
    stop: int


def shares(values: Sequence[tuple[str, int, int]], ranks: Sequence[int]) -> list[ElementRange]:
    """Split values, laid side by side, into one range of bytes for each rank, even up to an element.

    Args:
        values: (key, elements, bytes of an element) of each; one without elements has no part.
        ranks: Who writes.

    Example:
        >>> shares([("a", 3, 4), ("b", 5, 4)], [0, 1])
        [ElementRange(key='a', rank=0, start=0, stop=3), ElementRange(key='b', rank=0, start=0, stop=1), ElementRange(key='b', rank=1, start=1, stop=5)]
    """
    total = sum(count * itemsize for _, count, itemsize in values)
    bounds = [total * index // len(ranks) for index in range(len(ranks) + 1)]
    made, offset = [], 0
    for key, count, itemsize in values:
        edges = [min(max(-(-(bound - offset) // itemsize), 0), count) for bound in bounds]
        edges[-1] = count
        made += [
            ElementRange(key, rank, start, stop)
            for rank, start, stop in zip(ranks, edges, edges[1:], strict=False)
            if start < stop
        ]
        offset += count * itemsize
    return made
