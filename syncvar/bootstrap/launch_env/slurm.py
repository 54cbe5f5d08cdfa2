"""Slurm: tasks of srun. Batch scripts and shells of salloc are none: they run once per job."""

from __future__ import annotations

import re

from syncvar.bootstrap.launch_env.base import LaunchEnvironment, LaunchInfo, whole
from syncvar.core.errors import ConfigError

_STEP_MAX = 0xFFFFFFF0  # larger step numbers are Slurm's own: batch, interactive, extern, pending
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


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
        job, step = (
            self.environ.get("SLURM_JOB_ID", self.environ.get("SLURM_JOBID", "")),
            self._step(),
        )
        cluster, again = (
            self.environ.get("SLURM_CLUSTER_NAME", ""),
            self.environ.get("SLURM_RESTART_COUNT", "0"),
        )
        port = self.environ.get("SLURM_STEP_LAUNCHER_PORT", "")
        return f"{cluster} {job}.{step} {again} {port}" if job and step else ""

    def info(self) -> LaunchInfo | None:
        """Return the identity of this process.

        None if an old srun does not list the tasks of each host.

        Raises:
            ConfigError: The variables are wrong, or the tasks are not numbered host by host.
        """
        environ, size = self.environ, self.size()
        if size == 1:
            return self._checked(0, 1, 0, 1)
        if (
            not size
            or not self.run()
            or any(
                name not in environ
                for name in ("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", self.local_rank)
            )
        ):
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
        return self._checked(
            rank,
            size,
            local_rank,
            on_hosts[host],
            host_index=host,
            host_count=len(on_hosts),
            restarts=again,
        )

    def _step(self) -> str:
        return self.environ.get("SLURM_STEP_ID", self.environ.get("SLURM_STEPID", ""))


def counts(text: str, name: str) -> list[int]:
    """Return the numbers in a list as Slurm writes it.

    Raises:
        ConfigError: The list cannot be parsed.

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
