"""When increments wait: the decision by itself, and digests of blocks by themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncvar.variables.deferral_tuner import (
    COSTS,
    IDLE_RUNS,
    Costs,
    Hysteresis,
    SampleWindow,
    choose,
    period,
)
from syncvar.variables.storage import BLOCK_BYTES, block_count, block_digests, combined

LINKS = COSTS["links", False]
SHM = Costs(
    5, 8.0, 0.3, 3.3, 2.0, 105.0
)  # as it were if calls in shared memory took longer than they do
ALL = [SHM, *COSTS.values()]


def paces(windows, *, runs=4, sends=0, bar=None, costs=SHM):
    choices, bar = choose(windows, runs, sends, bar or Hysteresis(), costs)
    return [choice.is_deferred for choice in choices], bar


def test_many_increments_and_few_reads_wait():
    assert paces([SampleWindow(4, False, 400, 4)])[0] == [True]
    assert paces([SampleWindow(4, False, 40, 0)], costs=LINKS)[0] == [True]


def test_reads_between_increments_make_them_eager_again():
    assert paces([SampleWindow(4, True, 40, 40)], sends=40)[0] == [False]
    assert paces([SampleWindow(4, True, 40, 40)], sends=40, costs=LINKS)[0] == [False]


def test_one_increment_in_a_run_does_not_wait():
    for costs in ALL:
        assert paces([SampleWindow(4, False, 4, 0)], costs=costs)[0] == [False]


def test_many_variables_wait_together_where_each_alone_would_not():
    assert paces([SampleWindow(4, False, 4, 0)] * 10, costs=LINKS)[0] == [True] * 10


def test_a_variable_that_is_read_often_does_not_take_the_others_with_it():
    assert paces([SampleWindow(4, False, 400, 0), SampleWindow(4, False, 40, 40)])[0] == [
        True,
        False,
    ]


def test_large_variables_fill_the_bucket_and_do_not_wait():
    assert paces([SampleWindow(1 << 20, False, 400, 0)])[0] == [False]


def test_what_is_not_written_stays_as_it_is():
    assert paces([SampleWindow(4, True, 0, 0), SampleWindow(4, False, 0, 0)])[0] == [True, False]


def test_what_is_about_even_does_not_change_to_and_fro():
    for increments in range(1, 400):
        for breaks in range(0, increments + 1, 7):
            eager = paces([SampleWindow(4, False, increments, breaks)])[0][0]
            if eager:  # it has been deferred; with what is then counted it stays so
                assert paces(
                    [SampleWindow(4, True, increments, breaks)], sends=min(4, increments) + breaks
                )[0] == [True]


def test_where_other_calls_send_the_queue_it_is_not_tried_for_a_while_each_time_longer():
    busy, bar = SampleWindow(4, False, 400, 0), Hysteresis()
    waited = []
    for _ in range(7):
        tries = 0
        while not (found := paces([busy], bar=bar))[0][0]:
            bar = found[1]
            tries += 1
        waited.append(tries)
        found = paces([busy._replace(is_deferred=True)], sends=400, bar=found[1])
        assert found[0] == [False]
        bar = found[1]
    assert waited == [0, 4, 8, 16, 32, 64, 64]
    assert paces([busy._replace(is_deferred=True)], sends=4, bar=bar) == ([True], Hysteresis())


@pytest.mark.parametrize("costs", ALL)
def test_a_change_of_the_program_is_answered_within_20_steps(costs):
    for variables in (1, 17, 1000):
        assert 2 * period(costs, variables, is_idle=False) <= 20
    assert period(costs, 1, is_idle=True) == IDLE_RUNS <= 20


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 22), st.booleans(), st.integers(0, 10**6), st.integers(0, 10**6)
        ),
        max_size=8,
    ),
    st.integers(0, 100),
    st.integers(0, 10**6),
    st.integers(0, 64),
    st.sampled_from(ALL),
)
def test_any_counts_give_a_choice_for_each_with_a_reason(rows, runs, sends, left, costs):
    choices, bar = choose(
        [SampleWindow(*row) for row in rows], runs, sends, Hysteresis(max(left, 4), left), costs
    )
    assert len(choices) == len(rows)
    assert all(choice.reason for choice in choices)
    assert 0 <= bar.left <= max(bar.length, left)


# -- digests ---------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2 * BLOCK_BYTES + 100), st.data())
def test_any_flipped_bit_changes_the_digest_of_its_block_only(nbytes, data):
    array = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    before = block_digests(array)
    place = data.draw(st.integers(0, nbytes - 1))
    array[place] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    after = block_digests(array)
    assert np.flatnonzero(before != after).tolist() == [place // BLOCK_BYTES]
    assert combined(before) != combined(after)


def test_words_that_change_places_change_the_digest():
    array = np.arange(1000, dtype=np.int64)
    swapped = array.copy()
    swapped[[3, 700]] = swapped[[700, 3]]
    assert block_digests(array) != block_digests(swapped)


def test_there_are_as_many_digests_as_blocks():
    for array in (
        np.arange(50_000, dtype=np.float32),
        np.float64(0.5).reshape(()),
        np.zeros((0, 3)),
    ):
        assert block_digests(array).size == block_count(array.nbytes)
