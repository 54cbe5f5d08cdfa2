"""Pods of the manifests of configs/, played on this machine: names that are known late, pods that come late, one that is killed.

The processes have the environments that Kubernetes and the JobSet controller make (tests/support/kubernetes_pods.py); a pod's
name is known once it has begun. Whoever plays the controller starts again what has failed, as the manifest says.
"""

import os
import secrets
import subprocess
import sys
import time

import pytest

from tests.support.kubernetes_pods import pods_of_job, pods_of_set
from tests.support.launching import await_true, free_ports

pytestmark = pytest.mark.slow

POD = """
import glob, os, signal, socket, sys, time
plain = socket.getaddrinfo
first = os.environ["MASTER_ADDR"]

def getaddrinfo(host, *rest, **more):
    if host == first:
        if not os.path.exists("begun-" + first.partition(".")[0]):
            open("asked-" + os.environ["HOSTNAME"], "w").close()
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        host = "127.0.0.1"
    return plain(host, *rest, **more)

socket.getaddrinfo = getaddrinfo
open("begun-" + os.environ["HOSTNAME"], "w").close()
import numpy as np
import syncvar as sv
total = sv.all_reduce(np.arange(3.0))[2]
sys.stdout.write(f"{os.environ['HOSTNAME']} is rank {sv.rank()} of {sv.world_size()} on host {sv.host_index()}, sum {total:g}, start {sv.restart_count()}\\n")
sys.stdout.flush()
open("summed-" + os.environ["HOSTNAME"], "w").close()
if not os.path.exists("killed") and sv.rank() == int(sys.argv[1]):
    until = time.monotonic() + 60
    while len(glob.glob("summed-*")) < sv.world_size():  # what others still need of its part would be lost with it
        assert time.monotonic() < until, glob.glob("summed-*")
        time.sleep(0.005)
    open("killed", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
try:
    sv.barrier()
except sv.PeerLost as error:
    sys.stdout.write(f"lost {error.rank}\\n")
    sys.stdout.flush()
    raise
"""
LIMITS = {
    "RENDEZVOUS_TIMEOUT_S": 40,
    "LOST_AFTER_S": 20,
    "SUSPECT_AFTER_S": 10,
    "HEARTBEAT_INTERVAL_S": 0.2,
    "SHUTDOWN_TIMEOUT_S": 0.5,
}


class Cluster:
    """Where pods run."""

    def __init__(self, folder, runtime, lost):
        self.folder = folder
        self.lost = lost
        self.port = {"MASTER_PORT": str(free_ports(2))}  # of this test: the hosts are one
        plain = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SYNCVAR_", "MASTER_")) or name == "SYNCVAR_TEST_MARK"
        }
        self.plain = (
            plain
            | {f"SYNCVAR_{name}": str(value) for name, value in LIMITS.items()}
            | {"XDG_RUNTIME_DIR": str(runtime)}
        )
        (folder / "pod.py").write_text(POD)
        self.pods = {}

    def begin(self, host, environ):
        with (self.folder / f"out-{host}").open("ab") as out:
            line = [sys.executable, "pod.py", str(self.lost)]
            self.pods[host] = subprocess.Popen(
                line, stdout=out, stderr=out, cwd=self.folder, env=self.plain | self.port | environ
            )

    def codes(self, limit_s=120):
        until = time.monotonic() + limit_s
        return {
            host: one.wait(max(0.1, until - time.monotonic())) for host, one in self.pods.items()
        }

    def out(self, host):
        return (self.folder / f"out-{host}").read_text()

    def close(self):
        for one in self.pods.values():
            if one.poll() is None:
                one.kill()
            one.wait(120)


@pytest.fixture
def cluster(tmp_path, runtime):
    made = []

    def make(lost):
        made.append(Cluster(tmp_path, runtime, lost))
        return made[0]

    yield make
    for one in made:
        one.close()


def test_pods_of_a_set_of_which_the_first_comes_late_and_one_is_killed_go_on_with_the_next_attempt(
    cluster, tmp_path
):
    key = secrets.token_hex(32)
    played = cluster(lost=2)
    pods = pods_of_set(key)
    first, *others = pods
    for host in reversed(others):
        played.begin(host, pods[host])
    await_true(
        lambda: len(list(tmp_path.glob("asked-*"))) == 3,
        60,
        "three pods that ask for the name of the first",
    )
    played.begin(first, pods[first])
    codes = played.codes()
    assert codes == {host: -9 if rank == 2 else 70 for rank, host in enumerate(pods)}
    for rank, host in enumerate(pods):
        said = f"{host} is rank {rank} of 4 on host {rank}, sum 8, start 0\n"
        assert said in played.out(host)
        assert ("lost 2\n" in played.out(host)) == (rank != 2), played.out(host)
    for host, environ in pods_of_set(key, attempt=1).items():  # the controller makes all jobs anew
        played.begin(host, environ)
    assert set(played.codes().values()) == {0}, [played.out(host) for host in pods]
    for rank, host in enumerate(pods):
        assert f"{host} is rank {rank} of 4 on host {rank}, sum 8, start 1\n" in played.out(host)
        assert key not in played.out(host)


@pytest.mark.parametrize("lost", [0, 3])
def test_pods_of_an_indexed_job_are_started_again_one_by_one_and_meet_anew(lost, cluster):
    """The one that was killed comes again at once, while the others have yet to see that it was lost."""
    played = cluster(lost)
    pods = pods_of_job(secrets.token_hex(32))
    for host, environ in pods.items():
        played.begin(host, environ)
    begun, until = 4, time.monotonic() + 90
    while any(one.poll() != 0 for one in played.pods.values()):
        assert time.monotonic() < until, [played.out(host) for host in pods]
        for host, one in list(played.pods.items()):
            if one.poll() not in (None, 0):
                assert begun < 4 + 12, [
                    played.out(host) for host in pods
                ]  # the manifest's backoffLimit
                begun += 1
                played.begin(host, pods[host])
        time.sleep(0.02)
    for rank, host in enumerate(pods):
        assert (
            played.out(host).count(f"{host} is rank {rank} of 4 on host {rank}, sum 8, start 0\n")
            == 2
        ), played.out(host)
