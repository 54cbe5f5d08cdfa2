"""Summing ResNet-50's gradients by mpi4py: `mpirun -np 2 python bench/peers/model_mpi.py`.

Kinds: "each" (one Allreduce for each of the 161 arrays, in place) and "flat" (one for a vector of
    all). They sum; the
division that an average needs is not made.
"""

from __future__ import annotations

from math import prod

import numpy as np
from model import mean_of, pieces_case, shapes
from mpi4py import MPI
from peer_mpi import mpi_team
from timing import arguments, finish, measure


def main() -> None:
    """Run as one worker."""
    chosen = arguments(__doc__)
    comm = MPI.COMM_WORLD
    team = mpi_team(comm, MPI.MAX)
    model = shapes()
    values = mean_of(model, team.rank, team.world, "sum")
    results = []
    for kind in ("each", "flat"):
        arrays = [
            np.empty(shape, np.float32)
            for shape in (model if kind == "each" else [(sum(map(prod, model)),)])
        ]

        def call(arrays: list[np.ndarray] = arrays) -> None:  # type: ignore[type-arg]
            for array in arrays:
                comm.Allreduce(MPI.IN_PLACE, array)

        def result(arrays: list[np.ndarray] = arrays) -> list[np.ndarray]:  # type: ignore[type-arg]
            return arrays

        results.append(
            {
                "kind": kind,
                **measure(
                    team, pieces_case(arrays, call, result, in_place=True), values, chosen.seconds
                ),
            }
        )
    finish(team, chosen, results)


if __name__ == "__main__":
    main()
