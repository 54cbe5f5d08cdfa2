"""The fixed tree over logical shards: which nodes a rank can sum alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def split(lo: int, hi: int) -> int:
    """Return the point where T(lo, hi) is cut: lo + the largest power of two below hi - lo.

    Example:
        >>> split(0, 8), split(8, 13)
        (4, 12)
    """
    return int(lo + (1 << ((hi - lo - 1).bit_length() - 1)))


def runs_of(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending ids as ranges [start, stop).

    Example:
        >>> runs_of([0, 1, 2, 5])
        [(0, 3), (5, 6)]
    """
    runs: list[tuple[int, int]] = []
    for one in ids:
        if runs and runs[-1][1] == one:
            runs[-1] = (runs[-1][0], one + 1)
        else:
            runs.append((one, one + 1))
    return runs


def whole_nodes(runs: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return the largest nodes of the tree T(0, count) inside the ranges.

    Together they cover these.

    The nodes of the tree are the aligned blocks of 1, 2, 4, ... items, cut off at `count`. The
    ranges `runs` ascend and have gaps between them. There are at most 2 log2(count) nodes for each
    range.

    Example:
        >>> whole_nodes([(0, 5)], 24), whole_nodes([(3, 7)], 7), whole_nodes([(0, 7)], 7)
        ([(0, 4), (4, 5)], [(3, 4), (4, 7)], [(0, 7)])
    """
    nodes = []
    for start, stop in runs:
        lo = start
        while lo < stop:
            span = 1
            while lo % (2 * span) == 0 and span < count - lo and min(lo + 2 * span, count) <= stop:
                span *= 2
            nodes.append((lo, min(lo + span, count)))
            lo += span
    return nodes
