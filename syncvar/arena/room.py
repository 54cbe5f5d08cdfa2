"""How much memory the container and the machine still have, so that a shortage is an error and not a killed process.

The system populates shared pages without a word and ends a process when the container's limit is reached. So the limit
is read before pages are asked for. What was merely read from files and can be dropped at once does not count as used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

__all__ = ["Room", "Shortage"]

_ROOT = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 60  # version 1 writes "none" as the largest multiple of a page


@dataclass(frozen=True, slots=True)
class Shortage:
    """A limit that a request would pass.

    Args:
        used: Bytes in use under it.
        limit: Bytes allowed.
        whose: What sets it, in words.
    """

    used: int
    limit: int
    whose: str


@dataclass(frozen=True, slots=True)
class _Group:
    """The files of one control group and what its statistics call droppable."""

    folder: str
    limit: str
    usage: str
    droppable: tuple[bytes, ...]


_VERSION_2 = _Group("", "memory.max", "memory.current", (b"inactive_file", b"active_file", b"slab_reclaimable"))
_VERSION_1 = _Group("", "memory.limit_in_bytes", "memory.usage_in_bytes", (b"total_inactive_file", b"total_active_file"))


class Room:
    """The limits that hold for this process; the groups are found once, their numbers are read at every question.

    Args:
        membership: The text of the file that names this process's control groups.
        root: Where the control groups are mounted.
        machine: The file with the machine's memory.

    Example:
        >>> Room().shortage(4096) is None
        True
    """

    def __init__(
        self, membership: str | None = None, root: str = _ROOT, machine: str = "/proc/meminfo"
    ) -> None:
        text = _read("/proc/self/cgroup").decode(errors="replace") if membership is None else membership
        self._groups = tuple(_groups(text, root))
        self._machine = machine

    def shortage(self, nbytes: int) -> Shortage | None:
        """Return the limit that `nbytes` more would pass, or None."""
        for group in self._groups:
            path = f"{group.folder}/{group.limit}"
            limit = _number(_read(path))
            if limit is None or limit >= _NO_LIMIT:
                continue
            statistics = _read(f"{group.folder}/memory.stat")
            used = _number(_read(f"{group.folder}/{group.usage}")) or 0
            used -= sum(_field(statistics, name) for name in group.droppable)
            if used + nbytes > limit:
                return Shortage(max(0, used), limit, f"the container's limit ({path})")
        machine = _read(self._machine)
        total = 1024 * (_field(machine, b"MemTotal:") + _field(machine, b"SwapTotal:"))
        free = 1024 * (_field(machine, b"MemAvailable:") + _field(machine, b"SwapFree:"))
        if total and nbytes > free:
            return Shortage(total - free, total, "the machine's memory")
        return None


def _groups(membership: str, root: str) -> list[_Group]:
    """Return the control groups with a limit of memory that this process is in, the innermost first."""
    found: list[_Group] = []
    for line in membership.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        tops: tuple[str, ...]
        if hierarchy == "0" and not controllers:
            kind, tops = _VERSION_2, (root, f"{root}/unified")
        elif "memory" in controllers.split(","):
            kind, tops = _VERSION_1, (f"{root}/memory",)
        else:
            continue
        for top in tops:
            # Inside a container the path may be one of the host's, which is not mounted here; its own group is the top.
            folder = os.path.normpath(f"{top}/{path}")
            while folder.startswith(top):
                if os.path.exists(f"{folder}/{kind.limit}"):
                    found.append(replace(kind, folder=folder))
                folder = os.path.dirname(folder)
    return found


def _read(path: str) -> bytes:
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


def _field(text: bytes, name: bytes) -> int:
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return 0
