"""Why a variable behaves as it does, for people."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Explanation"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `Variable.explain()` returns.

    Args:
        mode: The synchronization in force; of an AUTO variable with the pace that was chosen, or pinned.
        requested: What the program asked for.
        rule: Why.
        numbers: Counters of this replica: replicas, reads, writes, collectives, nbytes (of the value). Where AUTO may
            defer, also increments (writes that can wait), turns (reads that came after one) and pending (that wait now).
        changes: (step, from, to, why) of each change of pace. The step is the number of the strategy's run at whose end
            (pin: after which) it changed; outside every scope that of the variable's increment (pin: write).
        reason: Of an AUTO variable, why its pace is what it is now: what AUTO decided last, when, and from which numbers, also
            where it changed nothing; or why there is nothing to decide.
    """

    mode: str
    requested: str
    rule: str
    numbers: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[int, str, str, str]] = field(default_factory=list)
    reason: str = ""

    def __str__(self) -> str:
        lines = [
            f"mode {self.mode}, requested {self.requested}",
            f"rule: {self.rule}",
            "numbers: " + ", ".join(f"{name} {value}" for name, value in self.numbers.items()),
        ]
        lines += [
            f"step {step}: {before} -> {after}, {why}" for step, before, after, why in self.changes
        ]
        lines += [f"now: {self.reason}"] if self.reason else []
        return "\n".join(lines)
