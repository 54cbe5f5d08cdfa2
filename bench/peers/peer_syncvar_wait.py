"""What a wait costs: rank 1 comes late to an all-reduce, and looks how much CPU time rank 0 uses meanwhile.

`syncvar-launch --workers 2 bench/peers/peer_syncvar_wait.py`. The late rank reads the other's CPU
time (user and system, all its threads) from /proc, so that nothing but the wait runs in the process
that is watched.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time

import numpy as np

import syncvar as sv

FIRST_S = 1.0


def main() -> None:
    """Run as one of two workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sleep", type=float, default=10.0, help="seconds that rank 1 comes late")
    parser.add_argument("--result", required=True, help="file for the JSON of rank 1")
    chosen = parser.parse_args()
    pids = sv.all_gather(np.array([os.getpid()]))
    x, out = np.full(1024, sv.rank() + 1, np.float32), np.empty(1024, np.float32)
    sv.all_reduce(x, out=out)
    sv.barrier()
    if sv.rank() == 0:
        sv.all_reduce(x, out=out)
        sv.all_gather(np.array([time.monotonic()]))
        return
    samples = [_sample(int(pids.flat[0]))]
    for seconds in (FIRST_S, chosen.sleep - FIRST_S):
        time.sleep(seconds)
        samples.append(_sample(int(pids.flat[0])))
    begin = time.monotonic()  # one clock for all processes of a host
    sv.all_reduce(x, out=out)
    ends = sv.all_gather(np.array([time.monotonic()]))
    first, later = (
        (cpu - cpu_before) / (clock - clock_before)
        for (clock_before, cpu_before), (clock, cpu) in itertools.pairwise(samples)
    )
    with open(chosen.result, "w", encoding="utf-8") as file:
        json.dump(
            {
                "first_second": first,
                "after": later,
                "woken_after_us": (float(ends.flat[0]) - begin) * 1e6,
            },
            file,
        )


def _sample(pid: int) -> tuple[float, float]:
    """Return the time, and the CPU time that a process has used, in seconds."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return time.monotonic(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
