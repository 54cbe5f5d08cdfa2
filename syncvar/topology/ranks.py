"""Ranks in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["rank_list"]


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as people write them.

    Example:
        >>> rank_list([0, 1, 2, 5])
        'ranks 0-2, 5'
        >>> rank_list([3])
        'rank 3'
    """
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans]
    single = len(spans) == 1 and spans[0][0] == spans[0][1]
    return ("rank " if single else "ranks ") + ", ".join(parts)
