"""What workers may use of this host: cores, BLAS threads, memory, open files and processes.

Without binding, small calls are slow where workers share cores. BLAS libraries that each start a
thread per core slow each other down. Limits of the system are checked before a job starts, and the
counters of control groups show whether a worker ran out of memory.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.errors import ConfigError, HostUnreachable
from syncvar.shm.host_limits import CONTROL_GROUPS, control_groups, named_number, read_file
from syncvar_launcher.options.option_table import BIND_MODES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar_launcher.options.launch_options import LaunchOptions

BLAS_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)

OUT_OF_MEMORY = "out of memory (kernel)"
OF_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""The errors of system calls that exceed a limit of the system."""

_COUNTERS = {2: "memory.events", 1: "memory.oom_control"}
# The longest time from the count to the end of a process: the system frees its memory first.
_RECENT_S = 10.0
_SIGKILL = 9

# Counted in jobs of 2 to 10 ranks, with some to spare for what is open for a moment only.
_FILES, _FILES_OF_A_RANK, _FILES_OF_A_LINK = 24, 5, 4
_COPIES_OF_A_LINK = 2  # of its descriptors, between hosts: `syncvar.transports.zeromq_sockets`
_TASKS_OF_A_RANK = 4  # the script, two threads of ZeroMQ, and the one that makes progress
_TASKS = 5  # the launcher with its threads, the cleanup process, and the fork server


class Binding(NamedTuple):
    """The cores of each worker of one host."""

    # for each local rank the cores that it may use, or None without binding
    cores: tuple[tuple[int, ...] | None, ...]
    reason: str  # why, in one sentence


def plan_binding(
    workers: int,
    usable_cores: Sequence[int],
    online_cores: int,
    mode: str = "auto",
    cores_per_worker: int | None = None,
) -> Binding:
    """Decide which cores each worker of a host may use.

    All workers get equally many cores, because a collective waits for the slowest. Remaining cores
    stay free for the launcher.

    Args:
        workers: The number of workers on this host, at least 1.
        usable_cores: The cores that the launcher may use, in the order of assignment.
        online_cores: The number of cores of the host. Fewer usable ones mean that an affinity is
            set.
        mode: "auto" (bind without an affinity, if each core gets equally many workers), "cores"
            (always) or "none".
        cores_per_worker: The cores of each worker, or None for an equal share. A number also binds
            under "auto".

    Example:
        >>> plan_binding(2, [0, 1, 2, 3], 4).cores
        ((0, 1), (2, 3))
        >>> plan_binding(3, [0, 1], 2)
        Binding(cores=(None, None, None), reason='not bound: 3 workers share 2 usable cores')
    """
    usable = len(usable_cores)
    if mode not in BIND_MODES:
        raise ConfigError(f"bind must be one of {', '.join(BIND_MODES)}, not {mode!r}")
    if cores_per_worker is not None and workers * cores_per_worker > usable:
        fewer_cores, fewer_workers = usable // workers, usable // cores_per_worker
        remedies = [f"--cores-per-worker {fewer_cores}"] * (fewer_cores > 0)
        remedies += [f"at most {_count(fewer_workers, 'worker')}"] * (fewer_workers > 0)
        use = f"use {' or '.join(remedies)}, or " if remedies else ""
        raise ConfigError(
            f"{_count(workers, 'worker')} with {_count(cores_per_worker, 'core')} each need "
            f"{workers * cores_per_worker} cores, but this host lets us use {usable}: "
            f"{use}leave --cores-per-worker out"
        )
    unbound: tuple[None, ...] = (None,) * workers
    if mode == "none":
        return Binding(unbound, "not bound: --bind none")
    sharing = f"{_count(workers, 'worker')} share {_count(usable, 'usable core')}"
    if mode == "auto" and workers > usable and workers % usable:
        return Binding(unbound, f"not bound: {sharing}")
    if mode == "auto" and cores_per_worker is None and usable != online_cores:
        share = f"{usable} of {_count(online_cores, 'core')} usable"
        return Binding(unbound, f"not bound: an affinity is set already ({share})")
    if workers > usable:
        shared = tuple((usable_cores[worker % usable],) for worker in range(workers))
        return Binding(shared, f"bound in turn: {sharing}")
    size = cores_per_worker or usable // workers
    cores = tuple(tuple(usable_cores[size * one : size * (one + 1)]) for one in range(workers))
    return Binding(cores, f"bound: {_count(size, 'core')} of its own for each worker")


