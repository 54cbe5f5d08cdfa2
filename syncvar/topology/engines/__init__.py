"""The engines that start processes: one small class each, the innermost first."""

from __future__ import annotations

from syncvar.topology.engines.base import ADDRESS, FOLDER, MPI, PMI, Engine, Told
from syncvar.topology.engines.kubernetes import IndexedJob
from syncvar.topology.engines.mpi import Horovod, Hydra, Mvapich, OpenMpi, Pmix
from syncvar.topology.engines.schedulers import Flux, Jsrun, Pals, Pbsdsh
from syncvar.topology.engines.slurm import Slurm
from syncvar.topology.engines.tensorflow import TfConfig
from syncvar.topology.engines.torch import Torchrun

__all__ = [
    "ADDRESS",
    "BY_HAND",
    "ENGINES",
    "FOLDER",
    "MPI",
    "PMI",
    "Engine",
    "TfConfig",
    "Told",
    "Torchrun",
]

BY_HAND: tuple[type[Engine], ...] = (Torchrun, TfConfig)
"""Those whose variables a program, or a person, may have set for processes that something else has started."""

ENGINES: tuple[type[Engine], ...] = (
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
