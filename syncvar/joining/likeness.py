"""What this rank tells the others of itself when they meet, so that what should be alike can be compared."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import numpy as np

from syncvar.wire import PROTOCOL_VERSION
from syncvar.wire.likeness import SETTING

if TYPE_CHECKING:
    from syncvar.config import RuntimeConfig

__all__ = ["likeness"]

_SCRIPT_NBYTES_MAX = 4 << 20


def likeness(config: RuntimeConfig) -> dict[str, int | str]:
    """Return package, interpreter, NumPy, script and the settings that all ranks must have alike.

    Cost: reading the script, some 50 us.
    """
    return {
        "protocol": PROTOCOL_VERSION,
        "byte_order": sys.byteorder,
        "syncvar": sys.modules["syncvar"].__version__,  # an import of the package from here would be a circle
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "numpy": ".".join(np.__version__.split(".")[:2]),
        "script": _script(),
        **{SETTING + name: value for name, value in config.shared().items()},
    }


def _script() -> str:
    """Return name and digest of the file that runs as `__main__`; empty where there is none, or it cannot be read."""
    import hashlib  # not before ranks meet: the package is imported sooner without it

    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):  # of a pipe nothing is left to be read
        return ""
    try:
        with open(path, "rb") as file:
            data = file.read(_SCRIPT_NBYTES_MAX)
    except OSError:
        return ""
    return f"{os.path.basename(path)[:100]} {hashlib.blake2b(data, digest_size=4).hexdigest()}"
