"""New files and folders, mostly of this user alone: made where nobody else leads, and seen whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

PRIVATE = 0o600
"""The mode of keys and of files that syncvar makes for itself."""

REQUESTED = 0o666
"""The mode of files that a user asks for: the umask of the process decides who may read them."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def create_file(path: str | Path, mode: int, folder: int | None = None) -> int:
    """Create a file and return a descriptor to write to it.

    Args:
        path: Its name.
        mode: `PRIVATE` or `REQUESTED`.
        folder: The descriptor of the folder it is in, where the name is relative to that.

    Raises:
        FileExistsError: There is something of this name.
    """
    return os.open(path, _NEW, mode, dir_fd=folder)


def write_file(folder: str | Path, name: str, text: str, mode: int) -> None:
    """Write a file; whoever looks sees all of it or what was there before.

    Args:
        folder: The folder it is in.
        name: Its name there.
        text: Its content.
        mode: `PRIVATE` or `REQUESTED`.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        draft = f"{name}.{os.getpid()}.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=directory)  # of a process that was killed while it wrote
        try:
            with open(
                create_file(draft, mode, directory),
                "w",
                encoding="utf-8",
                errors="backslashreplace",
            ) as file:
                file.write(text)
            os.replace(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=directory)
            raise
    finally:
        os.close(directory)


def make_private_folder(path: Path, what: str, remedy: str) -> None:
    """Make a folder that nobody else may enter, or check that it is one.

    Args:
        path: Its name; it is in a folder that is there.
        what: What it is, for messages.
        remedy: What to write where it does not serve.

    Raises:
        ConfigError: It belongs to somebody else, others can enter it, or it cannot be made.
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
    """Refuse a path of which some part is a symbolic link of a user other than this one and root.

    In a folder where everybody may write, such as /tmp, anybody can lay a link where a file of ours is going to be made.

    Raises:
        PermissionError: There is one; `filename` tells which.
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
