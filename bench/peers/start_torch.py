"""A job that starts, imports NumPy, meets in a barrier and ends: `torchrun --nproc-per-node 4 bench/peers/start_torch.py`."""

from __future__ import annotations

import numpy as np  # noqa: F401  (as programs do that bring arrays)
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
