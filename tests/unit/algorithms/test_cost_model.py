"""The choice between hosts: from drawn networks, the same everywhere, and never an unsuitable algorithm."""

import random

import pytest

from syncvar.algorithms.builders import (
    ALGORITHMS,
    SCHEDULES,
    Combination,
    build_all,
    sums_by_the_tree,
    unsuited,
)
from syncvar.algorithms.cost_model import (
    BY_RULES,
    HOSTS_MAX,
    LINKS,
    BetweenHosts,
    HostNetwork,
    PairRate,
    network_lines,
    pairs_of_hosts,
    predicted_seconds,
)
from syncvar.algorithms.selection import choose

FAST, SLOW = PairRate(60_000, 120_000), PairRate(60_000, 1_000)
SIZES = (8, 5_000, 1 << 20)


def drawn_network(seed):
    """Return a network of 2 to 8 hosts with some slow or distant pairs."""
    draw = random.Random(seed)
    hosts = draw.randint(2, HOSTS_MAX)
    pairs = {
        (a, b): PairRate(
            draw.choice((20_000, 60_000, 60_000, 5_000_000)),
            draw.choice((1_000, 120_000, 120_000, 120_000, 1_200_000)),
        )
        for a in range(hosts)
        for b in range(a + 1, hosts)
        if draw.random() < 0.9
    }
    return hosts, HostNetwork.of_pairs(hosts, pairs or {(0, 1): FAST})


