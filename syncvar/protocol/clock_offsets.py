"""Offsets of clocks between hosts, from the round trips of questions and answers. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_TRIPS_MAX = 32
_OFFSET_MAX_NS = 1 << 62  # messages have integers of 64 bits
_DRIFT = 50e-6  # by which two clocks may drift apart, in seconds for each second


class ClockOffset(NamedTuple):
    """What to add to the times of another clock, and by how much that may be wrong."""

    offset_ns: int = 0
    error_ns: int = -1  # -1: not measured

    @property
    def is_known(self) -> bool:
        """Whether the offset was measured."""
        return self.error_ns >= 0


SAME_CLOCK = ClockOffset(0, 0)


class _RoundTrip(NamedTuple):
    at_ns: int
    offset_ns: int
    error_ns: int


class ClockFilter:
    """Estimates the offset of one clock; the shortest of the last round trips counts.

    A message takes at most the round trip in one direction. So half of it bounds the error,
    whatever the two directions take. An older estimate gets worse by the drift of the clocks.

    Example:
        >>> clock = ClockFilter()
        >>> clock.add(sent_ns=0, received_ns=1_050, answered_ns=1_060, returned_ns=110)
        >>> clock.estimate(now_ns=110)
        ClockOffset(offset_ns=-1000, error_ns=50)
    """

    def __init__(self) -> None:
        self._trips: deque[_RoundTrip] = deque(maxlen=_TRIPS_MAX)

    def add(self, *, sent_ns: int, received_ns: int, answered_ns: int, returned_ns: int) -> None:
        """Add a round trip: times of both messages, the first and the last by our own clock."""
        travelled = (returned_ns - sent_ns) - (answered_ns - received_ns)
        offset = (sent_ns + returned_ns - received_ns - answered_ns) // 2
        if travelled < 0 or answered_ns < received_ns or abs(offset) >= _OFFSET_MAX_NS:
            return  # such times are no round trip
        self._trips.append(_RoundTrip(returned_ns, offset, (travelled + 1) // 2))

    def estimate(self, now_ns: int) -> ClockOffset:
        """Return what to add to a time of the other clock to get ours."""
        found = [
            ClockOffset(one.offset_ns, one.error_ns + int(max(0, now_ns - one.at_ns) * _DRIFT))
            for one in self._trips
        ]
        return min(found, key=lambda one: one.error_ns, default=ClockOffset())
