"""The launch environments in order, the innermost first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.bootstrap.launch_env.kubernetes import IndexedJob
from syncvar.bootstrap.launch_env.mpi_launchers import Horovod, Hydra, Mvapich, OpenMpi, Pmix
from syncvar.bootstrap.launch_env.other_schedulers import Flux, Jsrun, Pals, Pbsdsh
from syncvar.bootstrap.launch_env.slurm import Slurm
from syncvar.bootstrap.launch_env.tf_config import TfConfig
from syncvar.bootstrap.launch_env.torchrun import Torchrun

if TYPE_CHECKING:
    from syncvar.bootstrap.launch_env.base import LaunchEnvironment

BY_HAND: tuple[type[LaunchEnvironment], ...] = (Torchrun, TfConfig)
"""Launchers whose variables a user may have set by hand."""

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
"""The innermost first, for instance mpirun under srun in a pod of Kubernetes."""
