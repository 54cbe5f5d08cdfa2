"""The table: every row, its borders, its reasons, and wrong names."""

import pytest

from syncvar.algorithms.builders import (
    ALGORITHMS,
    SCHEDULES,
    WorkLayout,
    build,
    build_all,
    unsuited,
)
from syncvar.algorithms.cost_model import predicted_seconds
from syncvar.algorithms.schedule import ScheduleArgs
from syncvar.algorithms.selection import choose, parse_forced
from syncvar.core.errors import ConfigError
from tests.verification.schedules.collective_contracts import contract_of
from tests.verification.schedules.schedule_checker import verify

KIB = 1024


@pytest.mark.parametrize(
    ("collective", "nbytes", "world_size", "algorithm"),
    [
        ("all_reduce", 0, 1, "direct"),
        ("all_reduce", 16 * KIB, 3, "direct"),
        ("all_reduce", 16 * KIB + 1, 3, "doubling"),
        ("all_reduce", 0, 4, "doubling"),
        ("all_reduce", 64 * KIB, 2, "doubling"),
        ("all_reduce", 64 * KIB, 63, "doubling"),
        ("all_reduce", 64 * KIB + 1, 2, "halving"),
        ("all_reduce", 64 * KIB + 1, 6, "ring"),
        ("all_reduce", 64 * KIB + 1, 17, "halving"),
        ("all_reduce", 1 << 20, 17, "halving"),
        ("all_reduce", (1 << 20) + 1, 17, "ring"),
        ("all_reduce", 1 << 30, 64, "halving"),
        ("all_gather", 32 * KIB, 3, "direct"),
        ("all_gather", 32 * KIB, 4, "doubling"),
        ("all_gather", 4 << 20, 4, "doubling"),
        ("all_gather", (4 << 20) + 1, 4, "ring"),
        ("all_gather", 32 * KIB, 7, "direct"),
        ("all_gather", 32 * KIB + 1, 7, "ring"),
        ("all_gather", 32 * KIB, 9, "ring"),
        ("broadcast", 0, 2, "tree"),
        ("broadcast", 256 * KIB, 64, "tree"),
        ("broadcast", 256 * KIB + 1, 2, "tree"),
        ("broadcast", 256 * KIB + 1, 3, "scatter_gather"),
        ("broadcast", 4 << 20, 31, "scatter_gather"),
        ("broadcast", 4 << 20, 32, "double_tree"),
        ("broadcast", (4 << 20) + 1, 3, "double_tree"),
        ("reduce", 256 * KIB, 3, "tree"),
        ("reduce", 256 * KIB + 1, 3, "owners"),
        ("reduce", (4 << 20) + 1, 2, "owners"),
        ("reduce", (4 << 20) + 1, 3, "double_tree"),
        ("gather", 64, 3, "direct"),
        ("gather", 1 << 20, 4, "tree"),
        ("gather", (1 << 20) + 1, 4, "direct"),
        ("scatter", 64, 3, "direct"),
        ("scatter", 1 << 20, 4, "tree"),
        ("reduce_scatter", 256 * KIB, 9, "direct"),
        ("reduce_scatter", 256 * KIB + 1, 9, "pairwise"),
        ("all_to_all", 1 << 20, 4, "direct"),
        ("all_to_all", (1 << 20) + 1, 4, "pairwise"),
        ("scan", 1 << 30, 3, "direct"),
        ("scan", 0, 4, "doubling"),
        ("exscan", 0, 3, "direct"),
        ("exscan", 0, 4, "doubling"),
        ("barrier", 0, 3, "dissemination"),
        ("header_exchange", 64, 3, "dissemination"),
    ],
)
def test_the_table(collective, nbytes, world_size, algorithm):
    choice = choose(collective, nbytes, world_size)
    assert choice.algorithm == algorithm
    assert choice.reason.startswith(f"{algorithm}: {nbytes} bytes on {world_size} ranks: ")


@pytest.mark.parametrize(
    ("collective", "nbytes", "world_size", "algorithm"),
    [
        ("all_gather", 32 * KIB, 9, "dissemination"),
        ("all_gather", (1 << 20) + 1, 9, "ring"),
        ("all_gather", 32 * KIB, 8, "doubling"),
        ("all_to_all", 64 * KIB, 4, "bruck"),
        ("all_to_all", 64, 3, "direct"),
        ("all_to_all", 64 * KIB + 1, 4, "direct"),
        ("header_exchange", 64, 3, "dissemination"),
    ],
)
def test_equal_blocks_have_more_algorithms(collective, nbytes, world_size, algorithm):
    assert choose(collective, nbytes, world_size, even=True).algorithm == algorithm


