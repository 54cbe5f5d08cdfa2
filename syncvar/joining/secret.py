"""The job's secret, as this process was handed it: by an inherited descriptor, a file, or, at last, a variable."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from syncvar.env import PREFIX
from syncvar.errors import ConfigError
from syncvar.wire import KEY_BYTES, parse_key

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["job_secret", "secret_of_file"]

_DESCRIPTOR, _FILE, _VARIABLE = PREFIX + "KEY_FD", PREFIX + "KEY_FILE", PREFIX + "KEY"
_FILE_MAX = 1024
_kept: dict[str, bytes] = {}  # by variable and its text: a process joins again after `shutdown`


def job_secret(environ: MutableMapping[str, str]) -> bytes | None:
    """Return the job's secret, or None where this process was given none.

    The variable that holds it is removed, so that children and dumps of the environment do not have it.

    Args:
        environ: `os.environ`.

    Raises:
        ConfigError: It cannot be read, or others may read it.
    """
    text = environ.pop(_VARIABLE, None)
    if text is not None:
        _kept[_VARIABLE] = parse_key(text, _VARIABLE)
    descriptor, path = environ.get(_DESCRIPTOR), environ.get(_FILE)
    if descriptor is not None:
        place = f"{_DESCRIPTOR}={descriptor}"
        if place not in _kept:
            _kept[place] = _of_descriptor(descriptor)
        return _kept[place]
    if path is not None:
        place = f"{_FILE}={path}"
        if place not in _kept:
            _kept[place] = secret_of_file(path, f"{_FILE}=")
        return _kept[place]
    return _kept.get(_VARIABLE)


def _of_descriptor(text: str) -> bytes:
    try:
        number = int(text)
        os.set_inheritable(number, False)
        key = os.pread(number, KEY_BYTES + 1, 0)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_DESCRIPTOR}={text} cannot be read: {error}; start the script with syncvar-launch") from error
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{_DESCRIPTOR}={text} holds no secret; start the script with syncvar-launch")
    return key


def secret_of_file(path: str, shown: str) -> bytes:
    """Return the secret that a file holds.

    Args:
        path: The file.
        shown: What named it, for messages: the variable or option, with what stands before its value.

    Raises:
        ConfigError: It cannot be read, holds no secret, or others may read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{shown}{path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(f"{shown}{path} must be a file of yours that nobody else can read: chmod 600 {path}")
        return parse_key(file.read(_FILE_MAX).decode("ascii", "replace"), f"{shown}{path}")