def network_with_slow(hosts, *slow):
    every = [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
    return HostNetwork.of_pairs(hosts, {pair: SLOW if pair in slow else FAST for pair in every})


@pytest.mark.parametrize("seed", range(12))
def test_a_choice_suits_the_call_and_is_the_same_again(seed):
    hosts, network = drawn_network(seed)
    draw = random.Random(-seed)
    for collective in ALGORITHMS:
        for keeps_bits in (True, False):
            even, reproducible, root = (
                draw.random() < 0.5,
                draw.random() < 0.3,
                draw.randrange(hosts),
            )
            nbytes = draw.choice(SIZES)
            options = {"root": root, "reproducible": reproducible, "even": even}
            between = BetweenHosts(network, keeps_bits)
            choice = between.choose(collective, nbytes, hosts, **options)
            copy = BetweenHosts(HostNetwork(*network), keeps_bits)
            assert copy.choose(collective, nbytes, hosts, **options) == choice
            assert sorted(choice.order) == list(range(hosts))
            if SCHEDULES[collective].combines is Combination.PREFIX:
                assert choice.order == tuple(range(hosts))
            is_even = even or collective == "header_exchange"
            assert unsuited(collective, choice.algorithm, hosts, even=is_even) is None
            if reproducible and SCHEDULES[collective].combines is Combination.ALL:
                assert sums_by_the_tree(collective, choice.algorithm, hosts)
                assert choice.order == tuple(range(hosts))


@pytest.mark.parametrize("seed", range(12))
def test_a_choice_that_keeps_bits_sums_in_the_order_of_the_rules(seed):
    hosts, network = drawn_network(seed)
    for collective, known in SCHEDULES.items():
        if known.combines is Combination.NONE or hosts == 2:
            continue
        for nbytes in SIZES:
            choice = BetweenHosts(network).choose(collective, nbytes, hosts)
            usual = BY_RULES.choose(collective, nbytes, hosts).algorithm
            assert choice.order == tuple(range(hosts))
            if choice.algorithm != usual:
                both = (choice.algorithm, usual)
                assert all(sums_by_the_tree(collective, name, hosts) for name in both)


@pytest.mark.parametrize("seed", range(12))
def test_a_measured_choice_is_never_predicted_slower_than_the_rules(seed):
    hosts, network = drawn_network(seed)
    for nbytes in (1 << 6, 1 << 14, 1 << 20, 1 << 24):
        choice = BetweenHosts(network, keeps_bits=False).choose("all_reduce", nbytes, hosts)
        usual = choose("all_reduce", nbytes, hosts).algorithm
        own = build_all("all_reduce", choice.algorithm, hosts, count=nbytes)
        rules = build_all("all_reduce", usual, hosts, count=nbytes)
        assert predicted_seconds(own, 1, LINKS, network.among(choice.order)) <= predicted_seconds(
            rules, 1, LINKS, network
        )


@pytest.mark.parametrize("hosts", range(4, HOSTS_MAX + 1))
def test_the_ring_avoids_a_slow_pair(hosts):
    for slow in ((0, 1), (1, hosts - 1), (0, hosts - 1)):
        order = network_with_slow(hosts, slow).ring_order()
        neighbours = {tuple(sorted((order[at - 1], order[at]))) for at in range(hosts)}
        assert slow not in neighbours
        assert order[0] not in slow


def test_the_only_ring_of_three_hosts_gives_way_to_a_tree():
    network = network_with_slow(3, (1, 2))
    choice = BetweenHosts(network, keeps_bits=False).choose("all_reduce", 1 << 20, 3)
    assert choice.algorithm != "ring"
    between = {
        tuple(sorted((plan.rank, step.peer)))
        for plan in build_all("all_reduce", choice.algorithm, 3, count=64)
        for steps in plan.rounds
        for step in steps
        if hasattr(step, "peer")
    }
    assert {tuple(sorted((choice.order[a], choice.order[b]))) for a, b in between} == {
        (0, 1),
        (0, 2),
    }
    kept = BetweenHosts(network).choose("all_reduce", 1 << 20, 3)
    assert kept.algorithm == "ring"  # another one would change bits


def test_pairs_that_differ_little_count_as_the_median():
    pairs = {(0, 1): PairRate(50_000, 100_000), (0, 2): PairRate(90_000, 60_000)}
    network = HostNetwork.of_pairs(3, pairs | {(1, 2): PairRate(40_000, 300_000)})
    assert {rate for row in network.rates for rate in row} == {network.median}
    choice = BetweenHosts(network, keeps_bits=False).choose("all_reduce", 1 << 20, 3)
    assert choice.order == (0, 1, 2)
    assert HostNetwork.of_pairs(3, {}) is None


@pytest.mark.parametrize("hosts", [1, 2, 3, 5, 8])
def test_the_probe_measures_all_pairs_of_few_hosts_in_rounds_of_disjoint_pairs(hosts):
    rounds = pairs_of_hosts(hosts)
    for pairs in rounds:
        used = [host for pair in pairs for host in pair]
        assert len(used) == len(set(used))
    every = sorted(pair for pairs in rounds for pair in pairs)
    assert every == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]


def test_of_many_hosts_some_pairs_count_and_thresholds_follow_the_median():
    pairs = [pair for pairs in pairs_of_hosts(101) for pair in pairs]
    assert len(pairs) == 100
    assert {host for pair in pairs for host in pair} == set(range(101))
    wide = HostNetwork.of_pairs(101, dict.fromkeys(pairs, PairRate(10_000_000, 1_200_000)))
    assert not wide.rates
    assert choose("broadcast", 1 << 20, 101).algorithm == "double_tree"
    assert BetweenHosts(wide).choose("broadcast", 1 << 20, 101).algorithm == "tree"


def test_the_lines_name_what_differs_from_the_rules():
    pairs = {(0, 1): FAST, (0, 2): FAST, (1, 2): SLOW}
    lines = network_lines(["a", "b", "c"], pairs, "same-bits")
    assert lines[2] == "b to c: 60 us, 1 MB/s"
    assert any(line.startswith("broadcast: direct from ") for line in lines)
    assert lines[-1].startswith("algorithm_choice measured would change bits of sums, by all_red")
    assert len(network_lines(["a", "b", "c"], pairs, "rules")) == 3
    assert network_lines(["a", "b"], {}, "measured") == [
        "no pair of hosts has answered in time; the rules choose"
    ]
