"""Elastic jobs under Slurm, whose nodes are hosts of their own: a node is lost, Slurm's signal, salloc, a second job that joins."""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.support.host_testbed import Hosts
from tests.support.launching import free_ports
from tests.support.slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

LAUNCH = f"{sys.executable} -m syncvar_launcher"
TRAIN = """
    import os, sys, time
    import numpy as np
    import syncvar as sv

    w = sv.Variable(np.zeros(100), aggregation="MEAN", name="w")
    state = sv.elastic.State(w=w, step=0)

    @sv.elastic.run
    def train(state):
        place = f"{sv.world_size()} on {sv.host_count()} at step {state.step}"
        print(f"rank {sv.rank()} of {place}", flush=True)
        while not sv.all_reduce(os.path.exists("end"), op="or"):
            w.assign_add(np.ones(100))
            state.step += 1
            state.commit()
            time.sleep(0.02)

    train(state)
    print(f"done: {state.step} {float(w.numpy()[0]):.0f} of {sv.world_size()}")
"""


class Site:
    """The cluster for one test, and the folder in which its jobs run."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        (folder / "train.py").write_text(textwrap.dedent(TRAIN))

    def sbatch(self, text, *options):
        """Submit a batch script; return its number and where it writes."""
        script = self.folder / f"job{len(list(self.folder.glob('*.sh')))}.sh"
        script.write_text("#!/bin/bash\n" + textwrap.dedent(text))
        out = script.with_suffix(".out")
        words = ("--parsable", "-o", str(out), "-D", str(self.folder), *options, str(script))
        number = self.cluster.ask("sbatch", *words)
        assert number.isdigit(), number
        return int(number), out

    def await_size(self, out, size, hosts):
        """Wait until the newest generation has so many workers on so many hosts."""
        newest = rf"rank \d+ of {size} on {hosts} at step \d+"

        def ask():
            found = re.findall(r"rank \d+ of .*", out.read_text()) if out.exists() else []
            return len(found) >= size and all(re.match(newest, one) for one in found[-size:])

        self.wait(ask, f"{size} workers on {hosts} hosts", out)

    def wait(self, condition, what, *outs):
        try:
            self.cluster.wait(condition, what, 120)
        except AssertionError as error:
            for one in outs:
                error.add_note(one.read_text() if one.exists() else "nothing written")
            raise

    def finish(self, out, size):
        """Let the program end; its state must be that of as many steps of an undisturbed run."""
        (self.folder / "end").touch()
        self.wait(lambda: "launcher ended" in out.read_text(), "the end of the launcher", out)
        text = out.read_text()
        assert "launcher ended with 0\n" in text, text
        done = re.findall(r"done: (\d+) (\d+) of (\d+)", text)
        assert len(done) == size, text
        assert {(one, int(count)) for one, _, count in done} == {(done[0][1], size)}, text


@pytest.fixture
def site(tmp_path, nothing_left_behind):
    folder = Path(tempfile.mkdtemp(prefix="sv-slurm-", dir="/tmp"))  # short: sockets lie in it
    for name in ("hosts", "run"):
        (folder / name).mkdir(mode=0o700)
    hosts = Hosts(folder / "hosts", 3)
    cluster = Cluster(folder, hosts)
    cluster.environ |= {"XDG_RUNTIME_DIR": f"{folder}/run", "SYNCVAR_RENDEZVOUS_DIR": str(tmp_path)}
    try:
        cluster.start()
        yield Site(cluster, tmp_path)
        (tmp_path / "end").touch()
        cluster.ask("scancel", "-u", "root")
        cluster.wait(lambda: not cluster.ask("squeue", "-h", "-o", "%i"), "the end of all jobs")
    finally:
        cluster.stop()
        hosts.close()
        shutil.rmtree(folder)


BATCH = f"{LAUNCH} --workers 2:4 train.py\necho launcher ended with $?\n"


def test_a_job_goes_on_without_a_node_that_is_lost(site):
    job, out = site.sbatch(BATCH, "-N2", "-n4", "--no-kill")
    site.await_size(out, 4, 2)
    site.cluster.lose(1)
    site.await_size(out, 2, 1)
    site.wait(lambda: "down" in site.cluster.ask("sinfo", "-h", "-n", "n2", "-o", "%t"), "the news")
    site.finish(out, 2)
    assert "is lost: its host n2 is gone" in out.read_text(), out.read_text()
    site.wait(lambda: site.cluster.state(job) == "COMPLETED", "the job's end", out)


def test_the_workers_of_a_node_leave_at_the_signal_of_slurm(site):
    """Slurm signals each process of the step, and the agent passes the signal on: that is one notice."""
    job, out = site.sbatch(BATCH, "-N2", "-n4")
    site.await_size(out, 4, 2)
    site.cluster.ask("scancel", "--signal=TERM", f"{job}.0")
    site.await_size(out, 2, 1)
    steps = ["squeue", "-h", "-s", "-j", str(job), "-o", "%i"]
    site.wait(lambda: f"{job}.0" not in site.cluster.ask(*steps).split(), "the step's end", out)
    site.finish(out, 2)
    text = out.read_text()
    assert text.count("on n2 asks to leave: it leaves at the next commit") == 2, text
    assert "is lost" not in text, text


def test_salloc_gives_the_hosts_of_an_elastic_job(site):
    words = ["salloc", "-N3", "-n6", "-D", str(site.folder), "bash", "-c", BATCH]
    out = site.folder / "salloc.out"
    with out.open("wb") as file:
        process = subprocess.Popen(
            [*site.cluster.prefix, *words], env=site.cluster.environ, stdout=file, stderr=file
        )
    try:
        site.await_size(out, 4, 2)  # the third node would be beyond MAX
        site.finish(out, 4)
    finally:
        assert process.wait(120) == 0, out.read_text()


def test_a_second_job_joins_a_first_one_and_is_preempted(site):
    key = site.folder / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    where = f"{site.cluster.hosts.names[0]}:{free_ports()} --key-file {key}"
    join = f"srun {LAUNCH} --join {where} --slots 2\necho joined: $?\n"
    begin = f"{LAUNCH} --listen {where} --workers 2:6 train.py &\n{join}wait %1\necho launcher ended with $?\n"
    first, out = site.sbatch(begin, "-N2", "--ntasks-per-node=1", "-c2")
    site.await_size(out, 4, 2)
    second, joined = site.sbatch(join, "-N1", "-n1", "-c2")
    site.await_size(out, 6, 3)
    site.cluster.ask("scancel", "--signal=TERM", str(second))
    site.await_size(out, 4, 2)
    site.wait(lambda: site.cluster.state(second) == "COMPLETED", "the second job's end", joined)
    assert f"joined: {128 + signal.SIGTERM}" in joined.read_text()
    site.finish(out, 4)
    text = out.read_text()
    assert text.count("asks to leave: it leaves at the next commit") == 2, text
    assert "is lost" not in text, text
    site.wait(lambda: site.cluster.state(first) == "COMPLETED", "the first job's end", out)
