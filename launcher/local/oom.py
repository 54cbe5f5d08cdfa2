"""Whether the system killed a worker because memory ran out: the counters of its control group.

Such a kill is a plain SIGKILL to whoever looks at the process. The group that it belonged to counts it before the
signal is sent: "oom_kill" in `memory.events`, or in `memory.oom_control` where groups are those of version 1. So a
worker that SIGKILL ended, and whose group has counted a kill a moment before, ran out of memory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncvar.shm.host_limits import CONTROL_GROUPS, control_groups, field_of, read_file

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
        now: Seconds of a monotonic clock.
        root: Where the control groups are mounted.
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
        """Note in which group each worker is, and what the groups have counted.

        Args:
            pids: Rank -> process.
            now: Seconds.
        """
        for rank, pid in pids.items():
            self.belongs(rank, read_file(f"/proc/{pid}/cgroup"))
        for file in {*self._of_rank.values()}:
            self._count(file, now)

    def belongs(self, rank: int, membership: bytes) -> None:
        """Note what a worker's process says of its groups; nothing where it has ended.

        While it ends, version 1 says that it is in the root, so a group above the one that is known is not believed.
        """
        if membership:
            file, known = self._file(membership), self._of_rank.get(rank, "")
            if not (known and known.startswith(f"{os.path.dirname(file)}/")):  # noqa: PTH120
                self._of_rank[rank] = file

    def ended(self, rank: int, status: int, now: float) -> str:
        """Return "out of memory (kernel)" for a worker that was killed for that, else an empty text.

        Args:
            rank: Which one.
            status: Exit code, or minus the signal.
            now: Seconds.
        """
        file = self._of_rank.pop(rank, "") or self._file(read_file("/proc/self/cgroup"))
        if status != -_SIGKILL:
            return ""
        self._count(file, now)
        kills = [at for at in self._unexplained.get(file, []) if now - at <= _RECENT_S]
        self._unexplained[file] = kills[1:]  # each kill explains one end
        return OUT_OF_MEMORY if kills else ""

    def _file(self, membership: bytes) -> str:
        """Return the counter's file of the innermost group that has one; empty where none has."""
        if membership not in self._files:
            groups = control_groups("memory", membership.decode(errors="replace"), self._root)
            files = [f"{folder}/{_COUNTERS[version]}" for version, folder in groups]
            self._files[membership] = next((file for file in files if os.path.exists(file)), "")  # noqa: PTH110
        return self._files[membership]

    def _count(self, file: str, now: float) -> None:
        if not file:
            return
        count = field_of(read_file(file), b"oom_kill")
        risen = count - self._counted.get(file, count)
        self._counted[file] = max(
            count, self._counted.get(file, 0)
        )  # a group that has been removed reads as 0
        self._unexplained.setdefault(file, []).extend([now] * max(0, risen))
