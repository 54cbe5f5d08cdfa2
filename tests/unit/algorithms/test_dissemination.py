"""Dissemination: one message per rank and round, logarithmic rounds."""

from math import ceil, log2

import pytest

from syncvar.algorithms.builders import build_all
from syncvar.algorithms.schedule import Buffer, Copy, Send
from tests.verification.schedules.collective_contracts import contract_of
from tests.verification.schedules.schedule_checker import verify


@pytest.mark.parametrize("world_size", range(1, 20))
def test_barrier_takes_log_rounds_of_empty_messages(world_size):
    n, depth = world_size, ceil(log2(world_size))
    report = verify(build_all("barrier", "dissemination", n), contract_of("barrier", n))
    assert report.rounds == depth
    assert report.messages == (depth,) * n
    assert report.elements == (0,) * n


@pytest.mark.parametrize("world_size", range(1, 20))
@pytest.mark.parametrize("count", [0, 1, 3])
def test_all_gather_takes_log_rounds_and_sends_each_block_once(world_size, count):
    n, depth = world_size, ceil(log2(world_size))
    plans = build_all("all_gather", "dissemination", n, count=count)
    report = verify(plans, contract_of("all_gather", n, count=count))
    assert report.rounds == depth
    assert report.messages == (depth,) * n
    assert report.elements == ((n - 1) * count,) * n
    assert all(plan.scratch_count <= n * count for plan in plans)


@pytest.mark.parametrize("world_size", range(2, 20))
def test_every_round_is_one_send_and_one_receive(world_size):
    for collective in ("barrier", "all_gather"):
        for plan in build_all(collective, "dissemination", world_size, count=2):
            for steps in plan.rounds:
                assert [isinstance(step, Send) for step in steps if not isinstance(step, Copy)] == [
                    True,
                    False,
                ]


def test_the_own_block_stays_where_it_is():
    for plan in build_all("all_gather", "dissemination", 6, count=2):
        written = [
            step.target
            for steps in plan.rounds
            for step in steps
            if isinstance(step, Copy) and step.target.buffer == Buffer.WORK
        ]
        own = range(2 * plan.rank, 2 * plan.rank + 2)
        assert all(
            element not in range(chunk.start, chunk.stop) for chunk in written for element in own
        )


def test_headers_are_exchanged_like_equal_blocks():
    headers = build_all("header_exchange", "dissemination", 5, count=4)
    blocks = build_all("all_gather", "dissemination", 5, count=4)
    assert [plan.rounds for plan in headers] == [plan.rounds for plan in blocks]