@pytest.mark.parametrize("collective", [name for name in ALGORITHMS if name != "all_reduce"])
def test_in_shared_memory_everything_is_direct(collective):
    for nbytes in (0, 1 << 30):
        for world_size in (1, 2, 64):
            choice = choose(collective, nbytes, world_size, shared=True, reproducible=True)
            assert choice.algorithm == "direct"
            assert "in shared memory" in choice.reason


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8, 12, 16, 24])
@pytest.mark.parametrize("collective", [name for name, one in SCHEDULES.items() if one.bus])
def test_the_table_is_near_the_best_of_the_predictions(collective, world_size):
    in_blocks = SCHEDULES[collective].work in (WorkLayout.BLOCKS, WorkLayout.PAIRS)
    for size in (0, 9, 14, 16, 17, 18, 19, 20, 21, 22, 26):
        count = max(1, (1 << size) // world_size) if in_blocks else 1 << size
        seconds = {
            algorithm: predicted_seconds(
                build_all(collective, algorithm, world_size, count=count), 1
            )
            for algorithm in ALGORITHMS[collective]
            if unsuited(collective, algorithm, world_size, even=True) is None
        }
        chosen = choose(
            collective, count * world_size if in_blocks else count, world_size, even=True
        ).algorithm
        assert seconds[chosen] <= 1.75 * min(seconds.values()), (size, chosen, seconds)


@pytest.mark.parametrize(
    ("nbytes", "algorithm"), [(0, "direct"), (16 * KIB + 1, "tree"), (64 * KIB + 1, "reproducible")]
)
def test_a_reproducible_all_reduce_takes_only_algorithms_that_sum_by_the_tree(nbytes, algorithm):
    choice = choose("all_reduce", nbytes, 3, reproducible=True)
    assert choice.algorithm == algorithm
    assert "sums by the tree" in choice.reason
    verify(
        build_all("all_reduce", choice.algorithm, 5, count=7),
        contract_of("all_reduce", 5, count=7, tree=True),
    )
    for forced in ("direct", "tree", "reproducible"):
        assert choose("all_reduce", nbytes, 3, reproducible=True, forced=forced).algorithm == forced


def test_doubling_and_halving_sum_by_the_tree_in_powers_of_two():
    assert choose("all_reduce", 64, 4, reproducible=True).algorithm == "doubling"
    assert choose("all_reduce", 64, 5, reproducible=True).algorithm == "tree"
    assert choose("all_reduce", 1 << 20, 4, reproducible=True).algorithm == "halving"
    assert choose("all_reduce", 1 << 20, 5, reproducible=True).algorithm == "reproducible"
    assert choose("reduce", 1 << 30, 5, reproducible=True).algorithm == "owners"
    with pytest.raises(ConfigError, match="'halving' contradicts reproducible"):
        choose("all_reduce", 8, 6, reproducible=True, forced="halving")


@pytest.mark.parametrize("collective", ["all_gather", "broadcast", "barrier", "header_exchange"])
def test_collectives_that_sum_nothing_are_reproducible_as_they_are(collective):
    assert choose(collective, 8, 3, reproducible=True) == choose(collective, 8, 3)


@pytest.mark.parametrize(
    ("collective", "name"), [(c, name) for c, names in ALGORITHMS.items() for name in names]
)
def test_every_algorithm_can_be_demanded(collective, name):
    choice = choose(collective, 8, 4, forced=name)
    assert choice.algorithm == name
    assert "the caller demands it" in choice.reason


def test_a_demand_cannot_contradict_reproducibility():
    with pytest.raises(ConfigError, match="'ring' contradicts reproducible"):
        choose("all_reduce", 8, 3, reproducible=True, forced="ring")


def test_an_unknown_algorithm_is_answered_with_the_nearest_name_and_the_list():
    for call in (
        lambda: choose("all_reduce", 8, 3, forced="rign"),
        lambda: build("all_reduce", "rign", ScheduleArgs(0, 3)),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == (
            "there is no algorithm 'rign' for all_reduce (did you mean ring?). Known: direct, owners, tree, doubling, halving, ring, reproducible [SV-101]"
        )


def test_an_unknown_collective_is_answered_with_the_nearest_name_and_the_list():
    for call in (
        lambda: choose("allreduce", 8, 3),
        lambda: build("allreduce", "ring", ScheduleArgs(0, 3)),
    ):
        with pytest.raises(
            ConfigError, match=r"no collective 'allreduce' \(did you mean all_reduce\?\)"
        ) as caught:
            call()
        assert all(name in str(caught.value) for name in ALGORITHMS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 3, "world_size": 3}, "rank 3 is not in a group of 3"),
        ({"rank": -1, "world_size": 3}, "rank -1"),
        ({"rank": 0, "world_size": 0}, "group of 0"),
        ({"rank": 0, "world_size": 3, "count": -1}, "negative"),
        ({"rank": 0, "world_size": 3, "root": 3}, "root 3"),
        ({"rank": 0, "world_size": 3, "counts": [1, 2, 3]}, "cannot take 3 counts"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        build("all_reduce", "ring", ScheduleArgs(**arguments))


def test_an_all_gather_takes_one_count_per_rank():
    with pytest.raises(ConfigError, match="cannot take 2 counts"):
        build("all_gather", "ring", ScheduleArgs(0, 3, counts=[1, 2]))
    with pytest.raises(ConfigError, match="a count is negative: -2"):
        build("all_gather", "ring", ScheduleArgs(0, 2, counts=[1, -2]))


def test_dissemination_refuses_uneven_blocks():
    with pytest.raises(
        ConfigError, match="all_gather by 'dissemination' needs blocks of equal count"
    ):
        build("all_gather", "dissemination", ScheduleArgs(0, 2, counts=[1, 2]))
    assert build("all_gather", "dissemination", ScheduleArgs(0, 2, counts=[2, 2])) == build(
        "all_gather", "dissemination", ScheduleArgs(0, 2, count=2)
    )


def test_a_plan_says_what_it_is():
    plan = build("all_gather", "ring", ScheduleArgs(1, 3, counts=[1, 2, 3]))
    assert (plan.collective, plan.algorithm, plan.rank, plan.world_size) == (
        "all_gather",
        "ring",
        1,
        3,
    )
    assert (plan.work_count, plan.scratch_count) == (6, 0)
    assert build("barrier", "dissemination", ScheduleArgs(0, 2, count=9)).work_count == 0


def test_scratch_reaches_as_far_as_the_chunks():
    assert build("all_reduce", "direct", ScheduleArgs(0, 3, count=4)).scratch_count == 12
    assert build("all_reduce", "reproducible", ScheduleArgs(1, 3, count=6)).scratch_count == 4


def test_building_is_a_pure_function():
    assert build_all("all_reduce", "ring", 4, count=9) == build_all(
        "all_reduce", "ring", 4, count=9
    )


def test_an_all_gather_by_doubling_refuses_other_numbers_than_powers_of_two():
    with pytest.raises(ConfigError, match="needs a power of two of ranks, not 3"):
        build("all_gather", "doubling", ScheduleArgs(0, 3, count=1))
    with pytest.raises(ConfigError, match="needs a power of two of ranks, not 6"):
        choose("all_gather", 8, 6, forced="doubling")


@pytest.mark.parametrize("matrix", [[[1, 2]], [[1, 2], [3]], [[1, 2, 3]] * 3])
def test_a_matrix_has_a_row_and_a_column_per_rank(matrix):
    with pytest.raises(ConfigError, match="cannot take a matrix"):
        build("all_to_all", "direct", ScheduleArgs(0, 2, matrix=matrix))


def test_only_an_all_to_all_takes_a_matrix():
    with pytest.raises(ConfigError, match="all_reduce on 1 ranks cannot take a matrix"):
        build("all_reduce", "ring", ScheduleArgs(0, 1, matrix=[[1]]))
    with pytest.raises(ConfigError, match="a count is negative: -4"):
        build("all_to_all", "direct", ScheduleArgs(0, 2, matrix=[[1, 2], [-4, 2]]))
    with pytest.raises(ConfigError, match="'bruck' needs blocks of equal count"):
        build("all_to_all", "bruck", ScheduleArgs(0, 2, matrix=[[1, 2], [1, 1]]))


def test_the_work_of_an_all_to_all_has_what_goes_and_what_comes():
    plans = build_all("all_to_all", "pairwise", 2, matrix=[[1, 2], [0, 4]])
    assert [plan.work_count for plan in plans] == [3 + 1, 4 + 6]


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        ("", {}),
        ("  ", {}),
        ("all_reduce:ring", {"all_reduce": "ring"}),
        (" all_reduce : ring , broadcast:tree ", {"all_reduce": "ring", "broadcast": "tree"}),
    ],
)
def test_a_job_demands_algorithms_in_a_text(text, forced):
    assert parse_forced(text) == forced


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ring", "collective:algorithm, not 'ring'"),
        ("all_reduce:", "collective:algorithm, not 'all_reduce:'"),
        ("all_reduce:ring,", "collective:algorithm, not ''"),
        ("allreduce:ring", "no collective 'allreduce' .did you mean all_reduce"),
        (
            "all_reduce:rign",
            "no algorithm 'rign' for all_reduce .did you mean ring.*Known: direct, owners",
        ),
        (
            "all_reduce:ring,all_reduce:tree",
            "two algorithms are demanded for all_reduce: 'ring' and 'tree'",
        ),
    ],
)
def test_a_demand_that_cannot_be_read_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_forced(text)
