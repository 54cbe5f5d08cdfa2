"""The pods of configs/kubernetes-elastic.yaml, played on this machine: its commands, each with namespaces of its own.

A pod has a network with an address, a name, processes of which its command is the first, and its own /tmp and /dev/shm.
The file /etc/hosts stands for the headless service. No Kubernetes runs here.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.support.host_testbed import Hosts
from tests.support.launching import await_true
from tests.support.paths import CONFIGS, REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TRAIN = """
    import os, time
    import numpy as np
    import syncvar as sv

    w = sv.Variable(np.zeros(100), aggregation="MEAN", name="w")
    state = sv.elastic.State(w=w, step=0)

    @sv.elastic.run
    def train(state):
        print(f"rank {sv.rank()} of {sv.world_size()} on {sv.host_count()} pods", flush=True)
        while not sv.all_reduce(os.path.exists("end"), op="or"):
            w.assign_add(np.ones(100))
            state.step += 1
            state.commit()
            time.sleep(0.05)

    train(state)
    print(f"done: {state.step} {float(w.numpy()[0]):.0f} of {sv.world_size()}")
"""
# As a container: arguments are the folders of the pod, its name, folders that stay although they are in /tmp (a line each),
# and its command.
POD = """
set -e
mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs shm /dev/shm
hostname "$3"
mount --bind "$1/image" /mnt
echo "$4" | while read -r kept; do
    test -z "$kept" || { mkdir -p "$2/${kept#/tmp/}"; mount --bind "$kept" "$2/${kept#/tmp/}"; }
done
mount --rbind "$2" /tmp
cd /mnt
shift 4
exec "$@"
"""
INSTALLED = [path for path in (sys.prefix, str(REPOSITORY)) if path.startswith("/tmp/")]


def jobs():
    """Return the pod templates of the jobs in the manifest, by name."""
    documents = yaml.safe_load_all((CONFIGS / "kubernetes-elastic.yaml").read_text())
    found = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "Job"}
    return {name: spec["template"]["spec"] for name, spec in found.items()}


class Pod:
    """A pod that runs."""

    def __init__(self, folder, hosts, index, name, spec):
        (self.container,) = spec["containers"]
        self.grace_s = spec.get("terminationGracePeriodSeconds", 30)
        self.out = folder / f"{name}.out"
        own = folder / f"tmp-{name}"
        own.mkdir(mode=0o700)
        sources = {"JOIN_KEY": "5e" * 32, "POD_IP": hosts.names[index]}
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SYNCVAR_TEST_MARK": os.environ["SYNCVAR_TEST_MARK"],
            **{one["name"]: sources[one["name"]] for one in self.container["env"]},
        }
        command = [*self.container["command"], *self.container["args"]]
        spaces = ["--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        line = ["nsenter", f"--net=/run/netns/{hosts.spaces[index]}", "unshare", *spaces]
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *line,
                    *("sh", "-c", POD, "sh", str(folder), str(own), name, "\n".join(INSTALLED)),
                    *command,
                ],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def send(self, number):
        """Send a signal to the first process of the pod."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        os.kill(int(await_true(children.read_text, what="the first process")), number)

    def shown(self):
        return self.out.read_text()

    def has_shown(self, words):
        assert self.process.poll() is None, self.shown()
        return words in self.shown()


@pytest.fixture
def cluster(tmp_path, nothing_left_behind):
    folder, pods = tmp_path, {}
    for name in ("image", "testbed"):
        (folder / name).mkdir()
    (folder / "image" / "train.py").write_text(textwrap.dedent(TRAIN))
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    hosts = Hosts(folder / "testbed", 4)

    def begin(index, job):
        name = "launcher" if job == "train" else f"train-workers-{index}"
        pods[name] = Pod(folder, hosts, index, name, jobs()[job])
        return pods[name]

    try:
        yield hosts, begin
    finally:
        for one in pods.values():
            one.process.kill()
            one.process.wait(120)
        hosts.close()


def await_size(launcher, size, pods):
    newest = rf"rank \d+ of {size} on {pods} pods"

    def ask():
        assert launcher.process.poll() is None, launcher.shown()
        found = re.findall(r"rank \d+ of .*", launcher.shown())[-size:]
        return len(found) == size and all(re.match(newest, one) for one in found)

    try:
        await_true(ask, what=f"{size} workers on {pods} pods")
    except AssertionError as error:
        error.add_note(launcher.shown())
        raise


def test_pods_come_are_evicted_and_killed_and_the_others_go_on(cluster, tmp_path):
    hosts, begin = cluster
    first = begin(1, "train-workers")  # it waits for the name of the launcher
    await_true(lambda: first.has_shown("launcher.train is unknown"), what="a pod that waits")
    launcher = begin(0, "train")
    with (tmp_path / "hosts").open("a") as file:
        file.write(f"{hosts.names[0]} launcher.train\n")
    await_size(launcher, 4, 1)
    evicted = begin(2, "train-workers")
    await_size(launcher, 8, 2)
    evicted.send(signal.SIGTERM)
    await_size(launcher, 4, 1)
    assert evicted.process.wait(evicted.grace_s) == 128 + signal.SIGTERM, evicted.shown()
    shown = launcher.shown()
    assert shown.count("asks to leave: it leaves at the next commit") == 4, shown
    assert "is lost" not in shown, shown
    killed = begin(3, "train-workers")  # in place of the other
    await_size(launcher, 8, 2)
    killed.send(signal.SIGKILL)  # as after a grace that was too short
    await_size(launcher, 4, 1)
    (tmp_path / "image" / "end").touch()
    assert launcher.process.wait(120) == 0, launcher.shown()
    assert first.process.wait(120) == 0, first.shown()
    done = re.findall(r"done: (\d+) (\d+) of (\d+)", launcher.shown())
    assert len(done) == 4, launcher.shown()
    assert {(one, int(size)) for one, _, size in done} == {(done[0][1], 4)}, launcher.shown()


def test_the_names_of_the_manifest_agree():
    documents = [*yaml.safe_load_all((CONFIGS / "kubernetes-elastic.yaml").read_text())]
    service, launcher, _ = documents
    spec = launcher["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": launcher["metadata"]["name"]}
    assert spec["subdomain"] == service["metadata"]["name"]
    name = f"{spec['hostname']}.{spec['subdomain']}"
    (worker,) = jobs()["train-workers"]["containers"]
    assert f"--join {name}:29400 " in worker["args"][0]
    assert ':29400" ' in spec["containers"][0]["args"][0]
