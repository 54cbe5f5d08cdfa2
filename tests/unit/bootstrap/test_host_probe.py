"""The probe between hosts: on transports of one process, and the measuring rule on links of any speed."""

import threading
import time

import pytest

from syncvar.algorithms.cost_model import HostNetwork, PairRate
from syncvar.bootstrap.host_probe import (
    PROBE_S,
    HostProbe,
    MeasuringLimits,
    measure_pair,
    network_of,
    wants_probe,
)
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.frame import FrameType, Header
from tests.support.host_worlds import world_of_hosts

PLAIN = RuntimeConfig(encryption="off", insecure="on")
LIMITS = MeasuringLimits(16, 1 << 20)


class SlowLink:
    """Answers by a clock of its own: a link of some latency and rate."""

    def __init__(self, latency_s, bytes_per_s, limit_s):
        self.latency_s, self.bytes_per_s, self.limit_s = latency_s, bytes_per_s, limit_s
        self.now = 0.0
        self.nbytes = 0

    def ask(self, nbytes):
        seconds = 2 * self.latency_s + nbytes / self.bytes_per_s
        self.nbytes += nbytes
        self.now += seconds
        return None if self.now > self.limit_s else seconds

    def left_s(self):
        return self.limit_s - self.now


@pytest.mark.parametrize("latency_s", [1e-5, 1e-3, 0.01])
@pytest.mark.parametrize("bytes_per_s", [1.25e5, 1e7, 1e9])
def test_latency_and_rate_of_a_link_are_found(latency_s, bytes_per_s):
    link = SlowLink(latency_s, bytes_per_s, 1.0)
    rate = measure_pair(link, LIMITS)
    assert rate.latency_ns == pytest.approx(latency_s * 1e9, rel=0.01)
    # a longer message than the longest would show the rate; this is what the longest shows
    limit = (1 << 20) / (0.5 * latency_s)
    assert rate.bytes_per_ms * 1e3 == pytest.approx(min(bytes_per_s, limit), rel=0.05)


def test_a_slow_link_gets_few_bytes_and_no_more_time():
    link = SlowLink(0.002, 1.25e5, 0.2)  # 1 Mbit/s
    rate = measure_pair(link, LIMITS)
    assert link.nbytes <= 4 * 4096
    assert link.now <= 0.2
    assert rate.bytes_per_ms == pytest.approx(125, rel=0.2)
    assert measure_pair(SlowLink(0.002, 1e4, 0.2), LIMITS) is None
    assert measure_pair(SlowLink(1.0, 1e9, 0.2), LIMITS) is None


def test_a_busy_machine_is_no_slow_link():
    class BusyLink(SlowLink):
        def ask(self, nbytes):
            self.latency_s *= 1.3  # no two messages agree
            return super().ask(nbytes)

    assert measure_pair(BusyLink(1e-4, 1e9, 0.2), LIMITS) is None
    unsure = measure_pair(BusyLink(1e-4, 1e9, 0.2), LIMITS._replace(is_sure=False))
    assert unsure.latency_ns == pytest.approx(1.3**2 * 1e5, rel=0.01), "the fastest of all counts"


def probe_all(ranks, places, *, absent=()):
    """Run the probe of the heads, each in a thread; return by rank the flat numbers and leftovers."""
    found = {}

    def one(rank):
        probe = HostProbe(ranks[rank], rank, 0, places)
        found[rank] = probe.run(1 << 20), probe.leftovers

    heads = [min(rank for rank in places if places[rank] == host) for host in {*places.values()}]
    threads = [threading.Thread(target=one, args=(rank,)) for rank in heads if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_the_heads_measure_all_pairs_and_others_take_no_part():
    places = {0: 0, 1: 0, 2: 1, 3: 2}
    with world_of_hosts(PLAIN, [None] * 4) as ranks:
        for _ in range(20):  # a busy machine may be too slow for one probe
            found = probe_all(ranks, places)
            assert found.keys() == {0, 2, 3}
            flat = [number for numbers, leftovers in found.values() for number in numbers]
            assert not any(leftovers for _, leftovers in found.values())
            pairs = {(a, b) for a, b in zip(flat[::4], flat[1::4], strict=True)}
            assert pairs <= {(0, 1), (0, 2), (1, 2)}
            if len(pairs) == 3:
                break
        else:
            raise AssertionError("no probe was complete")
    network = network_of(3, flat)
    assert isinstance(network, HostNetwork)
    assert network == network_of(3, flat)


def test_a_head_that_does_not_answer_costs_the_probe_no_more_than_its_time():
    with world_of_hosts(PLAIN, [None] * 2) as ranks:
        begin = time.monotonic()
        found = probe_all(ranks, {0: 0, 1: 1}, absent=(1,))
        assert time.monotonic() - begin < 50 * PROBE_S
        assert found == {0: ([], [])}
    assert network_of(2, []) is None


def test_what_arrives_beside_the_probe_is_kept_for_the_engine():
    with world_of_hosts(PLAIN, [None] * 2) as ranks:
        header = Header(FrameType.DATA, 1, 0, 0, 0, nbytes=3)
        ranks[1].send(0, header.pack(), memoryview(b"abc"))
        probe = HostProbe(ranks[0], 0, 0, {0: 0, 1: 1})
        until = time.monotonic() + 60
        while not probe.leftovers and time.monotonic() < until:
            assert ranks[1].receive() is None
            probe.look(0.01)
        (frame,) = probe.leftovers
        assert bytes(frame.payload) == b"abc"


def test_numbers_of_hosts_that_are_none_are_ignored():
    assert network_of(2, [0, 7, 1, 1, 1, 0, 1, 1]) is None
    assert network_of(2, [0, 1, 60_000, 110_000, 9]).median == PairRate(65536, 131072)


def test_settings_and_worlds_without_other_hosts_make_no_probe():
    class Transport:
        outside = "tcp://10.0.0.1:4000"

    assert wants_probe(RuntimeConfig(), Transport)
    assert not wants_probe(RuntimeConfig(algorithm_choice="rules"), Transport)
    assert not wants_probe(RuntimeConfig(transport="mpi"), Transport)
    Transport.outside = ""
    assert not wants_probe(RuntimeConfig(), Transport)
