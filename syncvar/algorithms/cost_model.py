"""What a schedule costs by the network, and the choice between hosts that follows from that.

An interpreter of schedules moves a clock instead of data. Over links a rank has one port to send
and one to receive, used at the same time. A message of b bytes occupies both ports for
latency + b * per_byte; a rank sends in the order of its schedule. Reductions and copies follow
after the transfers of the round. This is the single-port, full-duplex alpha-beta-gamma model
(Hockney 1994; Chan et al. 2007, section 2); formulas of papers test it.

In shared memory a round is a phase: all ranks publish, wait for each other, and read. It costs the
latency, the copies of the slowest rank, and its reductions. The constants are rough measurements.

Between hosts the probe of `bootstrap.host_probe` has measured latency and bandwidth. All ranks have
the same numbers, so all make the same choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from itertools import chain, permutations
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.builders import (
    ALGORITHMS,
    SCHEDULES,
    Combination,
    WorkLayout,
    build_all,
    sums_by_the_tree,
    unsuited,
)
from syncvar.algorithms.schedule import Copy, Recv, RecvReduce, Reduce, Send
from syncvar.algorithms.selection import choose

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from syncvar.algorithms.schedule import Schedule, Step

HOSTS_MAX = 8
"""Up to so many hosts the probe measures all pairs; of more hosts only the median counts."""

_NOISE = 4
_WORTH = 0.8  # share of the usual choice's time that another one must not exceed
_SIZE_MAX = 1 << 40
_SCALED = ("all_reduce", "broadcast")  # on many hosts scaled sizes bring the rules nearer the best
_SHOWN = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of a path."""

    latency: float  # seconds of a message, or of a phase in shared memory, whatever its size
    per_byte: float  # seconds per byte of a message; in shared memory per byte copied out or in
    per_reduced_byte: float  # seconds per byte of a reduction's result
    per_copied_byte: float  # seconds per byte of a local copy
    shared: bool = False  # whether rounds are phases in shared memory

    def text(self) -> str:
        """Return the constants in words."""
        unit = "phase" if self.shared else "message"
        return (
            f"{self.latency * 1e6:.0f} us per {unit}, {self.per_byte * 1e9:.2f} ns per byte, "
            f"{self.per_reduced_byte * 1e9:.2f} ns per byte reduced"
        )


LINKS = CostModel(latency=45e-6, per_byte=0.4e-9, per_reduced_byte=0.1e-9, per_copied_byte=0.1e-9)
"""Unix sockets between processes of one host: a message of Python and libzmq, 2.5 GB/s."""

SHM = CostModel(
    latency=10e-6, per_byte=0.1e-9, per_reduced_byte=0.1e-9, per_copied_byte=0.1e-9, shared=True
)
"""Memory that the ranks of one host share: a wait for all, and copies at 10 GB/s."""


def predicted_seconds(
    plans: Sequence[Schedule],
    itemsize: int,
    model: CostModel = LINKS,
    network: HostNetwork | None = None,
) -> float:
    """Return the seconds from a common start to the end of the last rank.

    With a `network` its times replace latency and bandwidth of the model: each rank is a host.
    """
    now = [0.0] * len(plans)
    for number in range(max(len(plan.rounds) for plan in plans)):
        steps = [plan.rounds[number] if number < len(plan.rounds) else () for plan in plans]
        if model.shared:
            now = _phase(steps, now, itemsize, model)
        else:
            now = _round(steps, now, itemsize, model, network)
    return max(now)


def _round(
    steps: Sequence[tuple[Step, ...]],
    now: Sequence[float],
    itemsize: int,
    model: CostModel,
    network: HostNetwork | None,
) -> list[float]:
    """Return when each rank ends a round over links that it begins at `now`."""
    queues = [[step for step in reversed(mine) if isinstance(step, Send)] for mine in steps]
    out_free, in_free, ends = list(now), list(now), list(now)
    heap = [(now[rank], rank) for rank, queue in enumerate(queues) if queue]
    heapify(heap)
    while heap:
        start, rank = heap[0]
        send = queues[rank][-1]
        possible = max(out_free[rank], in_free[send.peer])
        if possible > start:
            heapreplace(heap, (possible, rank))
            continue
        queues[rank].pop()
        nbytes = send.chunk.count * itemsize
        if network is None:
            end = start + model.latency + nbytes * model.per_byte
        else:
            end = start + network.seconds(rank, send.peer, nbytes)
        out_free[rank] = in_free[send.peer] = end
        ends[rank], ends[send.peer] = max(ends[rank], end), max(ends[send.peer], end)
        if queues[rank]:
            heapreplace(heap, (end, rank))
        else:
            heappop(heap)
    return [end + _local(mine, itemsize, model) for end, mine in zip(ends, steps, strict=True)]


