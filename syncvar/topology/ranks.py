"""Ranks in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["rank_list", "rank_spans"]


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as people write them.

    Example:
        >>> rank_list([0, 1, 2, 5])
        'ranks 0-2, 5'
        >>> rank_list([3])
        'rank 3'
    """
    distinct = set(ranks)
    return ("rank " if len(distinct) == 1 else "ranks ") + rank_spans(distinct)


def rank_spans(ranks: Iterable[int]) -> str:
    """Return ranks in a short way: three or more in a row become a span.

    Example:
        >>> rank_spans([3, 0, 1, 2, 7])
        '0-3, 7'
        >>> rank_spans([0, 1, 3])
        '0, 1, 3'
    """
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans)
