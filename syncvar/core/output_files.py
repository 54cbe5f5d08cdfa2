"""Files that a user asks for: logs, traces, events, totals. They are tried before the job, and never lost in silence.

One rule holds for all of them. At the start, `check_folder` and `check_file` raise an error for what cannot be written.
Later, code that fails to write a file makes a `LostFile`. A rank passes it to `report_lost_file`, and the launcher names
every lost file at the end of the job.
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
from syncvar.core.status_pipe import tell

LOST_FILE_EVENT = "lost_file"
"""The name of the record by which a rank reports a lost file to its launcher."""

AUTO_LOG = "SYNCVAR_AUTO_LOG"
"""The origin of the file of AUTO's decisions."""

EVIDENCE = "flight records"
"""The origin of flight records. Their loss does not change the exit code: the user has not asked for them."""

_PROBE_NBYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LostFile(NamedTuple):
    """A file that is missing, or is not complete.

    Args:
        path: Its name.
        origin: What asked for it: an option, such as "--log-dir", or a variable.
        reason: Why it could not be written.
        missing_nbytes: How many bytes are missing, as far as they are known; -1 where the number is not known.
    """

    path: str
    origin: str
    reason: str
    missing_nbytes: int = -1

    def __str__(self) -> str:
        count = self.missing_nbytes
        missing = (
            f"; its last {count} bytes are missing"
            if count > 0
            else "; it is missing or not complete"
        )
        return f"cannot write {self.path} of {self.origin}: {self.reason}{missing}"


def check_folder(path: str, origin: str) -> None:
    """Make a folder where it is missing, and write and remove a file of 4 KiB there.

    Args:
        path: The folder.
        origin: The option or the variable that names it.

    Raises:
        ConfigError: Files cannot be written there.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        why = f"{why_unwritten(error)}; {_remedy(error)}"
        raise ConfigError(f"cannot make the folder {path} of {origin}: {why}") from None
    try:
        _probe(path)
    except OSError as error:
        why = f"{why_unwritten(error)}; {_remedy(error)}"
        raise ConfigError(f"cannot write to the folder {path} of {origin}: {why}") from None


def check_file(path: str, origin: str) -> None:
    """Open a file for writing without changing it; where it is missing, write and remove a file of 4 KiB beside it.

    Args:
        path: The file, or a pipe or device, which is not written to.
        origin: The option or the variable that names it.

    Raises:
        ConfigError: The file cannot be written.
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
        why = f"{why_unwritten(error)}; {_remedy(error)}"
        raise ConfigError(f"cannot write {path} of {origin}: {why}") from None


def report_lost_file(lost: LostFile) -> None:
    """Report a lost file from a rank or a server.

    The launcher shows it at the end of the job. Without a launcher it goes to the standard error at once.
    """
    if tell(LOST_FILE_EVENT, **lost._asdict()):
        return
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # the standard error may be closed
        sys.stderr.write(f"syncvar: {lost}\n")
        sys.stderr.flush()


def why_unwritten(error: Exception) -> str:
    """Return the reason of a failed write in words.

    Example:
        >>> why_unwritten(OSError(errno.ENOSPC, "No space left on device"))
        'No space left on device'
    """
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _remedy(error: OSError) -> str:
    if error.errno in _FULL:
        return "free some space there, or name another place"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "make the folder first, or name another place"
    return "name another place, or change its permissions"


def _probe(folder: str) -> None:
    """Write and remove a file: an empty file would fit on a full disk."""
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
