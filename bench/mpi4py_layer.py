"""What the layer for mpi4py adds to a small call: `python bench/mpi4py_layer.py [--workers 2]`.

`Comm.Allreduce` of one float64 and `sv.all_reduce` of the same arrays alternate. The script prints
the medians in microseconds, and their difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from first_rank import run_as_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

_TURNS, _CALLS = 40, 2000


def microseconds(call: Callable[[], Any]) -> float:
    """Return the time of a call."""
    begin = perf_counter()
    for _ in range(_CALLS):
        call()
    return (perf_counter() - begin) / _CALLS * 1e6


def work() -> None:
    """Measure, as one rank; rank 0 prints."""
    import syncvar as sv
    from syncvar.compat.mpi4py import MPI

    comm, x, out = MPI.COMM_WORLD, np.ones(1), np.empty(1)
    calls: dict[str, Callable[[], Any]] = {
        "sv.all_reduce": lambda: sv.all_reduce(x, out=out),
        "Allreduce": lambda: comm.Allreduce(x, out),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_TURNS + 2):
        for name, call in calls.items():
            spent = microseconds(call)
            if turn > 1:  # the first ones warm up
                times[name].append(spent)
    found = {name: median(values) for name, values in times.items()}
    if sv.rank() == 0:
        print(json.dumps({**found, "added": found["Allreduce"] - found["sv.all_reduce"]}))


def main() -> None:
    """Start the ranks, or be one."""
    if "SYNCVAR_RANK" in os.environ:
        work()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    sys.exit(run_as_ranks(__file__, parser.parse_args().workers))


if __name__ == "__main__":
    main()
