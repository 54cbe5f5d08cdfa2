"""Deferred writes beside eager ones, and what size of bucket is best: `python bench/queued.py`.

Two workers make a step of increments to AUTO variables and read them at its end: eager (each write
is one transfer), then deferred with buckets of several sizes, in turns, over shared memory and over
ZeroMQ. Medians, in microseconds of a write. A bucket that is full is sent at once; a larger one is
fuller when the step ends, and less of it is in the caches.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from statistics import median
from time import perf_counter

import numpy as np

import syncvar as sv
from syncvar.variables import deferred_writes

_BUCKETS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_ROUNDS = 5
_SIZES = (8, 4 << 10, 64 << 10)  # bytes of a write


def work(budget: int) -> None:
    """Measure, as one of two workers; rank 0 prints."""
    for nbytes in _SIZES:
        writes = max(8, min(200, budget // nbytes))
        times = _of_size(nbytes, writes)
        if sv.rank() == 0:
            cells = "  ".join(
                f"{name} {median(found) / writes * 1e6:8.1f}" for name, found in times.items()
            )
            print(f"{writes:4} writes of {nbytes:6} B: {cells}")


def _of_size(nbytes: int, writes: int) -> dict[str, list[float]]:
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        variables = [sv.Variable(np.zeros(nbytes // 8), aggregation="SUM") for _ in range(4)]
    x = np.ones(nbytes // 8)

    def step() -> None:
        for number in range(writes):
            variables[number % 4].assign_add(x)
        for variable in variables:
            variable.read_value(copy=False)

    times: dict[str, list[float]] = {}
    for _ in range(_ROUNDS):
        for bucket in (0, *_BUCKETS):
            for variable in variables:
                variable.pin("deferred" if bucket else "eager")
            deferred_writes.BUCKET_BYTES = bucket
            strategy.run(step)
            sv.barrier()
            begin = perf_counter()
            strategy.run(step)
            times.setdefault(f"{bucket >> 10} KiB" if bucket else "eager", []).append(
                perf_counter() - begin
            )
    return times


def main() -> int:
    """Run the workers, or work as one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", type=int, default=8 << 20, help="bytes that a step writes at most [8 MiB]"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen.budget)
        return 0
    line = [
        sys.executable,
        "-m",
        "syncvar_launcher",
        "--workers",
        "2",
        "--bind",
        "auto",
        __file__,
        "--worker",
    ]
    codes = []
    for transport in ("auto", "zmq"):
        print("shared memory" if transport == "auto" else "ZeroMQ", flush=True)
        environment = os.environ | {"SYNCVAR_TRANSPORT": transport}
        codes.append(
            subprocess.run(
                [*line, "--budget", str(chosen.budget)], check=False, env=environment
            ).returncode
        )
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
