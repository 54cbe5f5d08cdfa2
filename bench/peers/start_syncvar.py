"""A job that starts, meets in a barrier and ends: `syncvar-launch --workers 4 bench/peers/start_syncvar.py`."""

from __future__ import annotations

import syncvar as sv

sv.init()
sv.barrier()
