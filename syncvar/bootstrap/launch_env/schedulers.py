"""Launchers of MPI and of schedulers: mpirun, Slurm, Flux, PALS, jsrun, pbsdsh and Kubernetes."""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from syncvar.bootstrap.launch_env import (
    FOLDER,
    PMI,
    LaunchEnvironment,
    LaunchInfo,
    port_of,
    whole,
)
from syncvar.core.environment import OWN_SIZE
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PORT = 29500
_STEP_MAX = 0xFFFFFFF0  # larger step numbers are Slurm's own: batch, interactive, extern, pending
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def has_kv_store(environ: Mapping[str, str]) -> bool:
    """Return whether the process manager offers its key-value store on an open descriptor."""
    return environ.get("PMI_FD", "").isdecimal()


class Horovod(LaunchEnvironment):
    """horovodrun with Gloo; with MPI, the MPI launcher is present too and agrees."""

    name = "horovodrun"
    rank = "HOROVOD_RANK"
    sizes = ("HOROVOD_SIZE",)
    local_rank = "HOROVOD_LOCAL_RANK"
    local_sizes = ("HOROVOD_LOCAL_SIZE",)

    def run(self) -> str:
        """Return the address of its rendezvous."""
        address = [
            self.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}", "") for part in ("ADDR", "PORT")
        ]
        return " ".join(address) if all(address) else ""


class OpenMpi(LaunchEnvironment):
    """mpirun of Open MPI 4 and 5: it has a name of the job, and version 4 also a random number."""

    name = "mpirun of Open MPI"
    rank = "OMPI_COMM_WORLD_RANK"
    sizes = ("OMPI_COMM_WORLD_SIZE",)
    # OMPI_COMM_WORLD_NODE_RANK counts ranks of all jobs on the host
    local_rank = "OMPI_COMM_WORLD_LOCAL_RANK"
    local_sizes = ("OMPI_COMM_WORLD_LOCAL_SIZE",)

    def run(self) -> str:
        """Return the job's name and its random number."""
        name = self.environ.get("PMIX_NAMESPACE") or self.environ.get("OMPI_MCA_ess_base_jobid", "")
        number = self.environ.get("OMPI_MCA_orte_precondition_transports", "")
        return f"{name} {number}" if name else ""

    def program(self, rank: int) -> int:
        """Return the index of a rank's program, of those with a colon between them."""
        sizes = self.environ.get("OMPI_APP_CTX_NUM_PROCS", "").split()
        ends = [*accumulate(int(one) for one in sizes if one.isdecimal())]
        return bisect_right(ends, rank) if rank < max(ends, default=0) else 0


class Hydra(LaunchEnvironment):
    """mpiexec of MPICH and Intel MPI; other launchers set PMI variables too."""

    name = "mpiexec, by PMI as of MPICH and Intel MPI,"
    rank = "PMI_RANK"
    sizes = ("PMI_SIZE",)
    local_rank = "MPI_LOCALRANKID"
    local_sizes = ("MPI_LOCALNRANKS",)
    _outer = (
        ("PALS_RANKID", ""),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    )

    def is_present(self) -> bool:
        """Return whether mpiexec has started this process, and not a scheduler with PMI."""
        if not super().is_present():
            return False
        environ = self.environ
        if "MPI_LOCALRANKID" in environ or "HYDI_CONTROL_FD" in environ:
            return True
        return not any(
            rank in environ
            and environ.get("PMI_RANK") == environ[rank]
            and (not size or environ.get("PMI_SIZE") == environ.get(size))
            for rank, size in self._outer
        )

    def way(self) -> str:
        """Return how the ranks of several hosts meet."""
        return PMI if has_kv_store(self.environ) else FOLDER


class Mvapich(Hydra):
    """MVAPICH2, which uses MPICH's mpiexec."""

    name = "mpirun of MVAPICH2"
    rank = "MV2_COMM_WORLD_RANK"
    sizes = ("MV2_COMM_WORLD_SIZE",)
    local_rank = "MV2_COMM_WORLD_LOCAL_RANK"
    local_sizes = ("MV2_COMM_WORLD_LOCAL_SIZE",)

    def is_present(self) -> bool:
        """Return whether it has started this process."""
        return self.rank in self.environ or self.sizes[0] in self.environ


