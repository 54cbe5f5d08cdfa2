"""Detects that the system killed a worker because memory ran out, by its control group.

Such a kill looks like any SIGKILL. Before it, the kernel counts it in the worker's group:
"oom_kill" in `memory.events`, or in `memory.oom_control` for version 1. So a worker ran out of
memory if SIGKILL ended it just after its group counted a kill.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.shm.host_limits import CONTROL_GROUPS, control_groups, named_number, read_file

if TYPE_CHECKING:
    from collections.abc import Mapping

OUT_OF_MEMORY = "out of memory (kernel)"
_COUNTERS = {2: "memory.events", 1: "memory.oom_control"}
# between the count and the end of a large process, whose memory the system takes back first
_RECENT_S = 10.0
_SIGKILL = 9


class OutOfMemory:
    """The kills that the groups of the workers have counted.

    Args:
        now: The time in seconds of a monotonic clock.
        root: The mount point of the control groups.
    """

    def __init__(self, now: float, root: str = CONTROL_GROUPS) -> None:
        self._root = root
        self._files: dict[bytes, str] = {}  # by what a process says of its groups
        self._of_rank: dict[int, str] = {}
        self._counted: dict[str, int] = {}
        self._unexplained: dict[str, list[float]] = {}
        self._count(
            self._file(read_file("/proc/self/cgroup")), now
        )  # workers begin in the launcher's own group

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
        self._counted[file] = max(
            count, self._counted.get(file, 0)
        )  # a group that has been removed reads as 0
        self._unexplained.setdefault(file, []).extend([now] * max(0, risen))
