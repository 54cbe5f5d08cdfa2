"""The launchers of MPI: mpirun of Open MPI, process managers with PMI, and horovodrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.bootstrap.launch_env.base import FOLDER, PMI, LaunchEnvironment, LaunchInfo

if TYPE_CHECKING:
    from collections.abc import Mapping


def hands_cards(environ: Mapping[str, str]) -> bool:
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
        return (
            f"{name} {self.environ.get('OMPI_MCA_orte_precondition_transports', '')}"
            if name
            else ""
        )


class Hydra(LaunchEnvironment):
    """mpiexec of MPICH and Intel MPI.

    Other launchers set PMI variables too, and have variables of their own.
    """

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
        return PMI if hands_cards(self.environ) else FOLDER


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