class Pmix(LaunchEnvironment):
    """An unknown launcher that speaks PMIx."""

    name = "a launcher that speaks PMIx"
    rank = "PMIX_RANK"

    def info(self) -> LaunchInfo | None:
        """Return None: only the library of PMIx can read the rest."""
        return None


class Flux(LaunchEnvironment):
    """flux run: only PMI says how many ranks are on a host."""

    name = "flux run"
    rank = "FLUX_TASK_RANK"
    sizes = ("FLUX_JOB_SIZE",)
    local_rank = "FLUX_TASK_LOCAL_ID"

    def run(self) -> str:
        """Return the job."""
        return self.environ.get("FLUX_JOB_ID", "")

    def way(self) -> str:
        """Return how the ranks of several hosts meet."""
        return PMI if has_kv_store(self.environ) else FOLDER

    def info(self) -> LaunchInfo | None:
        """Return the identity; None if the number of ranks on this host is unknown."""
        size = self.size()
        is_one_host = size == 1 or self.environ.get("FLUX_JOB_NNODES") == "1"
        if (
            not size
            or not self.run()
            or not (is_one_host or self.way() == PMI)
            or (size > 1 and self.local_rank not in self.environ)
        ):
            return None
        rank = whole(self.environ, self.rank) if self.rank in self.environ else 0
        local_rank = whole(self.environ, self.local_rank) if size > 1 else 0
        return self._checked(rank, size, local_rank, size if is_one_host else 0)


class Pals(LaunchEnvironment):
    """mpiexec of PALS: only the size on this host always has a variable."""

    name = "mpiexec of PALS"
    rank = "PALS_RANKID"
    sizes = ("PALS_SIZE", "PMI_SIZE")
    local_rank = "PALS_LOCAL_RANKID"
    local_sizes = ("PALS_LOCAL_SIZE",)

    def is_present(self) -> bool:
        """Return whether it has started this process."""
        return any(
            name.startswith("PALS_")
            for name in (*self.sizes, self.rank, *self.local_sizes)
            if name in self.environ
        )

    def run(self) -> str:
        """Return its name of this run."""
        return self.environ.get("PALS_APID", "")


class Jsrun(LaunchEnvironment):
    """jsrun, in a job of LSF."""

    name = "jsrun"
    rank = "JSM_NAMESPACE_RANK"
    sizes = ("JSM_NAMESPACE_SIZE",)
    local_rank = "JSM_NAMESPACE_LOCAL_RANK"
    local_sizes = ("JSM_NAMESPACE_LOCAL_SIZE",)

    def run(self) -> str:
        """Return the job and its step."""
        job, step = self.environ.get("LSB_JOBID", ""), self.environ.get("PMIX_NAMESPACE", "")
        return f"{job} {step}" if job and step else ""


class Pbsdsh(LaunchEnvironment):
    """pbsdsh: it numbers its tasks, but has no total. Task 0 is the job's script."""

    name = "pbsdsh"
    rank = "PBS_VNODENUM"

    def is_present(self) -> bool:
        """Return whether this is a task other than the job's script."""
        return self.environ.get(self.rank, "0") not in ("", "0")

    def info(self) -> LaunchInfo | None:
        """Return None: its variables are not sufficient."""
        return None