def _phase(
    steps: Sequence[tuple[Step, ...]], now: Sequence[float], itemsize: int, model: CostModel
) -> list[float]:
    """Return when each rank ends a phase; no rank reads before all have published."""
    published = [
        sum(chunk.count for chunk in {step.chunk for step in mine if isinstance(step, Send)})
        for mine in steps
    ]
    received = [sum(step.chunk.count for step in mine if isinstance(step, Recv)) for mine in steps]
    per_element = itemsize * model.per_byte
    ready = model.latency + max(
        begin + count * per_element for begin, count in zip(now, published, strict=True)
    )
    return [
        ready + count * per_element + _local(mine, itemsize, model)
        for count, mine in zip(received, steps, strict=True)
    ]


def _local(steps: tuple[Step, ...], itemsize: int, model: CostModel) -> float:
    seconds = 0.0
    for step in steps:
        if isinstance(step, RecvReduce):
            seconds += step.chunk.count * itemsize * model.per_reduced_byte
        elif isinstance(step, Reduce):
            seconds += step.target.count * itemsize * model.per_reduced_byte
        elif isinstance(step, Copy):
            seconds += step.target.count * itemsize * model.per_copied_byte
    return seconds


class PairRate(NamedTuple):
    """What was measured between two hosts."""

    latency_ns: int  # one way, of a short message
    bytes_per_ms: int  # one way, of a long one

    def near(self, middle: PairRate) -> PairRate:
        """Return these numbers as powers of two, or those of `middle` if they are near."""
        return PairRate(
            *(
                usual if usual <= _NOISE * own and own <= _NOISE * usual else _rounded(own)
                for own, usual in zip(self, middle, strict=True)
            )
        )

    def text(self) -> str:
        """Return the rate for people."""
        return f"{self.latency_ns / 1e3:,.0f} us, {self.bytes_per_ms / 1e3:,.4g} MB/s"


def rates_by_pair(flat: Sequence[int]) -> dict[tuple[int, int], PairRate]:
    """Return the rates of pairs of hosts from (host, host, latency, rate) one after another.

    Example:
        >>> rates_by_pair([0, 1, 50_000, 110_000])
        {(0, 1): PairRate(latency_ns=50000, bytes_per_ms=110000)}
    """
    pairs = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=False)
    return {(a, b): PairRate(*rate) for a, b, *rate in pairs}


class HostNetwork(NamedTuple):
    """The network between the hosts of a job, or of a group.

    Rates are powers of two: runs on the same hosts then mostly make the same choices.
    """

    # By host and host; empty above `HOSTS_MAX` hosts.
    rates: tuple[tuple[PairRate, ...], ...]
    median: PairRate

    @classmethod
    def of_pairs(cls, hosts: int, pairs: Mapping[tuple[int, int], PairRate]) -> HostNetwork | None:
        """Return the network of hosts of which some pairs were measured; None if none was.

        The other pairs get the median. So do those that differ from it by a factor of at most
        `_NOISE`: on a busy machine two probes differ as much.

        Example:
            >>> HostNetwork.of_pairs(3, {(0, 1): PairRate(50_000, 110_000)}).median
            PairRate(latency_ns=65536, bytes_per_ms=131072)
        """
        if not pairs:
            return None
        middle = PairRate(
            *(_rounded(median_low(column)) for column in zip(*pairs.values(), strict=True))
        )
        rough = {pair: rate.near(middle) for pair, rate in pairs.items()}
        rates: tuple[tuple[PairRate, ...], ...] = ()
        if hosts <= HOSTS_MAX:
            every = range(hosts)
            rates = tuple(
                tuple(rough.get((min(a, b), max(a, b)), middle) for b in every) for a in every
            )
        return cls(rates, middle)

    def among(self, hosts: Sequence[int]) -> HostNetwork:
        """Return the network of some of the hosts, in their order."""
        if not self.rates:
            return self
        return self._replace(rates=tuple(tuple(self.rates[a][b] for b in hosts) for a in hosts))

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """Return the time of a message between two hosts."""
        rate = self.rates[source][target] if self.rates else self.median
        return rate.latency_ns * 1e-9 + nbytes / (rate.bytes_per_ms * 1e3)

    def ring_order(self) -> tuple[int, ...]:
        """Return the hosts in the order of the best ring, beginning with the best connected one.

        The best ring has the fastest slowest pair, then the least time of all pairs.

        Example:
            >>> fast, slow = PairRate(2**16, 2**17), PairRate(2**16, 2**10)
            >>> pairs = {(a, b): fast for a in range(4) for b in range(a + 1, 4)}
            >>> HostNetwork.of_pairs(4, pairs | {(0, 1): slow}).ring_order()
            (2, 1, 3, 0)
        """
        count = len(self.rates)
        costs = [[self.seconds(a, b, 1 << 20) for b in range(count)] for a in range(count)]
        best: tuple[float, float, tuple[int, ...]] | None = None
        for rest in permutations(range(1, count)):
            ring = (0, *rest)
            edges = [costs[ring[at - 1]][ring[at]] for at in range(count)]
            if best is None or (max(edges), sum(edges), ring) < best:
                best = max(edges), sum(edges), ring
        assert best is not None
        ring = best[2]
        first = min(range(count), key=lambda at: (max(costs[ring[at]]), sum(costs[ring[at]]), at))
        return ring[first:] + ring[:first]


