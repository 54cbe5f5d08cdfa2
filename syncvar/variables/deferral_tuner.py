"""AUTO's tuner: are increments of a variable sent at once (eager) or queued (deferred)?

Eager, each increment is one all-reduce. Deferred increments travel together at the end of a run, or
before a read of the variable or another kind of write (a *break*). Deferring pays where many
increments come between two breaks. The rule, `choose`, is a pure function of counters that all
replicas have agreed on, so all replicas change at the same point. The registry calls the tuner,
and keeps the log of its decisions.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncvar.variables.variable_owner import VariableOwner
    from syncvar.variables.variable_state import RegistryEntry, VariableState

NEVER = 1 << 62
IDLE_RUNS = 20  # between two decisions while nothing is incremented
_MANY = 4  # with more variables than this, decisions are half as frequent: each costs 2 us more
_WORTH = 0.8  # a change must cost at most this part of staying
_BEARABLE = 1.25  # the present mode may cost up to this multiple of the other one
_BACKOFF_MIN, _BACKOFF_MAX = 4, 64


class Costs(NamedTuple):
    """Costs of one path: runs between decisions, then microseconds, and nanoseconds a byte."""

    runs: int  # at most half of the 20 runs within which a change must be answered
    eager_us: float
    eager_ns: float
    queued_us: float
    queued_ns: float
    send_us: float

    def eager(self, increments: int, nbytes: int) -> float:
        """Return the microseconds of increments that are sent one by one."""
        return increments * (self.eager_us + self.eager_ns * nbytes / 1000)

    def queued(self, increments: int, nbytes: int) -> float:
        """Return the microseconds of queueing increments, without sending the queue."""
        return increments * (self.queued_us + self.queued_ns * nbytes / 1000)

    @property
    def may_pay(self) -> bool:
        """Whether deferring could pay at all on this path, if sending the queue were free."""
        return self.queued_us <= _WORTH * self.eager_us or self.queued_ns <= _WORTH * self.eager_ns


# By (path, reproducible): medians of two ranks on two cores, one write after the other. Only the
# ratios count. Reproducible increments are queued one by one instead of summed, which costs more.
COSTS = {
    ("shm", False): Costs(5, 4.3, 0.3, 4.4, 2.0, 105.0),
    ("shm", True): Costs(5, 4.3, 0.3, 8.0, 5.0, 105.0),
    ("links", False): Costs(10, 150.0, 3.5, 10.0, 3.0, 215.0),
    ("links", True): Costs(10, 150.0, 3.5, 14.0, 9.0, 215.0),
}


class SampleWindow(NamedTuple):
    """Counters of a variable since the last decision; of each the largest on any replica."""

    nbytes: int
    is_deferred: bool
    increments: int
    breaks: int  # reads after an increment, and other writes: each flushes the queue


class Hysteresis(NamedTuple):
    """Back-off after deferring did not pay as predicted, because other calls flush the queue."""

    length: int = 0  # decisions that it lasts; doubled each time
    left: int = 0


class DeferralDecision(NamedTuple):
    """Whether a variable is deferred until the next decision, and why."""

    is_deferred: bool
    reason: str


class ProgramPoint(NamedTuple):
    """A point of decision: the end of a run, or an increment of the variable `of` ("write")."""

    at: str
    step: int
    of: str = ""


class DeferralChange(NamedTuple):
    """A change of one variable between eager and deferred."""

    point: ProgramPoint
    variable: str
    before: str
    after: str
    reason: str


def period(costs: Costs, variables: int, *, is_idle: bool) -> int:
    """Return the number of runs until the next decision."""
    if is_idle:
        return IDLE_RUNS
    return min(costs.runs * (2 if variables > _MANY else 1), IDLE_RUNS // 2)


def choose(
    windows: Sequence[SampleWindow],
    runs: int,
    sends: int,
    backoff: Hysteresis,
    costs: Costs,
    bucket_bytes: int = 1 << 20,
) -> tuple[list[DeferralDecision], Hysteresis]:
    """Return the decision for each variable and the new back-off.

    A variable that breaks too often stays eager, because it would flush the increments of the
    others. The remaining variables share the cost of sending, so they are deferred together or not
    at all.

    Example:
        >>> busy, mixed = SampleWindow(4, False, 400, 4), SampleWindow(4, False, 40, 40)
        >>> choices, _ = choose([busy, mixed], 4, 0, Hysteresis(), COSTS["links", False])
        >>> [choice.is_deferred for choice in choices]
        [True, False]
    """
    refusals = [_refusal(one, costs) for one in windows]
    pairs = list(zip(windows, refusals, strict=True))
    chosen = [one for one, refusal in pairs if one.increments and not refusal]
    since = f" in {runs} runs" if runs else ""
    shared, backoff = _shared_decision(chosen, runs, sends, backoff, costs, bucket_bytes)
    return [_own_decision(one, refusal, since) or shared for one, refusal in pairs], backoff


def _shared_decision(
    chosen: list[SampleWindow],
    runs: int,
    sends: int,
    backoff: Hysteresis,
    costs: Costs,
    bucket_bytes: int,
) -> tuple[DeferralDecision, Hysteresis]:
    """Return the decision about the variables that share the cost of sending."""
    increments = sum(one.increments for one in chosen)
    breaks = sum(min(one.breaks, one.increments) for one in chosen)
    nbytes = sum(one.increments * one.nbytes for one in chosen)
    now = sum(costs.eager(one.increments, one.nbytes) for one in chosen)
    queued = sum(costs.queued(one.increments, one.nbytes) for one in chosen)
    are_deferred = bool(chosen) and all(one.is_deferred for one in chosen)
    expected = max(min(max(runs, 1), increments) + breaks, nbytes // bucket_bytes)
    late = queued + costs.send_us * (max(sends, 1) if are_deferred else expected)
    is_worth = late <= now * (_BEARABLE if are_deferred else _WORTH)
    text = f"{increments} increments of {len(chosen)} variables"
    text += f" in {runs} runs" if runs else ""
    estimate = f"{late:.0f} us deferred, {now:.0f} us eager"
    if are_deferred and is_worth:
        backoff = Hysteresis()
    elif are_deferred and queued + costs.send_us * expected <= now * _WORTH:
        length = min(max(backoff.length * 2, _BACKOFF_MIN), _BACKOFF_MAX)
        backoff = Hysteresis(length, length)
        text += f", sent {sends} times because of other calls"
    elif chosen and is_worth and backoff.left:
        backoff = backoff._replace(left=backoff.left - 1)
        is_worth = False
        estimate += (
            f"; not tried for {backoff.left} more decisions, because other calls have sent the "
            "queue"
        )
    return DeferralDecision(is_worth, f"{text}: {estimate}"), backoff


def _refusal(one: SampleWindow, costs: Costs) -> str:
    """Return why deferring a variable does not pay; "" if it may."""
    eager = costs.eager(one.increments, one.nbytes)
    # As if sending at the ends of runs were free.
    least = costs.queued(one.increments, one.nbytes)
    least += costs.send_us * min(one.breaks, one.increments)
    if least <= (_BEARABLE if one.is_deferred else _WORTH) * eager:
        return ""
    return f"at least {least:.0f} us deferred, {eager:.0f} us eager"


def _own_decision(one: SampleWindow, refusal: str, since: str) -> DeferralDecision | None:
    """Return the decision about a variable that is not deferred together with the others."""
    if not one.increments:
        return DeferralDecision(one.is_deferred, "nothing was added")
    if not refusal:
        return None
    counts = f"{one.increments} increments, {one.breaks} reads or other writes after one"
    reason = f"{counts}{since}: waiting does not pay ({refusal})"
    return DeferralDecision(is_deferred=False, reason=reason)


class DecisionLog(Protocol):
    """The log of AUTO's decisions, as `DeferralLog` implements it."""

    replay_path: str  # of recorded decisions to repeat, or empty

    def append(self, changes: list[DeferralChange]) -> None:
        """Record changes."""

    def read(self) -> dict[ProgramPoint, list[tuple[str, str]]]:
        """Return the recorded changes, (variable, pace), by point. Collective."""


