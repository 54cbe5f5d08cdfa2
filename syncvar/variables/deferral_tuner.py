"""AUTO's tuner: are increments of a variable sent at once (eager) or queued (deferred)?

Eager, each increment is one all-reduce. Deferred increments travel together at the end of a run, or
before a read of the variable or another kind of write (a *break*). Deferring pays where many
increments come between two breaks. The rule, `choose`, is a pure function of counters that all
replicas have agreed on, so all replicas change at the same point. The registry calls the tuner;
`deferral_log` records and replays.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.collectives.stage_builders import gather_objects
from syncvar.core.errors import ConfigError
from syncvar.core.output_files import (
    AUTO_LOG,
    REQUESTED,
    LostFile,
    check_file,
    report_lost_file,
    write_error_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncvar.variables.variable_owner import VariableOwner
    from syncvar.variables.variable_state import RegistryEntry, VariableState


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
    why: str


def append_changes(
    path: str, strategy: int, changes: list[DeferralChange], *, begins: bool
) -> bool:
    """Append changes to a log of JSON lines, and return whether that succeeded."""
    key = f"{strategy:016x}"
    lines: list[dict[str, Any]] = [{"strategy": key, "begins": True}] if begins else []
    for (at, step, of), name, before, after, why in changes:
        place = {"strategy": key, "at": at, "step": step, "of": of, "variable": name}
        lines.append(place | {"from": before, "to": after, "why": why})
    rest = "".join(json.dumps(line) + "\n" for line in lines).encode()
    if not rest:
        return True
    try:  # one write to the end of the file, because several groups may share it
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, REQUESTED)
        try:
            while rest:  # a full disk takes a part, and raises the error for the next one
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        report_lost_file(LostFile(path, AUTO_LOG, write_error_text(error)))
        return False
    return True


def read_changes(path: str, strategy: int) -> list[tuple[str, int, str, str, str]]:
    """Return a strategy's changes in the last job of a log: (at, step, of, variable, pace)."""
    key = f"{strategy:016x}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"auto_replay={path!r} cannot be read: {error}. Name a file that SYNCVAR_AUTO_LOG has "
            "made"
        ) from error
    found: list[tuple[str, int, str, str, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            if one["strategy"] != key:
                continue
            if one.get("begins"):
                found.clear()
                continue
            record = one["at"], one["step"], str(one["of"]), one["variable"], one["to"]
            at, step, _, variable, pace = record
            is_known = at in ("run", "write") and pace in ("eager", "deferred")
            if not is_known or type(step) is not int or not isinstance(variable, str):
                raise ValueError(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"auto_replay={path!r}: line {number} is no decision of AUTO: {line:.80}"
            ) from error
        found.append(record)
    return found


NEVER = 1 << 62
IDLE_RUNS = 20  # between two decisions while nothing is incremented
_MANY = 4  # with more variables than this, decisions are half as frequent: each costs 2 us more
_WORTH = 0.8  # a change must cost at most this part of staying
_BEARABLE = 1.25  # the present mode may cost up to this multiple of the other one
_BAR_MIN, _BAR_MAX = 4, 64
_log = logging.getLogger("syncvar")


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
# ratios
# count. Reproducible increments are queued one by one instead of summed, which costs more.
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
    why: str


def period(costs: Costs, variables: int, *, is_idle: bool) -> int:
    """Return the number of runs until the next decision."""
    if is_idle:
        return IDLE_RUNS
    return min(costs.runs * (2 if variables > _MANY else 1), IDLE_RUNS // 2)


def choose(
    windows: Sequence[SampleWindow],
    runs: int,
    sends: int,
    bar: Hysteresis,
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
    refusals: list[str] = []  # by variable, why deferring it does not pay; "" if it may
    chosen = total = filled = breaks = 0
    now = queued = 0.0
    are_deferred = True
    for one in windows:
        eager = costs.eager(one.increments, one.nbytes)
        waiting = costs.queued(one.increments, one.nbytes)
        own_breaks = min(one.breaks, one.increments)
        limit = _BEARABLE if one.is_deferred else _WORTH
        least = waiting + costs.send_us * own_breaks  # as if sending at the ends of runs were free
        is_worth = least <= limit * eager
        refusals.append(
            "" if is_worth else f"at least {least:.0f} us deferred, {eager:.0f} us eager"
        )
        if is_worth and one.increments:
            chosen += 1
            total += one.increments
            filled += one.increments * one.nbytes
            breaks += own_breaks
            now += eager
            queued += waiting
            are_deferred = are_deferred and one.is_deferred
    are_deferred = are_deferred and chosen > 0
    expected = max(min(max(runs, 1), total) + breaks, filled // bucket_bytes)
    late = queued + costs.send_us * (max(sends, 1) if are_deferred else expected)
    is_worth = late <= now * (_BEARABLE if are_deferred else _WORTH)
    since = f" in {runs} runs" if runs else ""
    because = f"{total} increments of {chosen} variables{since}"
    estimate = f"{late:.0f} us deferred, {now:.0f} us eager"
    if are_deferred:
        if is_worth:
            bar = Hysteresis()
        elif queued + costs.send_us * expected <= now * _WORTH:
            length = min(max(bar.length * 2, _BAR_MIN), _BAR_MAX)
            bar = Hysteresis(length, length)
            because += f", sent {sends} times because of other calls"
    elif chosen and is_worth and bar.left:
        bar = bar._replace(left=bar.left - 1)
        is_worth = False
        estimate += (
            f"; not tried for {bar.left} more decisions, because other calls have sent the queue"
        )
    shared = DeferralDecision(is_worth, f"{because}: {estimate}")
    choices = [shared] * len(windows)
    for place, (one, refusal) in enumerate(zip(windows, refusals, strict=True)):
        if not one.increments:
            choices[place] = DeferralDecision(one.is_deferred, "nothing was added")
        elif refusal:
            counts = f"{one.increments} increments, {one.breaks} reads or other writes after one"
            reason = f"{counts}{since}: waiting does not pay ({refusal})"
            choices[place] = DeferralDecision(is_deferred=False, why=reason)
    return choices, bar


class DeferralTuner:
    """Decides for the AUTO variables of one strategy, and records or replays the decisions."""

    def __init__(self, owner: VariableOwner, entries: Mapping[str, RegistryEntry]) -> None:
        self._owner, self._entries = weakref.ref(owner), entries
        self.next_run = NEVER  # the run at whose end the next decision is made
        self._last_run = self._sends = 0  # at the last decision: the run, and sends of the queue
        self._seen_sends = 0
        self._bar = Hysteresis()
        config = owner.context.config
        self._log_path, self.replay_path = config.auto_log, config.auto_replay
        self._replay: dict[ProgramPoint, list[tuple[str, str]]] | None = None
        self._has_logged = False
        self._is_logging = bool(self._log_path) and owner.communicator.member_rank == 0
        if self._is_logging:
            check_file(self._log_path, AUTO_LOG)

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
        if self._replay is not None or not (self.replay_path or self.may_defer):
            return
        # A replica that leaves a run by an exception does not reach its end. So a decision that is
        # due
        # while there are no candidates stays due until there is another variable.
        due = self.next_run if self.has_candidates else NEVER
        self.next_run = min(due, runs + (1 if self.replay_path else self._costs.runs))

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
        owner = self._owner()
        assert owner is not None
        self._sends = self._seen_sends
        windows = [window for _, window in samples]
        is_idle = not any(window.increments for window in windows)
        passed, self._last_run = runs - self._last_run, runs
        self.next_run = runs + period(self._costs, len(windows), is_idle=is_idle)
        if is_idle:
            return
        choices, self._bar = choose(windows, passed, sends, self._bar, self._costs)
        changes = []
        for (state, _), choice in zip(samples, choices, strict=True):
            if choice.is_deferred == state.is_deferred:
                state.decided = point.step, choice.why
                continue
            before, after = ("eager", "deferred") if choice.is_deferred else ("deferred", "eager")
            state.change_pace(after, point.step, choice.why)
            changes.append(DeferralChange(point, state.name, before, after, choice.why))
        if owner.communicator.member_rank == 0:
            self._record(changes, owner.communicator.identity)

    def _record(self, changes: list[DeferralChange], identity: int) -> None:
        for (at, step, _), *change in changes:
            _log.info("AUTO, %s %d: variable %r %s -> %s: %s", at, step, *change)
        if self._is_logging:  # stops after a failure: a log with a hole would mislead a replay
            begins = not self._has_logged
            self._is_logging = append_changes(self._log_path, identity, changes, begins=begins)
            self._has_logged = True

    def replay(self, point: ProgramPoint, runs: int) -> None:
        """Repeat the changes that were recorded for a point of the program."""
        if self._replay is None:
            self._replay = self._read_replay()
        for name, pace in self._replay.get(point, ()):
            entry = self._entries.get(name)
            state = None if entry is None or entry.is_pinned else entry.state()
            if state is not None and state.is_deferred != (pace == "deferred"):
                state.change_pace(pace, point.step, "replayed")
        later: Iterable[int] = (p.step for p in self._replay if p.at == "run" and p.step > runs)
        self.next_run = min(later, default=NEVER)

    def _read_replay(self) -> dict[ProgramPoint, list[tuple[str, str]]]:
        owner = self._owner()
        assert owner is not None
        communicator = owner.communicator

        def mine() -> Any:
            is_first = communicator.member_rank == 0
            return read_changes(self.replay_path, communicator.identity) if is_first else []

        what = "recorded decisions of AUTO"
        rows = gather_objects(communicator, what, mine, owner.timeout)[0]
        found: dict[ProgramPoint, list[tuple[str, str]]] = {}
        for at, step, of, name, pace in rows:
            found.setdefault(ProgramPoint(at, step, of), []).append((name, pace))
        return found
