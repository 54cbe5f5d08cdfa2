"""Backend "syncvar" of torch.distributed, and a small DataParallel.

`import syncvar.torch` registers the backend. After that the usual line starts it, and the rest of
the program stays as it is: `torch.distributed.init_process_group("syncvar")`.
"""

from __future__ import annotations

try:
    import torch.distributed  # noqa: F401  (a clear error without it)
except ImportError as error:
    raise ImportError(
        "syncvar.torch needs PyTorch with torch.distributed: pip install 'syncvar[torch]'"
    ) from error

from syncvar.torch.process_group import SyncvarProcessGroup, register
from syncvar.torch.torch_data_parallel import DataParallel

__all__ = ["DataParallel", "SyncvarProcessGroup"]

register()
