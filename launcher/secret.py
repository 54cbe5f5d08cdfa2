"""How workers get the job's secret: as an open file that has no name, never on a command line or in a variable."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KEY_FD", "WITHHELD", "secret_descriptor"]

KEY_FD = "SYNCVAR_KEY_FD"
"""The variable in which a worker finds the number of the descriptor."""

WITHHELD = frozenset((KEY_FD, "SYNCVAR_KEY", "SYNCVAR_STATUS_FD", "SYNCVAR_PASS_FDS", "SYNCVAR_PARENT_FD", "SYNCVAR_OUTCOME_FILE"))
"""Variables of the launcher itself, and of whoever started it: no worker gets them."""


def secret_descriptor(secret: bytes, directory: Path) -> int:
    """Return a descriptor of the job's secret: nobody else can open what it refers to.

    Args:
        secret: What the workers are to read.
        directory: A private folder, for a kernel that knows no file without a folder.
    """
    try:
        descriptor = os.memfd_create("syncvar-key", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        path = directory / "key"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        path.unlink()
    os.write(descriptor, secret)
    return descriptor
