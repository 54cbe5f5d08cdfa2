"""The roll call as a pure machine: who has joined, who is missing, and what to tell whom.

A worker joins with its address; when all have joined, everyone gets the roll. Time comes in as `now` (seconds of any
monotonic clock), so the machine runs in tests without a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from syncvar.core.rank_text import rank_list
from syncvar.protocol.compatibility import differences


class Member(NamedTuple):
    """A rank that has joined."""

    rank: int
    address: str
    host: str
    pid: int
    about: dict[str, Any]

    @property
    def host_index(self) -> int:
        """Which host it is on."""
        index = self.about.get("host_index", 0)
        return index if isinstance(index, int) else -1

    @property
    def outside(self) -> str:
        """Where other hosts reach it; empty where they do not."""
        return str(self.about.get("outside", ""))

    def address_for(self, other: Member) -> str:
        """Return where another rank reaches this one."""
        return self.address if other.host_index == self.host_index else self.outside


@dataclass(slots=True)
class RollCall:
    """The meeting of one generation.

    Args:
        world_size: Ranks that must join.
        generation: Version of the membership.
        timeout_s: Longest time from the first join to the last, in seconds.
        interval_s: How often the missing ranks are named, in seconds.
    """

    world_size: int
    generation: int
    timeout_s: float
    interval_s: float
    members: dict[int, Member] = field(default_factory=dict)
    began: float | None = None
    named: float = 0.0
    failed: str = ""
    absent: dict[int, str] = field(
        default_factory=dict
    )  # ranks that ended before they joined, and how

    @property
    def is_complete(self) -> bool:
        """Whether every rank has joined, and they can work together."""
        return len(self.members) == self.world_size and not self.failed

    def compare(self) -> str:
        """Compare what the ranks tell of themselves, all of which have joined; the roll call fails where they cannot work together.

        Returns:
            What to warn of, in one sentence, or an empty text.
        """
        self.failed, warning = differences(
            {rank: member.about for rank, member in self.members.items()}
        )
        return "" if self.failed else warning

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank in range(self.world_size) if rank not in self.members]

    def join(self, member: Member, now: float) -> str:
        """Take a rank in.

        Returns:
            An empty text, or the reason why the rank is refused.
        """
        if self.failed:
            return self.failed
        if not 0 <= member.rank < self.world_size:
            return f"rank {member.rank} is outside a world of {self.world_size}"
        present = self.members.get(member.rank)
        if present is not None:
            return f"rank {member.rank} is already taken by process {present.pid} on {present.host}"
        for other in self.members.values():
            if other.host_index != member.host_index:
                for one in (member, other):
                    if not one.outside:
                        return f"rank {one.rank} listens to no other host, and there are several (SYNCVAR_HOST_ADDRESS)"
        if self.began is None:
            self.began = self.named = now
        self.members[member.rank] = member
        return ""

    def tick(self, now: float) -> tuple[str, str]:
        """Look at the clock.

        Returns:
            (sentence to show or "", reason of failure or "").
        """
        if self.began is None or self.is_complete or self.failed:
            return "", ""
        if self.absent:
            self.failed = self._nobody_comes()
            return "", self.failed
        waited = now - self.began
        absent = rank_list(self.missing())
        if waited >= self.timeout_s:
            self.failed = (
                f"{absent} did not join within {waited:.0f} s (joined: {len(self.members)} of {self.world_size}); "
                f"does every rank reach sv.init() or its first collective?"
            )
            return "", self.failed
        if now - self.named >= self.interval_s:
            self.named = now
            return (
                f"waiting for {absent} to join since {waited:.0f} s ({len(self.members)} of {self.world_size} are here)",
                "",
            )
        return "", ""

    def ended(self, rank: int, how: str) -> str:
        """Note that a rank ended before it joined.

        Returns:
            The reason of failure when others are waiting for it, else an empty text.
        """
        if rank in self.members or self.failed:
            return ""
        self.absent[rank] = how
        if self.members:  # else whoever comes first is told
            self.failed = self._nobody_comes()
        return self.failed

    def _nobody_comes(self) -> str:
        rank, how = next(iter(self.absent.items()))
        return f"rank {rank} {how} without joining, while {rank_list(self.members)} waited for it"
