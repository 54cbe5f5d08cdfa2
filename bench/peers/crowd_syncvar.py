"""Many workers on one host: `syncvar-launch --workers 64 bench/peers/crowd_syncvar.py`.

Each joins, meets the others in a barrier, and makes an all-reduce of 1 MiB, whose every element is
looked at. Rank 0 tells the seconds since its script began, and each worker's own memory: the
resident pages of its private mappings (Private_Clean + Private_Dirty of /proc/self/smaps, of
mappings that are not shared), and its proportional share of everything (Pss), in bytes. The pages
of shared memory are the host's, and are in the second number alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time

import numpy as np
from values import Values

import syncvar as sv

COUNT = 1 << 18
HEAD = re.compile(r"[0-9a-f]+-[0-9a-f]+ ...([ps]) ")


def main() -> None:
    """Run as one worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", required=True, help="file for the JSON of rank 0")
    chosen = parser.parse_args()
    start = time.monotonic()
    sv.init()
    sv.barrier()
    met = time.monotonic()
    values = Values("all_reduce", "float32", COUNT, sv.rank(), sv.world_size())
    x = values.brought()
    out = np.empty_like(x)
    begin = time.monotonic()
    sv.all_reduce(x, out=out)
    took = time.monotonic() - begin
    if not np.array_equal(out, values.expected()):
        sys.exit(f"rank {sv.rank()}: the sum is wrong")
    memory = sv.all_gather(np.array([_memory()]))
    if sv.rank() == 0:
        own, share = memory.T.tolist()
        seconds = {
            "joined_s": met - start,
            "all_reduce_s": took,
            "whole_s": time.monotonic() - start,
        }
        with open(chosen.result, "w", encoding="utf-8") as file:
            json.dump(
                {"workers": sv.world_size(), **seconds, "own_bytes": own, "pss_bytes": share}, file
            )


def _memory() -> tuple[int, int]:
    """Return the bytes of this process's private mappings, and its proportional share of all."""
    own = share = 0
    is_private = False
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            head = HEAD.match(line)
            if head:
                is_private = head[1] == "p"
            elif line.startswith("Pss:"):
                share += int(line.split()[1]) * 1024
            elif is_private and line.startswith(("Private_Clean:", "Private_Dirty:")):
                own += int(line.split()[1]) * 1024
    return own, share


if __name__ == "__main__":
    main()
