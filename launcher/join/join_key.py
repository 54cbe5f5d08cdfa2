"""The key by which hosts join a job: a file that only its owner may read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.bootstrap.job_private import secret_of_file
from syncvar.core.errors import ConfigError
from syncvar.core.output_files import PRIVATE, create_file
from syncvar.protocol.auth_keys import KEY_BYTES, derive

if TYPE_CHECKING:
    from pathlib import Path

_SHOWN = "--key-file "


def make_key_file(path: Path) -> bool:
    """Make a key file unless there is one; return whether it made one."""
    try:
        descriptor = create_file(path, PRIVATE)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"--key-file {path} cannot be made: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(os.urandom(KEY_BYTES).hex() + "\n")
    return True


def join_secret(path: Path) -> bytes:
    """Return the secret that protects the connections of hosts that join."""
    return derive(secret_of_file(str(path), _SHOWN), b"syncvar join")
