"""Collectives over several hosts: what is composed of proven plans is proven as a whole."""

import itertools

import pytest

from syncvar.algorithms.hierarchical import COMPOSED, keeps_the_tree
from syncvar.algorithms.schedule import Reduce, Schedule
from syncvar.core.errors import PlanError
from tests.verification.schedules.collective_contracts import contract_of, tree_expression
from tests.verification.schedules.schedule_checker import flattened, verify

HOSTS = [
    sizes
    for hosts in (2, 3)
    for sizes in itertools.product((1, 2, 3), repeat=hosts)
    if max(sizes) > 1 and sum(sizes) <= 6
] + [(2, 2, 2, 2), (1, 2, 1, 1), (4, 4), (5, 3), (4, 4, 2), (8, 8)]
LARGE = 1 << 20  # bytes of an element: several links at once


@pytest.mark.parametrize("itemsize", [1, LARGE])
def test_all_reduce(itemsize):
    for sizes in HOSTS:
        n = sum(sizes)
        for count in (0, 1, n - 1, n + 1, 2 * n + 3):
            plans = flattened("all_reduce", sizes, count=count, itemsize=itemsize)
            verify(plans, contract_of("all_reduce", n, count=count))
            if keeps_the_tree(sizes):
                plans = flattened(
                    "all_reduce", sizes, count=count, itemsize=itemsize, reproducible=True
                )
                verify(plans, contract_of("all_reduce", n, count=count, tree=True))


@pytest.mark.parametrize("itemsize", [1, LARGE])
def test_broadcast(itemsize):
    for sizes in HOSTS:
        n = sum(sizes)
        for root, count in itertools.product({0, 1, n // 2, n - 1}, (0, 1, n + 1)):
            plans = flattened("broadcast", sizes, count=count, root=root, itemsize=itemsize)
            verify(plans, contract_of("broadcast", n, count=count, root=root))


@pytest.mark.parametrize("collective", ["all_gather", "header_exchange"])
def test_all_gather(collective):
    for sizes in HOSTS:
        n = sum(sizes)
        lone = [0] * n
        lone[n // 2] = 5
        for counts in ([0] * n, [2] * n, [(7 * rank + 3) % 4 for rank in range(n)], lone):
            for itemsize in (1, LARGE):
                plans = flattened(collective, sizes, counts=counts, itemsize=itemsize)
                verify(plans, contract_of(collective, n, counts=counts))


def test_barrier():
    for sizes in HOSTS:
        verify(flattened("barrier", sizes), contract_of("barrier", sum(sizes)))


def test_the_tree_is_kept_exactly_where_the_hosts_are_subtrees():
    for sizes in itertools.product(range(1, 6), repeat=3):
        starts = (0, sizes[0], sizes[0] + sizes[1])
        on_hosts = [
            tree_expression(start, start + size) for start, size in zip(starts, sizes, strict=True)
        ]

        def over(expression, on_hosts=on_hosts):
            return (
                on_hosts[expression]
                if isinstance(expression, int)
                else (over(expression[0]), over(expression[1]))
            )

        is_same = over(tree_expression(0, 3)) == tree_expression(0, sum(sizes))
        if keeps_the_tree(sizes):
            assert is_same, sizes
        elif is_same:  # few shapes are subtrees by accident; they go the long way
            assert len(set(sizes)) > 1, sizes


def test_several_links_work_at_once():
    plans = flattened("all_reduce", (2, 2), count=8, itemsize=LARGE)
    crossing = [
        sum(
            step.chunk.count
            for steps in plan.rounds
            for step in steps
            if hasattr(step, "peer")
            and step.peer // 2 != rank // 2
            and type(step).__name__ == "Send"
        )
        for rank, plan in enumerate(plans)
    ]
    assert crossing == [4, 4, 4, 4], "each rank carries its shard between the hosts"


@pytest.mark.parametrize("collective", COMPOSED)
def test_every_step_is_needed(collective):
    """Without any one step of any rank the checker refuses the whole."""
    counts = (
        {"counts": [1, 2, 1, 1, 1]}
        if collective in ("all_gather", "header_exchange")
        else {"count": 5}
    )
    if collective == "barrier":
        counts = {}
    plans = flattened(collective, (3, 2), itemsize=LARGE, **counts)
    contract = contract_of(collective, 5, **counts)
    verify(plans, contract)
    tried = 0
    for plan in plans:
        for number, steps in enumerate(plan.rounds):
            for place, step in enumerate(steps):
                if isinstance(step, Reduce) and not step.target.count:
                    continue  # this rank owns no shard; what it does with nothing changes nothing
                rounds = list(plan.rounds)
                rounds[number] = steps[:place] + steps[place + 1 :]
                mutant = Schedule(
                    plan.collective,
                    plan.algorithm,
                    plan.rank,
                    plan.world_size,
                    plan.work_count,
                    plan.scratch_count,
                    tuple(rounds),
                )
                with pytest.raises(PlanError):
                    verify([mutant if one is plan else one for one in plans], contract)
                tried += 1
    assert tried > 10
