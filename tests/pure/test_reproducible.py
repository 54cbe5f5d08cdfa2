"""The reproducible all-reduce and its tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.plans import (
    Copy,
    Reduce,
    Send,
    build_all,
    contract_of,
    even_chunks,
    reproducible_all_reduce,
    tree_expression,
    tree_order,
    verify,
)


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
    # So a program with a fixed number of micro-shards gets the same sum for any number of ranks that divides them.
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
        steps = [step for steps in reproducible_all_reduce(rank, 7, 20) for step in steps]
        assert sum(isinstance(step, Reduce) for step in steps) == 6
        assert not any(isinstance(step, Copy) for step in steps)


def test_contributions_travel_raw():
    # Until the reduce-scatter is over, a rank sends only what it held at the start: nothing wrote to WORK before.
    rounds = list(reproducible_all_reduce(2, 5, 20))
    pieces = [step.chunk for steps in rounds[:4] for step in steps if isinstance(step, Send)]
    assert sorted(chunk.start for chunk in pieces) == [0, 4, 12, 16]
    assert [step.peer for steps in rounds[:4] for step in steps if isinstance(step, Send)] == [3, 4, 0, 1]
