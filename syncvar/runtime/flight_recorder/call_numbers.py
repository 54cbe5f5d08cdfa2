"""Call numbers as a program counts them: the first call of a group on a rank is call 1.

In frames, each begin and end of a `strategy.run` continues at the next million, so that calls of
different runs never match (`syncvar.runtime.communicator`). Texts show the ordinal instead. Ranks
that have made the same calls have the same ordinals.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Gap = tuple[int, int]
"""First number of a block of calls, and how many numbers before it belong to no call."""

_BLOCKS_MAX = 2048  # as many as the ring of events: each kept block has a call
_GROUPS_MAX = 1024


class CallNumbers:
    """The numbers that each group of a process has left out."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[int, deque[Gap]] = OrderedDict()

    def skip(self, group: int, following: int, first: int) -> None:
        """Record that a group continues with another number than the following one."""
        gaps = self._gaps.get(group)
        if gaps is None:
            gaps = self._gaps[group] = deque(maxlen=_BLOCKS_MAX)
            if len(self._gaps) > _GROUPS_MAX:
                self._gaps.popitem(last=False)
        left_out = first - following + (gaps[-1][1] if gaps else 0)
        if gaps and gaps[-1][0] == following:  # the block has no call
            gaps[-1] = (first, left_out)
        else:
            gaps.append((first, left_out))

    def text(self, what: str, group: int, call: int) -> str:
        """Return a call with its ordinal, for messages.

        Example:
            >>> numbers = CallNumbers()
            >>> numbers.skip(0, 2, 1_000_000)
            >>> numbers.text("barrier", 0, 1), numbers.text("barrier", 0, 1_000_000)
            ('barrier (call 2)', 'barrier (call 3)')
        """
        return what if call < 0 else f"{what} (call {self.ordinal(group, call)})"

    def ordinal(self, group: int, call: int) -> int:
        """Return the ordinal of a call in its group, from 1."""
        gaps = self._gaps.get(group)
        return call + 1 if gaps is None else ordinal(list(gaps), call)

    def known(self) -> dict[int, list[Gap]]:
        """Return the gaps by group."""
        return {group: list(gaps) for group, gaps in self._gaps.copy().items()}


def ordinal(gaps: Sequence[Gap], call: int) -> int:
    """Return the ordinal of a call, from 1.

    Example:
        >>> gaps = [(1_000_000, 999_998), (3_000_000, 2_999_995)]
        >>> [ordinal(gaps, call) for call in (0, 1, 1_000_000, 3_000_001)]
        [1, 2, 3, 7]
    """
    index = bisect.bisect_right(gaps, call, key=lambda gap: gap[0])
    return call + 1 - (gaps[index - 1][1] if index else 0)
