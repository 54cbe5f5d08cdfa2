"""Agents, ssh, launchers and whole hosts are killed, in each phase, over and over: the others learn it in time, and nothing is left."""

import contextlib
import os
import signal
import time

import pytest

from tests.support.fault_table import ROWS
from tests.support.host_faults import (
    check_old_checkpoint,
    check_survivors,
    over_and_over,
    phases,
    silence_s,
)
from tests.support.launching import check_bound

pytestmark = pytest.mark.slow


def ssh_of(hosts, index):
    """Return the process of ssh that leads from the launcher to a host."""
    (found,) = [
        pid
        for pid, words in hosts.processes(0).items()
        if words.startswith("ssh ") and hosts.names[index] in words
    ]
    return found


def killed(pid):
    now = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return now


@pytest.mark.parametrize("phase", phases("RCX"))
def test_f17_the_agent_of_another_host_is_killed(hosts, tmp_path, phase):
    for job in over_and_over(hosts, tmp_path, phase, "RCX"):
        injected = killed(hosts.agent(2))
        assert job.wait(120) == 70, job
        assert f"on {hosts.names[2]} failed after" in job.report, job
        check_survivors(
            job, injected, f"F17-{phase}", phase, ROWS["F17"].bound, "its agent has ended"
        )


@pytest.mark.parametrize("phase", phases("CX"))
def test_f18_the_ssh_client_is_killed(hosts, tmp_path, phase):
    for job in over_and_over(hosts, tmp_path, phase, "CX"):
        there = {pid for pid, words in hosts.processes(2).items() if "script.py" in words}
        assert len(there) >= 2, hosts.processes(2)
        injected = killed(ssh_of(hosts, 2))
        assert job.wait(120) == 70, job
        check_survivors(
            job, injected, f"F18-{phase}", phase, ROWS["F18"].bound, "its connection ended with -9"
        )


@pytest.mark.parametrize("phase", "RCX")
def test_f12_the_launcher_is_killed(hosts, tmp_path, phase):
    for job in over_and_over(hosts, tmp_path, phase, "RCX"):
        injected = killed(job.process.pid)
        job.wait(120)
        left = hosts.await_quiet()
        assert not left, (left, job)
        check_bound(
            f"F12-{phase} on several hosts", time.monotonic() - injected, ROWS["F12"].bound[1]
        )
        time.sleep(0.5)  # an agent that ssh was just starting comes now, finds nobody, and goes
        assert not hosts.await_quiet(), job


@pytest.mark.parametrize("phase", "CXK")
def test_f58_all_ranks_are_killed_at_once(hosts, tmp_path, phase):
    for job in over_and_over(hosts, tmp_path, phase, "CXK"):
        pids = job.pids().values()
        assert len(pids) == 4
        injected = time.monotonic()
        for pid in pids:
            with contextlib.suppress(
                ProcessLookupError
            ):  # the end of the others has ended it already
                os.kill(pid, signal.SIGKILL)
        assert job.wait(120) == 137, job
        assert job.report.count("was killed by signal 9 (SIGKILL)") == 1, job
        check_bound(f"F58-{phase}, all ranks", job.ended - injected, ROWS["F58"].bound[1])
        if phase == "K":
            check_old_checkpoint(job)


@pytest.mark.parametrize("phase", phases("CXK"))
def test_f58_a_whole_host_is_gone(own_hosts, tmp_path, phase):
    for job in over_and_over(own_hosts, tmp_path, phase, "CXK", lost_after_s=silence_s(phase)):
        injected = time.monotonic()
        own_hosts.lose(2)
        try:
            assert job.wait(120) == 70, job
        finally:
            own_hosts.restore(2)
        assert f"rank 2 on {own_hosts.names[2]} failed after" in job.report, job
        assert job.report.count("nothing has come from it") == 1, job
        assert f"rank 3: its host {own_hosts.names[2]} is gone" in job.report, job
        check_survivors(job, injected, f"F58-{phase}, a host", phase, ROWS["F58"].bound)
        if phase == "K":
            check_old_checkpoint(job)
