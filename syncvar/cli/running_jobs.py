"""Finds running jobs of this user, and asks their launchers over their private sockets."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.bootstrap.job_private import holders_of_meetings
from syncvar.bootstrap.status_client import ask, job_folders, running_jobs
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

__all__ = ["add_job_argument", "ask", "ask_job", "choose_job", "find_jobs", "job_text"]


def add_job_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument by which a command chooses a running job."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="its name, or the process number of its syncvar-launch; the newest job otherwise",
    )


def choose_job(name: str | None) -> str:
    """Return the socket of the job with this name, or of the newest; then name the others."""
    path, others = find_jobs(name, os.environ)
    if others:
        sys.stderr.write(
            f"syncvar: {len(others) + 1} jobs are running; this is the newest. The others: "
            f"{'; '.join(map(job_text, others))}\n"
        )
    return path


def ask_job(path: str, **request: Any) -> dict[str, Any]:
    """Return the answer of a job's launcher; raise ConfigError if none comes."""
    answer = ask(path, **request)
    if answer is None:
        raise ConfigError(
            "the job has just ended, or its launcher does not answer (is it stopped?)"
        )
    return answer


def job_text(job: Mapping[str, Any]) -> str:
    """Return a job as text: its name, size, launcher, age and command."""
    word = job.get("process_word", "rank")
    ranks = f"{job['workers']} {word}{'s' * (job['workers'] != 1)}"
    if servers := job["servers"]:
        ranks += f" and {servers} server{'s' * (servers != 1)}"
    since = f"since {job['lasted_s']:.0f} s"
    return f"{job['name']}: {ranks}, launcher {job['pid']}, {since}: {job['command']}"


def find_jobs(name: str | None, environ: Mapping[str, str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the socket of a job, and without a name also the other running jobs."""
    folders = job_folders(environ)
    if name is not None and name.isdigit():
        folders = list(dict.fromkeys([*folders, *job_folders(environment_of(int(name)))]))
    found = list(running_jobs(folders))
    found.sort(key=lambda one: one[1]["lasted_s"])
    if name is None:
        if not found:
            raise ConfigError(
                "no job of yours is running that syncvar-launch or sv.run has started (looked in "
                f"{', '.join(folders)}){_jobs_of_other_launchers(folders)}"
            )
        return found[0][0], [job for _, job in found[1:]]
    named = [one for one in found if name == str(one[1]["pid"])]
    named = named or [one for one in found if one[1]["name"].startswith(name)]
    if len(named) > 1:
        raise ConfigError(
            f"{len(named)} jobs have names that begin with {name!r}: "
            f"{'; '.join(job_text(job) for _, job in named)}"
        )
    if not named:
        reason = _unknown_job(name, [job for _, job in found])
        raise ConfigError(reason + _jobs_of_other_launchers(folders))
    return named[0][0], []


def _unknown_job(name: str, jobs: Sequence[Mapping[str, Any]]) -> str:
    running = "; no job of yours is running"
    if jobs:
        running = f"; running: {'; '.join(map(job_text, jobs))}"
    if name.isdigit():
        with contextlib.suppress(OSError):
            owner = os.stat(f"/proc/{name}").st_uid
            if owner != os.getuid():
                return f"process {name} belongs to {_user(owner)}, who alone can ask about it"
            return f"process {name} is not the syncvar-launch of a running job{running}"
    return f"no running job is called {name!r}, and no launcher has that process number{running}"


def _jobs_of_other_launchers(folders: Sequence[str]) -> str:
    """Describe jobs of other launchers, which this command cannot ask; "" if there are none."""
    holders = [holder for folder in folders for holder in holders_of_meetings(Path(folder))]
    if not holders:
        return ""
    return (
        f". mpirun, srun or another launcher has started {len(holders)} that "
        f"run{'s' * (len(holders) == 1)} here (first rank: {', '.join(holders)}): this command "
        "asks syncvar-launch, which such a job does not have. `py-spy dump --pid PROCESS` shows "
        "where one rank stands"
    )


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process began; empty if it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (item.partition(b"=") for item in file.read().split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return {}
