"""Scripts unchanged under Slurm: srun, sbatch, scancel, preemption with a checkpoint and requeue; see install_slurm.sh."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest

from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slurm

HELLO = """
import sys
import numpy as np
import syncvar as sv
total = sv.all_reduce(np.arange(3.0))
sys.stdout.write(f"rank {sv.rank()} of {sv.world_size()} local {sv.local_rank()} host {sv.host_index()} of {sv.host_count()} sum {total[2]:g}\\n")
"""


@pytest.fixture(scope="module")
def daemons():
    folder = tempfile.mkdtemp(prefix="sv-slurm-", dir="/tmp")  # short: sockets lie in it
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture
def cluster(daemons, tmp_path, nothing_left_behind):
    """The cluster, for one test: its ranks meet in a folder of the test's; its jobs are gone after it."""
    before = daemons.environ
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SYNCVAR_", "SLURM_")) or name == "SYNCVAR_TEST_MARK"
    }
    daemons.environ = {
        **inherited,
        "SLURM_CONF": before["SLURM_CONF"],
        "SYNCVAR_RENDEZVOUS_DIR": str(tmp_path),
    }
    yield daemons
    for job in daemons.ask("squeue", "-h", "-o", "%i").split():
        daemons.ask("scancel", job)
    daemons.wait(lambda: not daemons.ask("squeue", "-h", "-o", "%i"), "the end of all jobs")
    daemons.wait(
        lambda: daemons.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%t") == "idle\nidle",
        "idle nodes",
    )
    daemons.wait(lambda: not nothing_left_behind.own_processes(), "the end of all processes")
    assert not list(tmp_path.glob("syncvar-*/*")), "the folders in which ranks meet are removed"
    daemons.environ = before


