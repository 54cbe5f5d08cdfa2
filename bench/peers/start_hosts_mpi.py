"""A job that starts, imports NumPy, makes one all-reduce and ends: `mpirun --hostfile F -np 4 python bench/peers/start_hosts_mpi.py`."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
total = np.zeros(4)
world.Allreduce(np.ones(4), total)
if not (total == world.Get_size()).all():
    raise SystemExit("the sum is wrong")