class DeferralTuner:
    """Decides for the AUTO variables of one strategy, or repeats recorded decisions."""

    def __init__(
        self, owner: VariableOwner, entries: Mapping[str, RegistryEntry], log: DecisionLog
    ) -> None:
        self._owner, self._entries, self._log = weakref.ref(owner), entries, log
        self.is_replaying = bool(log.replay_path)
        self.next_run = NEVER  # the run at whose end the next decision is made
        self._last_run = self._sends = 0  # at the last decision: the run, and sends of the queue
        self._seen_sends = 0
        self._backoff = Hysteresis()
        self._replay: dict[ProgramPoint, list[tuple[str, str]]] | None = None

    @property
    def _costs(self) -> Costs:
        owner = self._owner()
        assert owner is not None
        return COSTS["links" if owner.communicator.channel is None else "shm", owner.reproducible]

    @property
    def may_defer(self) -> bool:
        """Whether AUTO defers increments at all on this path."""
        return self._costs.may_pay

    @property
    def has_candidates(self) -> bool:
        """Whether there is a variable to decide about."""
        return self.may_defer and any(entry.is_open for entry in self._entries.values())

    def schedule(self, runs: int) -> None:
        """Plan a decision soon; called before there is one more variable to decide about."""
        if self._replay is not None or not (self.is_replaying or self.may_defer):
            return
        # A replica that leaves a run by an exception does not reach its end. So a decision that is
        # due while there are no candidates stays due until there is another variable.
        due = self.next_run if self.has_candidates else NEVER
        self.next_run = min(due, runs + (1 if self.is_replaying else self._costs.runs))

    def sends_since(self, queue: Any) -> int:
        """Return how often a queue was sent since the last decision."""
        self._seen_sends = 0 if queue is None else queue.sends
        return self._seen_sends - self._sends

    def decide(
        self,
        point: ProgramPoint,
        runs: int,
        samples: Sequence[tuple[VariableState, SampleWindow]],
        sends: int,
    ) -> None:
        """Decide, and change the variables; the arguments are the same on all replicas."""
        self._sends = self._seen_sends
        windows = [window for _, window in samples]
        is_idle = not any(window.increments for window in windows)
        passed, self._last_run = runs - self._last_run, runs
        self.next_run = runs + period(self._costs, len(windows), is_idle=is_idle)
        if is_idle:
            return
        choices, self._backoff = choose(windows, passed, sends, self._backoff, self._costs)
        changes = []
        for (state, _), choice in zip(samples, choices, strict=True):
            if choice.is_deferred == state.is_deferred:
                state.decided = point.step, choice.reason
                continue
            before, after = ("eager", "deferred") if choice.is_deferred else ("deferred", "eager")
            state.change_pace(after, point.step, choice.reason)
            changes.append(DeferralChange(point, state.name, before, after, choice.reason))
        self._log.append(changes)

    def replay(self, point: ProgramPoint, runs: int) -> None:
        """Repeat the changes that were recorded for a point of the program."""
        if self._replay is None:
            self._replay = self._log.read()
        for name, pace in self._replay.get(point, ()):
            entry = self._entries.get(name)
            state = None if entry is None or entry.is_pinned else entry.state()
            if state is not None and state.is_deferred != (pace == "deferred"):
                state.change_pace(pace, point.step, "replayed")
        later: Iterable[int] = (p.step for p in self._replay if p.at == "run" and p.step > runs)
        self.next_run = min(later, default=NEVER)
