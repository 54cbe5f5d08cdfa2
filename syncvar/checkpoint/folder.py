"""Files of a checkpoint: written so that a name is either absent or whole, read without trust.

A file is written under a temporary name in the same folder (created exclusively; the umask decides who may read it),
synced, closed, renamed, and the folder is synced. A sync that fails is final: the kernel may have dropped the pages, and a second sync would report success, so the
file is thrown away instead.

Source: Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Self

from syncvar.checkpoint.file_names import is_left_over, temporary_name
from syncvar.core.errors import CheckpointError, NotFound
from syncvar.core.private_files import REQUESTED, create_file, refuse_foreign_links

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_SLACK = 1.1  # of what will be written: headers, and what the file system keeps for itself


class Disk:
    """The operations of which writing a file consists, one method for each, so that a test can make each of them fail."""

    @staticmethod
    def create(folder: int, name: str) -> int:
        """Create a file that is not there yet, and return its descriptor."""
        return create_file(name, REQUESTED, folder)

    @staticmethod
    def write(descriptor: int, data: memoryview) -> int:
        """Write some of the bytes and return how many."""
        return os.write(descriptor, data)

    @staticmethod
    def sync(descriptor: int) -> None:
        """Wait until the file's bytes are on the medium."""
        os.fsync(descriptor)

    @staticmethod
    def close(descriptor: int) -> None:
        """Close the file; network file systems report late errors here."""
        os.close(descriptor)

    @staticmethod
    def rename(folder: int, source: str, target: str) -> None:
        """Give a file its name; what had the name is gone in the same moment."""
        os.rename(source, target, src_dir_fd=folder, dst_dir_fd=folder)

    @staticmethod
    def sync_folder(folder: int) -> None:
        """Wait until the names of the folder are on the medium."""
        os.fsync(folder)

    @staticmethod
    def remove(folder: int, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=folder)

    @staticmethod
    def free_bytes(folder: int) -> int:
        """Return how much may still be written."""
        room = os.fstatvfs(folder)
        return room.f_bavail * room.f_frsize


