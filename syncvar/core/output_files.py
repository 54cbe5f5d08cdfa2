"""New files: private ones, those that a user requests, and flight records.

Nothing here follows links of other users. Only this user can read `PRIVATE` files.

Requested files are logs, traces, events and statistics. At the start, `check_folder` and
`check_file` raise an error if one cannot be written. Code that later fails to write one passes a
`LostFile` to `report_lost_file`, and the launcher lists them all at the end of the job.

Flight records of the last jobs are in the user's state folder: `$XDG_STATE_HOME/syncvar`, else
`~/.local/state/syncvar`, else a private temporary folder. Each job has one folder in it, created
with its first record.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError
from syncvar.core.exit_status import send_status

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def make_private_folder(path: Path, description: str, remedy: str) -> None:
    """Create a folder that only this user may enter, or check one; or raise ConfigError."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        reason = f"cannot be made: {error.strerror}; {remedy}"
        raise ConfigError(f"the {description} {path} {reason}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"the {description} {path} is not a folder of this user; {remedy}")
    if status.st_mode & 0o077:
        mode = f"{status.st_mode & 0o777:o}"
        raise ConfigError(f"the {description} {path} is open to others (mode {mode}); {remedy}")


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


# -- files that a user requests --------------------------------------------------------------------

LOST_FILE_EVENT = "lost_file"  # status record of a rank about a lost file
AUTO_LOG = "SYNCVAR_AUTO_LOG"  # origin of the file with AUTO's decisions
MATCH_LOG = "SYNCVAR_MATCH_LOG"  # origin of the files with the sources of messages
EVIDENCE = "flight records"  # origin; no user requests them, so a loss keeps the exit code

_PROBE_NBYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LostFile(NamedTuple):
    """A file that is missing or incomplete, of an option or variable such as "--log-dir"."""

    path: str
    origin: str
    reason: str
    missing_nbytes: int = -1

    def __str__(self) -> str:
        count = self.missing_nbytes
        missing = "it is missing or incomplete"
        if count > 0:
            missing = f"its last {count} bytes are missing"
        return f"cannot write {self.path} of {self.origin}: {self.reason}; {missing}"


def check_folder(path: str, origin: str) -> None:
    """Create a folder if it is missing, then write and remove a file of 4 KiB in it.

    `origin` is the option or variable that names it. Raises ConfigError on failure.
    """
    step = "make"
    try:
        os.makedirs(path, exist_ok=True)
        step = "write to"
        _probe(path)
    except OSError as error:
        reason = f"{write_error_text(error)}; {_remedy(error)}"
        raise ConfigError(f"cannot {step} the folder {path} of {origin}: {reason}") from None


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


# -- flight records --------------------------------------------------------------------------------

JOBS_MAX = 10
RECORDS = "flight-[rs]*.json"  # flight records of ranks and servers
TOTALS = "stats-*.json"  # call statistics of a rank, for --stats
_RECORD = re.compile(r"flight-(?:rank|server)\d+\.(?:generation\d+\.)?json(?:\.\d+\.tmp)?")
_JOB = re.compile("job-[0-9a-f]{8}")
_STICKY = stat.S_ISVTX


class StateFolder(NamedTuple):
    """Folder for flight records, which need not exist; None if no folder can be trusted.

    `refusal` says why it is not the usual one, and a remedy; it is empty if it is.
    """

    path: Path | None
    refusal: str = ""


def state_folder(environ: Mapping[str, str]) -> StateFolder:
    """Return the folder for flight records, without creating it.

    `XDG_STATE_HOME`, `HOME` and `TMPDIR` of `environ` count if they are absolute paths.
    """
    usual = _usual(environ)
    if usual is None:
        refusal = "neither XDG_STATE_HOME nor HOME names a folder; set one"
    else:
        problem = _problem(usual)
        if not problem:
            return StateFolder(usual)
        refusal = f"{usual} is not used: {problem}"
    spare = _spare(environ)
    if problem := _problem(spare):
        return StateFolder(None, f"{refusal}; {spare} neither: {problem}")
    return StateFolder(spare, refusal)


def job_name(job_id: str) -> str:
    """Return the name of a job's folder, from the job's hexadecimal identity."""
    return f"job-{job_id[:8]}"


def job_folders(folder: Path) -> list[Path]:
    """Return the folders of jobs with records, newest last record first.

    The time is that of a record, because the removal of records changes the time of a folder.
    """
    found: list[tuple[int, str]] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                if _JOB.fullmatch(entry.name) and is_own_folder:
                    last = _last_record(entry.path)
                    if last:
                        found.append((last, entry.name))
    return [folder / name for _, name in sorted(found, reverse=True)]


def find_job(environ: Mapping[str, str], job: str = "") -> Path | None:
    """Return the folder of a job with records, by its first eight digits or the newest; or None."""
    tops = [top for top in (_usual(environ), _spare(environ)) if top and not _problem(top)]
    found = [
        path for top in tops for path in job_folders(top) if not job or path.name == job_name(job)
    ]
    return max(found, key=_last_record, default=None)


def keep_newest(folder: Path, count: int = JOBS_MAX) -> None:
    """Remove the records of all jobs but the newest; several processes may do so at once."""
    for path in job_folders(folder)[count:]:
        remove_job(path)


def remove_job(path: Path) -> None:
    """Remove the records in a folder, and then the folder if it is a job's and empty."""
    with contextlib.suppress(OSError):
        is_job = _JOB.fullmatch(path.name) is not None
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if is_job else 0)
        directory = os.open(path, flags)
        try:
            for name in os.listdir(directory):
                if _RECORD.fullmatch(name):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=directory)
        finally:
            os.close(directory)
        if is_job:
            path.rmdir()