def srun(cluster, *words, limit_s=100):
    return subprocess.run(
        ["srun", *words],
        env=cluster.environ,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def sbatch(cluster, folder, text, *options):
    """Submit a batch script; return its number and where it writes."""
    script, out = folder / "job.sh", folder / "job.out"
    script.write_text("#!/bin/bash\n" + textwrap.dedent(text))
    told = cluster.ask(
        "sbatch",
        "--parsable",
        "-o",
        str(out),
        "--open-mode=append",
        "-D",
        str(folder),
        *options,
        str(script),
    )
    assert told.isdigit(), told
    return int(told), out


def test_tasks_of_srun_are_ranks_host_by_host(cluster, tmp_path):
    (tmp_path / "hello.py").write_text(HELLO)
    done = srun(cluster, "-N2", "-n4", sys.executable, str(tmp_path / "hello.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of 4 local {rank % 2} host {rank // 2} of 2 sum 8" for rank in range(4)
    ]
    uneven = srun(cluster, "-N2", "-n3", sys.executable, str(tmp_path / "hello.py"))
    places = [(0, 0), (1, 0), (0, 1)]  # local rank, host
    assert sorted(uneven.stdout.splitlines()) == [
        f"rank {rank} of 3 local {local} host {host} of 2 sum 6"
        for rank, (local, host) in enumerate(places)
    ]


def test_a_step_may_have_fewer_tasks_than_its_job_and_a_batch_script_is_no_rank(cluster, tmp_path):
    (tmp_path / "hello.py").write_text(HELLO)
    python = f"{sys.executable} {tmp_path}/hello.py"
    job, out = sbatch(
        cluster, tmp_path, f"{python}\nsrun -N1 -n2 {python}\nsrun {python}\n", "-N2", "-n4"
    )
    cluster.wait(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), "the end of the job")
    lines = out.read_text().splitlines()
    assert cluster.state(job) == "COMPLETED", lines
    assert lines[0] == "rank 0 of 1 local 0 host 0 of 1 sum 2"
    assert sorted(lines[1:3]) == [
        f"rank {rank} of 2 local {rank} host 0 of 1 sum 4" for rank in range(2)
    ]
    assert sorted(lines[3:]) == [
        f"rank {rank} of 4 local {rank % 2} host {rank // 2} of 2 sum 8" for rank in range(4)
    ]


def test_digits_ends_with_the_weights_that_it_has_under_syncvar_launch(cluster):
    words = ["-m", "syncvar.examples.digits", "--epochs", "2"]
    done = srun(cluster, "-N2", "-n4", sys.executable, *words)
    assert done.returncode == 0, done.stderr
    launcher = [sys.executable, "-m", "syncvar_launcher", "--workers", "2", *words]
    here = subprocess.run(
        launcher, env=cluster.environ, capture_output=True, text=True, timeout=120, check=True
    )
    found = [re.search(r"weights_sha256=(\w{64})", one.stdout)[1] for one in (done, here)]
    assert found[0] == found[1]
    assert "workers=4" in done.stdout


ELASTIC = """
import sys
import syncvar as sv
state = sv.elastic.State(step=0)

@sv.elastic.run
def train(state):
    state.step += 1
    state.commit()
    sys.stdout.write(f"rank {sv.rank()} of {sv.world_size()} at step {state.step}\\n")

train(state)
"""


def test_tasks_of_srun_call_an_elastic_function_once(cluster, tmp_path):
    (tmp_path / "elastic.py").write_text(ELASTIC)
    done = srun(cluster, "-N2", "-n4", sys.executable, str(tmp_path / "elastic.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 4 at step 1" for rank in range(4)]


def sweep(cluster):
    """Run another job, which removes the private folders of one whose ranks were killed."""
    done = srun(cluster, "-N2", "-n2", sys.executable, "-c", "import syncvar as sv; sv.barrier()")
    assert done.returncode == 0, done.stderr


FALLS = """
import os, signal, sys
import syncvar as sv
sv.barrier()
if sv.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    sv.barrier()
except sv.PeerLost as error:
    sys.stdout.write(f"rank {sv.rank()} lost {error.rank}\\n")
    sys.stdout.flush()
    raise
"""


def test_a_task_that_is_killed_is_lost_to_the_others(cluster, tmp_path):
    (tmp_path / "falls.py").write_text(FALLS)
    done = srun(cluster, "-N2", "-n4", sys.executable, str(tmp_path / "falls.py"))
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 lost 1", "rank 2 lost 1", "rank 3 lost 1"]
    sweep(cluster)


IDLES = """
import sys, time
import syncvar as sv
sv.barrier()
sys.stdout.write("began\\n")
sys.stdout.flush()
sv.barrier() if sv.rank() else time.sleep(100)
"""


def test_scancel_ends_all_ranks(cluster, tmp_path, nothing_left_behind):
    (tmp_path / "idles.py").write_text(IDLES)
    job, out = sbatch(
        cluster, tmp_path, f"srun {sys.executable} {tmp_path}/idles.py\n", "-N2", "-n4"
    )
    cluster.wait(
        lambda: out.exists() and out.read_text().count("began") == 4, "four ranks that have begun"
    )
    cluster.ask("scancel", str(job))
    cluster.wait(lambda: cluster.state(job) == "CANCELLED", "the job's end")
    cluster.wait(lambda: not nothing_left_behind.own_processes(), "the end of all ranks", 20)
    sweep(cluster)


RESUMES = """
trap : TERM   # the shell waits for the step, which saves
srun {python} -m syncvar.examples.resume {folder}/saved --steps {steps} --pause $(cat {folder}/pause)
code=$?
echo "step ended with $code"
test $code = 75 && scontrol requeue $SLURM_JOB_ID   # saved: run me again
exit $code
"""


def submitted(cluster, folder, steps, *options):
    """Submit a job that takes its time until it is stopped, and none after that."""
    (folder / "pause").write_text("0.2")
    return sbatch(
        cluster,
        folder,
        RESUMES.format(python=sys.executable, folder=folder, steps=steps),
        "-N2",
        "-n4",
        "--requeue",
        *options,
    )


def resumed(cluster, folder, steps, job, out):
    """Wait for the end of a job that is stopped once: it goes on where it was, and ends as if it had been left alone."""
    cluster.wait(
        lambda: out.exists() and "step ended with" in out.read_text(),
        "the end of the first start",
        130,
    )
    (folder / "pause").write_text("0")
    cluster.wait(
        lambda: cluster.state(job) == "PENDING" and not cluster.ask("squeue", "-h", "-t", "CG"),
        "the job in the queue again",
    )
    # Slurm would let it wait for two minutes; a start within the second of the end is refused by slurmd.
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now+4", "TimeLimit=10")
    cluster.wait(lambda: cluster.state(job) == "COMPLETED", "the job's end", 100)
    text = out.read_text()
    assert re.findall(r"step ended with (\d+)", text) == ["75", "0"], text
    assert (
        cluster.ask("scontrol", "-o", "show", "job", str(job))
        .partition("Restarts=")[2]
        .startswith("1 ")
    ), text
    assert 0 < int(re.search(r"continues after step (\d+)", text)[1]) < steps
    words = ["-m", "syncvar.examples.resume", str(folder / "alone"), "--steps", str(steps)]
    alone = srun(cluster, "-N2", "-n4", sys.executable, *words)
    assert alone.returncode == 0, alone.stderr
    assert (
        re.search(r"weights_sha256=\w+", text)[0]
        == re.search(r"weights_sha256=\w+", alone.stdout)[0]
    )


@pytest.mark.timeout(300)
def test_a_job_that_is_preempted_by_another_saves_is_queued_again_and_goes_on(cluster, tmp_path):
    job, out = submitted(cluster, tmp_path, 600, "-p", "low", "--exclusive")
    saved = tmp_path / "saved"
    cluster.wait(lambda: saved.is_dir() and any(saved.iterdir()), "a first checkpoint")
    urgent = srun(cluster, "-p", "high", "-N2", "-n2", "--exclusive", "true")
    assert urgent.returncode == 0, urgent.stderr
    resumed(cluster, tmp_path, 600, job, out)


@pytest.mark.timeout(300)
def test_a_job_that_is_signalled_before_its_time_is_over_saves_and_goes_on_after_requeue(
    cluster, tmp_path
):
    # The signal comes up to a minute before it is due, as Slurm's manual says: 30 to 90 s after the start.
    job, out = submitted(cluster, tmp_path, 600, "--time=2", "--signal=TERM@30")
    resumed(cluster, tmp_path, 600, job, out)


IN_BATCH = """
{launch} -m syncvar.examples.resume {folder}/saved --steps 600 --pause $(cat {folder}/pause) &
trap 'kill -TERM $!' TERM
wait $!; wait $!   # the first ends with the signal, the second with the launcher
code=$?
echo "step ended with $code"
test $code = 75 && scontrol requeue $SLURM_JOB_ID
exit $code
"""


@pytest.mark.timeout(300)
def test_syncvar_launch_in_a_batch_script_saves_at_its_signal_and_goes_on_after_requeue(
    cluster, tmp_path
):
    """The signal is that of `--signal=B:TERM@…`, sent at once; both nodes are this machine, which counts once, with the slots of both."""
    (tmp_path / "pause").write_text("0.2")
    launch = f"{sys.executable} -m syncvar_launcher"
    job, out = sbatch(
        cluster,
        tmp_path,
        IN_BATCH.format(launch=launch, folder=tmp_path),
        "-N2",
        "-n4",
        "--requeue",
    )
    saved = tmp_path / "saved"
    cluster.wait(lambda: saved.is_dir() and any(saved.iterdir()), "a first checkpoint")
    cluster.ask("scancel", "--batch", "--signal=TERM", str(job))
    resumed(cluster, tmp_path, 600, job, out)
