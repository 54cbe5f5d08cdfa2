"""Every algorithm of the table is proven, for every world size and count that could be a corner.

A new row of the table is covered by being there.
"""

import pytest

from syncvar.algorithms.builders import (
    ALGORITHMS,
    SCHEDULES,
    WorkLayout,
    build_all,
    sums_by_the_tree,
    unsuited,
)
from syncvar.algorithms.compile_schedule import publications
from syncvar.algorithms.schedule import Chunk, Copy
from syncvar.core.errors import InternalError, PlanError
from tests.verification.schedules.collective_contracts import contract_of
from tests.verification.schedules.schedule_checker import verify

RANKS_MAX = 64
BATCHES = {"1-9": range(1, 10), "10-17": (10, 13, 15, 16, 17)}  # the others are with the slow tests
PAIRS = [(collective, algorithm) for collective, names in ALGORITHMS.items() for algorithm in names]


def test_a_plan_error_is_a_bug_of_ours():
    assert issubclass(PlanError, InternalError)


def able(collective, algorithm, world_sizes):
    """The world sizes that an algorithm can do."""
    return [n for n in world_sizes if unsuited(collective, algorithm, n, even=True) is None]


def sizes(collective, algorithm, world_size, *, thorough):
    """The arguments count, counts or matrix to try."""
    n, work = world_size, SCHEDULES[collective].work
    if work is WorkLayout.NOTHING:
        return [{}]
    if work is WorkLayout.BLOCKS:
        even = [{"count": count} for count in ((0, 1, 2, 3, n + 1) if thorough else (0, 2))]
        if unsuited(collective, algorithm, n, even=False):
            return even
        lone = [0] * n
        lone[n // 2] = 5
        return [*even, {"counts": [(7 * rank + 3) % 4 for rank in range(n)]}, {"counts": lone}]
    if work is WorkLayout.PAIRS:
        even = [{"count": count} for count in ((0, 1, 3) if thorough else (0, 1))]
        if unsuited(collective, algorithm, n, even=False):
            return even
        return [
            *even,
            {
                "matrix": [
                    [(5 * source + 3 * target) % 4 for target in range(n)] for source in range(n)
                ]
            },
        ]
    return [
        {"count": count}
        for count in sorted({0, 1, n - 1, n, n + 1, 2 * n + 3} if thorough else {0, n + 1})
    ]


def cases(collective, algorithm, world_size, *, thorough):
    """The arguments to try: all sizes with one root, and all roots with one size."""
    n = world_size
    every = sizes(collective, algorithm, n, thorough=thorough)
    if n > 32:
        every = every[-1:]
    if not SCHEDULES[collective].has_root:
        return every
    roots = range(n) if thorough else {0, n - 1} if n > 32 else {0, 1 % n, n // 2, n - 1}
    return [{**size, "root": n // 3} for size in every] + [
        {**every[-1], "root": root} for root in roots
    ]


def prove(collective, algorithm, world_size, *, thorough):
    tree = sums_by_the_tree(collective, algorithm, world_size)
    for case in cases(collective, algorithm, world_size, thorough=thorough):
        plans = build_all(collective, algorithm, world_size, **case)
        try:
            verify(plans, contract_of(collective, world_size, tree=tree, **case))
        except PlanError as error:
            pytest.fail(f"{collective} by {algorithm} on {world_size} ranks with {case}: {error}")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_the_plan_fulfils_its_contract(collective, algorithm, batch):
    for world_size in able(collective, algorithm, BATCHES[batch]):
        prove(collective, algorithm, world_size, thorough=world_size <= 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(n, marks=[pytest.mark.nightly] if 24 < n < RANKS_MAX else [])
        for n in range(1, RANKS_MAX + 1)
    ],
)
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_the_plan_fulfils_its_contract_for_every_world_size_and_count(
    collective, algorithm, world_size
):
    for n in able(collective, algorithm, [world_size]):
        prove(collective, algorithm, n, thorough=True)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_a_group_of_one_has_nothing_to_do(collective, algorithm):
    (plan,) = build_all(collective, algorithm, 1, count=3)
    copies = (
        (Copy(Chunk(0, 3), Chunk(3, 6)),),
    )  # from the half for destinations to the half from sources
    assert plan.rounds == (copies if SCHEDULES[collective].work is WorkLayout.PAIRS else ())
    assert plan.scratch_count == 0


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_the_count_does_not_change_who_talks_to_whom(collective, algorithm):
    def links(world_size, count):
        plans = build_all(collective, algorithm, world_size, count=count)
        return [
            [
                [(type(step).__name__, step.peer) for step in steps if hasattr(step, "peer")]
                for steps in plan.rounds
            ]
            for plan in plans
        ]

    for n in able(collective, algorithm, [2, 3, 5, 8]):
        assert links(n, 0) == links(n, 1) == links(n, 20)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_rank_has_the_same_number_of_rounds(collective, algorithm):
    for n in able(collective, algorithm, [2, 3, 5, 8]):
        assert len({len(plan.rounds) for plan in build_all(collective, algorithm, n, count=4)}) == 1


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_in_shared_memory_every_receive_finds_its_part(collective, algorithm):
    for n in able(collective, algorithm, [2, 3, 5, 8]):
        for case in cases(collective, algorithm, n, thorough=False):
            plans = build_all(collective, algorithm, n, **case)
            published = [publications(plans, rank) for rank in range(n)]
            for rank, rounds in enumerate(published):
                for number, publication in enumerate(rounds):
                    assert publication.length == sum(chunk.count for chunk in publication.ranges)
                    assert publication.length <= publication.longest
                    for take in publication.takes:
                        assert take.start + take.target.count <= published[take.peer][number].length
                        assert take.peer != rank
