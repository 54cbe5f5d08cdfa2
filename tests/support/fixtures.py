"""Fixtures that tests of several folders use; the conftest of a folder imports them."""

import itertools
import os
import tempfile
from pathlib import Path

import pytest

from tests.support.launching import Job


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
def jobs_of_this_test(monkeypatch):
    """Let commands see no jobs that run beside this test."""
    monkeypatch.setattr(
        "syncvar.cli.running_jobs.job_folders",
        lambda environ: [environ.get("XDG_RUNTIME_DIR", "") + "/syncvar"],
    )


@pytest.fixture
def runtime():
    """A runtime directory of the test's own; below the folder of a test, paths of sockets in it would be too long."""
    with tempfile.TemporaryDirectory(prefix="sv-") as made:
        yield Path(made)


@pytest.fixture
def foreign_link(monkeypatch):
    """Return what makes a link that belongs to another user; who is not root takes the place of the other user himself."""

    def make(link, target):
        link.symlink_to(target)
        if os.geteuid() == 0:
            os.lchown(link, 65534, 65534)
        else:
            other = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: other)

    return make