class CheckpointFolder:
    """An open folder; a context manager. Its files are reached relative to its descriptor, links are not followed.

    Args:
        path: Of the folder.

    Raises:
        NotFound: There is none.
        CheckpointError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"there is no checkpoint at {path}: no such folder") from None
        except OSError as error:
            raise CheckpointError(
                f"the folder {path} cannot be opened: {error.strerror}"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, name: str, parts: Iterable[memoryview], nonce: str) -> int:
        """Write a file so that it is there whole or not at all; return its length.

        Args:
            name: Of the file; one of that name is replaced.
            parts: Its bytes.
            nonce: 16 hexadecimal digits, for the temporary name.

        Raises:
            CheckpointError: The system refused; the temporary file is gone, a file of that name is as it was (unless only
                syncing the folder failed: then the new one is there, but may not survive a power cut).
        """
        temporary = temporary_name(name, nonce)
        descriptor, renamed, nbytes, doing = -1, False, 0, "create"
        try:
            descriptor = Disk.create(self._descriptor, temporary)
            doing = "write"
            for part in parts:
                rest = part
                while rest.nbytes:
                    rest = rest[Disk.write(descriptor, rest) :]
                nbytes += part.nbytes
            doing = "sync"
            Disk.sync(descriptor)
            doing = "close"
            closing, descriptor = (
                descriptor,
                -1,
            )  # whatever close says, the number is no longer ours
            Disk.close(closing)
            doing = "rename"
            Disk.rename(self._descriptor, temporary, name)
            renamed, doing = True, "sync the folder of"
            Disk.sync_folder(self._descriptor)
        except OSError as error:
            note = "; it is there, but may not survive a power cut" if renamed else ""
            raise CheckpointError(
                f"cannot {doing} {self.path}/{name}: {error.strerror or error}{note}"
            ) from error
        finally:
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            if not renamed:
                with contextlib.suppress(OSError):
                    Disk.remove(self._descriptor, temporary)
        return nbytes

    def require_room(self, nbytes: int) -> None:
        """Look whether so many bytes can be written.

        Raises:
            CheckpointError: There is less room.
        """
        try:
            free = Disk.free_bytes(self._descriptor)
        except OSError as error:
            raise CheckpointError(
                f"cannot ask for the free space of {self.path}: {error.strerror}"
            ) from error
        if free < nbytes * _SLACK:
            raise CheckpointError(
                f"{self.path} has room for {free} bytes, the checkpoint takes {nbytes}: free some space, or keep fewer "
                f"checkpoints (CheckpointManager(…, keep=N))"
            )

    def names(self) -> list[str]:
        """Return the names in the folder.

        Raises:
            CheckpointError: The system refused.
        """
        try:
            return sorted(os.listdir(self._descriptor))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be listed: {error.strerror}") from error

    def has(self, name: str) -> bool:
        """Return whether there is something of this name."""
        return os.access(name, os.F_OK, dir_fd=self._descriptor, follow_symlinks=False)

    def nbytes_of(self, name: str) -> int | None:
        """Return the length of a file, None where there is no ordinary file of this name."""
        try:
            about = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return None
        return about.st_size if stat.S_ISREG(about.st_mode) else None

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[tuple[int, int]]:
        """Open a file to read; gives its descriptor and length.

        Raises:
            NotFound: There is none.
            CheckpointError: It is no ordinary file, or cannot be read.
        """
        try:
            descriptor = os.open(
                name,
                os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                dir_fd=self._descriptor,
            )
        except FileNotFoundError:
            raise NotFound(f"{self.path} has no {name}") from None
        except OSError as error:
            raise CheckpointError(
                f"{self.path}/{name} cannot be opened: {error.strerror}"
            ) from error
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise CheckpointError(f"{self.path}/{name} is no ordinary file")
            yield descriptor, about.st_size
        except CheckpointError:  # NotFound is an OSError too
            raise
        except OSError as error:
            raise CheckpointError(f"{self.path}/{name} cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def read(self, name: str, limit_nbytes: int) -> bytes:
        """Return a whole file.

        Raises:
            NotFound: There is none.
            CheckpointError: It is longer than the limit, or cannot be read.
        """
        with self.reading(name) as (descriptor, nbytes):
            if nbytes > limit_nbytes:
                raise CheckpointError(
                    f"{self.path}/{name} has {nbytes} bytes, more than {limit_nbytes}"
                )
            made = bytearray(nbytes)
            read_into(descriptor, memoryview(made), 0, name)
            return bytes(made)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there and the system lets us."""
        with contextlib.suppress(OSError):
            Disk.remove(self._descriptor, name)

    def sync(self) -> None:
        """Wait until the folder's names are on the medium.

        Raises:
            CheckpointError: The system refused.
        """
        try:
            Disk.sync_folder(self._descriptor)
        except OSError as error:
            raise CheckpointError(f"cannot sync {self.path}: {error.strerror}") from error

    def sweep(self, identity: str | None) -> None:
        """Remove what saves that did not finish left behind, and the shards of older checkpoints.

        Args:
            identity: Of the checkpoint whose manifest is in the folder; None where there is none.
        """
        for name in self.names():
            if is_left_over(name, identity):
                self.remove(name)


def read_into(descriptor: int, target: memoryview, offset: int, name: str) -> None:
    """Fill `target` with the bytes of a file from `offset` on.

    Raises:
        CheckpointError: The file ends before.
    """
    done = 0
    while done < target.nbytes:
        count = os.preadv(descriptor, [target[done : done + (1 << 30)]], offset + done)
        if count == 0:
            raise CheckpointError(f"{name} ends at byte {offset + done}")
        done += count


def make_folder(path: str) -> CheckpointFolder:
    """Open a folder to write to, after making it if need be.

    Raises:
        CheckpointError: The system refused, or the path leads over a link of another user.
    """
    try:
        refuse_foreign_links(path)
        missing, at = [], os.path.abspath(path)
        while not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            above = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                Disk.sync_folder(above)
            finally:
                os.close(above)
    except OSError as error:
        where = (
            f"the folder {path} cannot be made"
            if error.errno != errno.EPERM
            else f"nothing is written to {error.filename}"
        )
        raise CheckpointError(f"{where}: {error.strerror or error}") from error
    return CheckpointFolder(path)
