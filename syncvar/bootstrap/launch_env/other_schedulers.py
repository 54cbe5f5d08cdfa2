"""Schedulers with launchers of their own: Flux, PALS under PBS, jsrun under LSF; and pbsdsh."""

from __future__ import annotations

from syncvar.bootstrap.launch_env.base import FOLDER, PMI, LaunchEnvironment, LaunchInfo, whole
from syncvar.bootstrap.launch_env.mpi_launchers import hands_cards


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
        return PMI if hands_cards(self.environ) else FOLDER

    def info(self) -> LaunchInfo | None:
        """Return the identity of this process.

        None if the number of ranks on this host is unknown.
        """
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
