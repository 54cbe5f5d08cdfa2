"""Fixtures of the tests that start real jobs."""

import itertools

import pytest
from launching import Job, measure_slowness

collect_ignore = ["soak.py", "every_collective.py", "disagreeing.py"]  # scripts that run as ranks


@pytest.fixture(autouse=True)
def slowness_before(request):
    """Measure the machine's slowness just before a test of a module that asserts bounds."""
    measure_slowness(needed=hasattr(request.module, "check_bound") or hasattr(request.module, "slowness"))


@pytest.fixture
def launch(tmp_path):
    """Start jobs; those that still run at the end of the test are ended."""
    jobs, number = [], itertools.count()

    def start(script=None, **keywords):
        folder = tmp_path / f"job{next(number)}"
        folder.mkdir()
        jobs.append(Job(folder, script, **keywords))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()
