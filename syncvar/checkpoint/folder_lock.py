"""The lock of a checkpoint folder: one job at a time writes there.

The lock is an flock, which ends with its process, however that ends; the file only names the
process. So a dead holder never blocks anyone: the next process takes the lock, and logs whose it
was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref

from syncvar.checkpoint.file_names import LOCK
from syncvar.core.errors import CheckpointError
from syncvar.core.output_files import REQUESTED

_log = logging.getLogger("syncvar")
_TEXT_MAX = 4096


class FolderLock:
    """The lock of a folder, held from its construction.

    Args:
        folder: Path of an existing folder.
        what: What the holder does there, for the error of other processes.
    """

    def __init__(self, folder: str, what: str) -> None:
        path = os.path.join(folder, LOCK)
        descriptor = _locked(path, what)
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
                "started": _start_of(os.getpid()),
                "since": _timestamp(),
                "job": os.environ.get("SYNCVAR_JOB_ID", ""),
            }
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder, sort_keys=True).encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise CheckpointError(f"cannot lock {folder}: {error.strerror}") from error
        self._finalizer = weakref.finalize(self, _let_go, descriptor, path, os.getpid())

    @property
    def is_held(self) -> bool:
        """Whether it has not been released."""
        return self._finalizer.alive

    def release(self) -> None:
        """Release the lock and remove its file. Idempotent."""
        self._finalizer()


def _locked(path: str, what: str) -> int:
    while True:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, REQUESTED)
        except OSError as error:
            raise CheckpointError(
                f"cannot lock {os.path.dirname(path)}: {error.strerror}"
            ) from error
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
                    f"{os.path.dirname(path)} is in use: {holder} {what} there. Two jobs cannot "
                    "write the same folder; wait for that one to end, or give this one another "
                    "folder"
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


def _let_go(descriptor: int, path: str, process: int) -> None:
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


def _start_of(pid: int) -> str:
    """Return the start time of a process, since process ids are reused."""
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
