"""Elastic jobs under random faults: the job ends, no sample is lost or read twice, and the weights are the same to the bit."""

import pytest

from tests.support.elastic_training import finals, random_run, training

SLOW_RUNS = 6
RUNS = 50
_expected = []


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.slow if seed < SLOW_RUNS else pytest.mark.nightly)
        for seed in range(RUNS)
    ],
)
def test_random_faults(launch, seed):
    if not _expected:
        job = training(launch, 2)
        assert job.wait() == 0, job
        _expected.append(finals(job)[0])
    options, faults = random_run(seed)
    job = training(launch, "1:4", faults, pause_s=0.02, options=options)
    assert job.wait() == 0, job
    assert finals(job)[0] == _expected[0], job
