"""Passes the job's secret to workers: in an open file without a name.

It never stands on a command line or in a variable. Programs of `--no-python` get it as a file in
the private folder of the job, because a wrapper may close inherited descriptors.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.core.output_files import PRIVATE, create_file

if TYPE_CHECKING:
    from pathlib import Path

_FILE_NAME = "key"


def secret_descriptor(secret: bytes, directory: Path) -> int:
    """Return a descriptor of the secret, which no other user can open.

    Kernels without memfd use a file in the private folder `directory`, and unlink it.
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
    """Write the secret to a file that only this user can read, once; return its path.

    `directory` is the private folder of the job on this host.
    """
    path = directory / _FILE_NAME
    if not path.exists():
        with os.fdopen(create_file(path, PRIVATE), "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
    return str(path)
