"""Times of MPI's all-reduce by mpi4py: `mpirun -np 2 python bench/peers/peer_mpi.py`."""

from __future__ import annotations

import mpi4py
import numpy as np
from timing import Case, Team, arguments, finish, measure_all, show_versions


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    mpi4py.rc.initialize = not chosen.versions
    from mpi4py import MPI

    if chosen.versions:
        library = MPI.Get_library_version().splitlines()[0].split(",")[0]
        name, _, version = " ".join(library.split()).replace(" Version:", "").rpartition(" ")
        show_versions(**{"mpi4py": mpi4py.__version__, name: version.removeprefix("v")})
        return
    comm = MPI.COMM_WORLD
    team = Team(comm.Get_rank(), comm.Get_size(), comm.Barrier, comm.bcast)

    def make(_kind: str, count: int) -> Case:
        x, out = np.empty(count, np.float32), np.full(count, np.nan, np.float32)
        return Case(x, lambda: comm.Allreduce(x, out), lambda: out)

    finish(team, chosen, measure_all(team, chosen, make))


if __name__ == "__main__":
    main()
