"""Say hello from every worker and compute a sum.

syncvar-launch --workers 4 -m syncvar.examples.hello
"""

from __future__ import annotations

import os

import numpy as np

import syncvar as sv


def main() -> None:
    """Say hello; every worker runs it."""
    rank, workers = sv.rank(), sv.world_size()
    print(f"hello from rank {rank} of {workers}, process {os.getpid()}", flush=True)

    total = sv.all_reduce(np.array([rank, 1.0]))  # every worker gets the sum over all workers
    expected = [workers * (workers - 1) / 2, workers]
    if total.tolist() != expected:
        raise SystemExit(f"rank {rank}: the sum is {total.tolist()}, expected {expected}")

    sv.barrier()
    if rank == 0:
        print(f"sum of ranks = {total[0]:g}, workers = {total[1]:g}", flush=True)


if __name__ == "__main__":
    main()
