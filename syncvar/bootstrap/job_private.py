"""The private directory and the secret of a job, which only its processes can reach.

The directory has a random name and mode 0700. It is locked while the job lives, and removed when
stale. The secret comes from an inherited descriptor, a file or a variable.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.core.environment import PREFIX
from syncvar.core.errors import ConfigError
from syncvar.core.output_files import make_private_folder
from syncvar.protocol.auth_keys import KEY_BYTES, parse_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

    from syncvar.core.environment import RankEnvironment
    from syncvar.core.settings import RuntimeConfig
    from syncvar.transports.curve import LinkKeys

# Prefix of directories of jobs without syncvar-launch; random names are hexadecimal.
MEETING = "m"
_SOCKET_NAME_MAX = 24
_DIRECTORY_NAME_MAX = 9
_UNIX_PATH_MAX = 107
_LAST_RESORT = "/tmp"  # noqa: S108  (base_directory checks what is made there)
_LOCK_LIMIT_S = 60.0
_LOCK_NOTICE_S = 5.0
_LOCK_PAUSE_S, _LOCK_PAUSE_S_MAX = 0.001, 0.05
_DESCRIPTOR, _FILE, _VARIABLE = PREFIX + "KEY_FD", PREFIX + "KEY_FILE", PREFIX + "KEY"
_FILE_MAX = 1024
_secrets: dict[str, bytes] = {}  # by variable and value: a process joins again after `shutdown`

_log = logging.getLogger("syncvar")


def runtime_directory(environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the folder for files of running jobs, and whether it is private to this user.

    It is the first of XDG_RUNTIME_DIR, TMPDIR and /tmp that is writable, and short enough for
    socket paths.
    """
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        path, is_private = environ.get(name, ""), name == "XDG_RUNTIME_DIR"
        is_usable = os.path.isabs(path) and os.access(path, os.W_OK | os.X_OK)
        if is_usable and _is_short_enough(_base(Path(path), is_private=is_private)):
            return Path(path), is_private
    return Path(_LAST_RESORT), False


def _base(parent: Path, *, is_private: bool) -> Path:
    return parent / ("syncvar" if is_private else f"syncvar-{os.getuid()}")


def _is_short_enough(base: Path) -> bool:
    return len(os.fsencode(base)) + 1 + _DIRECTORY_NAME_MAX + _SOCKET_NAME_MAX <= _UNIX_PATH_MAX


def base_directory(environ: Mapping[str, str]) -> Path:
    """Return the folder for this user's job directories; raise ConfigError if it is not safe."""
    parent, is_private = runtime_directory(environ)
    base = _base(parent, is_private=is_private)
    make_private_folder(
        base, "runtime directory", "set XDG_RUNTIME_DIR to a private folder of yours"
    )
    return base


