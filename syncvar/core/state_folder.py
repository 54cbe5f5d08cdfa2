"""The user's private folder for flight records of the last jobs.

It is `$XDG_STATE_HOME/syncvar`, else `~/.local/state/syncvar`. If that cannot be used, it is a
private temporary folder. Each job has one folder in it, created with its first record.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.private_files import PRIVATE, REQUESTED, refuse_foreign_links, write_file

if TYPE_CHECKING:
    from collections.abc import Mapping

JOBS_MAX = 10
RECORDS = "flight-[rs]*.json"  # flight records of ranks and servers
TOTALS = "stats-*.json"  # call statistics of a rank, for --stats
_RECORD = re.compile(r"flight-(?:rank|server)\d+\.(?:generation\d+\.)?json(?:\.\d+\.tmp)?")
_JOB = re.compile("job-[0-9a-f]{8}")
_STICKY = stat.S_ISVTX


class StateFolder(NamedTuple):
    """Folder for flight records.

    Args:
        path: The folder, which need not exist; None if no folder can be trusted.
        refusal: Reason why it is not the usual one, and remedy; empty if it is.
    """

    path: Path | None
    refusal: str = ""


def state_folder(environ: Mapping[str, str]) -> StateFolder:
    """Return the folder for flight records, without creating it.

    `XDG_STATE_HOME`, `HOME` and `TMPDIR` of `environ` count if they are absolute paths.
    """
    usual, refusal = _usual(environ), ""
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
    """Return the folder of a job with records, by default of the newest job; None if there is none.

    `job` is the first eight digits of the job's identity.
    """
    usual = _usual(environ)
    usual = _usual(environ)
    tops = [top for top in (usual, _spare(environ)) if top is not None and not _problem(top)]
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
    if not stat.S_ISDIR(status.st_mode):
        return "it is no folder; remove it"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}; remove it, or set XDG_STATE_HOME"
    if status.st_mode & 0o022:
        return f"others may write to it (mode {status.st_mode & 0o777:o}); chmod 700 {folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "it cannot be written to; set XDG_STATE_HOME to a folder that can"
    return ""


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