def _rounded(number: int) -> int:
    """Return the power of two that is nearest by ratio."""
    number = max(1, number)
    low = 1 << (number.bit_length() - 1)
    return low if number * number < 2 * low * low else 2 * low


class HostChoice(NamedTuple):
    """How a collective goes between hosts."""

    algorithm: str
    order: tuple[int, ...]  # the host of each rank of the schedule
    reason: str


@dataclass(frozen=True, slots=True)
class BetweenHosts:
    """Chooses algorithm and order between hosts: by the rules, or by what was measured.

    Attributes:
        network: The network between the hosts of the group, in the group's order; None if it is
            not known.
        keeps_bits: Whether a choice may not change the bits of a sum. The network differs a little
            in each run, and two runs are to have the same bits.
    """

    network: HostNetwork | None = None
    keeps_bits: bool = True

    def choose(
        self,
        collective: str,
        nbytes: int,
        hosts: int,
        *,
        root: int = 0,
        reproducible: bool = False,
        even: bool = False,
    ) -> HostChoice:
        """Choose for a call of `nbytes` between so many hosts, as `selection.choose` does.

        `root` is the host of the root.
        """
        even = even or collective == "header_exchange"
        if self.network is None:
            one = choose(collective, nbytes, hosts, reproducible=reproducible, even=even)
            return HostChoice(one.algorithm, tuple(range(hosts)), one.reason)
        # one simulation for all sizes up to the next power of two
        size = min(_SIZE_MAX, 1 << max(0, nbytes - 1).bit_length())
        case = _Case(collective, size, nbytes, hosts, root, reproducible, even, self.keeps_bits)
        return _chosen(self.network, case)


BY_RULES = BetweenHosts()
"""Chooses by the rules alone."""


class _Case(NamedTuple):
    collective: str
    size: int
    nbytes: int
    hosts: int
    root: int
    reproducible: bool
    even: bool
    keeps_bits: bool

    @property
    def combines(self) -> bool:
        return SCHEDULES[self.collective].combines is not Combination.NONE

    def algorithms(self, usual: str) -> Iterable[str]:
        """Return the algorithms that may replace the usual one."""
        keeps = self.combines and (self.keeps_bits or self.reproducible)
        for name in ALGORITHMS[self.collective]:
            by_tree = sums_by_the_tree(self.collective, name, self.hosts)
            if unsuited(self.collective, name, self.hosts, even=self.even) is not None:
                continue
            same = by_tree and sums_by_the_tree(self.collective, usual, self.hosts)
            # two operands have one sum
            if name == usual or not keeps or same or (self.hosts == 2 and not self.reproducible):
                yield name

    def orders(self, network: HostNetwork) -> list[tuple[int, ...]]:
        """Return the orders of the hosts to choose from."""
        own = tuple(range(self.hosts))
        known = SCHEDULES[self.collective]
        has_order = known.work in (WorkLayout.BLOCKS, WorkLayout.PAIRS)
        has_order = has_order or known.combines is Combination.PREFIX
        has_order = has_order or len({*chain.from_iterable(network.rates)}) == 1
        if has_order or (self.combines and (self.keeps_bits or self.reproducible)):
            return [own]
        return [own, network.ring_order()]


@lru_cache(maxsize=4096)
def _chosen(network: HostNetwork, case: _Case) -> HostChoice:
    own = tuple(range(case.hosts))
    rules = {"reproducible": case.reproducible, "even": case.even}
    usual = choose(case.collective, case.nbytes, case.hosts, **rules)
    choice = HostChoice(usual.algorithm, own, usual.reason)
    if not network.rates:
        if case.collective not in _SCALED:
            return choice
        scaled = int(case.nbytes * _scale(network.median))
        other = choose(case.collective, scaled, case.hosts, **rules)
        if other.algorithm in case.algorithms(usual.algorithm):
            reason = f"measured between hosts, like {other.reason}"
            return choice if other == usual else HostChoice(other.algorithm, own, reason)
        return choice
    best = seconds = _between(network, case, usual.algorithm, own)
    for order in case.orders(network):
        for name in case.algorithms(usual.algorithm):
            time = _between(network, case, name, order)
            if time < min(best, _WORTH * seconds):
                best, shown = time, ""
                if order != own:
                    shown = f", hosts in the order {', '.join(map(str, order))}"
                reason = (
                    f"{name}: {case.nbytes} bytes on {case.hosts} hosts: by the measured network "
                    f"{time * 1e6:.0f} us{shown}; {usual.algorithm} would take {seconds * 1e6:.0f}"
                )
                choice = HostChoice(name, order, reason)
    return choice


