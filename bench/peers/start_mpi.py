"""A job that starts, meets in a barrier and ends: `mpirun -np 4 python bench/peers/start_mpi.py`."""

from __future__ import annotations

from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
