"""Limits of the container and the machine: free memory and usable cores.

The system kills a process that passes the container's memory limit. So the segment reads the limit
before it asks for pages, and a shortage becomes an error. The page cache, which the system can drop
at once, does not count as used.
"""

from __future__ import annotations

import os
from typing import NamedTuple

CONTROL_GROUPS = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 60  # version 1 writes "none" as the largest multiple of a page

# By version: limit, usage, and what the statistics call droppable.
_MEMORY = {
    2: ("memory.max", "memory.current", (b"inactive_file", b"active_file", b"slab_reclaimable")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        (b"total_inactive_file", b"total_active_file"),
    ),
}


class Shortage(NamedTuple):
    """A limit that a request would pass: bytes in use, bytes allowed, and its name for messages."""

    used: int
    limit: int
    limit_name: str


class MemoryLimits:
    """The memory limits of this process, by its control groups and the machine.

    It finds the control groups once and reads their numbers at each call.

    Example:
        >>> MemoryLimits().shortage(4096) is None
        True
    """

    def __init__(
        self,
        membership: str | None = None,
        root: str = CONTROL_GROUPS,
        machine: str = "/proc/meminfo",
    ) -> None:
        groups = control_groups("memory", membership, root)
        self._groups = [(folder, *_MEMORY[version]) for version, folder in groups]
        self._groups = [group for group in self._groups if os.path.exists(f"{group[0]}/{group[1]}")]
        self._machine = machine

    def shortage(self, nbytes: int) -> Shortage | None:
        """Return the limit that `nbytes` more would pass, or None."""
        for folder, limit_file, usage_file, droppable in self._groups:
            limit = _number(read_file(f"{folder}/{limit_file}"))
            if limit is None or limit >= _NO_LIMIT:
                continue
            statistics = read_file(f"{folder}/memory.stat")
            used = _number(read_file(f"{folder}/{usage_file}")) or 0
            used -= sum(named_number(statistics, name) for name in droppable)
            if used + nbytes > limit:
                name = f"the container's limit ({folder}/{limit_file})"
                return Shortage(max(0, used), limit, name)
        machine = read_file(self._machine)
        total = 1024 * (named_number(machine, b"MemTotal:") + named_number(machine, b"SwapTotal:"))
        free = named_number(machine, b"MemAvailable:") + named_number(machine, b"SwapFree:")
        free *= 1024
        if total and nbytes > free:
            return Shortage(total - free, total, "the machine's memory")
        return None


def core_quota(membership: str | None = None, root: str = CONTROL_GROUPS) -> int | None:
    """Return how many cores the control groups allow, rounded up; None for no limit."""
    quotas = []
    for version, folder in control_groups("cpu", membership, root):
        words = read_file(f"{folder}/cpu.max").split()
        if version != 2:
            words = [read_file(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period")]
        numbers = [_number(word) for word in words]
        if len(numbers) == 2 and numbers[0] and numbers[1]:  # "max", or -1 in version 1: no quota
            quotas.append(-(-numbers[0] // numbers[1]))
    return min(quotas, default=None)


def control_groups(controller: str, membership: str | None, root: str) -> list[tuple[int, str]]:
    """Return version and folder of this process's control groups, innermost first."""
    text = membership
    if text is None:
        text = read_file("/proc/self/cgroup").decode(errors="replace")
    found: list[tuple[int, str]] = []
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        tops: tuple[str, ...]
        if hierarchy == "0" and not controllers:
            version, tops = 2, (root, f"{root}/unified")
        elif controller in controllers.split(","):
            version, tops = 1, (f"{root}/{controller}", f"{root}/{controllers}")
        else:
            continue
        for top in dict.fromkeys(tops):
            # In a container the path may be the host's, which is not mounted; then its group is the
            # top.
            folder = os.path.normpath(f"{top}/{path}")
            while folder == top or folder.startswith(f"{top}/"):
                if os.path.isdir(folder):
                    found.append((version, folder))
                folder = os.path.dirname(folder)
    return found


def read_file(path: str) -> bytes:
    """Return at most 64 KiB of a file of /proc or /sys; nothing if it is not readable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _number(text: bytes) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def named_number(text: bytes, name: bytes) -> int:
    r"""Return the number beside a name, 0 if there is none.

    Example:
        >>> named_number(b"low 0\noom_kill 3\n", b"oom_kill")
        3
    """
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return 0
