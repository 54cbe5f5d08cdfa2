"""The reproducible all-reduce and its tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.algorithms.builders import build_all
from syncvar.algorithms.reproducible_tree import (
    runs_of,
    split,
    tree_order,
    whole_nodes,
)
from syncvar.algorithms.ring import reproducible_all_reduce
from syncvar.algorithms.schedule import Copy, Reduce, ScheduleArgs, Send, even_chunks
from tests.verification.schedules.collective_contracts import contract_of, tree_expression
from tests.verification.schedules.schedule_checker import verify


def by_order(lo, hi):
    items = dict(zip(range(lo, hi), range(lo, hi), strict=True))
    for target, source in tree_order(lo, hi):
        items[target] = (items[target], items.pop(source))
    assert list(items) == [lo]
    return items[lo]


@given(lo=st.integers(0, 50), size=st.integers(1, 300))
def test_tree_order_builds_the_tree_of_the_definition(lo, size):
    assert by_order(lo, lo + size) == tree_expression(lo, lo + size)


def test_the_tree_by_hand():
    assert tree_expression(0, 1) == 0
    assert tree_expression(0, 3) == ((0, 1), 2)
    assert tree_expression(0, 6) == (((0, 1), (2, 3)), (4, 5))
    assert tree_expression(0, 7) == (((0, 1), (2, 3)), ((4, 5), 6))
    assert tree_expression(3, 6) == ((3, 4), 5)


def test_a_power_of_two_of_items_splits_into_equal_subtrees():
    # So ranks with equal shares, a power of two each, sum whole nodes alone.
    for span in (1, 2, 4, 8):
        parts = [tree_expression(lo, lo + span) for lo in range(0, 16, span)]
        for target, source in tree_order(0, len(parts)):
            parts[target] = (parts[target], parts[source])
        assert parts[0] == tree_expression(0, 16)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 8, 12])
@pytest.mark.parametrize("count", [0, 1, 7, 24, 25])
def test_it_moves_as_much_as_a_ring(world_size, count):
    n = world_size
    plans = build_all("all_reduce", "reproducible", n, count=count)
    report = verify(plans, contract_of("all_reduce", n, count=count, tree=True))
    assert report.rounds == 2 * (n - 1)
    assert report.messages == (2 * (n - 1),) * n
    if n > 1:
        chunks = [chunk.count for chunk in even_chunks(count, n)]
        assert report.elements == tuple(
            2 * count - chunks[rank] - chunks[(rank + 1) % n] for rank in range(n)
        )
        assert [plan.scratch_count for plan in plans] == [(n - 1) * chunk for chunk in chunks]


def test_the_owner_reduces_once_per_peer_and_copies_nothing():
    for rank in range(7):
        steps = [
            step for steps in reproducible_all_reduce(ScheduleArgs(rank, 7, 20)) for step in steps
        ]
        assert sum(isinstance(step, Reduce) for step in steps) == 6
        assert not any(isinstance(step, Copy) for step in steps)


def test_contributions_travel_raw():
    # Until the reduce-scatter is over, a rank sends only what it held at the start: nothing wrote to WORK before.
    rounds = list(reproducible_all_reduce(ScheduleArgs(2, 5, 20)))
    pieces = [step.chunk for steps in rounds[:4] for step in steps if isinstance(step, Send)]
    assert sorted(chunk.start for chunk in pieces) == [0, 4, 12, 16]
    assert [step.peer for steps in rounds[:4] for step in steps if isinstance(step, Send)] == [
        3,
        4,
        0,
        1,
    ]


@given(data=st.data(), count=st.integers(1, 70))
def test_whole_nodes_are_the_largest_nodes_that_lie_inside(data, count):
    ids = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    nodes = whole_nodes(runs_of(ids), count)

    def largest(lo, hi):
        """Walk the tree of the definition: a node that lies inside, or what its halves have."""
        if all(item in ids for item in range(lo, hi)):
            return [(lo, hi)]
        return [] if hi == lo + 1 else largest(lo, split(lo, hi)) + largest(split(lo, hi), hi)

    assert nodes == largest(0, count)
    assert len(nodes) <= 2 * max(1, count.bit_length()) * len(runs_of(ids))


@given(data=st.data(), count=st.integers(1, 40))
def test_the_nodes_of_any_cut_make_the_whole_tree(data, count):
    owner = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    held = {}
    for rank in range(6):
        for node in whole_nodes(
            runs_of(item for item in range(count) if owner[item] == rank), count
        ):
            held[node] = tree_expression(*node)

    def whole(lo, hi):
        return (
            held[lo, hi]
            if (lo, hi) in held
            else (whole(lo, split(lo, hi)), whole(split(lo, hi), hi))
        )

    assert whole(0, count) == tree_expression(0, count)
