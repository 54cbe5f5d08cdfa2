"""A cluster of Slurm for tests: its daemons as children of this process, two nodes on this machine, everything in one folder.

It needs neither systemd nor cgroups nor an account database: processes are known by their ancestry (proctrack/linuxproc),
and nobody binds them (task/none).
"""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

NODES = ("n1", "n2")
SETTINGS = """
ClusterName=syncvar{ports[0]}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
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
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


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
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.settings = self.folder / "slurm.conf"
        self.settings.write_text(
            SETTINGS.format(
                folder=folder, ports=free_ports(3), host=socket.gethostname().partition(".")[0]
            )
        )
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
        self._daemon("slurmctld", "-D", "-i")
        for name in NODES:
            (self.folder / f"spool.{name}").mkdir()
            self._daemon("slurmd", "-D", "-N", name)
        self.wait(
            lambda: self.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%t") == "idle\nidle",
            "idle nodes",
        )

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
            words, env=self.environ, capture_output=True, text=True, timeout=120, check=False
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

    def _daemon(self, name, *words):
        path = shutil.which(name) or f"/usr/sbin/{name}"
        with (self.folder / f"{name}{len(self.running)}.out").open("wb") as out:
            self.running.append(
                subprocess.Popen(
                    [path, *words],
                    env=self.environ,
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                )
            )
