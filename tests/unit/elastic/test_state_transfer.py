"""Which commit the members of a new generation take, and from whom."""

import pytest

from syncvar.core.errors import InternalError
from syncvar.elastic.state_transfer import NEVER, Holding, RankHoldings, choose_commit


def holding(generation, number, own=(), plain=None, ranks=2):
    own = None if own is None else frozenset(own)
    return Holding((generation, number), ranks, own, plain or {})


def test_the_common_commit_is_the_smallest_of_the_newest():
    ranks = [
        RankHoldings(4, [holding(4, 8), holding(4, 9, None)]),
        RankHoldings(4, [holding(4, 7), holding(4, 8)]),
        RankHoldings(4, [holding(4, 8), holding(4, 9, None)]),
    ]
    plan = choose_commit(ranks)
    assert (plan.common, plan.having, plan.source) == ((4, 8), [0, 1, 2], 0)


def test_a_worker_with_an_older_tag_holds_nothing():
    ranks = [RankHoldings(1, [holding(1, 30)]), RankHoldings(2, [holding(1, 5)])]
    plan = choose_commit(ranks)
    assert (plan.common, plan.having) == ((1, 5), [1])


def test_a_worker_with_an_older_tag_may_have_the_common_commit():
    ranks = [
        RankHoldings(1, [holding(1, 5), holding(1, 6, None)]),
        RankHoldings(2, [holding(1, 5)]),
    ]
    plan = choose_commit(ranks)
    assert (plan.common, plan.having, plan.source) == ((1, 5), [1, 0], 1)


def test_commits_of_one_number_in_two_generations_differ():
    ranks = [RankHoldings(3, [holding(3, 6)]), RankHoldings(4, [holding(4, 6)])]
    assert choose_commit(ranks).having == [1]


def test_without_holders_all_take_the_objects_of_rank_0():
    ranks = [RankHoldings(NEVER, [holding(NEVER, 0, None, {"a": "1", "b": x}, 1)]) for x in "12"]
    plan = choose_commit(ranks)
    assert (plan.common, plan.having, plan.own) == ((NEVER, 0), [0], {"b"})


def test_a_commit_that_nobody_has_completed_has_own_what_differs_or_did():
    def held(digest):
        return [
            holding(1, 1, ["old"], {"old": "1"}),
            holding(1, 2, None, {"old": "1", "new": digest}),
        ]

    ranks = [
        RankHoldings(1, held("a")),
        RankHoldings(1, held("b")),
        RankHoldings(NEVER, [holding(NEVER, 0)]),
    ]
    plan = choose_commit(ranks)
    assert (plan.common, plan.having, plan.own) == ((1, 2), [0, 1], {"old", "new"})


def test_holders_that_contradict_each_other_are_a_bug():
    ranks = [RankHoldings(1, [holding(1, 7)]), RankHoldings(1, [holding(1, 5)])]
    with pytest.raises(InternalError, match="lacks commit 5"):
        choose_commit(ranks)
