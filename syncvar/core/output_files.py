"""Files that a user requests: logs, traces, events and statistics.

At the start, `check_folder` and `check_file` raise an error if a file cannot be written. Code that
later fails to write one passes a `LostFile` to `report_lost_file`, and the launcher lists them all
at the end of the job.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from typing import NamedTuple

from syncvar.core.errors import ConfigError
from syncvar.core.private_files import PRIVATE, create_file
from syncvar.core.status_pipe import send_status

LOST_FILE_EVENT = "lost_file"  # status record of a rank about a lost file
AUTO_LOG = "SYNCVAR_AUTO_LOG"  # origin of the file with AUTO's decisions
EVIDENCE = "flight records"  # origin; no user requests them, so a loss keeps the exit code

_PROBE_NBYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LostFile(NamedTuple):
    """A file that is missing or incomplete.

    Args:
        path: Its name.
        origin: Option or variable that requests it, such as "--log-dir".
        reason: Why it could not be written.
        missing_nbytes: Number of missing bytes; -1 if unknown.
    """

    path: str
    origin: str
    reason: str
    missing_nbytes: int = -1

    def __str__(self) -> str:
        count = self.missing_nbytes
        missing = (
            f"its last {count} bytes are missing" if count > 0 else "it is missing or incomplete"
        )
        return f"cannot write {self.path} of {self.origin}: {self.reason}; {missing}"


def check_folder(path: str, origin: str) -> None:
    """Create a folder if it is missing, then write and remove a file of 4 KiB in it.

    `origin` is the option or variable that names it. Raises ConfigError on failure.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        reason = f"{write_error_text(error)}; {_remedy(error)}"
        raise ConfigError(f"cannot make the folder {path} of {origin}: {reason}") from None
    try:
        _probe(path)
    except OSError as error:
        reason = f"{write_error_text(error)}; {_remedy(error)}"
        raise ConfigError(f"cannot write to the folder {path} of {origin}: {reason}") from None


def check_file(path: str, origin: str) -> None:
    """Check that a file can be written, without changing it; a pipe or device gets no data.

    A missing file is tested with a file of 4 KiB beside it. Raises ConfigError on failure.
    """
    try:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            _probe(os.path.dirname(os.path.realpath(path)))
            return
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
            folder = os.path.dirname(os.path.realpath(path))
            if os.access(folder, os.W_OK | os.X_OK):
                _probe(folder)
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    except OSError as error:
        reason = f"{write_error_text(error)}; {_remedy(error)}"
        raise ConfigError(f"cannot write {path} of {origin}: {reason}") from None


def report_lost_file(lost: LostFile) -> None:
    """Report a lost file to the launcher, or on standard error if there is no launcher."""
    if send_status(LOST_FILE_EVENT, **lost._asdict()):
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        sys.stderr.write(f"syncvar: {lost}\n")
        sys.stderr.flush()


def write_error_text(error: Exception) -> str:
    """Return the reason of a failed write as text."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _remedy(error: OSError) -> str:
    if error.errno in _FULL:
        return "free some space there, or name another place"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "make the folder first, or name another place"
    return "name another place, or change its permissions"


def _probe(folder: str) -> None:
    # The file is not empty, because an empty one would fit on a full disk.
    path = os.path.join(folder, f".syncvar-probe-{os.urandom(6).hex()}")
    descriptor = create_file(path, PRIVATE)
    try:
        rest = bytes(_PROBE_NBYTES)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(path)
