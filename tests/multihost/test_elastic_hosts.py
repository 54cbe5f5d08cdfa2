"""Elastic jobs on real hosts: hosts come, leave and fail, and the state of the workers that live goes on."""

import os
import re
from pathlib import Path

import pytest
from test_several_hosts import start

from tests.support.launching import Job, await_true, state

pytestmark = pytest.mark.slow

TRAIN = """
    import os
    import time
    import numpy as np
    import probe
    import syncvar as sv

    w = sv.Variable(np.zeros(100), aggregation="MEAN", name="w")
    state = sv.elastic.State(w=w, step=0)

    @sv.elastic.run
    def train(state):
        probe.note("generation", size=sv.world_size(), hosts=sv.host_count(), step=state.step)
        while not sv.all_reduce(os.path.exists(f"{probe.FOLDER}/gate-end"), op="or"):
            w.assign_add(np.ones(100))
            state.step += 1
            state.commit()
            time.sleep(0.02)

    train(state)
    probe.note("done", step=state.step, w=float(w.numpy()[0]), size=sv.world_size())
"""
SLOW_DIGITS = """
    import os, time
    from types import SimpleNamespace
    import probe
    from syncvar.examples import elastic_digits

    # Steps are slow until the test has seen what it waits for, so that the job does not end before.
    def pause(_seconds):
        if not os.path.exists(f"{probe.FOLDER}/gate-end"):
            time.sleep(0.3)

    elastic_digits.time = SimpleNamespace(sleep=pause)
    elastic_digits.main()
"""
SETTINGS = {"SYNCVAR_HOST_DISCOVERY_S": "0.2", "SYNCVAR_HOST_EXCLUSION_S": "1"}


def await_size(job, size, hosts):
    """Wait until a generation of so many workers on so many hosts runs; return its events."""

    def ask():
        assert job.process.poll() is None, job
        found = job.events("generation")[-size:]
        wanted = {(size, hosts)}
        is_there = len(found) == size and {(one["size"], one["hosts"]) for one in found} == wanted
        return found if is_there else None

    try:
        return await_true(ask, what=f"a generation of {size} workers on {hosts} hosts")
    except AssertionError as error:
        error.add_note(repr(job))
        raise


def finish(job, size):
    """Let a job end; its state must be that of one undisturbed run of as many steps."""
    job.open_gate("end")
    assert job.wait() == 0, job
    done = job.events("done")[-size:]
    assert {one["size"] for one in done} == {size}, job
    assert len({(one["step"], one["w"]) for one in done}) == 1, job
    assert done[0]["w"] == done[0]["step"], job
    steps = [one["step"] for one in job.events("generation")]
    assert done[0]["step"] >= max(steps), job


def name_hosts(hosts, folder, *indices):
    new = folder / "hosts.new"
    new.write_text("".join(f"{hosts.names[index]}:2\n" for index in indices))
    new.replace(folder / "hosts")


def test_hosts_that_a_script_names_come_and_go(own_hosts, tmp_path):
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    script.chmod(0o755)
    name_hosts(own_hosts, tmp_path, 0, 1)
    job = Job(
        tmp_path,
        TRAIN,
        workers="2:6",
        prefix=own_hosts.prefix,
        options=(*own_hosts.ssh, "--host-discovery", str(script)),
        env=SETTINGS,
    )
    await_size(job, 4, 2)
    name_hosts(own_hosts, tmp_path, 0, 1, 2)
    await_size(job, 6, 3)
    name_hosts(own_hosts, tmp_path, 0, 2)  # the second one is asked to leave
    await_size(job, 4, 2)
    os.kill(own_hosts.agent(2), 9)
    await_size(job, 2, 1)
    name_hosts(own_hosts, tmp_path, 0, 1, 2)  # one is back, one was excluded for a second
    await_size(job, 6, 3)
    await_true(lambda: not zombies(job), what="the end of the connections to lost hosts")
    finish(job, 6)
    assert "asks to leave: it leaves at the next commit" in job.report, job
    assert f"{own_hosts.names[2]} is not used for 1 s" in job.report, job
    assert not own_hosts.await_quiet()


def zombies(job):
    """Return the children of a launcher that have ended, and of which it has not taken notice."""
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    return [pid for pid in children if not state(pid)]


