"""Which rank waited for which, from the times at which ranks entered and left calls. Pure."""

from __future__ import annotations

from bisect import bisect_right
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class CallTimes(NamedTuple):
    """When a rank was in a call, by the clock of the launcher."""

    group: int
    call: int
    began_ns: int
    ended_ns: int  # 0 while the call runs
    # When a thread began to wait for it: later than the begin if the call was started before, 0 if
    # no thread has waited, None if unknown
    waited_ns: int | None = None

    @property
    def wait_began_ns(self) -> int:
        """When the rank began to wait."""
        return self.began_ns if self.waited_ns is None else self.waited_ns or _FOREVER


_FOREVER = 1 << 63
_SAMPLE = 240  # calls without long waits of a rank in a window
_STRIDES = (1, 4, 16, 64)
LONG = 64  # a wait of more than 1 / LONG of the window is in it whether it is sampled or not


def sample_stride(count: int) -> int:
    """Return of how many calls one is sampled, of so many in a window."""
    return next((one for one in _STRIDES if count <= one * _SAMPLE), _STRIDES[-1])


def is_sampled(call: int, stride: int) -> bool:
    """Return whether a call is in the sample, from its number, which all ranks know.

    The numbers are mixed first: a step has as many calls as the one before, so every fourth
    call may be the one in which ranks wait.
    """
    return (call * 0x9E3779B97F4A7C15 >> 40) % stride == 0


class RankWindow(NamedTuple):
    """The calls of a rank in a span of time."""

    began_ns: int
    ended_ns: int
    calls: Sequence[CallTimes]
    stride: int = 1  # `calls` has those that `is_sampled` with it, and those with long waits

    @property
    def nanoseconds(self) -> int:
        """The length of the span."""
        return max(1, self.ended_ns - self.began_ns)


_Span = tuple[int, int, int, tuple[int, int]]  # begin, end, late rank, call
CallWait = tuple[tuple[int, int], int, int, float]
"""A call (group, number), a rank that waited in it, the late rank, and the share of the window."""


def wait_shares(
    windows: Mapping[int, RankWindow], members: Mapping[int, Sequence[int]]
) -> dict[int, dict[int, float]]:
    """Return for each rank the shares of its window that it waited for other ranks.

    Example:
        >>> calls = {0: CallTimes(0, 7, 100, 200), 1: CallTimes(0, 7, 180, 200)}
        >>> windows = {rank: RankWindow(0, 200, [times]) for rank, times in calls.items()}
        >>> wait_shares(windows, {0: (0, 1)})
        {0: {1: 0.4}, 1: {}}
    """
    return sum_shares(windows, call_waits(windows, members))


def call_waits(
    windows: Mapping[int, RankWindow], members: Mapping[int, Sequence[int]]
) -> Iterator[CallWait]:
    """Yield the waits of ranks for other ranks.

    A rank waits in a call until the last rank has entered it that entered before the first one
    left. So the time after that, in which data move, is no wait. While a rank has not entered the
    call that others are in, they wait for it. In a call that a rank has started before, it waits
    from when a thread waits for it.

    Args:
        windows: The calls of each rank that has answered.
        members: The ranks of each group.
    """
    entered: dict[tuple[int, int], dict[int, CallTimes]] = {}
    newest: dict[tuple[int, int], int] = {}
    for rank, window in windows.items():
        for times in window.calls:
            entered.setdefault((times.group, times.call), {})[rank] = times
            key = times.group, rank
            newest[key] = max(newest.get(key, -1), times.call)
    spans: dict[int, list[_Span]] = {rank: [] for rank in windows}
    stride = max((window.stride for window in windows.values()), default=1)
    for (group, call), present in entered.items():
        absent = -1
        if any(not times.ended_ns for times in present.values()):
            # A rank that has made a later call is late in none; we have no times of this one.
            known = windows.keys() & set(members.get(group, ()))
            absent = min((one for one in known if newest.get((group, one), -1) < call), default=-1)
        weight = stride if is_sampled(call, stride) else 0
        for rank, late, span in _waits(present, absent):
            window = windows[rank]
            begin, end = max(span[0], window.began_ns), min(span[1], window.ended_ns)
            if stride == 1 or (end - begin) * LONG > window.nanoseconds:
                spans[rank].append((begin, end, late, (group, call)))
            elif weight and end > begin:
                yield (group, call), rank, late, (end - begin) * weight / window.nanoseconds
    for rank, mine in spans.items():
        yield from _disjoint(rank, windows[rank], mine)


