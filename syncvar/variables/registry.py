"""The registry of a strategy's replicated variables, and what the replicas agree on about them.

It holds weak references. The strategy calls it at the ends of runs; outside runs, the variables
call it before and after writes. `CheckSchedule` says which copies are compared then, and
`DeferralTuner` which increments are deferred. The registry makes the one small all-reduce that both
need. That all-reduce also agrees which variables still exist, since garbage is collected at
different times on the replicas.

`DeferralLog` writes the tuner's decisions to a file, and reads them to repeat them. `resynchronize`
gives all replicas the same values at the end of `sv.uneven`.

With one replica there is no registry.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native import CheckGate
from syncvar._native.constants import WRITES_PER_DECISION
from syncvar.collectives.all_reduce import agree
from syncvar.collectives.broadcast import BroadcastCall
from syncvar.collectives.stage_builders import gather_objects
from syncvar.core.errors import ConfigError, MismatchError
from syncvar.core.output_files import (
    AUTO_LOG,
    REQUESTED,
    LostFile,
    check_file,
    report_lost_file,
    write_error_text,
)
from syncvar.variables.deferral_tuner import (
    DeferralChange,
    DeferralTuner,
    ProgramPoint,
    SampleWindow,
)
from syncvar.variables.replica_check import CheckSchedule, compare
from syncvar.variables.variable_state import RegistryEntry

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from syncvar._native import VariableCounters
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.variable_owner import VariableOwner
    from syncvar.variables.variable_state import VariableState

_AT_ONCE = -1
_MISSING_MAX = 16  # names of variables that no longer exist, in each creation of another one
_AGREEMENT = "counters of AUTO variables, and which variables still exist"
_REPLAY = "recorded decisions of AUTO"
_RESYNC = "values of variables after sv.uneven"
_TOGETHER_BYTES = 16 << 20
_log = logging.getLogger("syncvar")


class DeferralLog:
    """The log of AUTO's decisions of one strategy, to read and to replay."""

    def __init__(self, owner: VariableOwner) -> None:
        self._owner = weakref.ref(owner)
        config = owner.context.config
        self._path, self.replay_path = config.auto_log, config.auto_replay
        self._has_started = False
        self._is_writing = bool(self._path) and owner.communicator.member_rank == 0
        if self._is_writing:
            check_file(self._path, AUTO_LOG)

    @property
    def _communicator(self) -> Communicator:
        owner = self._owner()
        assert owner is not None
        return owner.communicator

    def append(self, changes: list[DeferralChange]) -> None:
        """Record changes; the first replica does so."""
        communicator = self._communicator
        if communicator.member_rank != 0:
            return
        for (at, step, _), *change in changes:
            _log.info("AUTO, %s %d: variable %r %s -> %s: %s", at, step, *change)
        if self._is_writing:  # stops after a failure: a log with a hole would mislead a replay
            begins = not self._has_started
            self._is_writing = append_changes(
                self._path, communicator.identity, changes, begins=begins
            )
            self._has_started = True

    def read(self) -> dict[ProgramPoint, list[tuple[str, str]]]:
        """Return the recorded changes, (variable, pace), by point. Collective."""
        owner, communicator = self._owner(), self._communicator
        assert owner is not None

        def mine() -> Any:
            is_first = communicator.member_rank == 0
            return read_changes(self.replay_path, communicator.identity) if is_first else []

        found: dict[ProgramPoint, list[tuple[str, str]]] = {}
        for *point, name, pace in gather_objects(communicator, _REPLAY, mine, owner.timeout)[0]:
            found.setdefault(ProgramPoint(*point), []).append((name, pace))
        return found


def append_changes(
    path: str, strategy: int, changes: list[DeferralChange], *, begins: bool
) -> bool:
    """Append changes to a log of JSON lines, and return whether that succeeded.

    A line is one change: {"strategy": …, "at": "run", "step": 12, "of": "", "variable": "w",
    "from": "eager", "to": "deferred", "why": …}. A line {"strategy": …, "begins": true} starts the
    record of a strategy, whose identity comes from its ranks and their order.
    """
    key = f"{strategy:016x}"
    lines: list[dict[str, Any]] = [{"strategy": key, "begins": True}] if begins else []
    for (at, step, of), name, before, after, reason in changes:
        place = {"strategy": key, "at": at, "step": step, "of": of, "variable": name}
        lines.append(place | {"from": before, "to": after, "why": reason})
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


