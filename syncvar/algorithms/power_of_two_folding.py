"""What algorithms for powers of two do with other numbers of ranks: the first pairs of ranks fold into one each.

With n = P + f, P the largest power of two up to n, ranks 2i and 2i+1 fold for i < f: the odd one
gives its vector to the even one, waits, and gets the result. The P ranks that go on are numbered in
rank order, so that contributions of neighbours stay neighbours.
"""

from __future__ import annotations

from typing import NamedTuple


class Folding(NamedTuple):
    """How the ranks of a group fold.

    Args:
        levels: log2 of the number of ranks that go on.
        folded: Pairs that fold.

    Example:
        >>> folding = Folding.of(5)
        >>> folding.levels, [folding.number(rank) for rank in range(5)], [folding.rank(number) for number in range(4)]
        (2, [0, None, 1, 2, 3], [0, 2, 3, 4])
    """

    levels: int
    folded: int

    @classmethod
    def of(cls, world_size: int) -> Folding:
        """Return how `world_size` ranks fold."""
        levels = world_size.bit_length() - 1
        return cls(levels, world_size - (1 << levels))

    def number(self, rank: int) -> int | None:
        """Return the number of a rank among those that go on, or None if it waits."""
        if rank >= 2 * self.folded:
            return rank - self.folded
        return None if rank % 2 else rank // 2

    def rank(self, number: int) -> int:
        """Return the rank with a number."""
        return 2 * number if number < self.folded else number + self.folded

    def partner(self, rank: int) -> int | None:
        """Return the rank that waits for a rank that goes on, or None."""
        return rank + 1 if rank < 2 * self.folded else None
