"""Servers on several hosts: placed in turns, reached over the network, replaced by their copies, which are on another host."""

import os
import signal
from pathlib import Path

import pytest

from tests.integration.collectives.test_every_size import SCRIPT as EVERY_SIZE
from tests.integration.parameter_server.test_servers import ENV, SCRIPT, check_sums
from tests.support.joined_jobs import Joined
from tests.support.launching import Job
from tests.support.paths import PROFILE

pytestmark = pytest.mark.slow


def servers_anywhere(job_folder):
    """Return server -> process id, by command lines that name the script of a job: hosts here are namespaces."""
    found = {}
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"server" in words and os.fsencode(job_folder / "script.py") in words:
            found[int(words[words.index(b"server") + 1])] = int(line.parent.name)
    return found


@pytest.mark.parametrize("encryption", ["required", "control-only"])
def test_a_server_on_another_host_is_replaced_by_its_copy_on_the_next(hosts, tmp_path, encryption):
    where = ",".join(f"{name}:1" for name in hosts.names[1:])
    job = Job(
        tmp_path,
        SCRIPT,
        workers=2,
        prefix=hosts.prefix,
        config=PROFILE,
        options=(
            *hosts.ssh,
            "-H",
            where,
            "--servers",
            "2",
            "--server-replicas",
            "1",
            "--encryption",
            encryption,
            "--env",
            f"PYTHONPATH={ENV['PYTHONPATH']}",
        ),
    )
    try:
        job.await_events("half", 2, limit_s=120)
        found = servers_anywhere(tmp_path)
        assert sorted(found) == [0, 1], job
        os.kill(found[1], signal.SIGKILL)
        job.open_gate("on")
        assert job.wait(120) == 0, job
        check_sums(job)
        assert f"server 1 on {hosts.names[2]} is lost: signal 9; server 0 has copies" in job.err, (
            job
        )
    finally:
        job.close()


@pytest.mark.parametrize("encryption", ["required", "control-only"])
def test_arrays_of_all_sizes_are_right_on_two_hosts(hosts, tmp_path, encryption):
    job = Joined(
        tmp_path,
        None,
        2,
        "--servers",
        "2",
        "--encryption",
        encryption,
        address=hosts.names[0],
        prefix=hosts.prefix,
        workers=4,
        target=[str(EVERY_SIZE)],
    )
    try:
        for index in (1, 2):
            job.join("--slots", "2", prefix=["ip", "netns", "exec", hosts.spaces[index]])
        assert job.wait(120) == 0, job
        assert job.codes() == [0, 0], job
        assert len(job.out.split("checked ")) == 5, job
    finally:
        job.close()
