"""A job that starts, imports NumPy, makes one all-reduce and ends: `syncvar-launch --hostfile F bench/peers/start_hosts_syncvar.py`."""

from __future__ import annotations

import numpy as np

import syncvar as sv

total = sv.all_reduce(np.ones(4))
if not (total == sv.world_size()).all():
    raise SystemExit("the sum is wrong")
