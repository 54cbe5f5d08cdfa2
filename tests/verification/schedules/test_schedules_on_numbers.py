"""The plans on numbers: a second, independent interpreter, so that the checker is not the only witness."""

import random

import pytest

from syncvar.algorithms.builders import ALGORITHMS, build_all
from syncvar.algorithms.schedule import Buffer, Copy, Recv, RecvReduce, Reduce, Send


def run_on_lists(plans, work):
    """Run all ranks round by round; every message is copied when it is sent."""
    memory = [
        {Buffer.WORK: list(values), Buffer.SCRATCH: [None] * plan.scratch_count}
        for plan, values in zip(plans, work, strict=True)
    ]

    def put(rank, chunk, values):
        memory[rank][chunk.buffer][chunk.start : chunk.stop] = values

    def get(rank, chunk):
        return memory[rank][chunk.buffer][chunk.start : chunk.stop]

    def total(rank, chunk, other, other_left):
        pairs = zip(other, get(rank, chunk), strict=True)
        return [one + two if other_left else two + one for one, two in pairs]

    for number in range(max(len(plan.rounds) for plan in plans)):
        mail = {}
        for plan in plans:
            for step in plan.rounds[number]:
                if isinstance(step, Send):
                    mail[plan.rank, step.peer] = get(plan.rank, step.chunk)
        for plan in plans:
            for step in plan.rounds[number]:
                match step:
                    case Recv(peer, chunk):
                        put(plan.rank, chunk, mail.pop((peer, plan.rank)))
                    case RecvReduce(peer, chunk, left):
                        put(
                            plan.rank,
                            chunk,
                            total(plan.rank, chunk, mail.pop((peer, plan.rank)), left),
                        )
                    case Copy(source, target):
                        put(plan.rank, target, get(plan.rank, source))
                    case Reduce(source, target, left):
                        put(
                            plan.rank,
                            target,
                            total(plan.rank, target, get(plan.rank, source), left),
                        )
        assert mail == {}
    return [one[Buffer.WORK] for one in memory]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_all_ranks_end_with_the_same_bits_and_the_right_sum(algorithm, world_size):
    generator = random.Random(world_size)
    work = [[generator.uniform(-1, 1) for _ in range(10)] for _ in range(world_size)]
    results = run_on_lists(build_all("all_reduce", algorithm, world_size, count=10), work)
    assert all(result == results[0] for result in results)
    assert results[0] == pytest.approx([sum(column) for column in zip(*work, strict=True)])


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_the_reproducible_sum_does_not_depend_on_the_place_in_the_vector(world_size):
    generator = random.Random(world_size)
    values = [generator.uniform(-1, 1) for _ in range(world_size)]
    work = [[value] * 11 for value in values]
    for algorithm in ("reproducible", "tree"):
        (result, *_) = run_on_lists(build_all("all_reduce", algorithm, world_size, count=11), work)
        assert len(set(result)) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "dissemination"])
def test_all_ranks_end_with_all_blocks_in_rank_order(algorithm, world_size):
    everything = list(range(3 * world_size))
    work = [[x if x // 3 == rank else None for x in everything] for rank in range(world_size)]
    plans = build_all("all_gather", algorithm, world_size, count=3)
    assert run_on_lists(plans, work) == [everything] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_all_ranks_end_with_what_the_root_held(world_size):
    for root in range(world_size):
        for algorithm in ALGORITHMS["broadcast"]:
            work = [[rank, rank] for rank in range(world_size)]
            plans = build_all("broadcast", algorithm, world_size, count=2, root=root)
            assert run_on_lists(plans, work) == [[root, root]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("algorithm", ALGORITHMS["reduce"])
def test_the_root_ends_with_the_sum(algorithm, world_size):
    for root in range(world_size):
        work = [[10**rank * x for x in range(5)] for rank in range(world_size)]
        plans = build_all("reduce", algorithm, world_size, count=5, root=root)
        assert run_on_lists(plans, work)[root] == [
            sum(column) for column in zip(*work, strict=True)
        ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 13])
def test_gather_is_scatter_backwards(world_size):
    counts = [(3 * rank + 1) % 4 for rank in range(world_size)]
    owner = [rank for rank, count in enumerate(counts) for _ in range(count)]
    for root in range(world_size):
        for algorithm in ALGORITHMS["gather"]:
            work = [[rank if rank == one else None for one in owner] for rank in range(world_size)]
            plans = build_all("gather", algorithm, world_size, counts=counts, root=root)
            assert run_on_lists(plans, work)[root] == owner
        for algorithm in ALGORITHMS["scatter"]:
            work = [
                list(owner) if rank == root else [None] * len(owner) for rank in range(world_size)
            ]
            plans = build_all("scatter", algorithm, world_size, counts=counts, root=root)
            for rank, result in enumerate(run_on_lists(plans, work)):
                assert [x for x, one in zip(result, owner, strict=True) if one == rank] == [
                    rank
                ] * counts[rank]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("algorithm", ALGORITHMS["reduce_scatter"])
def test_each_rank_ends_with_the_sum_of_its_block(algorithm, world_size):
    counts = [(3 * rank + 1) % 4 for rank in range(world_size)]
    owner = [rank for rank, count in enumerate(counts) for _ in range(count)]
    work = [[10**rank * (x + 1) for x in range(len(owner))] for rank in range(world_size)]
    totals = [sum(column) for column in zip(*work, strict=True)]
    results = run_on_lists(build_all("reduce_scatter", algorithm, world_size, counts=counts), work)
    for rank, result in enumerate(results):
        mine = [index for index, one in enumerate(owner) if one == rank]
        assert [result[index] for index in mine] == [totals[index] for index in mine]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_to_all"])
def test_blocks_change_places(algorithm, world_size):
    n = world_size
    size = (
        [[2] * n] * n
        if algorithm == "bruck"
        else [[(s + 2 * d) % 3 for d in range(n)] for s in range(n)]
    )
    work = [
        [(s, d, i) for d in range(n) for i in range(size[s][d])]
        + [None] * sum(row[s] for row in size)
        for s in range(n)
    ]
    results = run_on_lists(build_all("all_to_all", algorithm, n, matrix=size), work)
    for d, result in enumerate(results):
        assert result[sum(size[d]) :] == [(s, d, i) for s in range(n) for i in range(size[s][d])]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("algorithm", ALGORITHMS["scan"])
def test_a_scan_keeps_the_order_of_the_ranks(algorithm, world_size):
    work = [[chr(ord("a") + rank)] * 3 for rank in range(world_size)]
    every = "".join(chr(ord("a") + rank) for rank in range(world_size))
    for rank, result in enumerate(
        run_on_lists(build_all("scan", algorithm, world_size, count=3), work)
    ):
        assert result == [every[: rank + 1]] * 3
    for rank, result in enumerate(
        run_on_lists(build_all("exscan", algorithm, world_size, count=3), work)
    ):
        assert result == [every[:rank] or "a"] * 3
