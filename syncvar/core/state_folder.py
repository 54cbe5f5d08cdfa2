"""The folder of this user in which evidence of jobs outlives them: private, with the last jobs only.

It is `$XDG_STATE_HOME/syncvar`, else `~/.local/state/syncvar`; where that cannot be used, a private folder for temporary
files. Each job has one folder in it, which is made when its first record is written. Nothing is made by looking.
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

JOBS_KEPT = 10
RECORDS = "flight-[rs]*.json"  # of ranks and servers
TOTALS = "stats-*.json"  # of the calls of a rank, for --stats
_RECORD = re.compile(r"flight-(?:rank|server)\d+\.(?:generation\d+\.)?json(?:\.\d+\.tmp)?")
_JOB = re.compile("job-[0-9a-f]{8}")
_STICKY = stat.S_ISVTX


class StateFolder(NamedTuple):
    """Where evidence of jobs goes.

    Args:
        path: The folder, which need not be there; None where none can be trusted.
        refusal: Why it is not the usual one, and what to do; empty where it is.
    """

    path: Path | None
    refusal: str = ""


def state_folder(environ: Mapping[str, str]) -> StateFolder:
    """Return where evidence of jobs goes: looked at, and not made.

    Args:
        environ: Of XDG_STATE_HOME, HOME and TMPDIR each is used if it is an absolute path.
    """
    usual, refusal = _usual(environ), ""
    if usual is None:
        refusal = "neither XDG_STATE_HOME nor HOME names a folder; set one"
    else:
        why = _why_not(usual)
        if not why:
            return StateFolder(usual)
        refusal = f"{usual} is not used: {why}"
    spare = _spare(environ)
    why = _why_not(spare)
    return (
        StateFolder(None, f"{refusal}; {spare} neither: {why}")
        if why
        else StateFolder(spare, refusal)
    )


def job_name(job_id: str) -> str:
    """Return the name of a job's folder.

    Args:
        job_id: Identity of the job, hexadecimal.

    Example:
        >>> job_name("1a2b3c4d5e6f")
        'job-1a2b3c4d'
    """
    return f"job-{job_id[:8]}"


def job_folders(folder: Path) -> list[Path]:
    """Return the folders of jobs in which records are, newest first by their last record; nothing where there is none.

    The time is that of a record, not of its folder: a folder whose records are just being removed must not seem new.
    """
    found: list[tuple[int, str]] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                told = entry.stat(follow_symlinks=False)
                if (
                    _JOB.fullmatch(entry.name)
                    and stat.S_ISDIR(told.st_mode)
                    and told.st_uid == os.geteuid()
                ):
                    last = _last_record(entry.path)
                    if last:
                        found.append((last, entry.name))
    return [folder / name for _, name in sorted(found, reverse=True)]


def find_job(environ: Mapping[str, str], job: str = "") -> Path | None:
    """Return the folder of a job that left records, the newest by default; None where there is none.

    Args:
        environ: As for `state_folder`.
        job: The first eight digits of its identity.
    """
    usual = _usual(environ)
    places = [
        place for place in (usual, _spare(environ)) if place is not None and not _why_not(place)
    ]
    found = [
        path
        for place in places
        for path in job_folders(place)
        if not job or path.name == job_name(job)
    ]
    return max(found, key=_last_record, default=None)


def keep_newest(folder: Path, count: int = JOBS_KEPT) -> None:
    """Remove the records of all jobs but the newest; what does not look like ours stays. Several may do so at once."""
    for path in job_folders(folder)[count:]:
        remove_job(path)


def remove_job(path: Path) -> None:
    """Remove the records in a folder, also what a killed worker has left of one, and the folder if it is a job's and empty."""
    with contextlib.suppress(OSError):
        directory = os.open(
            path,
            os.O_RDONLY
            | os.O_DIRECTORY
            | os.O_CLOEXEC
            | (os.O_NOFOLLOW if _JOB.fullmatch(path.name) else 0),
        )
        try:
            for name in os.listdir(directory):
                if _RECORD.fullmatch(name):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=directory)
        finally:
            os.close(directory)
        if _JOB.fullmatch(path.name):
            path.rmdir()


def is_record(name: str) -> bool:
    """Return whether a file is called as the record of a rank or server is.

    Example:
        >>> is_record("flight-rank3.json"), is_record("../flight-rank3.json")
        (True, False)
    """
    return _RECORD.fullmatch(name) is not None


def write_record(folder: str, name: str, text: str) -> None:
    """Write a record in a folder, which is made if it is missing, then for this user alone.

    Records hold paths, command lines and texts of exceptions. In a folder that others may enter,
    as that of --log-dir or SYNCVAR_TRACE, the umask decides who may read them.
    Nothing that another user has put there is followed.
    """
    refuse_foreign_links(folder)
    _make_private(folder)
    refuse_foreign_links(folder)  # one that was laid meanwhile, where the folder was to be
    is_private = not os.stat(folder).st_mode & 0o077
    write_file(folder, name, text, PRIVATE if is_private else REQUESTED)


def _make_private(folder: str) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    if not os.path.isdir(folder):
        above = os.path.dirname(folder)
        if above and above != folder:
            _make_private(above)
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.mkdir(folder, 0o700)


def _last_record(folder: Path | str) -> int:
    """Return when the last record in a folder was written, in nanoseconds since the epoch; 0 where there is none."""
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
    return Path(top if top.startswith("/") else "/tmp", f"syncvar-state-{os.geteuid()}")  # noqa: S108  (it is looked at before it is used)


def _why_not(folder: Path) -> str:
    """Return why a folder must not be used, and what to do; empty where it may. One that is missing is made private."""
    try:
        told = folder.lstat()
    except FileNotFoundError:
        return _why_not_within(folder.parent)
    except OSError as error:
        return f"{error.strerror}"
    if not stat.S_ISDIR(told.st_mode):
        return "it is no folder; remove it"
    if told.st_uid != os.geteuid():
        return f"it belongs to user {told.st_uid}; remove it, or set XDG_STATE_HOME"
    if told.st_mode & 0o022:
        return f"others may write to it (mode {told.st_mode & 0o777:o}); chmod 700 {folder}"
    return (
        ""
        if os.access(folder, os.W_OK | os.X_OK)
        else "it cannot be written to; set XDG_STATE_HOME to a folder that can"
    )


def _why_not_within(folder: Path) -> str:
    """Return why no folder may be made in this one, or in the nearest above it that is there."""
    while True:
        try:
            told = folder.stat()
            break
        except FileNotFoundError:
            if folder == folder.parent:
                return "it is nowhere"
            folder = folder.parent
        except OSError as error:
            return f"{folder}: {error.strerror}"
    if told.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to user {told.st_uid}; set XDG_STATE_HOME to a folder of yours"
    if told.st_mode & 0o002 and not told.st_mode & _STICKY:
        return f"everybody may rename what is in {folder}; set XDG_STATE_HOME to a private folder"
    if not stat.S_ISDIR(told.st_mode) or not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written to; set XDG_STATE_HOME to a folder that can"
    return ""
