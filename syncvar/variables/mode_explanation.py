"""Why a variable behaves as it does, for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncvar.variables.policy import VariableSynchronization

if TYPE_CHECKING:
    from syncvar.variables.variable_state import VariableState


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `Variable.explain()` returns.

    Args:
        mode: The synchronization in force; of an AUTO variable with the pace that was chosen, or
            pinned.
        requested: What the program asked for.
        rule: Why.
        numbers: Counters of this replica: replicas, reads, writes, collectives, nbytes (of the
            value). Where AUTO may defer, also increments (writes that can wait), turns (reads that
            came after one) and pending (that wait now).
        changes: (step, from, to, why) of each change of pace. The step is the number of the
            strategy's run at whose end (pin: after which) it changed; outside every scope that of
            the variable's increment (pin: write).
        reason: Of an AUTO variable, why its pace is what it is now: what AUTO decided last, when,
            and from which numbers, also where it changed nothing; or why there is nothing to
            decide.
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


def explain(state: VariableState) -> Explanation:
    """Return the explanation of a variable whose copy is in this process."""
    tally = state.tally
    numbers = {
        "replicas": state.replicas,
        "reads": tally.reads,
        "writes": tally.writes,
        "collectives": tally.collectives,
        "nbytes": state.storage.view.nbytes,
    }
    if state.is_counted:
        pending = 0 if state.queue is None else state.queue.waiting(state)
        numbers |= {"increments": tally.added, "turns": tally.turns, "pending": pending}
    mode, reason = state.synchronization.name, ""
    if state.requested is VariableSynchronization.AUTO:
        mode += f" ({state.pace}{', pinned' if state.is_pinned else ''})"
        reason = f"{state.pace}: {_deferral_reason(state)}"
    return Explanation(mode, state.requested.name, state.rule, numbers, list(state.changes), reason)


def _deferral_reason(state: VariableState) -> str:
    """Return why an AUTO variable is eager or deferred now."""
    if state.replicas == 1:
        return "with one replica nothing has to travel"
    if state.is_pinned:
        return f"v.pin({state.pace!r}) fixes it"
    if not state.is_counted:
        return (
            f"{state.dtype.name} with aggregation {state.aggregation.name} has no increments that "
            "could wait"
        )
    if state.decided is not None:
        return "decided at step {}: {}".format(*state.decided)
    owner = state.owner
    if not owner.context.is_closed and owner.registry is not None and not owner.registry.may_defer:
        return "in shared memory an increment is sent in less time than it takes to let it wait"
    return (
        "nothing was decided yet; AUTO looks at the ends of every few runs, outside every scope "
        "at every 64th increment"
    )
