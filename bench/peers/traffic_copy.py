"""How fast the cores of this host copy arrays together: `python bench/peers/traffic_copy.py --result FILE`.

One process for each core copies one big NumPy array into another, all at the same time. The rate
counts each byte
twice: it is read, and it is written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from typing import Any

import numpy as np

NBYTES = 256 << 20
WARM = 2


def main() -> None:
    """Copy and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of copying [1]")
    parser.add_argument("--result", required=True, help="file for the JSON")
    chosen = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(cores))
    queue = context.Queue()
    processes = [
        context.Process(target=_copy, args=(core, barrier, queue, chosen.seconds)) for core in cores
    ]
    for process in processes:
        process.start()
    rates = [queue.get(timeout=60 + 2 * chosen.seconds) for _ in processes]
    for process in processes:
        process.join()
    with open(chosen.result, "w", encoding="utf-8") as file:
        json.dump({"cores": len(cores), "bytes_per_second": sum(rates)}, file)


def _copy(core: int, barrier: Any, queue: Any, seconds: float) -> None:
    os.sched_setaffinity(0, {core})
    source, target = np.ones(NBYTES // 8), np.zeros(NBYTES // 8)
    for _ in range(WARM):
        np.copyto(target, source)
    barrier.wait(60)
    copies = 0
    begin = time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds:
        np.copyto(target, source)
        copies += 1
    queue.put(2 * NBYTES * copies / took)


if __name__ == "__main__":
    main()
