"""Servers and workers are killed while a job starts: it is exact, or fails and names a victim."""

import pytest

from tests.fuzz import killed_starts

RUNS = 100
SLOW_RUNS = 30  # the others are nightly
PER_CASE = 10


def test_some_kills_while_a_job_starts(tmp_path):
    ends = killed_starts.run_many([1022, 1030, 4], tmp_path)
    assert [code for code, _, _ in ends[:2]] == [0, 0], ends  # these workers are started again


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.nightly if first >= SLOW_RUNS else ())
        for first in range(0, RUNS, PER_CASE)
    ],
)
def test_kills_at_random_moments_while_a_job_starts(tmp_path, first):
    ends = killed_starts.run_many(range(first, first + PER_CASE), tmp_path)
    assert len(ends) == PER_CASE


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3 * PER_CASE, PER_CASE))
def test_helpers_of_the_launcher_are_killed_while_a_job_starts(tmp_path, first):
    seeds = range(first, first + PER_CASE)
    ends = killed_starts.run_many(seeds, tmp_path, killed_starts.draw_helper)
    assert len(ends) == PER_CASE
