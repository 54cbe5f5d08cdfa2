"""Groups that only their members make."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from tests.support.harness import everywhere

SOON = {"collective_timeout_s": 60.0, "report_after_s": 0.05, "rendezvous_timeout_s": 60.0}


@pytest.fixture(params=["links", "shm"])
def ranks(request):
    def run(size, fn, **settings):
        config = RuntimeConfig(**{**SOON, **settings})
        shared = request.param == "shm"
        return everywhere(size, fn, config=config, shared=shared, timeout_s=120)

    return run


def test_only_the_members_make_the_group(ranks):
    def fn():
        if sv.rank() == 1:
            return None
        group = sv.new_group([2, 0], members_only=True)
        total = float(sv.all_reduce(sv.rank(), group=group))
        return group.ranks, group.rank, total

    assert ranks(3, fn) == [((2, 0), 1, 2.0), None, ((2, 0), 0, 2.0)]


def test_groups_of_the_same_members_do_not_meet(ranks):
    def fn():
        groups = [sv.new_group([0, 1], members_only=True) for _ in range(3)]
        if sv.rank() == 0:
            for number, group in enumerate(groups):
                sv.send(number, 1, group=group)
            return None
        return [int(sv.recv(0, group=group)) for group in reversed(groups)]

    assert ranks(2, fn)[1] == [2, 1, 0]


def test_ranks_with_other_groups_agree(ranks):
    def fn():
        rank = sv.rank()
        if rank != 2:
            sv.new_group([0, 1], members_only=True)
        if rank != 1:
            sv.new_group([0, 2], members_only=True)
        if rank == 0:
            sv.send(1.0, 1)  # not in step with rank 1
        else:
            last = sv.new_group([1, 2], members_only=True)
            assert float(sv.all_reduce(1.0, group=last)) == 2.0
        if rank == 1:
            sv.recv(0)
        everyone = sv.new_group(range(3), members_only=True)
        return sv.all_gather(np.full(1, rank), group=everyone).tolist()

    assert ranks(3, fn) == [[0, 1, 2]] * 3


def test_a_group_inside_another_group(ranks):
    def fn():
        rank = sv.rank()
        outer = sv.new_group([3, 2, 1])
        if rank == 0:
            return None
        both = sv.new_group([2, 0], group=outer)
        if rank != 2:
            inner = sv.new_group([0, 2], group=outer, members_only=True)
            assert float(sv.all_reduce(1.0, group=inner)) == 2.0
            return both.ranks, inner.ranks, inner.rank
        return both.ranks, both.is_member

    expected = [None, ((1, 3), (3, 1), 1), ((1, 3), False), ((1, 3), (3, 1), 0)]
    assert ranks(4, fn) == expected


def test_a_group_inside_strategy_run(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        groups = []

        def step():
            groups.append(sv.new_group([0, 1], members_only=True))
            return float(sv.all_reduce(1.0, group=groups[-1]))

        sums = []
        for _ in range(3):
            strategy.run(lambda: sums.append(step()))
        sums += [float(sv.all_reduce(1.0, group=group)) for group in groups]
        return sums

    assert ranks(2, fn) == [[2.0] * 6] * 2


def test_wrong_members_are_refused_on_the_rank_that_names_them(ranks):
    def fn():
        if sv.rank() == 0:
            for wrong, text in (([1], "is not in"), ([0, 5], "outside a world"), ([0, 0], "twice")):
                with pytest.raises(sv.ConfigError, match=text):
                    sv.new_group(wrong, members_only=True)
            alone = sv.new_group([0], members_only=True)
            with pytest.raises(sv.ConfigError, match="outside a group of 1"):
                sv.new_group([1], group=alone)
            assert float(sv.all_reduce(3.0, group=alone)) == 3.0
        return float(sv.all_reduce(1.0))

    assert ranks(2, fn) == [2.0, 2.0]


def test_a_member_that_does_not_come_is_an_error(ranks):
    def fn():
        if sv.rank() == 1:
            return "PeerLost"
        try:
            sv.new_group([0, 1], members_only=True)
        except sv.PeerLost as error:
            return type(error).__name__
        return None

    assert ranks(2, fn) == ["PeerLost"] * 2
