"""A cluster of Slurm for tests: its daemons as children of this process, everything in one folder.

Its nodes are two on this machine, or one on each host of `tests.support.host_testbed`. It needs neither systemd nor cgroups nor an account database: processes are known by their ancestry (proctrack/linuxproc),
and nobody binds them (task/none).
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

SETTINGS = """
ClusterName=syncvar{ports[0]}
SlurmctldHost={controller}
SlurmctldPort={ports[0]}
SlurmdTimeout={silence_s}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,requeue_setup_env_fail
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
MinJobAge=300
ReturnToService=2
SlurmdParameters=config_overrides
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN\n"


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Cluster:
    """The daemons, and the commands of a user.

    Args:
        folder: Of their own; paths of sockets in it must be short.
        hosts: Hosts, one for each node; users and the controller are on the first. None: all are
            on this machine.
    """

    def __init__(self, folder, hosts=None):
        self.folder, self.hosts = Path(folder), hosts
        self.settings = self.folder / "slurm.conf"
        own = socket.gethostname().partition(".")[0]
        addresses = ["127.0.0.1"] * 2 if hosts is None else hosts.names
        self.nodes = [f"n{number}" for number in range(1, len(addresses) + 1)]
        # Not `ip netns exec`, which hides the control groups of this machine from slurmd.
        spaces = [] if hosts is None else hosts.spaces
        self.prefixes = [["nsenter", f"--net=/run/netns/{space}"] for space in spaces]
        self.prefix = self.prefixes[0] if spaces else []
        ports = free_ports(1 + len(addresses))
        text = SETTINGS.format(
            folder=folder,
            ports=ports,
            controller="localhost(127.0.0.1)" if hosts is None else f"{own}({addresses[0]})",
            silence_s=300 if hosts is None else 10,
        )
        nodes, _, partitions = text.partition("PartitionName")
        for name, address, port in zip(self.nodes, addresses, ports[1:], strict=True):
            nodes += NODE.format(name=name, host=own, address=address, port=port)
        self.settings.write_text(f"{nodes}PartitionName{partitions}")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.environ = {**os.environ, "SLURM_CONF": str(self.settings)}
        self.running = []

    def start(self):
        """Start all daemons; return when both nodes are idle."""
        munge = {
            name: str(self.folder / f"munge.{name}") for name in ("sock", "pid", "log", "seed")
        }
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.folder}/munge.key",
            f"--socket={munge['sock']}",
            f"--pid-file={munge['pid']}",
            f"--log-file={munge['log']}",
            f"--seed-file={munge['seed']}",
        )
        self.wait(lambda: Path(munge["sock"]).exists(), "munge")
        self._daemon("slurmctld", "-D", "-i", prefix=self.prefix)
        for place, name in enumerate(self.nodes):
            (self.folder / f"spool.{name}").mkdir()
            prefix = self.prefixes[place] if self.hosts else []
            self._daemon("slurmd", "-D", "-N", name, prefix=prefix)
        self.wait(self.is_idle, "idle nodes")

    def is_idle(self):
        """Return whether all nodes are there, and nobody uses one."""
        states = self.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%t").split()
        return states == ["idle"] * len(self.nodes)

    def lose(self, place):
        """Kill all processes of a node, those of Slurm too; the node has a host of its own.

        Those that are started meanwhile too, by who is still to be killed.
        """
        while found := self.hosts.processes(place):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.running[place - len(self.nodes)].wait(60)

    def stop(self):
        """End all daemons, the last first."""
        for one in reversed(self.running):
            one.terminate()
            try:
                one.wait(120)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait(120)

    def ask(self, *words):
        """Return what a command writes; empty where it fails."""
        return subprocess.run(
            [*self.prefix, *words],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        ).stdout.strip()

    def wait(self, condition, what, limit_s=60.0):
        """Wait until something is so."""
        until = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < until, f"{what}: not within {limit_s:g} s\n{self.told()}"
            time.sleep(0.1)

    def state(self, job):
        """Return the state of a job, for instance COMPLETED."""
        shown = self.ask("scontrol", "-o", "show", "job", str(job))
        return shown.partition("JobState=")[2].partition(" ")[0]

    def told(self):
        """Return what the daemons have written, and what the cluster says of its jobs."""
        logs = [
            f"== {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted(self.folder.glob("*.out"))
        ]
        return "\n".join(
            [*logs, self.ask("squeue", "-a", "-l"), self.ask("scontrol", "show", "jobs")]
        )

    def _daemon(self, name, *words, prefix=()):
        path = shutil.which(name) or f"/usr/sbin/{name}"
        with (self.folder / f"{name}{len(self.running)}.out").open("wb") as out:
            process = subprocess.Popen(
                [*prefix, path, *words],
                env=self.environ,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self.running.append(process)