def is_record(name: str) -> bool:
    """Return whether a file name is that of a flight record."""
    return _RECORD.fullmatch(name) is not None


def write_record(folder: str, name: str, text: str) -> None:
    """Write a record into a folder, which is created privately if it is missing.

    Records contain paths, command lines and texts of exceptions. In a folder that others may
    enter, as with --log-dir, the umask decides who may read them. Links of other users raise.
    """
    refuse_foreign_links(folder)
    _make_private(folder)
    refuse_foreign_links(folder)  # another user may have placed a link in the meantime
    is_private = not os.stat(folder).st_mode & 0o077
    write_file(folder, name, text, PRIVATE if is_private else REQUESTED)


def _make_private(folder: str) -> None:
    """Create a folder and its missing parents for this user only."""
    if not os.path.isdir(folder):
        above = os.path.dirname(folder)
        if above and above != folder:
            _make_private(above)
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.mkdir(folder, 0o700)


def _last_record(folder: Path | str) -> int:
    """Return the time of the last record in a folder, in ns since the epoch; 0 if it has none."""
    times = [0]
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if _RECORD.fullmatch(entry.name):
                    times.append(entry.stat(follow_symlinks=False).st_mtime_ns)
    return max(times)


def _usual(environ: Mapping[str, str]) -> Path | None:
    for name, rest in (("XDG_STATE_HOME", "syncvar"), ("HOME", ".local/state/syncvar")):
        if environ.get(name, "").startswith("/"):
            return Path(environ[name], rest)
    return None


def _spare(environ: Mapping[str, str]) -> Path:
    top = environ.get("TMPDIR", "")
    return Path(top if top.startswith("/") else "/tmp", f"syncvar-state-{os.geteuid()}")  # noqa: S108  (checked before use)


def _problem(folder: Path) -> str:
    """Return why a folder must not be used, and a remedy; empty if it may be used or created."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return _parent_problem(folder.parent)
    except OSError as error:
        return f"{error.strerror}"
    problem = ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "it is no folder; remove it"
    elif status.st_uid != os.geteuid():
        problem = f"it belongs to user {status.st_uid}; remove it, or set XDG_STATE_HOME"
    elif status.st_mode & 0o022:
        problem = f"others may write to it (mode {status.st_mode & 0o777:o}); chmod 700 {folder}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = "it cannot be written to; set XDG_STATE_HOME to a folder that can"
    return problem


def _parent_problem(folder: Path) -> str:
    """Return why no folder may be created in this one, or in its nearest existing parent."""
    while True:
        try:
            status = folder.stat()
            break
        except FileNotFoundError:
            if folder == folder.parent:
                return "no parent folder exists"
            folder = folder.parent
        except OSError as error:
            return f"{folder}: {error.strerror}"
    if status.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to user {status.st_uid}; set XDG_STATE_HOME to a folder of yours"
    if status.st_mode & 0o002 and not status.st_mode & _STICKY:
        return f"everybody may rename files in {folder}; set XDG_STATE_HOME to a private folder"
    if not stat.S_ISDIR(status.st_mode) or not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written to; set XDG_STATE_HOME to a folder that can"
    return ""
