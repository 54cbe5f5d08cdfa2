"""The reproducible tree T(lo, hi) over ranks or shards: the order of its sums, and its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.schedule import Reduce

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from syncvar.algorithms.schedule import Chunk, Step


def tree_order(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Yield the combinations of the tree T(lo, hi), innermost first.

    T(lo, hi) = T(lo, mid) + T(mid, hi) with mid = lo + the largest power of two < hi - lo; T(lo,
    lo+1) is item lo. The subtrees that this makes are the aligned blocks of 1, 2, 4, ... items, so
    the tree is read off level by level.

    Cost: hi - lo - 1 pairs.

    Example:
        >>> list(tree_order(0, 5))
        [(0, 1), (2, 3), (0, 2), (0, 4)]
        >>> items = ["a", "b", "c", "d", "e"]
        >>> for target, source in tree_order(0, 5):
        ...     items[target] = f"({items[target]}+{items[source]})"
        >>> items[0]
        '(((a+b)+(c+d))+e)'
    """
    span = 1
    while span < hi - lo:
        for target in range(lo, hi - span, 2 * span):
            yield target, target + span
        span *= 2


def tree_steps(places: Sequence[Chunk], own: Chunk) -> Iterator[Step]:
    """Yield the local steps that sum by the tree T(0, len(places)), into the place that is `own`.

    Cost: len(places) - 1 reductions.

    Example:
        >>> from syncvar.algorithms.schedule import consecutive_chunks
        >>> from syncvar.algorithms.schedule import step_text
        >>> places = consecutive_chunks([1, 1, 1])
        >>> [step_text(step) for step in tree_steps(places, places[1])]
        ['w[1:2] = w[0:1] + w[1:2]', 'w[1:2] = w[1:2] + w[2:3]']
    """
    held = list(places)
    for left, right in tree_order(0, len(held)):
        if held[right] is own:
            yield Reduce(held[left], own, source_left=True)
            held[left] = own
        else:
            yield Reduce(held[right], held[left], source_left=False)


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
    """Return the largest nodes of the tree T(0, count) that together cover the ranges.

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
