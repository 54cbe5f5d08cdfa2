"""Times of MPI's collectives by mpi4py: `mpirun -np 2 python bench/peers/peer_mpi.py`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np
from timing import Case, Refused, Team, arguments, array_case, finish, measure_all, show_versions
from values import HALF_TYPES, Values, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable


def mpi_team(comm: Any, largest: Any) -> Team:
    """Return the ranks of a communicator; `largest` is its op of that meaning."""
    rank, world = comm.Get_rank(), comm.Get_size()
    return Team(
        rank, world, comm.Barrier, comm.bcast, lambda number: comm.allreduce(number, largest)
    )


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    mpi4py.rc.initialize = not chosen.versions
    from mpi4py import MPI

    if chosen.versions:
        name, version = re.findall(
            r"^(.+?)(?: Version:)?\s+v?(\d[\w.]*)", MPI.Get_library_version()
        )[0]
        show_versions(**{"mpi4py": mpi4py.__version__, name: version})
        return
    comm = MPI.COMM_WORLD
    team = mpi_team(comm, MPI.MAX)

    def make(_kind: str, values: Values) -> Case:
        is_half = values.dtype in HALF_TYPES
        if is_half and values.collective in ("all_reduce", "reduce_scatter"):
            raise Refused(f"mpi4py has no {values.dtype} to reduce")
        try:
            kind = numpy_dtype(values.dtype)
        except ImportError as problem:
            raise Refused(str(problem)) from problem
        x = np.empty(values.brought_count, kind)
        out = np.zeros(values.result_count, kind)
        mine, theirs = (
            ([x.view(np.uint8), MPI.BYTE], [out.view(np.uint8), MPI.BYTE]) if is_half else (x, out)
        )
        if values.collective == "broadcast":
            return array_case(x, lambda: comm.Bcast(mine, root=0))
        if values.collective == "barrier":
            return array_case(x, comm.Barrier)
        calls: dict[str, Callable[[Any, Any], None]] = {
            "all_reduce": comm.Allreduce,
            "all_gather": comm.Allgather,
            "reduce_scatter": comm.Reduce_scatter_block,
            "all_to_all": comm.Alltoall,
        }
        call = calls[values.collective]
        return array_case(x, lambda: call(mine, theirs), out)

    results, refused = measure_all(team, chosen, make)
    finish(team, chosen, results, refused=refused)


if __name__ == "__main__":
    main()