def blas_threads(workers: int, usable: int, cores_per_worker: int | None = None) -> int:
    """Return how many BLAS threads each worker may start.

    `usable` is the number of cores that the workers may use together.

    Example:
        >>> blas_threads(4, 8), blas_threads(4, 2), blas_threads(1, 8, 3)
        (2, 1, 3)
    """
    return cores_per_worker or max(1, usable // workers)


def blas_environment(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the thread variables to set for a worker, without those that it already has.

    Example:
        >>> sorted(blas_environment(2, {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "8"}))
        ['NUMEXPR_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'VECLIB_MAXIMUM_THREADS']
    """
    return {name: str(threads) for name in BLAS_VARIABLES if name not in environ}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class OutOfMemory:
    """Detects by control group that the system killed a worker because memory ran out.

    Such a kill looks like any SIGKILL. Before it, the kernel counts it in the worker's group:
    "oom_kill" in `memory.events`, or in `memory.oom_control` for version 1. So a worker ran out of
    memory if SIGKILL ended it just after its group counted a kill.
    """

    def __init__(self, now: float, root: str = CONTROL_GROUPS) -> None:
        self._root = root
        self._files: dict[bytes, str] = {}  # by the text of /proc/<pid>/cgroup
        self._of_rank: dict[int, str] = {}
        self._counted: dict[str, int] = {}
        self._unexplained: dict[str, list[float]] = {}
        # Workers start in the launcher's own group.
        self._count(self._file(read_file("/proc/self/cgroup")), now)

    def look(self, pids: Mapping[int, int], now: float) -> None:
        """Note the group of each worker (rank -> process), and the counters of the groups."""
        for rank, pid in pids.items():
            self.belongs(rank, read_file(f"/proc/{pid}/cgroup"))
        for file in {*self._of_rank.values()}:
            self._count(file, now)

    def belongs(self, rank: int, membership: bytes) -> None:
        """Note the groups of a worker's process, unless it has ended.

        During its end, version 1 reports the root, so a group above the known one does not count.
        """
        if membership:
            file, known = self._file(membership), self._of_rank.get(rank, "")
            if not (known and known.startswith(f"{os.path.dirname(file)}/")):  # noqa: PTH120
                self._of_rank[rank] = file

    def ended(self, rank: int, status: int, now: float) -> str:
        """Return "out of memory (kernel)" for a worker killed for that, else an empty text.

        `status` is the exit code, or minus the signal.
        """
        file = self._of_rank.pop(rank, "") or self._file(read_file("/proc/self/cgroup"))
        if status != -_SIGKILL:
            return ""
        self._count(file, now)
        kills = [at for at in self._unexplained.get(file, []) if now - at <= _RECENT_S]
        self._unexplained[file] = kills[1:]  # each kill explains one end
        return OUT_OF_MEMORY if kills else ""

    def _file(self, membership: bytes) -> str:
        """Return the counter's file of the innermost group that has one, or an empty text."""
        if membership not in self._files:
            groups = control_groups("memory", membership.decode(errors="replace"), self._root)
            files = [f"{folder}/{_COUNTERS[version]}" for version, folder in groups]
            self._files[membership] = next((file for file in files if os.path.exists(file)), "")  # noqa: PTH110
        return self._files[membership]

    def _count(self, file: str, now: float) -> None:
        if not file:
            return
        count = named_number(read_file(file), b"oom_kill")
        risen = count - self._counted.get(file, count)
        # A group that has been removed reads as 0.
        self._counted[file] = max(count, self._counted.get(file, 0))
        self._unexplained.setdefault(file, []).extend([now] * max(0, risen))


class LimitTooLow(ConfigError):
    """A limit of the system is too low for the job; the exit code is 71."""

    code = "SV-505"


class TimePassed(HostUnreachable):
    """The time limit of the job passed during the logins to its hosts; the exit code is 124."""

    code = "SV-507"


def needed_files(workers: int, hosts: int, *, has_logs: bool, are_linked: bool) -> tuple[int, str]:
    """Return the open files that a process of the job needs at most, and which process that is.

    This machine poses as so many `hosts`. With logs the launcher writes two files for each rank.
    Linked ranks have connections, because they share no memory.

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
    hosts, has_logs = options.ranks.fake_hosts, options.output.log_dir is not None
    are_linked = hosts > 1 or options.runtime.transport == "zmq"
    needed, process = needed_files(workers, hosts, has_logs=has_logs, are_linked=are_linked)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft, needed):
        raise LimitTooLow(
            f"{process} needs {needed} open files for {_ranks(workers)}, and {soft} are allowed: "
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