class VariableRegistry(CheckGate):
    """The replicated variables of one strategy; C reads `is_free` and `until`."""

    def __init__(self, owner: VariableOwner) -> None:
        self._owner = weakref.ref(owner)
        self.runs = 0  # runs that have begun
        self.entries: dict[str, RegistryEntry] = {}
        self.tuner = DeferralTuner(owner, self.entries, DeferralLog(owner))
        self._schedule = CheckSchedule(self.entries)
        self._numbers = 0
        # Names without a variable, not yet sent to the others.
        self._missing: deque[str] = deque()
        self.is_free = False  # writes are neither counted nor preceded by a comparison
        self.until = _AT_ONCE  # a write outside runs with a larger number may have to be checked
        self._is_running = False
        self._is_paused = False
        self._deferred: list[VariableState] = []  # while paused
        # When it was paused: runs, and increments of each variable.
        self._counted: tuple[int, dict[str, int]] = (0, {})
        self._checks_all = (
            False  # check every write outside runs: a difference may have been reported
        )
        self.writes = 0  # steps outside runs, counted by the variable that is written most often
        self._outside: list[RegistryEntry] = []  # to be compared before the present step
        self._due: set[int] = set()  # entries to be compared in this run
        self._compared: set[int] = set()  # of these, compared before a write
        self._next_due = 0  # no run before this one compares anything; 0 if unknown

    @property
    def owner(self) -> VariableOwner:
        """The strategy."""
        owner = self._owner()
        assert owner is not None  # whoever asks is called by it, or by a variable that refers to it
        return owner

    # -- variables ---------------------------------------------------------------------------------

    def enter(self, name: str, nbytes: int, *, is_auto: bool) -> None:
        """Add a name that all replicas have just agreed on."""
        if is_auto:
            self.tuner.schedule(self.runs)
        self._numbers += 1
        is_outside = self.owner.is_default and not self.runs
        good = f"write {self.writes}" if is_outside else f"run {self.runs}"
        lot = self._schedule.next_lot(nbytes)
        self.entries[name] = RegistryEntry(name, self._numbers, nbytes, lot, good, is_auto=is_auto)
        self.rebuild_schedule()

    def attach(self, state: VariableState) -> RegistryEntry | None:
        """Connect a name with its variable."""
        name, missing = state.name, self._missing
        entry = self.entries.get(name)
        if entry is not None:
            entry.reference = weakref.ref(state, lambda _: missing.append(name))
        return entry

    def pop_missing(self) -> list[str]:
        """Return some names whose variables no longer exist here, each once, to send to all."""
        count = min(len(self._missing), _MISSING_MAX)
        return [self._missing.popleft() for _ in range(count)]

    def forget(self, names: Iterable[str]) -> None:
        """Remove variables that some replica no longer has, on all at the same point."""
        for name in names:
            self.entries.pop(name, None)
        self.rebuild_schedule()

    def rebuild_schedule(self) -> None:
        """Rebuild the schedule: there are other variables, or another `check_every`."""
        self._schedule.invalidate()
        self._next_due = 0
        self.until = _AT_ONCE

    def record_pin(
        self, entry: RegistryEntry, counts: tuple[int, int, int], *, is_pinned: bool
    ) -> None:
        """Record that a program has pinned or released a variable, and its counters."""
        if entry.is_pinned and not is_pinned:
            self.tuner.schedule(self.runs)
        entry.is_pinned = is_pinned
        entry.counted = counts

    @property
    def may_defer(self) -> bool:
        """Whether AUTO defers increments at all on this path."""
        return self.tuner.may_defer

    def living(self) -> dict[str, VariableState]:
        """Return the variables that exist in this process, by name."""
        found = {name: entry.state() for name, entry in self.entries.items()}
        return {name: state for name, state in found.items() if state is not None}

    def pause(self) -> None:
        """Stop checks, decisions and deferral: some replicas may not go on (`sv.uneven`)."""
        if not self._is_paused:
            self._is_paused = self.is_free = True
            living = self.living()
            self._counted = self.runs, {name: one.tally.added for name, one in living.items()}
            self._deferred = [one for one in living.values() if one.is_deferred]
            for one in self._deferred:
                one.set_deferred(is_deferred=False)

    def resume(self, *, is_caught_up: bool) -> None:
        """End a pause; counters of before it return, unless all replicas have equal ones."""
        if not self._is_paused:
            return
        self._is_paused = self.is_free = False
        if not is_caught_up:
            self.runs, increments = self._counted
            for name, one in self.living().items():
                one.tally.added = increments.get(name, one.tally.added)
        for one in self._deferred:
            one.set_deferred(is_deferred=True)
        self._deferred = []
        self.rebuild_schedule()

    # -- points that all replicas reach ------------------------------------------------------------

    def begin_run(self, check_every: int) -> None:
        """Note that a run has begun, which `runs` includes."""
        self._is_running = True
        if self.runs < self._next_due:
            self.is_free = True
            self._due = set()  # also for writes on the slow path
            return
        self._due = {entry.number for entry in self._schedule.due_at(self.runs, check_every)}
        self._compared.clear()
        if self._due:
            self.until = _AT_ONCE  # cached writes have to be checked as well
        self.is_free = self._is_paused or not self._due
        self._next_due = self._schedule.next_after(self.runs, check_every) if not self._due else 0

    def leave_run(self) -> None:
        """Note that the run is over."""
        self._is_running, self.is_free = False, self._is_paused

    def is_due(self, tally: VariableCounters) -> bool:
        """Return whether `before_write` has to be called; cached writes skip this up to `until`."""
        if self._is_paused or self._is_running:
            return not self._is_paused
        step = tally.steps + 1
        if step <= self.until:
            return False
        if step > self.writes:
            self.writes = step
            self._outside = self._schedule.due_at(step, self.owner.check_every)
        if self._checks_all or (self._outside and step == self.writes):
            return True
        self._skip_checks()
        return False

    def count(self, tally: VariableCounters) -> None:
        """Count a write outside runs that succeeded on all replicas.

        Writes in a run do not count: after an exception replicas may differ in their number.
        """
        if not (self._is_paused or self._is_running):
            tally.steps += 1

    def _skip_checks(self) -> None:
        """Skip checks of writes outside runs until the next step that compares something."""
        # A write that was due may have failed, and is then repeated.
        looked_at = self.writes - 1 if self._outside else self.writes
        self.until = self._schedule.next_after(looked_at, self.owner.check_every) - 1

    def before_write(self, states: Iterable[VariableState]) -> None:
        """Compare the copies that are due before these variables are written. Collective."""
        found = [(one.entry, one) for one in states if one.entry is not None]
        # A reported difference is perhaps repaired by this write.
        mended = {entry.number for entry, _ in found if entry.is_reported}
        for entry, _ in found:
            entry.is_reported = False
        if self._is_running:
            due_now = self._due - self._compared - mended
            self._before_write_in_run([pair for pair in found if pair[0].number in due_now])
            return
        due = self._outside
        # Without check_cross_writes some writes outside runs send nothing, so this must not either.
        if due and self.owner.check_cross_writes:
            point, checked = ProgramPoint("write", self.writes), {entry.number for entry in due}
            self._agree(point, is_decision=False, checked=checked, mended=mended)
        self._outside = []
        self._checks_all = any(entry.is_reported for entry in self.entries.values())
        if not self._checks_all:
            self._skip_checks()

    def _before_write_in_run(self, pairs: list[tuple[RegistryEntry, VariableState]]) -> None:
        if not pairs:
            return
        shown = ", ".join(repr(entry.name) for entry, _ in pairs[:3])
        shown += ", …" if len(pairs) > 3 else ""
        before = f" before {shown} {'are' if len(pairs) > 1 else 'is'} written"
        self._checks_all, self.until = True, _AT_ONCE  # in case `compare` reports a difference
        now, good = f"run {self.runs}", f"run {self.runs - 1}"
        compare(self.owner, pairs, now, good=good, before=before)
        self._compared.update(entry.number for entry, _ in pairs)

    def end_run(self, check_every: int) -> None:
        """Decide and compare what is due at the end of a run, with an empty queue. Collective."""
        run = self.runs
        if self._is_paused or (run < self._next_due and run < self.tuner.next_run):
            return
        point = ProgramPoint("run", run)
        checked = {entry.number for entry in self._schedule.due_at(run, check_every)}
        is_decision = run >= self.tuner.next_run
        if is_decision and self.tuner.is_replaying:
            self.tuner.replay(point, run)
            is_decision = False
        is_decision = is_decision and self.tuner.has_candidates
        if is_decision or checked:
            self._agree(point, is_decision=is_decision, checked=checked)

    def after_write(self, name: str, increments: int) -> None:
        """Decide after an increment outside every scope, if a decision is due."""
        if increments % WRITES_PER_DECISION or not (self.may_defer or self.tuner.is_replaying):
            return
        entry = self.entries.get(name)
        if entry is None or self._is_paused or entry.is_pinned:
            return
        point = ProgramPoint("write", increments, name)
        if self.tuner.is_replaying:
            self.tuner.replay(point, self.runs)
        else:
            self._agree(point, is_decision=True)

    # -- what they agree on ------------------------------------------------------------------------

    def _agree(
        self,
        point: ProgramPoint,
        *,
        is_decision: bool,
        checked: Container[int] = frozenset(),
        mended: Container[int] = frozenset(),
    ) -> None:
        """Agree which variables exist and what was counted; then decide, and compare copies."""
        entries = [
            one
            for one in self.entries.values()
            if one.number in checked or (is_decision and one.is_open)
        ]
        states = [one.state() for one in entries]  # keeps them alive until the end of this method
        pairs = list(zip(entries, states, strict=True))
        autos = [pair for pair in pairs if pair[0].is_open] if is_decision else []
        counts = [self.tuner.sends_since(self.owner.queue)]
        counts += [int(state is None) for state in states]
        counted = [(0, 0, 0) if state is None else state.counts() for _, state in autos]
        for (entry, _), (increments, turns, others) in zip(autos, counted, strict=True):
            before = entry.counted
            counts += (increments - before[0], turns - before[1] + max(others - before[2], 0))
        owner, mine = self.owner, np.array(counts, np.int64)
        try:
            largest = agree(owner.communicator, _AGREEMENT, "max", mine, owner.timeout).tolist()
        except MismatchError as error:
            if point.at == "write":
                raise
            # Perhaps an exception has left the run on another replica. The program must not fail
            # here for that: the decision is tried again, and the comparison is due another time.
            _log.debug("the replicas have not agreed at the end of run %d: %s", point.step, error)
            return
        if checked and point.at == "write":
            self._outside = []  # a difference is reported once, not again before the next write
        for (entry, _), now in zip(autos, counted, strict=True):
            entry.counted = now
        flags = zip(entries, largest[1:], strict=False)
        missing = {entry.name for entry, is_missing in flags if is_missing}  # on some replica
        self.forget(missing)
        if is_decision:
            rows = largest[1 + len(entries) :]
            samples = [
                (state, SampleWindow(entry.nbytes, state.is_deferred, *counters))
                for (entry, state), *counters in zip(autos, rows[0::2], rows[1::2], strict=True)
                if state is not None and entry.name not in missing
            ]
            self.tuner.decide(point, self.runs, samples, largest[0])
        found = [
            (one, state) for one, state in pairs if state is not None and one.number in checked
        ]
        found = [
            pair for pair in found if pair[0].name not in missing and pair[0].number not in mended
        ]
        self._checks_all, self.until = True, _AT_ONCE  # in case `compare` reports a difference
        compare(owner, found, f"{point.at} {point.step}")


