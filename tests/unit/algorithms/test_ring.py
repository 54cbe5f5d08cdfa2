"""The ring: its cost is that of its docstring, and its order is that of its docstring."""

import pytest

from syncvar.algorithms.builders import build_all
from syncvar.algorithms.ring import ring_all_gather, ring_all_reduce
from syncvar.algorithms.schedule import Chunk, Recv, RecvReduce, ScheduleArgs, Send, even_chunks
from tests.verification.schedules.collective_contracts import contract_of
from tests.verification.schedules.schedule_checker import verify


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("count", [0, 1, 7, 24, 25])
def test_ring_all_reduce_sends_two_buffers_less_two_chunks(world_size, count):
    n = world_size
    report = verify(
        build_all("all_reduce", "ring", n, count=count), contract_of("all_reduce", n, count=count)
    )
    assert report.rounds == 2 * (n - 1)
    assert report.messages == (2 * (n - 1),) * n
    if n > 1:
        chunks = [chunk.count for chunk in even_chunks(count, n)]
        assert report.elements == tuple(
            2 * count - chunks[(rank + 1) % n] - chunks[(rank + 2) % n] for rank in range(n)
        )
    if count % n == 0:
        assert report.elements == (2 * (n - 1) * count // n,) * n


@pytest.mark.parametrize("counts", [[2], [1, 1], [3, 0, 2], [0, 0, 0, 4], [1, 2, 3, 4, 5]])
def test_ring_all_gather_sends_all_blocks_but_the_neighbours(counts):
    n = len(counts)
    report = verify(
        build_all("all_gather", "ring", n, counts=counts),
        contract_of("all_gather", n, counts=counts),
    )
    assert report.rounds == n - 1
    assert report.messages == (n - 1,) * n
    if n > 1:
        assert report.elements == tuple(sum(counts) - counts[(rank + 1) % n] for rank in range(n))


def test_ring_talks_to_its_two_neighbours_only():
    args = ScheduleArgs(2, 5, 10, (2,) * 5)
    for rounds in (ring_all_reduce(args), ring_all_gather(args)):
        for send, receive in rounds:
            assert (send.peer, receive.peer) == (3, 1)


def test_ring_with_fewer_elements_than_ranks_sends_empty_chunks():
    rounds = list(ring_all_reduce(ScheduleArgs(0, 4, 1)))
    assert rounds[0] == (Send(1, Chunk(0, 1)), RecvReduce(3, Chunk(1, 1), incoming_left=False))
    assert len(rounds) == 6


def test_only_rank_0_keeps_its_value_on_the_left():
    for rank in range(5):
        reductions = [
            step
            for steps in ring_all_reduce(ScheduleArgs(rank, 5, 10))
            for step in steps
            if isinstance(step, RecvReduce)
        ]
        assert {step.incoming_left for step in reductions} == {rank != 0}


def test_second_half_of_the_ring_only_replaces():
    rounds = list(ring_all_reduce(ScheduleArgs(1, 3, 6)))
    assert [type(step) for steps in rounds for step in steps] == [Send, RecvReduce] * 2 + [
        Send,
        Recv,
    ] * 2
