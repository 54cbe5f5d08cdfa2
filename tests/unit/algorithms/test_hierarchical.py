"""Collectives over several hosts: what is composed of proven plans is proven as a whole."""

import itertools

import pytest

from syncvar.algorithms.builders import SCHEDULES, WorkLayout
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
MIDDLE = 1 << 12  # one link for all ranks of a host


def blocks(n):
    """Return counts of the ranks' blocks: none, equal, uneven, and all on one rank."""
    lone = [0] * n
    lone[n // 2] = 5
    return [0] * n, [2] * n, [(7 * rank + 3) % 4 for rank in range(n)], lone


@pytest.mark.parametrize("itemsize", [1, MIDDLE, LARGE])
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
def test_reduce(itemsize):
    for sizes in HOSTS:
        n = sum(sizes)
        for root, count in itertools.product({0, 1, n // 2, n - 1}, (0, 1, n + 1)):
            case = {"count": count, "root": root}
            plans = flattened("reduce", sizes, itemsize=itemsize, **case)
            verify(plans, contract_of("reduce", n, **case))
            if keeps_the_tree(sizes):
                plans = flattened("reduce", sizes, itemsize=itemsize, reproducible=True, **case)
                verify(plans, contract_of("reduce", n, tree=True, **case))


@pytest.mark.parametrize("itemsize", [1, LARGE])
def test_reduce_scatter(itemsize):
    for sizes in HOSTS:
        n = sum(sizes)
        for counts in blocks(n):
            plans = flattened("reduce_scatter", sizes, counts=counts, itemsize=itemsize)
            verify(plans, contract_of("reduce_scatter", n, counts=counts))
            if keeps_the_tree(sizes):
                plans = flattened(
                    "reduce_scatter", sizes, counts=counts, itemsize=itemsize, reproducible=True
                )
                verify(plans, contract_of("reduce_scatter", n, counts=counts, tree=True))


@pytest.mark.parametrize("itemsize", [1, LARGE])
@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_gather_and_scatter(collective, itemsize):
    for sizes in HOSTS:
        n = sum(sizes)
        for root, counts in itertools.product({0, 1, n // 2, n - 1}, blocks(n)):
            case = {"counts": counts, "root": root}
            plans = flattened(collective, sizes, itemsize=itemsize, **case)
            verify(plans, contract_of(collective, n, **case))


@pytest.mark.parametrize("itemsize", [1, LARGE])
def test_all_to_all(itemsize):
    for sizes in HOSTS:
        n = sum(sizes)
        uneven = [[(5 * source + 3 * target) % 4 for target in range(n)] for source in range(n)]
        for case in ({"count": 0}, {"count": 2}, {"matrix": uneven}):
            plans = flattened("all_to_all", sizes, itemsize=itemsize, **case)
            verify(plans, contract_of("all_to_all", n, **case))


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
        for counts in blocks(n):
            for itemsize in (1, MIDDLE, LARGE):
                plans = flattened(collective, sizes, counts=counts, itemsize=itemsize)
                verify(plans, contract_of(collective, n, counts=counts))


def test_barrier():
    for sizes in HOSTS:
        verify(flattened("barrier", sizes), contract_of("barrier", sum(sizes)))


@pytest.mark.parametrize(
    ("itemsize", "alone"), [(1, [0, 0, 0, 0]), (MIDDLE, [0, 1, 0, 1]), (LARGE, [0, 0, 0, 0])]
)
def test_ranks_that_carry_nothing_between_hosts(itemsize, alone):
    """Only where one rank of a host carries all, the others are idle."""
    plans = flattened("all_reduce", (2, 2), count=8, itemsize=itemsize)
    crossing = [
        any(
            hasattr(step, "peer") and step.peer // 2 != plan.rank // 2
            for steps in plan.rounds
            for step in steps
        )
        for plan in plans
    ]
    assert [int(not one) for one in crossing] == alone


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


@pytest.mark.parametrize(
    ("sizes", "itemsize"), [((3, 2), LARGE), ((3, 2), 1), ((2, 2), 1), ((2, 2), MIDDLE)]
)
@pytest.mark.parametrize("collective", COMPOSED)
def test_every_step_is_needed(collective, sizes, itemsize):
    """Without any one step of any rank the checker refuses the whole."""
    n, work = sum(sizes), SCHEDULES[collective].work
    counts = {"count": 0 if work is WorkLayout.NOTHING else 5}
    if work is WorkLayout.BLOCKS:
        counts = {"counts": [1, 2, 1, 1, 1][:n]}
    plans = flattened(collective, sizes, itemsize=itemsize, **counts)
    contract = contract_of(collective, n, **counts)
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
    assert tried >= 6


@pytest.mark.slow
@pytest.mark.parametrize("collective", COMPOSED)
@pytest.mark.parametrize(
    "sizes", [(2,) * 5, (2,) * 8, (3, 3, 3), (3,) * 5, (4,) * 4, (4, 4, 4, 3), (1, 4, 2, 3)]
)
def test_many_hosts(collective, sizes):
    n, known = sum(sizes), SCHEDULES[collective]
    cases = [{"count": count} for count in (0, 1, n + 1)]
    if known.work is WorkLayout.NOTHING:
        cases = [{}]
    elif known.work is WorkLayout.BLOCKS:
        cases = [{"counts": counts} for counts in blocks(n)]
    elif known.work is WorkLayout.PAIRS:
        matrix = [[(5 * source + 3 * target) % 4 for target in range(n)] for source in range(n)]
        cases = [{"count": 2}, {"matrix": matrix}]
    roots = [{"root": root} for root in (0, n // 2, n - 1)] if known.has_root else [{}]
    for case, root, itemsize in itertools.product(cases, roots, (1, MIDDLE, LARGE)):
        plans = flattened(collective, sizes, itemsize=itemsize, **case, **root)
        verify(plans, contract_of(collective, n, **case, **root))
