"""Decide from signs of life when a rank is suspected and when it has failed; time is an argument.

The launcher's `Attempt` feeds it observations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Suspicion(NamedTuple):
    """A rank's new state.

    Args:
        rank: The rank.
        is_lost: True if it has failed, False if it is suspected.
        reason: Reason, as text.
    """

    rank: int
    is_lost: bool
    reason: str


@dataclass(slots=True)
class Health:
    """Signs of life of the ranks of one host or job.

    Args:
        suspect_after_s: Silence after which a rank is suspected, in seconds.
        lost_after_s: Silence after which a rank has failed, in seconds.
    """

    suspect_after_s: float
    lost_after_s: float
    _silent_since: dict[int, float] = field(default_factory=dict)
    _suspected: set[int] = field(default_factory=set)
    _lost: set[int] = field(default_factory=set)

    def observe(self, rank: int, sign: str, now: float) -> Suspicion | None:
        """Record one observation; return the rank's new state if it changed.

        Args:
            rank: The rank.
            sign: Empty for a sign of life, else the trouble ("its process is stopped (state T)").
            now: Seconds of a monotonic clock.
        """
        if not sign:
            self._silent_since.pop(rank, None)
            self._suspected.discard(rank)
            return None
        silence = now - self._silent_since.setdefault(rank, now)
        text = f"silent for {silence:.1f} s: {sign}"
        if silence >= self.lost_after_s and rank not in self._lost:
            self._lost.add(rank)
            return Suspicion(rank, is_lost=True, reason=text)
        if silence >= self.suspect_after_s and rank not in self._suspected:
            self._suspected.add(rank)
            return Suspicion(rank, is_lost=False, reason=f"suspect: {text}")
        return None
