"""Direct algorithms: one exchange, the tree over ranks."""

import pytest

from syncvar.algorithms.builders import build_all
from syncvar.algorithms.direct import direct_all_reduce
from syncvar.algorithms.schedule import Buffer, Chunk, Copy, Reduce, ScheduleArgs, Send
from tests.verification.schedules.collective_contracts import all_reduce_contract, contract_of
from tests.verification.schedules.schedule_checker import verify


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_direct_all_reduce_needs_one_exchange(world_size, count):
    n = world_size
    report = verify(
        build_all("all_reduce", "direct", n, count=count), contract_of("all_reduce", n, count=count)
    )
    assert report.rounds == (n > 1)
    assert report.messages == (n - 1,) * n
    assert report.elements == ((n - 1) * count,) * n


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_direct_all_reduce_sums_by_the_tree(world_size):
    n = world_size
    verify(build_all("all_reduce", "direct", n, count=2), all_reduce_contract(n, 2, tree=True))


@pytest.mark.parametrize("rank", range(5))
def test_direct_all_reduce_makes_one_copy_and_a_reduction_per_peer(rank):
    first, second = direct_all_reduce(ScheduleArgs(rank, 5, 3))
    assert first == (Copy(Chunk(0, 3), Chunk(3 * rank, 3 * rank + 3, Buffer.SCRATCH)),)
    assert sum(isinstance(step, Reduce) for step in second) == 4
    assert sum(isinstance(step, Copy) for step in second) == (rank > 0)


def test_direct_all_reduce_never_sends_work():
    for rank in range(4):
        sends = [
            step
            for steps in direct_all_reduce(ScheduleArgs(rank, 4, 3))
            for step in steps
            if isinstance(step, Send)
        ]
        assert {step.chunk.buffer for step in sends} == {Buffer.SCRATCH}


def test_direct_all_reduce_takes_a_slot_per_rank():
    assert {plan.scratch_count for plan in build_all("all_reduce", "direct", 4, count=3)} == {12}


@pytest.mark.parametrize("counts", [[2], [1, 1], [3, 0, 2], [1, 2, 3, 4]])
def test_direct_all_gather_sends_the_own_block_to_everyone_in_one_round(counts):
    n = len(counts)
    report = verify(
        build_all("all_gather", "direct", n, counts=counts),
        contract_of("all_gather", n, counts=counts),
    )
    assert report.rounds == (n > 1)
    assert report.messages == (n - 1,) * n
    assert report.elements == tuple((n - 1) * count for count in counts)


def test_ranks_do_not_all_begin_with_the_same_peer():
    for algorithm, collective in (("direct", "all_reduce"), ("direct", "all_gather")):
        plans = build_all(collective, algorithm, 5, count=1)
        firsts = [
            next(step for step in plan.rounds[-1] if isinstance(step, Send)) for plan in plans
        ]
        assert len({step.peer for step in firsts}) == 5