class JobDirectory:
    """The private directory of one job; created here, removed by `remove`.

    `name` is one that other processes can derive; None for a random one. `waits` is called while
    another process holds the lock of the runtime directory, and may raise. After 60 s it is a
    ConfigError.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        name: str | None = None,
        waits: Callable[[], None] | None = None,
    ) -> None:
        base = base_directory(environ)
        self.path = base / (name or os.urandom(4).hex())
        try:
            with _guarded(base, waits):
                self.swept = _sweep(base)
                self.path.mkdir(mode=0o700)
                self.lock = os.open(
                    self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL, 0o600
                )
                fcntl.flock(self.lock, fcntl.LOCK_EX)
        except OSError as error:
            where = f"{base}/.lock, which is a link" if error.errno == errno.ELOOP else str(base)
            raise ConfigError(
                f"the runtime directory {where} cannot be used: {error.strerror}"
            ) from error

    @staticmethod
    def find(environ: Mapping[str, str], name: str) -> Path | None:
        """Return the directory of a running job by its name; None if there is none."""
        base = base_directory(environ)
        with contextlib.suppress(OSError), _guarded(base):
            if _is_held(base / name):
                return base / name
        return None  # absent, or left over by a dead job

    def remove(self) -> None:
        """Remove the directory with its contents. Idempotent."""
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


def holders_of_meetings(base: Path) -> list[str]:
    """Return which processes hold directories of running jobs without syncvar-launch."""
    holders = []
    with contextlib.suppress(OSError, ConfigError), _guarded(base):
        for entry in sorted(base.glob(f"{MEETING}*")):
            if _is_held(entry):
                lock = os.open(entry / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                holders.append(_holder(lock))
                os.close(lock)
    return holders


@contextlib.contextmanager
def _guarded(base: Path, waits: Callable[[], None] | None = None) -> Iterator[None]:
    """Prevent other processes from creating, finding or removing job directories."""
    guard = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _await_lock(guard, base / ".lock", waits)
        yield
    finally:
        os.close(guard)


def _await_lock(guard: int, path: Path, waits: Callable[[], None] | None) -> None:
    """Take a lock; warn after a while, and at last raise ConfigError."""
    began, has_warned = time.monotonic(), False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited_s = time.monotonic() - began
        if waited_s >= _LOCK_LIMIT_S:
            raise ConfigError(
                f"process {os.getpid()} has waited {waited_s:.0f} s for the lock {path}, which "
                f"{_holder(guard)} holds: end that process if it does not go on, or set "
                "XDG_RUNTIME_DIR to another private folder"
            )
        if waited_s >= _LOCK_NOTICE_S and not has_warned:
            has_warned = True
            _log.warning(
                "process %d waits for the lock %s, which %s holds (at most %.0f s)",
                os.getpid(),
                path,
                _holder(guard),
                _LOCK_LIMIT_S,
            )
        if waits is not None:
            waits()
        time.sleep(min(_LOCK_PAUSE_S_MAX, max(_LOCK_PAUSE_S, waited_s / 4)))


def _holder(descriptor: int) -> str:
    """Return the process that holds the lock of a file."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF
            if fields[1] == "FLOCK" and device in fields:
                return f"process {fields[4]}"
    return "another process"


def _is_held(directory: Path) -> bool:
    """Return whether the job of a directory is alive. The caller holds the base's lock."""
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _sweep(base: Path) -> int:
    """Remove directories of dead jobs; return their number. The caller holds the base's lock."""
    swept = 0
    for entry in base.iterdir():
        with contextlib.suppress(OSError):
            if entry.is_dir() and not entry.is_symlink() and not _is_held(entry):
                shutil.rmtree(entry, ignore_errors=True)
                swept += 1
    return swept


# -- the secret ------------------------------------------------------------------------------------


def job_secret(environ: MutableMapping[str, str]) -> bytes | None:
    """Return the job's secret, or None if this process has none.

    The variable that holds the secret is removed, so that child processes and dumps do not contain
    it. Raises ConfigError if others may read it.
    """
    text = environ.pop(_VARIABLE, None)
    if text is not None:
        _secrets[_VARIABLE] = parse_key(text, _VARIABLE)
    for name in (_DESCRIPTOR, _FILE):
        if name in environ:
            value, source = environ[name], f"{name}={environ[name]}"
            if source not in _secrets and name == _DESCRIPTOR:
                _secrets[source] = _secret_of_descriptor(value)
            elif source not in _secrets:
                _secrets[source] = secret_of_file(value, f"{_FILE}=")
            return _secrets[source]
    return _secrets.get(_VARIABLE)


def keys_of(
    environment: RankEnvironment,
    config: RuntimeConfig,
    environ: MutableMapping[str, str],
    secret: bytes | None = None,
) -> LinkKeys | None:
    """Return the keys of this process's TCP links; None without TCP links or encryption.

    Raises ConfigError if it has TCP links but no secret.
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


def _secret_of_descriptor(text: str) -> bytes:
    try:
        number = int(text)
        os.set_inheritable(number, False)  # noqa: FBT003  (its parameters have no names)
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


def secret_of_file(path: str, shown: str) -> bytes:
    """Return the secret in a file, or raise ConfigError; `shown` precedes the path in messages."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{shown}{path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        if not is_own or status.st_mode & 0o077:
            raise ConfigError(
                f"{shown}{path} must be a file of yours that nobody else can read: chmod 600 {path}"
            )
        return parse_key(file.read(_FILE_MAX).decode("ascii", "replace"), f"{shown}{path}")
