"""New files and folders, mostly private to this user: no foreign links, and atomic replacement."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

PRIVATE = 0o600  # mode of keys and internal files
REQUESTED = 0o666  # mode of files that a user requests: the umask decides who may read them

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def create_file(path: str | Path, mode: int, folder: int | None = None) -> int:
    """Create a file and return a descriptor for writing; raise FileExistsError if the name exists.

    `mode` is `PRIVATE` or `REQUESTED`. With `folder`, a descriptor, the path is relative to it.
    """
    return os.open(path, _NEW, mode, dir_fd=folder)


def write_file(folder: str | Path, name: str, text: str, mode: int) -> None:
    """Write a file atomically: readers see the old content or all of the new one."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        draft = f"{name}.{os.getpid()}.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=directory)  # left by a process that was killed while writing
        try:
            file = create_file(draft, mode, directory)
            with open(file, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            os.replace(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=directory)
            raise
    finally:
        os.close(directory)


def make_private_folder(path: Path, what: str, remedy: str) -> None:
    """Create a folder that only this user may enter, or check that it is one.

    Args:
        path: The folder; its parent exists.
        what: Description for errors.
        remedy: What to do instead, for errors.

    Raises:
        ConfigError: It belongs to another user, others can enter it, or it cannot be created.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"the {what} {path} cannot be made: {error.strerror}; {remedy}"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"the {what} {path} is not a folder of this user; {remedy}")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"the {what} {path} is open to others (mode {status.st_mode & 0o777:o}); {remedy}"
        )


def refuse_foreign_links(path: str) -> None:
    """Raise PermissionError if a part of the path is a symbolic link of another user but root.

    In a world-writable folder such as /tmp, anybody can place a link at the path of a new file.
    """
    at = os.path.abspath(path)
    while True:
        try:
            about = os.lstat(at)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISLNK(about.st_mode) and about.st_uid not in (0, os.geteuid()):
                raise PermissionError(
                    errno.EPERM,
                    f"it is a link that user {about.st_uid} has made, and is not followed",
                    at,
                )
        above = os.path.dirname(at)
        if above == at:
            return
        at = above
