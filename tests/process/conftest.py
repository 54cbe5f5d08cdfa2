"""Fixtures of the tests that start real jobs."""

import itertools
import tempfile
from pathlib import Path

import pytest
from launching import Job

from syncvar import _native

collect_ignore = [
    "soak.py",
    "every_collective.py",
    "every_size.py",
    "disagreeing.py",
    "kernel_calls.py",
]  # scripts that run as ranks


def pytest_collection_modifyitems(config, items):
    """Leave out what compares both runners of persistent calls where there is one of them only, and say why."""
    own = [item for item in items if item.get_closest_marker("needs_c_extension")]
    if own and (why := _native.missing_reason()):
        config.syncvar_left_out.append(f"{len(own)} tests of the C extension were left out: {why}")
        config.hook.pytest_deselected(items=own)
        items[:] = [item for item in items if item not in own]


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


@pytest.fixture
def runtime():
    """A runtime directory of the test's own; below the folder of a test, paths of sockets in it would be too long."""
    with tempfile.TemporaryDirectory(prefix="sv-") as made:
        yield Path(made)
