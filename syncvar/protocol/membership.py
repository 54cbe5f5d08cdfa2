"""The handshake of one version of the membership, as a pure state machine.

Each worker joins with its address. When all have joined, the coordinator sends everyone all
addresses. `now` is seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from syncvar.core.process_ids import rank_list
from syncvar.protocol.compatibility import compare_abouts


class Member(NamedTuple):
    """A rank that has joined."""

    rank: int
    address: str
    host: str
    pid: int
    about: dict[str, Any]

    @property
    def host_index(self) -> int:
        """Index of the rank's host; -1 if the rank sent none that is valid."""
        index = self.about.get("host_index", 0)
        return index if isinstance(index, int) else -1

    @property
    def outside(self) -> str:
        """Address for ranks on other hosts; empty if it listens to none."""
        return str(self.about.get("outside", ""))

    def address_for(self, other: Member) -> str:
        """Return the address at which another rank reaches this one."""
        return self.address if other.host_index == self.host_index else self.outside


@dataclass(slots=True)
class RollCall:
    """Handshake of all ranks.

    Args:
        world_size: Ranks that must join.
        generation: Version of the membership.
        timeout_s: Longest time from the first join to the last, in seconds.
        interval_s: Interval of the messages that name missing ranks, in seconds.
    """

    world_size: int
    generation: int
    timeout_s: float
    interval_s: float
    members: dict[int, Member] = field(default_factory=dict)
    began: float | None = None
    named: float = 0.0
    failed: str = ""
    # Ranks that ended before they joined, each with the way it ended.
    absent: dict[int, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every rank has joined and their installations fit together."""
        return len(self.members) == self.world_size and not self.failed

    def compare(self) -> str:
        """Compare the installations of all ranks once they have joined.

        The handshake fails if they cannot work together.

        Returns:
            A warning about smaller differences, or an empty text.
        """
        self.failed, warning = compare_abouts(
            {rank: member.about for rank, member in self.members.items()}
        )
        return "" if self.failed else warning

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank in range(self.world_size) if rank not in self.members]

    def join(self, member: Member, now: float) -> str:
        """Add a rank; return the reason if it is refused, else an empty text."""
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
                        return (
                            f"rank {one.rank} listens to no other host, and the job has several. "
                            "Set SYNCVAR_HOST_ADDRESS on its host"
                        )
        if self.began is None:
            self.began = self.named = now
        self.members[member.rank] = member
        return ""

    def tick(self, now: float) -> tuple[str, str]:
        """Return (sentence to show or "", reason of failure or "") at time `now`."""
        if self.began is None or self.is_complete or self.failed:
            return "", ""
        if self.absent:
            self.failed = self._missing_forever()
            return "", self.failed
        waited = now - self.began
        absent = rank_list(self.missing())
        joined = f"{len(self.members)} of {self.world_size}"
        if waited >= self.timeout_s:
            self.failed = (
                f"{absent} did not join within {waited:.0f} s (joined: {joined}); "
                f"does every rank reach sv.init() or its first collective?"
            )
            return "", self.failed
        if now - self.named >= self.interval_s:
            self.named = now
            return f"still waiting for {absent} to join after {waited:.0f} s (joined: {joined})", ""
        return "", ""

    def ended(self, rank: int, how: str) -> str:
        """Record that a rank ended before it joined.

        Returns:
            The reason of failure if others are waiting for it, else an empty text.
        """
        if rank in self.members or self.failed:
            return ""
        self.absent[rank] = how
        if self.members:  # otherwise the first rank that joins learns it from `tick`
            self.failed = self._missing_forever()
        return self.failed

    def _missing_forever(self) -> str:
        rank, how = next(iter(self.absent.items()))
        return f"rank {rank} {how} without joining, while {rank_list(self.members)} waited for it"
