"""Every algorithm of the table is proven, for every world size and count that could be a corner.

A new row of the table is covered by being there.
"""

import pytest

from syncvar.plans import ALGORITHMS, build_all, contract_of, verify

WORLD_SIZES = (*range(1, 10), 12, 16, 17, 31, 32, 33, 63, 64)
PAIRS = [(collective, algorithm) for collective, names in ALGORITHMS.items() for algorithm in names]
SUMS_BY_THE_TREE = {"direct", "owners", "tree", "reproducible"}


def cases(collective, algorithm, world_size, *, thorough):
    """The arguments (count, counts, root) to try."""
    n = world_size
    if collective == "barrier":
        return [{}]
    if collective in {"all_gather", "header_exchange"}:
        even = [{"count": count} for count in ((0, 1, 2, 3, n - 1, n, n + 1) if thorough else (0, 2))]
        if algorithm == "dissemination":
            return even
        lone = [0] * n
        lone[n // 2] = 5
        return [*even, {"counts": [(7 * rank + 3) % 4 for rank in range(n)]}, {"counts": lone}]
    counts = sorted({0, 1, n - 1, n, n + 1, 2 * n + 3} if thorough else {0, 1, n + 1})
    if collective != "broadcast":
        return [{"count": count} for count in counts]
    roots = range(n) if thorough else (0, 1, n // 2, n - 1)
    return [{"count": count, "root": root} for count in (0, 3) for root in roots]


def prove(collective, algorithm, world_size, *, thorough):
    for case in cases(collective, algorithm, world_size, thorough=thorough):
        tree = collective == "all_reduce" and algorithm in SUMS_BY_THE_TREE
        plans = build_all(collective, algorithm, world_size, **case)
        verify(plans, contract_of(collective, world_size, tree=tree, **case))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_the_plan_fulfils_its_contract(collective, algorithm, world_size):
    prove(collective, algorithm, world_size, thorough=world_size <= 17)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", range(1, 65))
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_the_plan_fulfils_its_contract_for_every_world_size_and_count(collective, algorithm, world_size):
    prove(collective, algorithm, world_size, thorough=True)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_a_group_of_one_has_nothing_to_do(collective, algorithm):
    (plan,) = build_all(collective, algorithm, 1, count=3)
    assert plan.rounds == ()
    assert plan.scratch_count == 0


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_the_count_does_not_change_who_talks_to_whom(collective, algorithm, world_size):
    def links(count):
        plans = build_all(collective, algorithm, world_size, count=count)
        return [
            [
                [(type(step).__name__, step.peer) for step in steps if hasattr(step, "peer")]
                for steps in plan.rounds
            ]
            for plan in plans
        ]

    assert links(0) == links(1) == links(20)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_rank_has_the_same_number_of_rounds(collective, algorithm, world_size):
    plans = build_all(collective, algorithm, world_size, count=4)
    assert len({len(plan.rounds) for plan in plans}) == 1
