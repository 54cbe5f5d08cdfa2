"""The private directory of a job: unpredictable name, mode 0700, locked while the job lives, swept when stale."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.errors import ConfigError
from syncvar.private_files import make_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["JobDirectory", "base_directory", "runtime_directory"]

_SOCKET_NAME_MAX = 24
_UNIX_PATH_MAX = 107


def runtime_directory(environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the folder for what lives as long as a job, and whether it is meant for this user alone."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime), True
    return Path(environ.get("TMPDIR") or "/tmp"), False  # noqa: S108  (base_directory checks what is made there)


def base_directory(environ: Mapping[str, str]) -> Path:
    """Return the folder that holds the private directories of this user's jobs, made and checked.

    Raises:
        ConfigError: It belongs to somebody else, others can write to it, or it cannot be made.
    """
    parent, is_private = runtime_directory(environ)
    base = parent / ("syncvar" if is_private else f"syncvar-{os.getuid()}")
    make_private_folder(base, "runtime directory", "set XDG_RUNTIME_DIR to a private folder of yours")
    return base


class JobDirectory:
    """The private directory of one job; made on entry, removed by `remove`.

    Args:
        environ: Where XDG_RUNTIME_DIR or TMPDIR say what to use.
        name: What it is called, where processes have to find it that nobody tells; None for a random name.

    Raises:
        ConfigError: It cannot be made; a named one may be another job's.
    """

    def __init__(self, environ: Mapping[str, str], name: str | None = None) -> None:
        base = base_directory(environ)
        self.path = base / (name or os.urandom(4).hex())
        if len(os.fsencode(self.path)) + _SOCKET_NAME_MAX > _UNIX_PATH_MAX:
            raise ConfigError(
                f"the runtime directory {base} has too long a path: socket files in it would exceed "
                f"{_UNIX_PATH_MAX} bytes; set XDG_RUNTIME_DIR to a shorter one"
            )
        try:
            with _guarded(base):
                self.swept = _sweep(base)
                self.path.mkdir(mode=0o700)
                self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL, 0o600)
                fcntl.flock(self.lock, fcntl.LOCK_EX)
        except OSError as error:
            where = f"{base}/.lock, which is a link" if error.errno == errno.ELOOP else str(base)
            raise ConfigError(f"the runtime directory {where} cannot be used: {error.strerror}") from error

    @staticmethod
    def find(environ: Mapping[str, str], name: str) -> Path | None:
        """Return the directory of a job that is alive, by its name; None where there is none yet."""
        base = base_directory(environ)
        with contextlib.suppress(OSError), _guarded(base):
            if _is_held(base / name):
                return base / name
        return None  # or it is left over by a job that is gone

    def remove(self) -> None:
        """Remove the directory with everything in it. Idempotent."""
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


@contextlib.contextmanager
def _guarded(base: Path) -> Iterator[None]:
    """Keep others from making, finding or removing directories of jobs."""
    guard = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield
    finally:
        os.close(guard)


def _is_held(directory: Path) -> bool:
    """Return whether the job of a directory is alive: it holds the lock. The caller holds the base's lock.

    Raises:
        OSError: That cannot be found out.
    """
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
    """Remove directories of jobs that are gone; return how many there were. The caller holds the base's lock."""
    swept = 0
    for entry in base.iterdir():
        with contextlib.suppress(OSError):
            if entry.is_dir() and not entry.is_symlink() and not _is_held(entry):
                shutil.rmtree(entry, ignore_errors=True)
                swept += 1
    return swept
