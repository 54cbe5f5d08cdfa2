"""Measures latency and bandwidth between the hosts of a job, when its ranks meet.

One rank of each host takes part, its *head*, before any call. The heads work in rounds of disjoint
pairs. In a pair the lower head asks, and the other one answers at once, whatever it does itself.
The launcher collects the answers and sends the same numbers to all ranks.

A probe sends few bytes first, and more only if its time allows. So it takes no longer on a slow
link. `syncvar doctor` measures by the same rule, `measure_pair`, and takes more time.

The probe uses ZeroMQ links, which open faster than lanes. A message costs there about what a lane
and a call cost together.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from syncvar.algorithms.cost_model import HostNetwork, PairRate, pairs_of_hosts, rates_by_pair
from syncvar.protocol.frame import FrameType, Header
from syncvar.transports.base import PeerDisconnected

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.base import Arrival, Frame, Transport

PROBE_S = 0.2
"""Longest probe of a job, however many hosts it has."""

_FIRST_NBYTES, _GROWTH = 4096, 4
_LONGEST_NBYTES = 1 << 18  # enough to tell 10 Gbit/s from 1
_STEADY = 1.2  # two times agree up to this ratio
_NEAR = 0.15  # two sizes whose rates differ less end that of the bandwidth
_SHARE = 0.25  # of a latency that the bytes of a message take at least
_LONG = 8  # latencies that a long message takes at least
_REPEATED = 8  # most messages of one size
_QUESTION, _ANSWER, _END = range(3)  # `round` of a frame


class MeasuringLimits(NamedTuple):
    """Limits of the measurement of one pair."""

    messages: int  # short messages for the latency
    nbytes: int  # of the longest message
    is_sure: bool = True  # whether times that do not agree count for nothing


class Exchange(Protocol):
    """Sends messages to another rank, which answers each at once."""

    def ask(self, nbytes: int) -> float | None:
        """Send so many bytes; return the seconds until the answer, or None if time is over."""

    def left_s(self) -> float:
        """Return the seconds that are left for this pair."""


def measure_pair(exchange: Exchange, limits: MeasuringLimits) -> PairRate | None:
    """Measure latency and bandwidth of a pair; None if the time does not suffice for sure numbers.

    What else runs on a machine slows some messages, and a slow wire slows all alike. So a sure
    number is one on which the two fastest messages agree.
    """
    if exchange.ask(0) is None:  # this one opens the way
        return None
    latency_s = _fastest_s(exchange, 0, limits.messages, is_sure=limits.is_sure)
    if latency_s is None:
        return None
    rate, nbytes = 0.0, _FIRST_NBYTES
    while nbytes <= limits.nbytes:
        seconds = _fastest_s(exchange, nbytes, _REPEATED, is_sure=limits.is_sure)
        if seconds is None:
            break
        # a message that takes hardly longer than a short one shows no bandwidth
        moving = max(seconds - latency_s, _SHARE * latency_s)
        before, rate = rate, nbytes / moving
        is_stable = abs(rate - before) < _NEAR * rate and moving > _LONG * latency_s
        if is_stable or 2 * _GROWTH * seconds > exchange.left_s():
            break
        nbytes *= _GROWTH
    if not rate:
        return None
    return PairRate(max(1, int(latency_s / 2 * 1e9)), max(1, int(rate / 1e3)))


def _fastest_s(exchange: Exchange, nbytes: int, most: int, *, is_sure: bool) -> float | None:
    """Return the time of a message and its answer, once two agree.

    If they never do, return None where the number has to be sure.
    """
    times: list[float] = []
    for number in range(most):
        seconds = exchange.ask(nbytes)
        if seconds is None:
            break
        times = sorted((*times, seconds))[:2]
        if number >= most // 4 and times[1] <= _STEADY * times[0]:
            break
    if is_sure and (len(times) < 2 or times[1] > _STEADY * times[0]):
        return None
    return times[0] if times else None


def network_of(hosts: int, flat: Sequence[int]) -> HostNetwork | None:
    """Return the network from numbers of the launcher: (host, host, latency, rate) for each pair.

    Example:
        >>> network_of(2, [0, 1, 50_000, 110_000]).median.latency_ns
        65536
    """
    known = rates_by_pair(flat).items()
    return HostNetwork.of_pairs(
        hosts, {(a, b): rate for (a, b), rate in known if 0 <= a < b < hosts}
    )


def wants_probe(config: RuntimeConfig, transport: Transport) -> bool:
    """Return whether a job with these settings measures between its hosts."""
    outside = transport.outside.startswith("tcp://")
    return outside and config.algorithm_choice != "rules" and not config.uses_mpi


class HostProbe:
    """The probe of one head.

    Attributes:
        leftovers: What has arrived beside the probe, in order; the engine handles it.
    """

    def __init__(
        self, transport: Transport, rank: int, generation: int, places: Mapping[int, int]
    ) -> None:
        """`places` has the host index of each rank."""
        from syncvar.transports.lane_transport import LaneTransport

        self._send: Callable[[int, bytes, memoryview | None], object] = transport.send
        if isinstance(transport, LaneTransport):
            self._send = transport.send_by_link
        self.leftovers: list[Arrival] = []
        self._transport = transport
        self._rank = rank
        self._generation = generation
        self._heads: dict[int, int] = {}  # by host
        for one in sorted(places):
            self._heads.setdefault(places[one], one)
        self._host = places[rank]
        self._answered: dict[int, float] = {}  # when, by number of the question
        self._ended: set[int] = set()
        self._number = 0

    def run(self, segment_bytes: int) -> list[int]:
        """Take part, for at most `PROBE_S`; return the numbers of the pairs that this head asks."""
        until = time.monotonic() + PROBE_S
        mine = [
            pair
            for pairs in pairs_of_hosts(len(self._heads))
            for pair in pairs
            if self._host in pair
        ]
        asks = [b for a, b in mine if a == self._host]
        flat: list[int] = []
        for host in asks:  # all ways open at the same time
            self.send(self._heads[host], _QUESTION, 0)
        limits = MeasuringLimits(16, min(segment_bytes, _LONGEST_NBYTES))
        for at, host in enumerate(asks):
            now = time.monotonic()
            peer = self._heads[host]
            turns = _Turns(self, peer, now + max(0.0, until - now) / (len(asks) - at))
            rate = measure_pair(turns, limits)
            if rate is not None:
                flat += [self._host, host, *rate]
            self.send(peer, _END, 0)
        waits = {self._heads[a] for a, b in mine if b == self._host}
        while not waits <= self._ended and (left_s := until - time.monotonic()) > 0:
            self.look(left_s)
        return flat

    def send(self, peer: int, purpose: int, nbytes: int, number: int = 0) -> int:
        """Send a frame of the probe; return its number."""
        if purpose == _QUESTION:
            self._number = number = self._number + 1
        size = {"call": number, "round": purpose, "nbytes": nbytes}
        header = Header(FrameType.PROBE, self._rank, self._generation, 0, **size).pack()
        payload = memoryview(bytes(nbytes)) if nbytes else None
        self._send(peer, header, payload)
        return number

    def look(self, timeout_s: float) -> None:
        """Handle what has come, or wait for more."""
        arrival = self._transport.receive()
        if arrival is None:
            self._transport.wait(timeout_s)
            return
        if isinstance(arrival, PeerDisconnected):
            self._ended.add(arrival.peer)
            self.leftovers.append(arrival)
        elif arrival.header.kind != FrameType.PROBE:
            self.leftovers.append(arrival)
        else:
            self._take(arrival)

    def _take(self, frame: Frame) -> None:
        header = frame.header
        if header.round == _QUESTION:
            self.send(header.source, _ANSWER, 0, header.call)
        elif header.round == _ANSWER:
            self._answered[header.call] = time.perf_counter()
        else:
            self._ended.add(header.source)

    def answered(self, number: int) -> float | None:
        """Return when a question was answered, by `time.perf_counter`; None if it was not."""
        return self._answered.pop(number, None)

    def is_lost(self, peer: int) -> bool:
        """Return whether a peer takes no part any more."""
        return peer in self._ended


class _Turns:
    """Questions to one head."""

    def __init__(self, probe: HostProbe, peer: int, until: float) -> None:
        self._probe = probe
        self._peer = peer
        self._until = until

    def ask(self, nbytes: int) -> float | None:
        begin = time.perf_counter()
        number = self._probe.send(self._peer, _QUESTION, nbytes)
        while (answered := self._probe.answered(number)) is None:
            left_s = self.left_s()
            if left_s <= 0 or self._probe.is_lost(self._peer):
                return None
            self._probe.look(left_s)
        return answered - begin

    def left_s(self) -> float:
        return self._until - time.monotonic()