def resynchronize(owner: VariableOwner, registry: VariableRegistry, calls: int) -> None:
    """Give every replica the values of the one that has made most calls. Collective.

    Cost: an exchange of some bytes; if the numbers of calls differ, a broadcast of all values.
    """
    communicator = owner.communicator
    variables = registry.living()  # keeps them alive until the end
    counts = {name: [one.tally.writes, one.tally.added] for name, one in variables.items()}
    mine = [calls, sum(writes for writes, _ in counts.values()), registry.runs, counts]
    everyone = gather_objects(communicator, _RESYNC, lambda: mine, owner.timeout)
    ages = [tuple(one[:2]) for one in everyone]
    if all(age == ages[0] for age in ages):
        return
    newest = ages.index(max(ages))
    _, _, registry.runs, theirs = everyone[newest]
    shared = [
        (name, one)
        for name, one in variables.items()
        if all(name in record[3] for record in everyone)
    ]
    for part in _batches(shared):
        together = np.concatenate([_bytes_of(one) for _, one in part])
        check = partial(BroadcastCall, communicator, together, root=newest, name=_RESYNC)
        values = communicator.perform(_RESYNC, check, owner.timeout)
        start = 0
        for name, one in part:
            stop = start + _bytes_of(one).size
            if communicator.member_rank != newest:
                one.keep(values[start:stop].view(one.dtype).reshape(one.shape))
                one.tally.writes, one.tally.added = theirs[name]
            start = stop


def _bytes_of(state: VariableState) -> Any:
    return np.ascontiguousarray(state.storage.array).reshape(-1).view(np.uint8)


def _batches(shared: list[tuple[str, VariableState]]) -> Iterator[list[tuple[str, VariableState]]]:
    part: list[tuple[str, VariableState]] = []
    nbytes = 0
    for name, one in shared:
        part.append((name, one))
        nbytes += one.storage.array.nbytes
        if nbytes >= _TOGETHER_BYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part
