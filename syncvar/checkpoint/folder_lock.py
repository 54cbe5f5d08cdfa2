"""One job at a time: the lock of a folder that checkpoints are written to.

The lock is the system's (flock), which ends with the process that holds it, however it ends; the file's content only says who
that is. So a lock whose holder is gone is never in the way: whoever comes next gets it, and says whose it was.
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
from syncvar.core.private_files import REQUESTED

_log = logging.getLogger("syncvar")
_TEXT_MAX = 4096


class Lock:
    """The lock of a folder, held from the making on.

    Args:
        folder: Path of the folder, which exists.
        what: What is done there, in words.

    Raises:
        CheckpointError: Another process holds it; says which.
    """

    def __init__(self, folder: str, what: str) -> None:
        path = os.path.join(folder, LOCK)
        descriptor = _locked(path, what)
        try:
            before = _read(descriptor)
            if before:
                _log.warning(
                    "%s was left locked by %s, which is gone (it was killed, or its machine was): the lock is taken over, "
                    "what it did not commit is not used",
                    folder,
                    before,
                )
            text = json.dumps(
                {
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "started": _start_of(os.getpid()),
                    "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "job": os.environ.get("SYNCVAR_JOB_ID", ""),
                },
                sort_keys=True,
            )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise CheckpointError(f"cannot lock {folder}: {error.strerror}") from error
        self._finalizer = weakref.finalize(self, _let_go, descriptor, path, os.getpid())

    @property
    def is_held(self) -> bool:
        """Whether it has not been released."""
        return self._finalizer.alive

    def release(self) -> None:
        """Give the lock back and remove its file. Idempotent."""
        self._finalizer()


def _locked(path: str, what: str) -> int:
    """Return the descriptor of the lock's file, locked."""
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
            # Whoever held it may have removed the file between our open and our lock: then it is not the folder's any more.
            if _is_same(path, descriptor):
                return descriptor
        except OSError as error:
            holder = _read(descriptor) or "a process that has not said who it is"
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(
                    f"{os.path.dirname(path)} is in use: {holder} {what} there. Two jobs cannot write the same folder; "
                    f"wait for that one to end, or give this one another folder"
                ) from None
            raise CheckpointError(
                f"cannot lock {os.path.dirname(path)}: {error.strerror}; checkpoints need a file system with locks"
            ) from error
        os.close(descriptor)


def _is_same(path: str, descriptor: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _let_go(descriptor: int, path: str, process: int) -> None:
    if os.getpid() == process:  # a forked copy has the descriptor, not the lock
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(descriptor)


def _read(descriptor: int) -> str:
    """Return in words who says to hold the lock, or an empty text."""
    try:
        said = json.loads(os.pread(descriptor, _TEXT_MAX, 0))
        host, pid = str(said["host"]), int(said["pid"])
        words = f"process {pid} on {host!r:.80}, started {str(said['started'])!r:.40}, holding it since {str(said['since'])!r:.40}"
        job = str(said.get("job", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    return words + (f", job {job!r:.60}" if job else "")


def _start_of(pid: int) -> str:
    """Return when a process started, in words; numbers of processes are used again, these times are not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat", encoding="ascii") as file:
            booted = next(int(line.split()[1]) for line in file if line.startswith("btime "))
    except (OSError, ValueError, IndexError, StopIteration):
        return "unknown"
    return time.strftime(
        "%Y-%m-%dT%H:%M:%SZ", time.gmtime(booted + ticks / os.sysconf("SC_CLK_TCK"))
    )