def _between(network: HostNetwork, case: _Case, algorithm: str, order: tuple[int, ...]) -> float:
    """Return the predicted seconds of an algorithm with the hosts in some order."""
    work = SCHEDULES[case.collective].work
    parts = case.hosts if work in (WorkLayout.BLOCKS, WorkLayout.PAIRS) else 1
    count = 0 if work is WorkLayout.NOTHING else -(-case.size // parts)
    root = order.index(case.root)
    plans = build_all(case.collective, algorithm, case.hosts, count=count, root=root)
    return predicted_seconds(plans, 1, LINKS, network.among(order))


def _scale(rate: PairRate) -> float:
    """Return how long a message of the model's links is that is like one byte of this network."""
    latency = rate.latency_ns * 1e-9
    return LINKS.latency / LINKS.per_byte / (latency * rate.bytes_per_ms * 1e3)


def pairs_of_hosts(hosts: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of hosts for the probe; no host is twice in a round.

    All pairs up to `HOSTS_MAX` hosts, and some pairs of more hosts.

    Example:
        >>> pairs_of_hosts(3)
        [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    count = hosts + hosts % 2  # an odd one pauses
    rounds = []
    for number in range(count - 1 if hosts <= HOSTS_MAX else 2):
        pairs = [(number, count - 1)]
        pairs += [
            ((number + step) % (count - 1), (number - step) % (count - 1))
            for step in range(1, count // 2)
        ]
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in pairs if max(a, b) < hosts))
    return rounds


def network_lines(
    names: Sequence[str], pairs: Mapping[tuple[int, int], PairRate], choice: str
) -> list[str]:
    """Return what was measured between hosts, and what follows with `algorithm_choice`, as text.

    Example:
        >>> network_lines(["a", "b"], {(0, 1): PairRate(50_000, 1_100_000)}, "rules")
        ['a to b: 50 us, 1,100 MB/s']
    """
    found = HostNetwork.of_pairs(len(names), pairs)
    if found is None:
        return ["no pair of hosts has answered in time; the rules choose"]
    shown = sorted(pairs.items())
    if len(names) > HOSTS_MAX:  # the slowest ones
        shown = sorted(shown, key=lambda one: one[1].bytes_per_ms)[:HOSTS_MAX]
    lines = [f"{names[a]} to {names[b]}: {rate.text()}" for (a, b), rate in shown]
    if choice == "rules":
        return lines
    lines += _choice_lines(names, BetweenHosts(found, keeps_bits=choice != "measured"))
    if choice != "measured":
        other = _choice_lines(names, BetweenHosts(found, keeps_bits=False), ("all_reduce",))
        lines += [f"algorithm_choice measured would change bits of sums, by {one}" for one in other]
    return lines


def _choice_lines(
    names: Sequence[str], between: BetweenHosts, collectives: Iterable[str] = _SHOWN
) -> Iterator[str]:
    """Yield for each collective the choices that differ from the rules."""
    own = tuple(range(len(names)))
    for collective in collectives:
        words = [
            f"{one.algorithm} {limit}"
            + (f" in the order {', '.join(map(names.__getitem__, one.order))}" * (one.order != own))
            for limit, one in _changes(between, collective, len(names))
        ]
        if words:
            yield f"{collective}: {'; '.join(words)}"


def _changes(between: BetweenHosts, collective: str, hosts: int) -> list[tuple[str, HostChoice]]:
    """Return the choices that differ from the rules, each with its sizes."""
    found: list[tuple[int, int, HostChoice]] = []
    for size in (1 << power for power in range(3, 27)):
        one = between.choose(collective, size, hosts, even=True)
        usual = BY_RULES.choose(collective, size, hosts, even=True)
        if one[:2] == usual[:2]:
            continue
        if found and found[-1][1] == size // 2 and found[-1][2][:2] == one[:2]:
            found[-1] = found[-1][0], size, one
        else:
            found.append((size, size, one))
    return [(f"from {low:,} to {high:,} bytes", one) for low, high, one in found]
