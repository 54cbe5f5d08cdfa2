"""How workers get the job's secret: as an open file that has no name, never on a command line or in a variable.

Programs of `--no-python` get it as a file in the private folder of the job: a wrapper may close the descriptors that it
inherits before it starts the program.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.core.private_files import PRIVATE, create_file

if TYPE_CHECKING:
    from pathlib import Path

_FILE_NAME = "key"


def secret_descriptor(secret: bytes, directory: Path) -> int:
    """Return a descriptor of the job's secret: nobody else can open what it refers to.

    Args:
        secret: What the workers are to read.
        directory: A private folder, for a kernel that knows no file without a folder.
    """
    try:
        descriptor = os.memfd_create("syncvar-key", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        path = directory / "nameless-key"
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        path.unlink()
    os.write(descriptor, secret)
    return descriptor


def write_secret(secret: bytes, directory: Path) -> str:
    """Write the job's secret to a file that only this user can read, unless it is there already; return its path.

    Args:
        secret: What the programs are to read.
        directory: The private folder of the job on this host, which is removed with the job.
    """
    path = directory / _FILE_NAME
    if not path.exists():
        with os.fdopen(create_file(path, PRIVATE), "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
    return str(path)
