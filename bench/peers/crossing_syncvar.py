"""What each host sends for an all-reduce: `syncvar-launch --hostfile F --workers 4 bench/peers/crossing_syncvar.py`.

Of every interface but the loopback, as the kernel counts it: packets' headers, acknowledgements and
signs of life with it.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

import syncvar as sv

CALLS, COUNT = 8, 1 << 22


def main() -> None:
    """Run as one worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", required=True, help="file for the JSON of rank 0")
    chosen = parser.parse_args()
    x = np.full(COUNT, sv.rank() + 1, np.float32)
    out = sv.all_reduce(x)  # links are made by the first call
    sv.barrier()
    before = sent_bytes()
    for _ in range(CALLS):
        sv.all_reduce(x, out=out)
    sv.barrier()
    sent = sv.gather_object((sv.host_index(), sent_bytes() - before))
    if not (out == sum(range(1, sv.world_size() + 1))).all():
        raise SystemExit(f"rank {sv.rank()}: the sum is wrong")
    if sent is not None:
        of_host = {host: count for host, count in sent}  # noqa: C416  (the last rank of a host counts for it)
        with open(chosen.result, "w", encoding="utf-8") as file:
            json.dump(
                {"sent": [of_host[host] for host in sorted(of_host)], "bytes": CALLS * x.nbytes},
                file,
            )


def sent_bytes() -> int:
    """Return what this host has sent by all its interfaces but the loopback."""
    with open("/proc/self/net/dev", encoding="ascii") as file:
        lines = [line.split(":") for line in file if ":" in line]
    return sum(int(counts.split()[8]) for name, counts in lines if name.strip() != "lo")


if __name__ == "__main__":
    main()