def _disjoint(rank: int, window: RankWindow, spans: Iterable[_Span]) -> Iterator[CallWait]:
    """Yield waits of a rank as shares. Started calls overlap: no time counts twice."""
    free = window.began_ns
    for begin, end, late, call in sorted(spans):
        if end > max(begin, free):
            yield call, rank, late, (end - max(begin, free)) / window.nanoseconds
            free = end


def sum_shares(windows: Iterable[int], waits: Iterable[CallWait]) -> dict[int, dict[int, float]]:
    """Return for each rank the shares of its window that it waited, by late rank."""
    shares: dict[int, dict[int, float]] = {rank: {} for rank in windows}
    for _, rank, late, share in waits:
        shares[rank][late] = shares[rank].get(late, 0.0) + share
    return {rank: _at_most_one(one) for rank, one in shares.items()}


def _waits(
    present: Mapping[int, CallTimes], absent: int
) -> Iterable[tuple[int, int, tuple[int, int]]]:
    """Yield (rank, late rank, span of time) of the waits in one call; `absent` is late, or -1."""
    order = sorted((one.began_ns, rank) for rank, one in present.items())
    for rank, mine in present.items():
        if absent >= 0 and not mine.ended_ns:
            yield rank, absent, (mine.wait_began_ns, _FOREVER)
            continue
        arrived, late = order[bisect_right(order, (mine.ended_ns or _FOREVER, _FOREVER)) - 1]
        if arrived > mine.wait_began_ns:
            yield rank, late, (mine.wait_began_ns, arrived)


def _at_most_one(shares: dict[int, float]) -> dict[int, float]:
    """Return shares that do not exceed the whole, which an estimate from some calls may do."""
    total = sum(shares.values())
    return shares if total <= 1 else {rank: share / total for rank, share in shares.items()}


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    late_share: float  # of all waiting of the ranks
    cost_share: float  # share of time that each other rank waits for it, on average
    since_s: float  # length of the time that these shares are about


def find_straggler(
    shares: Mapping[int, Mapping[int, float]],
    since_s: float,
    longest: Mapping[int, float] = MappingProxyType({}),
) -> Straggler | None:
    """Return the rank that the others wait for most of their waiting; None if there is none.

    A rank that they wait for in one call only, for instance because it writes a checkpoint, is
    none. `longest` has, for each rank, the part of the waits for it that were in one call.

    Example:
        >>> find_straggler({0: {2: 0.4}, 1: {2: 0.5, 0: 0.1}, 2: {}}, 30.0)
        Straggler(rank=2, late_share=0.9, cost_share=0.45, since_s=30.0)
        >>> find_straggler({0: {1: 0.3}, 1: {0: 0.3}}, 30.0) is None
        True
    """
    costs = late_costs(shares)
    if not costs:
        return None
    total, rank = sum(costs.values()), max(costs, key=lambda one: costs[one])
    late_share = costs[rank] / total
    others = max(1, len(shares) - 1)
    if late_share < _MOST or costs[rank] - longest.get(rank, 0.0) < _COST_MIN * others:
        return None
    return Straggler(rank, round(late_share, 3), round(costs[rank] / others, 3), since_s)


def late_costs(shares: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return the sum of the shares that ranks waited, by late rank."""
    costs: dict[int, float] = {}
    for waits in shares.values():
        for late, share in waits.items():
            costs[late] = costs.get(late, 0.0) + share
    return costs


_MOST = 2 / 3  # of all waiting: then one rank is late in most steps
_COST_MIN = 0.1  # of the time of the others: less is not worth a sentence
