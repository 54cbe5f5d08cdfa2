"""Files of a checkpoint: a name is either absent or complete, and one job at a time writes.

`write` uses a temporary name in the same folder, syncs, closes and renames the file, and syncs the
folder. After a failed sync the file is removed and never synced again: the operating system may
have dropped the pages, and a second sync would report success.

The lock of a folder (`FolderLock`) is an flock, which ends with its process, however that ends; the
file only names the process. So a dead holder never blocks anyone: the next process takes the lock,
and logs whose it was.

Source: Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
import weakref
from typing import TYPE_CHECKING, Self

from syncvar.checkpoint.checkpoint_format import LOCK, is_left_over, temporary_name
from syncvar.core.errors import CheckpointError, NotFound
from syncvar.core.output_files import REQUESTED, create_file, refuse_foreign_links

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SLACK = 1.1  # factor for headers and the needs of the file system
_log = logging.getLogger("syncvar")
_TEXT_MAX = 4096


class Disk:
    """The operations of a file write, one method each, so that tests can make each of them fail."""

    @staticmethod
    def create(folder: int, name: str) -> int:
        """Create a new file; return its descriptor."""
        return create_file(name, REQUESTED, folder)

    @staticmethod
    def write(descriptor: int, data: memoryview) -> int:
        """Write some of the bytes; return their number."""
        return os.write(descriptor, data)

    @staticmethod
    def sync(descriptor: int) -> None:
        """Wait until the bytes of the file are on disk."""
        os.fsync(descriptor)

    @staticmethod
    def close(descriptor: int) -> None:
        """Close the file; network file systems report late errors here."""
        os.close(descriptor)

    @staticmethod
    def rename(folder: int, source: str, target: str) -> None:
        """Rename a file, and atomically replace the file of that name."""
        os.rename(source, target, src_dir_fd=folder, dst_dir_fd=folder)

    @staticmethod
    def sync_folder(folder: int) -> None:
        """Wait until the names in the folder are on disk."""
        os.fsync(folder)

    @staticmethod
    def remove(folder: int, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=folder)

    @staticmethod
    def free_bytes(folder: int) -> int:
        """Return the free space in bytes."""
        room = os.fstatvfs(folder)
        return room.f_bavail * room.f_frsize


@contextlib.contextmanager
def _reported(failure: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that begins with `failure`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{failure}: {error.strerror}") from error


class CheckpointFolder:
    """An open folder; it opens files relative to its descriptor and follows no links."""

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
        """Close the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, name: str, parts: Iterable[memoryview], nonce: str) -> int:
        """Write a complete file, or none; return its length."""
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
            closing, descriptor = descriptor, -1  # a failed close releases the number too
            Disk.close(closing)
            doing = "rename"
            Disk.rename(self._descriptor, temporary, name)
            renamed, doing = True, "sync the folder of"
            Disk.sync_folder(self._descriptor)
        except OSError as error:
            note = "; it exists, but may not survive a power cut" if renamed else ""
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
        """Raise CheckpointError unless so many bytes can be written."""
        with _reported(f"cannot read the free space of {self.path}"):
            free = Disk.free_bytes(self._descriptor)
        if free < nbytes * _SLACK:
            raise CheckpointError(
                f"{self.path} has room for {free} bytes, the checkpoint takes {nbytes}: free some "
                f"space, or keep fewer checkpoints (CheckpointManager(…, keep=N))"
            )

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        with _reported(f"{self.path} cannot be listed"):
            return sorted(os.listdir(self._descriptor))

    def has(self, name: str) -> bool:
        """Return whether a file of this name exists."""
        return os.access(name, os.F_OK, dir_fd=self._descriptor, follow_symlinks=False)

    def nbytes_of(self, name: str) -> int | None:
        """Return the length of a file, None if there is no regular file of this name."""
        try:
            about = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return None
        return about.st_size if stat.S_ISREG(about.st_mode) else None

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[tuple[int, int]]:
        """Open a file for reading; yields (descriptor, length)."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
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
        """Return the bytes of a file."""
        with self.reading(name) as (descriptor, nbytes):
            if nbytes > limit_nbytes:
                raise CheckpointError(
                    f"{self.path}/{name} has {nbytes} bytes, more than {limit_nbytes}"
                )
            data = bytearray(nbytes)
            read_into(descriptor, memoryview(data), 0, name)
            return bytes(data)

    def remove(self, name: str) -> None:
        """Remove a file if it exists; ignore errors."""
        with contextlib.suppress(OSError):
            Disk.remove(self._descriptor, name)

    def sync(self) -> None:
        """Wait until the names in the folder are on disk."""
        with _reported(f"cannot sync {self.path}"):
            Disk.sync_folder(self._descriptor)

    def sweep(self, identity: str | None) -> None:
        """Remove unfinished files and shards of other checkpoints than the committed `identity`."""
        for name in self.names():
            if is_left_over(name, identity):
                self.remove(name)


def read_into(descriptor: int, target: memoryview, offset: int, name: str) -> None:
    """Fill `target` from byte `offset` of a file; raise CheckpointError if that is too short."""
    done = 0
    while done < target.nbytes:
        count = os.preadv(descriptor, [target[done : done + (1 << 30)]], offset + done)
        if count == 0:
            raise CheckpointError(f"{name} ends at byte {offset + done}")
        done += count


def make_folder(path: str) -> CheckpointFolder:
    """Open a folder for writing; create it and its parents if missing."""
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


class FolderLock:
    """The lock of an existing folder, held from its construction.

    Errors of other processes name the holder's `activity`.
    """

    def __init__(self, folder: str, activity: str) -> None:
        path = os.path.join(folder, LOCK)
        descriptor = _lock_file(path, activity)
        try:
            before = _read(descriptor)
            if before:
                _log.warning(
                    "%s was left locked by %s, which no longer exists (it was killed, or its host "
                    "failed). This process takes the lock and ignores what was not committed",
                    folder,
                    before,
                )
            holder = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started": _start_time(os.getpid()),
                "since": _timestamp(),
                "job": os.environ.get("SYNCVAR_JOB_ID", ""),
            }
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder, sort_keys=True).encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise CheckpointError(f"cannot lock {folder}: {error.strerror}") from error
        self._finalizer = weakref.finalize(self, _unlock, descriptor, path, os.getpid())

    @property
    def is_held(self) -> bool:
        """Whether it has not been released."""
        return self._finalizer.alive

    def release(self) -> None:
        """Release the lock and remove its file. Idempotent."""
        self._finalizer()


def _lock_file(path: str, activity: str) -> int:
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with _reported(f"cannot lock {os.path.dirname(path)}"):
            descriptor = os.open(path, flags, REQUESTED)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder may have removed the file between our open and our lock: try again.
            if _is_same(path, descriptor):
                return descriptor
        except OSError as error:
            holder = _read(descriptor) or "an unknown process"
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(
                    f"{os.path.dirname(path)} is in use: {holder} {activity} there. Two jobs "
                    "cannot write the same folder; wait for that one to end, or give "
                    "this one another folder"
                ) from None
            raise CheckpointError(
                f"cannot lock {os.path.dirname(path)}: {error.strerror}; checkpoints need a file "
                "system with locks"
            ) from error
        os.close(descriptor)


def _is_same(path: str, descriptor: int) -> bool:
    try:
        current = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(current, os.fstat(descriptor))


def _unlock(descriptor: int, path: str, process: int) -> None:
    if os.getpid() == process:  # a forked copy has the descriptor, not the lock
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(descriptor)


def _read(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, _TEXT_MAX, 0))
        host, pid, started = str(holder["host"]), int(holder["pid"]), str(holder["started"])
        words = f"process {pid} on {host!r:.80}, started {started!r:.40}"
        words += f", holding it since {str(holder['since'])!r:.40}"
        job = str(holder.get("job", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    return words + (f", job {job!r:.60}" if job else "")


def _start_time(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat", encoding="ascii") as file:
            booted = next(int(line.split()[1]) for line in file if line.startswith("btime "))
    except (OSError, ValueError, IndexError, StopIteration):
        return "unknown"
    return _timestamp(booted + ticks / os.sysconf("SC_CLK_TCK"))


def _timestamp(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
