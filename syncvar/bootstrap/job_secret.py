"""Reads the secret of the job: from an inherited descriptor, a file or a variable."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from syncvar.core.environment import PREFIX
from syncvar.core.errors import ConfigError
from syncvar.protocol.auth_keys import KEY_BYTES, parse_key

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import LinkKeys

_DESCRIPTOR, _FILE, _VARIABLE = PREFIX + "KEY_FD", PREFIX + "KEY_FILE", PREFIX + "KEY"
_FILE_MAX = 1024
_secrets: dict[str, bytes] = {}  # by variable and value: a process joins again after `shutdown`


def job_secret(environ: MutableMapping[str, str]) -> bytes | None:
    """Return the job's secret, or None if this process has none.

    The variable that holds the secret is removed, so that child processes and dumps do not contain
    it.

    Raises:
        ConfigError: It cannot be read, or other users may read it.
    """
    text = environ.pop(_VARIABLE, None)
    if text is not None:
        _secrets[_VARIABLE] = parse_key(text, _VARIABLE)
    for name, read in ((_DESCRIPTOR, _of_descriptor), (_FILE, _of_file)):
        if name in environ:
            source = f"{name}={environ[name]}"
            if source not in _secrets:
                _secrets[source] = read(environ[name])
            return _secrets[source]
    return _secrets.get(_VARIABLE)


def keys_of(
    environment: RankEnvironment,
    config: RuntimeConfig,
    environ: MutableMapping[str, str],
    secret: bytes | None = None,
) -> LinkKeys | None:
    """Return the keys of this process's TCP links; None without TCP links or encryption.

    Raises:
        ConfigError: The process has TCP links but no secret.
    """
    if environment.host_count == 1 and not environment.rendezvous.startswith("tcp://"):
        return None
    # Always read it, because that removes the variable.
    secret = job_secret(environ) if secret is None else secret
    if config.encryption == "off":
        return None
    if secret is None:
        raise ConfigError(
            f"{environment.role.replace('worker', 'rank')} {environment.rank} communicates with "
            "other hosts, but has no secret (SYNCVAR_KEY_FD, SYNCVAR_KEY_FILE or SYNCVAR_KEY): "
            "start the script with syncvar-launch"
        )
    from syncvar.transports.curve import link_keys

    return link_keys(secret, environment.job_id)


def _of_descriptor(text: str) -> bytes:
    try:
        number = int(text)
        os.set_inheritable(number, False)
        key = os.pread(number, KEY_BYTES + 1, 0)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_DESCRIPTOR}={text} cannot be read: {error}; start the script with syncvar-launch"
        ) from error
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{_DESCRIPTOR}={text} holds no secret; start the script with syncvar-launch"
        )
    return key


def _of_file(path: str) -> bytes:
    return secret_of_file(path, f"{_FILE}=")


def secret_of_file(path: str, shown: str) -> bytes:
    """Return the secret in a file.

    Args:
        path: The file.
        shown: Text before the path in messages, for instance the variable that named it.

    Raises:
        ConfigError: It cannot be read, holds no secret, or other users may read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{shown}{path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & 0o077
        ):
            raise ConfigError(
                f"{shown}{path} must be a file of yours that nobody else can read: chmod 600 {path}"
            )
        return parse_key(file.read(_FILE_MAX).decode("ascii", "replace"), f"{shown}{path}")
