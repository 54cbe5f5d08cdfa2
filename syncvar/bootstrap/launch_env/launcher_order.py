"""The engines that start processes: one small class each, the innermost first."""

from __future__ import annotations

from syncvar.bootstrap.launch_env.base import (
    ADDRESS,
    FOLDER,
    MPI,
    PMI,
    LaunchEnvironment,
    LaunchInfo,
)
from syncvar.bootstrap.launch_env.kubernetes import IndexedJob
from syncvar.bootstrap.launch_env.mpi_launchers import Horovod, Hydra, Mvapich, OpenMpi, Pmix
from syncvar.bootstrap.launch_env.other_schedulers import Flux, Jsrun, Pals, Pbsdsh
from syncvar.bootstrap.launch_env.slurm import Slurm
from syncvar.bootstrap.launch_env.tf_config import TfConfig
from syncvar.bootstrap.launch_env.torchrun import Torchrun

__all__ = [
    "ADDRESS",
    "BY_HAND",
    "ENGINES",
    "FOLDER",
    "MPI",
    "PMI",
    "LaunchEnvironment",
    "LaunchInfo",
    "TfConfig",
    "Torchrun",
]

BY_HAND: tuple[type[LaunchEnvironment], ...] = (Torchrun, TfConfig)
"""Those whose variables a program, or a person, may have set for processes that something else has started."""

ENGINES: tuple[type[LaunchEnvironment], ...] = (
    *BY_HAND,
    Horovod,
    OpenMpi,
    Mvapich,
    Hydra,
    Pals,
    Flux,
    Jsrun,
    Slurm,
    Pmix,
    Pbsdsh,
    IndexedJob,
)
"""The innermost first, as one starts the other: mpirun on what srun has started, in a pod of Kubernetes."""
