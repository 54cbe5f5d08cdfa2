"""Times of the collectives by size: `syncvar-launch --workers 2 bench/collectives.py [--dtype float32]`.

Rank 0 prints one line for each size: median and spread (first and third quartile) of one call, in
microseconds. `bench/compare.py` runs beside other libraries.
"""

from __future__ import annotations

import argparse
import time
from statistics import quantiles

import numpy as np

import syncvar as sv
from syncvar.bootstrap.process import current


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--sizes", default="8,4096,65536,1048576,16777216", help="bytes, separated by commas"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each size")
    parser.add_argument("--reproducible", action="store_true")
    chosen = parser.parse_args()
    if sv.rank() == 0:
        print(
            f"all_reduce sum {chosen.dtype}, {sv.world_size()} ranks, transport "
            f"{current().transport}"
        )
        print(f"{'bytes':>10} {'median us':>11} {'quartiles us':>20} {'calls':>7}")
    for size in map(int, chosen.sizes.split(",")):
        x = np.ones(size // np.dtype(chosen.dtype).itemsize, chosen.dtype)
        out = np.empty_like(x)
        begin = time.perf_counter()
        for _ in range(5):
            sv.all_reduce(x, out=out, reproducible=chosen.reproducible)
        one = (time.perf_counter() - begin) / 5
        calls = int(sv.broadcast(max(20, min(5000, int(chosen.seconds / one)))))
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            sv.all_reduce(x, out=out, reproducible=chosen.reproducible)
            times.append((time.perf_counter() - begin) * 1e6)
        low, median, high = quantiles(times, n=4)
        if sv.rank() == 0:
            print(f"{size:>10} {median:>11.1f} {f'{low:.1f} - {high:.1f}':>20} {calls:>7}")


if __name__ == "__main__":
    main()
