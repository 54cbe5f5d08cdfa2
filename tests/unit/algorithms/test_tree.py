"""Binomial trees: logarithmic rounds, and the order of the reproducible tree."""

from math import ceil, log2

import pytest

from syncvar.algorithms.builders import build_all
from syncvar.algorithms.schedule import Send
from tests.verification.schedules.collective_contracts import contract_of
from tests.verification.schedules.schedule_checker import verify


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 9, 17])
def test_broadcast_takes_log_rounds_and_one_message_per_other_rank(world_size):
    n, depth = world_size, ceil(log2(world_size))
    for root in range(n):
        plans = build_all("broadcast", "tree", n, count=3, root=root)
        report = verify(plans, contract_of("broadcast", n, count=3, root=root))
        assert report.rounds == depth == len(plans[0].rounds)
        assert sum(report.messages) == n - 1
        assert report.messages[root] == depth
        assert sum(report.elements) == 3 * (n - 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 9, 17])
def test_tree_all_reduce_goes_up_and_down_once(world_size):
    n, depth = world_size, ceil(log2(world_size))
    report = verify(
        build_all("all_reduce", "tree", n, count=3), contract_of("all_reduce", n, count=3)
    )
    assert report.rounds == 2 * depth
    assert sum(report.messages) == 2 * (n - 1)
    assert sum(report.elements) == 2 * (n - 1) * 3
    assert report.messages[0] == depth


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 7, 11, 16, 31])
def test_tree_all_reduce_sums_by_the_reproducible_tree(world_size):
    plans = build_all("all_reduce", "tree", world_size, count=2)
    verify(plans, contract_of("all_reduce", world_size, count=2, tree=True))


def test_a_rank_makes_one_transfer_per_round_at_most():
    for plan in build_all("all_reduce", "tree", 13, count=1):
        assert all(len(steps) <= 1 for steps in plan.rounds)


def test_every_rank_but_the_root_receives_the_broadcast_before_it_sends():
    for plan in build_all("broadcast", "tree", 9, count=1, root=4):
        kinds = [type(step) for steps in plan.rounds for step in steps]
        if plan.rank != 4:
            assert kinds[0] is not Send
            assert set(kinds[1:]) <= {Send}