def test_the_only_worker_of_a_host_starts_again_there(own_hosts, tmp_path):
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {own_hosts.names[i]}:1\n" for i in range(2)))
    script.chmod(0o755)
    job = Job(
        tmp_path,
        TRAIN,
        workers="2:2",
        prefix=own_hosts.prefix,
        options=(*own_hosts.ssh, "--host-discovery", str(script), "--max-restarts", "2"),
        env=SETTINGS,
    )
    await_size(job, 2, 2)
    (pid,) = [pid for rank, pid in job.pids().items() if rank == 1]
    os.kill(pid, 9)
    await_true(lambda: len(job.events("generation")) >= 4, what="the next generation")
    await_size(job, 2, 2)
    finish(job, 2)
    assert "(restart 1 of 2)" in job.report, job
    assert "is gone" not in job.report, job


@pytest.mark.parametrize("fault", ["cores", "address"])
def test_a_host_that_does_not_fit_does_not_end_the_job(own_hosts, tmp_path, fault):
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    script.chmod(0o755)
    name_hosts(own_hosts, tmp_path, 0)
    (tmp_path / "hosts").write_text(f"{own_hosts.names[0]}:1\n")
    limits = {
        "cores": ("--cores-per-worker", str(len(os.sched_getaffinity(0)))),
        "address": ("--iface", f"{own_hosts.names[0]}/32"),
    }
    job = Job(
        tmp_path,
        TRAIN,
        workers="1:3",
        prefix=own_hosts.prefix,
        options=(*own_hosts.ssh, "--host-discovery", str(script), *limits[fault]),
        env=SETTINGS,
    )
    await_size(job, 1, 1)
    (tmp_path / "hosts").write_text(f"{own_hosts.names[0]}:1\n{own_hosts.names[1]}:2\n")
    await_true(lambda: f"{own_hosts.names[1]} is not used for" in job.report, what="the news")
    finish(job, 1)


def begun(job, size):
    """Return the steps at which generations of so many workers have begun, at worker 0 of each."""
    found = re.findall(rf"worker 0 of {size} begins at step (\d+)", job.out)
    return [int(step) for step in found]


def await_begun(job, size, count=1):
    def ask():
        assert job.process.poll() is None, job
        return len(begun(job, size)) >= count

    await_true(ask, what=f"{count} generations of {size} workers")


def test_digits_trains_the_same_weights_while_hosts_come_and_go(own_hosts, tmp_path):
    """The example of the documentation: a host comes, the way to one is cut, and one is left in order."""
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    script.chmod(0o755)
    name_hosts(own_hosts, tmp_path, 0, 1)
    arguments = ["--epochs", "80"]
    job = Job(
        tmp_path,
        SLOW_DIGITS,
        workers="2:6",
        arguments=arguments,
        prefix=own_hosts.prefix,
        options=(*own_hosts.ssh, "--host-discovery", str(script)),
        env=SETTINGS,
    )
    await_begun(job, 4)
    name_hosts(own_hosts, tmp_path, 0, 1, 2)
    await_begun(job, 6)
    for pid, words in own_hosts.processes(0).items():  # the launcher's login to the second host
        if words.startswith("ssh") and own_hosts.names[1] in words:
            os.kill(pid, 9)
    await_begun(job, 4, 2)
    await_begun(job, 6, 2)  # it is back after a second
    name_hosts(own_hosts, tmp_path, 0, 1)
    await_begun(job, 4, 3)
    job.open_gate("end")
    assert job.wait() == 0, job
    target = ["-m", "syncvar.examples.elastic_digits"]
    (folder := tmp_path / "alone").mkdir()
    alone = Job(folder, workers=1, target=target, arguments=arguments, start="auto")
    assert alone.wait() == 0, alone
    (expected,) = [line[4:] for line in alone.out.splitlines() if "weights_sha256" in line]
    assert expected in job.out, (job, alone)
    assert not own_hosts.await_quiet()


def test_a_job_goes_on_without_a_host_that_vanishes(own_hosts, tmp_path):
    """Nothing tells the others: no connection ends, and no packet comes any more."""
    where = ",".join(f"{name}:2" for name in own_hosts.names)
    job = start(own_hosts, tmp_path, TRAIN, where, workers="2:6", env={"SYNCVAR_LOST_AFTER_S": "3"})
    await_size(job, 6, 3)
    own_hosts.lose(2)
    await_size(job, 4, 2)
    finish(job, 4)
    assert f"its host {own_hosts.names[2]} is gone" in job.report, job


def test_a_job_starts_without_a_host_that_does_not_answer(own_hosts, tmp_path):
    own_hosts.lose(1)
    where = ",".join(f"{name}:1" for name in own_hosts.names)
    job = start(own_hosts, tmp_path, TRAIN, where, workers="2:3")
    await_size(job, 2, 2)
    finish(job, 2)
    assert f"{own_hosts.names[1]} is left out" in job.report, job