class IndexedJob(LaunchEnvironment):
    """Pods that know their index; the manifest has to say their number and the name of the first.

    In a JobSet with several jobs, labels say which job this is, how many there are, and the number
    of restarts. The manifest turns them into variables.
    """

    name = "an indexed job of Kubernetes"
    rank = "JOB_COMPLETION_INDEX"
    sizes = (OWN_SIZE,)
    remedy = (
        "Let the manifest say the rest, as `env` of the container: SYNCVAR_WORLD_SIZE, the "
        "number of pods; MASTER_ADDR, the name of the first (JOB-0.SERVICE, with a headless "
        "service and `subdomain: SERVICE`; in a JobSet its annotation "
        "jobset.sigs.k8s.io/coordinator); and SYNCVAR_KEY_FILE, a secret that all mount"
    )

    def is_present(self) -> bool:
        """Return whether this is a pod of an Indexed Job."""
        return self.rank in self.environ

    def info(self) -> LaunchInfo | None:
        """Return the identity of this process; None if the manifest is not sufficient."""
        size, address = self.size(), self.environ.get("MASTER_ADDR", "")
        if not size or (size > 1 and not address):
            return None
        rank = whole(self.environ, self.rank)
        if "JOBSET_GLOBAL_REPLICAS" in self.environ:
            jobs, job = (
                whole(self.environ, name)
                for name in ("JOBSET_GLOBAL_REPLICAS", "JOBSET_JOB_GLOBAL_INDEX")
            )
            if not jobs or size % jobs:
                raise ConfigError(
                    f"{OWN_SIZE}={size} is no multiple of JOBSET_GLOBAL_REPLICAS={jobs}: all jobs "
                    "of the set have as many pods"
                )
            rank += job * (size // jobs)
        if rank >= size:
            raise ConfigError(
                f"{self.rank}={self.environ[self.rank]} is rank {rank}, outside of "
                f"{OWN_SIZE}={size}: the number of pods of all jobs"
            )
        port = port_of(self.environ.get("MASTER_PORT", str(_PORT)), "MASTER_PORT")
        again = self.environ.get("JOBSET_RESTART_ATTEMPT", "")
        restarts = whole(self.environ, "JOBSET_RESTART_ATTEMPT") if again else 0
        return LaunchInfo(
            self.source(), rank, size, 0, 1, rank, size, address, port, again, restarts
        )


class Slurm(LaunchEnvironment):
    """srun: SLURM_NTASKS counts tasks of the whole job; a step may have fewer."""

    name = "srun"
    rank = "SLURM_PROCID"
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    local_rank = "SLURM_LOCALID"

    def is_present(self) -> bool:
        """Return whether srun has started this process, and not only allocated its host."""
        if self.rank not in self.environ:
            return False
        step = self._step()
        if not step:  # sbatch sets ENVIRONMENT, and procid 0
            return self.environ.get("ENVIRONMENT") != "BATCH" or self.environ[self.rank] != "0"
        return step.isdigit() and int(step) < _STEP_MAX

    def run(self) -> str:
        """Return cluster, job, step, restart and port of srun: numbers alone are reused."""
        get, step = self.environ.get, self._step()
        job = get("SLURM_JOB_ID", get("SLURM_JOBID", ""))
        cluster, again = get("SLURM_CLUSTER_NAME", ""), get("SLURM_RESTART_COUNT", "0")
        port = get("SLURM_STEP_LAUNCHER_PORT", "")
        return f"{cluster} {job}.{step} {again} {port}" if job and step else ""

    def info(self) -> LaunchInfo | None:
        """Return the identity; None if an old srun does not list the tasks of each host."""
        environ, size = self.environ, self.size()
        if size == 1:
            return self._checked(0, 1, 0, 1)
        needed = {"SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", self.local_rank}
        if not size or not self.run() or not needed <= environ.keys():
            return None
        rank, host, local_rank = (
            whole(environ, name) for name in (self.rank, "SLURM_NODEID", self.local_rank)
        )
        on_hosts = counts(environ["SLURM_STEP_TASKS_PER_NODE"], "SLURM_STEP_TASKS_PER_NODE")
        if sum(on_hosts) != size or host >= len(on_hosts):
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} contradicts "
                f"{self.named(self.sizes)}={size} and SLURM_NODEID={host}"
            )
        first = sum(on_hosts[:host])
        # Tasks of this host; all of them see a wrong order.
        here = environ.get("SLURM_GTIDS", "").split(",")
        if (
            rank != first + local_rank
            or here[0] not in ("", str(first))
            or here[-1] not in ("", str(first + on_hosts[host] - 1))
        ):
            raise ConfigError(
                f"SLURM_PROCID={rank} is the task {local_rank} of host "
                f"{host}{', which has ' + environ['SLURM_GTIDS'] if here[0] else ''}, and ranks "
                "are numbered host by host: write srun --distribution=block"
            )
        again = whole(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0
        more = {"host_index": host, "host_count": len(on_hosts), "restarts": again}
        return self._checked(rank, size, local_rank, on_hosts[host], **more)

    def _step(self) -> str:
        return self.environ.get("SLURM_STEP_ID", self.environ.get("SLURM_STEPID", ""))


def counts(text: str, name: str) -> list[int]:
    """Return the numbers in a list as Slurm writes it, or raise ConfigError.

    Example:
        >>> counts("2(x3),1", "SLURM_TASKS_PER_NODE")
        [2, 2, 2, 1]
    """
    result: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if found is None:
            raise ConfigError(
                f"{name}={text} cannot be understood: {part!r} is no number, and no number with "
                "(xN)"
            )
        result += [int(found[1])] * int(found[2] or 1)
    return result
