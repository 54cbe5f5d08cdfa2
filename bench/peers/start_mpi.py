"""A job that starts, imports NumPy, meets in a barrier and ends: `mpirun -np 4 python bench/peers/start_mpi.py`."""

from __future__ import annotations

import numpy as np  # noqa: F401  (as programs do that bring arrays)
from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
