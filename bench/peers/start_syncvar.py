"""A job that starts, imports NumPy, meets in a barrier and ends: `syncvar-launch --workers 4 bench/peers/start_syncvar.py`."""

from __future__ import annotations

import numpy as np  # noqa: F401  (as programs do that bring arrays)

import syncvar as sv

sv.init()
sv.barrier()
