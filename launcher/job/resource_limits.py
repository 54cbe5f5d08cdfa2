"""Checks limits before anything starts: open files and processes that the user may have."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError, HostUnreachable

if TYPE_CHECKING:
    from syncvar_launcher.options.launch_options import LaunchOptions

# Counted in jobs of 2 to 10 ranks, with some to spare for what is open for a moment only.
_FILES, _FILES_OF_A_RANK, _FILES_OF_A_LINK = 24, 5, 4
_COPIES_OF_A_LINK = 2  # of its descriptors, between hosts: `syncvar.transports.zeromq_sockets`
_TASKS_OF_A_RANK = 4  # the script, two threads of ZeroMQ, and the one that makes progress
_TASKS = 5  # the launcher with its threads, the cleanup process, and the fork server
OF_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


class LimitTooLow(ConfigError):
    """A limit of the system is too low for the job; the exit code is 71."""


class TimePassed(HostUnreachable):
    """The time limit of the job passed during the logins to its hosts; the exit code is 124."""


def needed_files(workers: int, hosts: int, *, has_logs: bool, are_linked: bool) -> tuple[int, str]:
    """Return the open files that a process of the job needs at most, and which process that is.

    Args:
        workers: The ranks of the job.
        hosts: The number of hosts as which this machine poses.
        has_logs: Whether the launcher writes two files for each rank.
        are_linked: Whether ranks have connections, because they share no memory.

    Example:
        >>> needed_files(16, 1, has_logs=False, are_linked=False)
        (106, 'the launcher')
    """
    launcher = _FILES + workers * (_FILES_OF_A_RANK + 2 * has_logs) + 2 * hosts
    of_a_link = _FILES_OF_A_LINK + (_COPIES_OF_A_LINK if hosts > 1 else 0)
    rank = _FILES + ((workers + hosts) * of_a_link if are_linked else 0)
    return max((launcher, "the launcher"), (rank, "each rank"))


def needed_tasks(workers: int) -> int:
    """Return how many processes and threads a job has at least."""
    return _TASKS + workers * _TASKS_OF_A_RANK


def tasks_left(groups: str | None = None, mounts: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many more tasks the control groups allow (pids.max); -1 for no limit."""
    if groups is None:
        try:
            groups = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return -1
    left = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        top = mounts / "pids" if controllers else mounts
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            try:
                allowed, current = (
                    (group / name).read_text(encoding="ascii").strip()
                    for name in ("pids.max", "pids.current")
                )
            except OSError:  # the topmost group has no limit
                pass
            else:
                left += [max(int(allowed) - int(current), 0)] if allowed != "max" else []
            group = group.parent
    return min(left, default=-1)


def check_limits(options: LaunchOptions) -> None:
    """Raise LimitTooLow for a job that exceeds a limit of the system."""
    workers = options.ranks.workers
    are_linked = options.ranks.fake_hosts > 1 or options.runtime.transport == "zmq"
    needed, whose = needed_files(
        workers,
        options.ranks.fake_hosts,
        has_logs=options.output.log_dir is not None,
        are_linked=are_linked,
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft, needed):
        raise LimitTooLow(
            f"{whose} needs {needed} open files for {_ranks(workers)}, and {soft} are allowed: "
            f"{_remedy('n', needed, hard)}, or start fewer ranks"
        )
    left = tasks_left()
    if 0 <= left < needed_tasks(workers):
        raise LimitTooLow(
            f"{_ranks(workers)} need {needed_tasks(workers)} processes and threads, "
            f"and the control group of the launcher allows {left} more (pids.max): "
            "ask for a higher limit of the container or session, or start fewer ranks"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.getuid() == 0:  # the system asks root for none
        return
    needed, used = needed_tasks(workers), _tasks_of_user()
    if _is_below(soft, used + needed):
        raise LimitTooLow(
            f"{_ranks(workers)} need {needed} processes and threads beside the {used} that this "
            f"user has, and {soft} are allowed: {_remedy('u', used + needed, hard)}, or start "
            "fewer ranks"
        )


def cannot_start(program: str, error: OSError) -> ConfigError:
    """Return the exception for a process that cannot start."""
    kind = LimitTooLow if error.errno in OF_LIMITS else ConfigError
    return kind(f"a worker cannot be started: {program}: {error.strerror}")


def _is_below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _ranks(workers: int) -> str:
    return f"{workers} rank{'s' * (workers > 1)}"


def _remedy(letter: str, needed: int, hard: int) -> str:
    if _is_below(hard, needed):
        return f"ask for a higher limit (ulimit -{letter} goes up to {hard} here)"
    return f"ulimit -{letter} {needed}"


def _tasks_of_user() -> int:
    """Return how many processes and threads of this user there are, as the system counts them."""
    own, count = os.getuid(), 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == own:
                    count += os.stat(f"/proc/{entry.name}/task").st_nlink - 2  # noqa: PTH116
            except OSError:  # it has ended meanwhile
                continue
    return count
