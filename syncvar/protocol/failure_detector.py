"""Who is silent, and since when: signs of life in, suspicion and loss out. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Suspicion(NamedTuple):
    """What changed about a rank.

    Args:
        rank: Which one.
        is_lost: True for lost, False for suspected.
        reason: Why, in words.
    """

    rank: int
    is_lost: bool
    reason: str


@dataclass(slots=True)
class Health:
    """Signs of life of the ranks of one host or job.

    Args:
        suspect_after_s: Silence after which a rank is suspected, in seconds.
        lost_after_s: Silence after which it is lost, in seconds.
    """

    suspect_after_s: float
    lost_after_s: float
    _silent_since: dict[int, float] = field(default_factory=dict)
    _suspected: set[int] = field(default_factory=set)
    _lost: set[int] = field(default_factory=set)

    def observe(self, rank: int, sign: str, now: float) -> Suspicion | None:
        """Take in one look at a rank.

        Args:
            rank: Which one.
            sign: Empty for a sign of life, else what is wrong ("its process is stopped (state T)").
            now: Seconds of a monotonic clock.

        Example:
            >>> health = Health(5.0, 15.0)
            >>> health.observe(2, "stopped", 0.0)
            >>> health.observe(2, "stopped", 6.0).is_lost, health.observe(2, "stopped", 16.0).is_lost
            (False, True)
        """
        if not sign:
            self._silent_since.pop(rank, None)
            self._suspected.discard(rank)
            return None
        since = self._silent_since.setdefault(rank, now)
        silence = now - since
        if silence >= self.lost_after_s and rank not in self._lost:
            self._lost.add(rank)
            return Suspicion(rank, True, f"silent for {silence:.1f} s: {sign}")
        if silence >= self.suspect_after_s and rank not in self._suspected:
            self._suspected.add(rank)
            return Suspicion(rank, False, f"suspect: silent for {silence:.1f} s: {sign}")
        return None
