"""Who waits for whom, from times; the offsets of clocks, from round trips."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.protocol.clock_offsets import ClockFilter, ClockOffset
from syncvar.protocol.wait_shares import (
    CallTimes,
    RankWindow,
    find_straggler,
    is_sampled,
    wait_shares,
)

ALL = {0: (0, 1, 2)}


def windows(*times, begin=0, end=1000, stride=1):
    """Return the window of each rank with its calls (call, began, ended)."""
    return {
        rank: RankWindow(begin, end, [CallTimes(0, *one) for one in calls], stride)
        for rank, calls in enumerate(times)
    }


def test_the_last_one_is_waited_for():
    found = wait_shares(windows([(0, 100, 410)], [(0, 200, 410)], [(0, 400, 410)]), {0: (0, 1, 2)})
    assert found == {0: {2: 0.3}, 1: {2: 0.2}, 2: {}}


def test_a_rank_that_left_before_the_last_came_waited_for_those_before():
    # The root of a broadcast leaves at once; rank 1 gets its data; rank 2 comes much later.
    found = wait_shares(windows([(0, 300, 310)], [(0, 100, 320)], [(0, 900, 910)]), ALL)
    assert found == {0: {}, 1: {0: 0.2}, 2: {}}


def test_who_has_not_entered_is_waited_for_until_now():
    found = wait_shares(windows([(4, 600, 0)], [(4, 700, 0)], [(3, 100, 200)]), ALL)
    assert found == {0: {2: 0.4}, 1: {2: 0.3}, 2: {}}


def test_a_rank_beyond_a_call_is_not_late_in_it():
    found = wait_shares(windows([(4, 600, 0)], [(4, 700, 0)], [(5, 710, 0)]), ALL)
    assert found == {0: {1: 0.1}, 1: {}, 2: {0: pytest.approx(0.29)}}


def test_only_the_window_counts():
    calls = [(0, 0, 600)], [(0, 500, 600)]
    assert wait_shares(windows(*calls, begin=400, end=1400), {0: (0, 1)})[0] == {1: 0.1}


def test_some_calls_stand_for_all():
    number = next(call for call in range(100) if is_sampled(call, 4))
    calls = [(number, 100, 120)], [(number, 110, 120)]
    assert wait_shares(windows(*calls, stride=4), {0: (0, 1)})[0] == {1: 0.04}
    calls = [(number, 100, 200)], [(number, 150, 200)]
    assert wait_shares(windows(*calls, stride=4), {0: (0, 1)})[0] == {1: 0.05}, "a long wait is one"


def test_started_calls_that_overlap_count_once():
    found = wait_shares(
        windows([(0, 100, 610), (1, 200, 710)], [(0, 500, 610), (1, 700, 710)]), ALL
    )
    assert found[0] == {1: pytest.approx(0.6)}


@pytest.mark.parametrize("block", [0, 1_000_000])
def test_the_sample_takes_all_calls_of_a_step_alike(block):
    """A step has four calls; they are in a block of numbers each, or not."""
    numbers = [step * (2 * block or 4) + call for step in range(2000) for call in range(4)]
    taken = [index % 4 for index, number in enumerate(numbers) if is_sampled(number, 4)]
    for call in range(4):
        assert 350 < taken.count(call) < 650


def test_many_ranks_take_a_moment():
    """512 ranks with 240 calls each: the launcher has other things to do."""
    times = [
        [(call, 10 * call + rank, 10 * call + 600) for call in range(60)] for rank in range(512)
    ]
    began = time.process_time()
    found = wait_shares(windows(*times), {0: range(512)})
    assert time.process_time() - began < 5
    assert set(found[0]) == {511}


def test_silent_ranks_are_not_guessed_about():
    assert wait_shares(windows([(0, 100, 0)]), {0: (0, 1)}) == {0: {}}


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=3, max_size=3),
        min_size=1,
        max_size=8,
    )
)
def test_shares_are_between_zero_and_one(steps):
    times = [[], [], []]
    for number, step in enumerate(steps):
        for rank, (begin, lasted) in enumerate(step):
            times[rank].append((number, begin, begin + lasted or 1))
    for rank, waits in wait_shares(windows(*times), ALL).items():
        assert rank not in waits
        assert 0 <= sum(waits.values()) <= 1 + 1e-9


def test_a_straggler_costs_and_is_late_most_of_the_time():
    assert find_straggler({0: {}, 1: {}}, 30.0) is None
    assert find_straggler({0: {1: 0.05}, 1: {}}, 30.0) is None, "too cheap for a sentence"
    assert find_straggler({0: {1: 0.3}, 1: {0: 0.2}}, 30.0) is None, "both are late"
    found = find_straggler({0: {3: 0.2}, 1: {3: 0.25}, 2: {3: 0.15}, 3: {0: 0.05}}, 30.0)
    assert (found.rank, found.cost_share) == (3, 0.2)


@given(
    offset=st.integers(-(10**12), 10**12),
    there=st.integers(0, 10**6),
    back=st.integers(0, 10**6),
    worked=st.integers(0, 10**6),
)
def test_the_error_of_an_offset_bounds_it(offset, there, back, worked):
    clock = ClockFilter()
    received = 5000 + there - offset  # by the other clock
    clock.add(
        sent_ns=5000,
        received_ns=received,
        answered_ns=received + worked,
        returned_ns=5000 + there + worked + back,
    )
    found = clock.estimate(5000 + there + worked + back)
    assert abs(found.offset_ns - offset) <= found.error_ns + 1


def test_the_shortest_round_trip_counts_until_it_is_old():
    clock = ClockFilter()
    assert not clock.estimate(0).is_known
    clock.add(sent_ns=0, received_ns=10, answered_ns=10, returned_ns=20)
    clock.add(sent_ns=100, received_ns=400, answered_ns=400, returned_ns=500)
    assert clock.estimate(500) == ClockOffset(0, 10)
    assert clock.estimate(10**9).error_ns == 10 + 49_999, "clocks drift"
    clock.add(sent_ns=10**9, received_ns=10**9 - 5, answered_ns=10**9 - 5, returned_ns=10**9 + 30)
    assert clock.estimate(10**9 + 30) == ClockOffset(20, 15)


def test_times_that_are_no_round_trip_are_dropped():
    clock = ClockFilter()
    clock.add(sent_ns=100, received_ns=0, answered_ns=900, returned_ns=200)
    clock.add(sent_ns=100, received_ns=9, answered_ns=0, returned_ns=200)
    assert not clock.estimate(200).is_known


def test_a_started_call_is_a_wait_from_when_a_thread_waits_for_it():
    def started(waited):
        return RankWindow(0, 1000, [CallTimes(0, 0, 100, 600, waited)])

    late = RankWindow(0, 1000, [CallTimes(0, 0, 500, 600, 500)])
    members = {0: (0, 1)}
    assert wait_shares({0: started(400), 1: late}, members)[0] == {1: 0.1}
    assert wait_shares({0: started(550), 1: late}, members)[0] == {}, "it came before the wait"
    assert wait_shares({0: started(0), 1: late}, members)[0] == {}, "nobody has waited"
    running = RankWindow(0, 1000, [CallTimes(0, 0, 100, 0, 700)])
    absent = RankWindow(0, 1000, [])
    assert wait_shares({0: running, 1: absent}, members)[0] == {1: 0.3}
