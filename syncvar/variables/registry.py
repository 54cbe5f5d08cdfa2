"""The variables of a strategy that are kept equal, without keeping them alive; what their replicas agree on at times.

At the end of every few runs (`pace.period`), and outside every scope at every 64th increment of a variable, the replicas
agree by one small all-reduce on what they have counted of AUTO's variables, and `pace` decides from the same numbers
everywhere; so all change at the same point of the program.

In each `check_every` runs the `checker` compares all copies of every variable in one: before the variable is first written
there, because a write may cover a difference up or take it to all, and at that run's end. A model of more than a MiB is
compared a MiB at a time, each in another run (its lot), so that no step takes much longer than others; a smaller one in the
runs whose number `check_every` divides. Outside runs a step is counted by the variable that is written most often, and what
is due is compared before that variable's write. For the comparison of all the replicas first agree which variables
still exist on all of them (garbage is collected at different times). What is gone is told to all when another variable is
made, too, so that a loop of temporaries leaves nothing.

Nothing here is made where there is one replica.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native import CheckGate
from syncvar.collectives.all_reduce import agree
from syncvar.collectives.sync_points import gather_objects
from syncvar.core.errors import MismatchError
from syncvar.core.output_files import AUTO_LOG, check_file
from syncvar.variables.deferral_log import DeferralChange, ProgramPoint, append, read
from syncvar.variables.deferral_policy import COSTS, Hysteresis, SampleWindow, choose, period
from syncvar.variables.persistent_access import WRITES_PER_DECISION
from syncvar.variables.replica_check import compare

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from syncvar._native import VariableCounters
    from syncvar.variables.deferral_policy import Costs, DeferralDecision
    from syncvar.variables.scope import Owner
    from syncvar.variables.variable import Variable

__all__ = ["RegistryEntry", "VariableRegistry"]

_NEVER = 1 << 62
_AT_ONCE = -1
_LOT_BYTES = 1 << 20  # 0.1 to 0.2 ms, and as much again at the end of a run
_TOLD_MAX = 16  # names of variables that are gone, at each creation of another one
_WHAT = "counts of AUTO's variables, and which still exist"
_log = logging.getLogger("syncvar")


class RegistryEntry:
    """A variable of the roster: the same on all replicas, but for the reference and what was counted.

    Args:
        name: Its name.
        number: In the order of creation.
        nbytes: Of its value.
        lot: It is compared so many runs before a run whose number `check_every` divides.
        good: Where the program was when its copies were last equal: "run 7".
        is_auto: AUTO may defer it.
    """

    __slots__ = (
        "counted",
        "good",
        "is_auto",
        "is_pinned",
        "is_told",
        "lot",
        "name",
        "nbytes",
        "number",
        "reference",
    )

    def __init__(
        self, name: str, number: int, nbytes: int, lot: int, good: str, *, is_auto: bool
    ) -> None:
        self.name = name
        self.number = number
        self.nbytes = nbytes
        self.lot = lot
        self.is_auto = is_auto
        self.is_pinned = False
        self.is_told = False  # that its copies differ: the next write, which may mend it, is made without another look
        self.reference: weakref.ref[Variable] | None = None
        self.counted = (0, 0, 0)  # when they were last agreed on
        self.good = good

    @property
    def is_open(self) -> bool:
        """Whether AUTO decides of it."""
        return self.is_auto and not self.is_pinned

    def variable(self) -> Variable | None:
        """Return the variable, if it lives in this process."""
        return None if self.reference is None else self.reference()


class VariableRegistry(CheckGate):
    """The roster of one strategy.

    Args:
        owner: The strategy; of more than one replica.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self.runs = 0  # that have begun
        self.entries: dict[str, RegistryEntry] = {}
        self._gone: deque[str] = deque()  # names whose variables have gone here, not told yet
        self._numbers = 0
        self._decision = _NEVER  # at the end of this run
        self._decided = 0  # at the end of that one
        self._sends = 0
        self._bar = Hysteresis()
        self.is_free = False  # writes are neither counted nor compared first: in most runs
        self.until = (
            _AT_ONCE  # a variable's write outside runs of a larger number is to be looked at
        )
        self._is_running = False
        self._looks = False  # at every write outside runs: a difference may have been told
        self._is_paused = False
        self._deferred: list[Variable] = []  # while it is paused
        self._counted: tuple[int, dict[str, int]] = (
            0,
            {},
        )  # runs, and increments of each variable, when it was paused
        self.writes = (
            0  # outside runs, of the variable that was written most often, when it was looked at
        )
        self._laid = 0  # bytes of all variables that were ever made
        self._lots: dict[
            int, list[RegistryEntry]
        ] = {}  # what is compared together, by the remainder of the number of its runs
        self._lots_are_of = 0  # this check_every; 0 when they have to be made
        self._due: set[int] = set()  # in this run
        self._next_due = 0  # in no run below this one anything is; 0 where that is not known
        self._outside: list[RegistryEntry] = []  # due before this write outside runs
        self._compared: set[int] = set()  # in this run, before a write
        self._config = owner.context.config
        self._replay: dict[ProgramPoint, list[tuple[str, str]]] | None = None
        self._has_begun = False
        self._logs = bool(self._config.auto_log) and owner.communicator.member_rank == 0
        if self._logs:
            check_file(self._config.auto_log, AUTO_LOG)

    @property
    def owner(self) -> Owner:
        """The strategy."""
        owner = self._owner()
        assert owner is not None  # whoever asks is called by it, or by a variable that refers to it
        return owner

    # -- variables ---------------------------------------------------------------------------------

    def enter(self, name: str, nbytes: int, *, is_auto: bool) -> None:
        """Take a name that all replicas have just agreed on."""
        if is_auto:
            self._expect(self.runs + self._costs.runs)
        self._numbers += 1
        good = (
            f"write {self.writes}"
            if self.owner.is_default and not self.runs
            else f"run {self.runs}"
        )
        self.entries[name] = RegistryEntry(
            name, self._numbers, nbytes, self._laid // _LOT_BYTES, good, is_auto=is_auto
        )
        self._laid += nbytes
        self.look_again()

    def attach(self, variable: Variable) -> RegistryEntry | None:
        """Connect a name with its variable."""
        name, gone = variable.name, self._gone
        entry = self.entries.get(name)
        if entry is not None:
            entry.reference = weakref.ref(variable, lambda _: gone.append(name))
        return entry

    def gone(self) -> list[str]:
        """Return some names whose variables no longer exist here, for all replicas to be told; each only once."""
        count = min(len(self._gone), _TOLD_MAX)
        return [self._gone.popleft() for _ in range(count)]

    def forget(self, names: Iterable[str]) -> None:
        """Forget variables that are gone on a replica; all replicas do it at the same point."""
        for name in names:
            self.entries.pop(name, None)
        self.look_again()

    def look_again(self) -> None:
        """Find out anew what is compared when: there are other variables, or another `check_every`."""
        self._lots_are_of = self._next_due = 0
        self.until = _AT_ONCE

    def pinned(
        self, entry: RegistryEntry, counts: tuple[int, int, int], *, is_pinned: bool
    ) -> None:
        """Take note that a variable is not AUTO's to decide, or is so again, and what was counted until then."""
        if entry.is_pinned and not is_pinned:
            self._expect(self.runs + self._costs.runs)
        entry.is_pinned = is_pinned
        entry.counted = counts

    def _expect(self, run: int) -> None:
        """Decide at the end of this run at the latest; called before there is one more variable to decide of."""
        if (self._config.auto_replay and self._replay is not None) or not (
            self._config.auto_replay or self.may_defer
        ):
            return
        # A run that a replica has left by an exception ends for the others only, so nothing may change here where there is
        # nothing to decide: a decision that had come due then stays so, until there is another variable.
        due = self._decision if self._decides else _NEVER
        self._decision = min(due, run if not self._config.auto_replay else self.runs + 1)

    @property
    def _decides(self) -> bool:
        """Whether there is anything to decide."""
        return self.may_defer and any(entry.is_open for entry in self.entries.values())

    @property
    def may_defer(self) -> bool:
        """Whether AUTO lets increments wait at all on this path."""
        return self._costs.may_pay

    @property
    def _costs(self) -> Costs:
        owner = self.owner
        return COSTS["links" if owner.communicator.channel is None else "shm", owner.reproducible]

    def living(self) -> dict[str, Variable]:
        """Return the variables that live in this process, by name."""
        found = {name: entry.variable() for name, entry in self.entries.items()}
        return {name: variable for name, variable in found.items() if variable is not None}

    def pause(self) -> None:
        """Decide and compare nothing, and defer nothing: some replicas may make no more steps (`sv.uneven`)."""
        if not self._is_paused:
            self._is_paused = self.is_free = True
            living = self.living()
            self._counted = self.runs, {name: one._tally.added for name, one in living.items()}  # noqa: SLF001  (its other half)
            self._deferred = [one for one in living.values() if one.is_deferred]
            for one in self._deferred:
                one.defers(is_deferred=False)

    def resume(self, *, is_caught_up: bool) -> None:
        """Go on as before.

        Args:
            is_caught_up: The replicas have counted the same meanwhile; else none of it counts, so that they agree.
        """
        if not self._is_paused:
            return
        self._is_paused = self.is_free = False
        if not is_caught_up:
            self.runs, increments = self._counted
            for name, one in self.living().items():
                one._tally.added = increments.get(name, one._tally.added)  # noqa: SLF001
        for one in self._deferred:
            one.defers(is_deferred=True)
        self._deferred = []
        self.look_again()

    # -- points that all replicas reach ------------------------------------------------------------

    def begin_run(self, check_every: int) -> None:
        """Be in a run, which has been counted."""
        self._is_running = True
        if self.runs < self._next_due:
            self.is_free = True
            self._due = set()  # also for a write that does not go the prepared way
            return
        self._due = {entry.number for entry in self._due_at(self.runs, check_every)}
        self._compared.clear()
        if self._due:
            self.until = _AT_ONCE  # a prepared write is to be looked at as any other
        self.is_free = self._is_paused or not self._due
        self._next_due = self._next(self.runs, check_every) if not self._due else 0

    def leave_run(self) -> None:
        """Be outside runs again."""
        self._is_running, self.is_free = False, self._is_paused

    def is_due(self, tally: VariableCounters) -> bool:
        """Return whether `before_write` has to be called before a write outside runs (of several variables together: of the first).

        Prepared writes are made without this, up to the one after `until`.
        """
        if self._is_paused or self._is_running:
            return not self._is_paused
        step = tally.steps + 1
        if step <= self.until:
            return False
        if step > self.writes:
            self.writes = step
            self._outside = self._due_at(step, self.owner.check_every)
        if self._looks or (self._outside and step == self.writes):
            return True
        self._free()
        return False

    def count(self, tally: VariableCounters) -> None:
        """Count a write outside runs that all replicas have made: none of them counts one on which they did not agree.

        A write in a run is not counted: by an exception some replicas may make fewer of them than others, and go on.
        """
        if not (self._is_paused or self._is_running):
            tally.steps += 1

    def _free(self) -> None:
        """Let writes outside runs pass without a look, up to the one before the next comparison."""
        looked_at = (
            self.writes - 1 if self._outside else self.writes
        )  # a write that is due may have failed, and comes again
        self.until = self._next(looked_at, self.owner.check_every) - 1

    def _next(self, number: int, check_every: int) -> int:
        """Return the number, after this one, of the run or step in which something is compared."""
        if check_every <= 0:
            return _NEVER
        self._due_at(number, check_every)  # knows the lots
        return number + min(
            [(lot - number - 1) % check_every + 1 for lot in self._lots], default=_NEVER
        )

    def before_write(self, variables: Iterable[Variable]) -> None:
        """Compare copies, if it is time, before they are written; called by all replicas, for all in one call.

        Args:
            variables: Which are written, the same on every replica.

        Raises:
            MismatchError: Copies of a variable differ; nothing has been written.
        """
        found = [(one._entry, one) for one in variables if one._entry is not None]  # noqa: SLF001  (its other half)
        mended = {entry.number for entry, _ in found if entry.is_told}  # perhaps, by this write
        for entry, _ in found:
            entry.is_told = False
        if self._is_running:
            self._before_write_in_run(
                [
                    (entry, one)
                    for entry, one in found
                    if entry.number in self._due - self._compared - mended
                ]
            )
            return
        due = self._outside
        if (
            due and self.owner.check_cross_writes
        ):  # else some writes outside runs send nothing, and this must not
            self._agree(
                ProgramPoint("write", self.writes),
                is_decision=False,
                checked={entry.number for entry in due},
                mended=mended,
            )
        self._outside = []
        self._looks = any(entry.is_told for entry in self.entries.values())
        if not self._looks:
            self._free()

    def _before_write_in_run(self, pairs: list[tuple[RegistryEntry, Variable]]) -> None:
        if pairs:
            shown = ", ".join(repr(entry.name) for entry, _ in pairs[:3]) + (
                ", …" if len(pairs) > 3 else ""
            )
            before = f" before {shown} {'are' if len(pairs) > 1 else 'is'} written"
            self._looks, self.until = True, _AT_ONCE  # unless nothing is told
            compare(
                self.owner, pairs, f"run {self.runs}", good=f"run {self.runs - 1}", before=before
            )
            self._compared.update(entry.number for entry, _ in pairs)

    def end_run(self, check_every: int) -> None:
        """Decide and compare, if it is time; called by all replicas at the end of a run, when nothing waits.

        Raises:
            MismatchError: Copies of a variable differ.
        """
        run = self.runs
        if self._is_paused or (run < self._next_due and run < self._decision):
            return
        point = ProgramPoint("run", run)
        checked = {entry.number for entry in self._due_at(run, check_every)}
        is_decision = run >= self._decision
        if is_decision and self._config.auto_replay:
            self._follow(point)
            is_decision = False
        is_decision = is_decision and self._decides
        if is_decision or checked:
            self._agree(point, is_decision=is_decision, checked=checked)

    def after_write(self, variable: Variable, increments: int) -> None:
        """Decide, if it is time, after an increment outside every scope."""
        if increments % WRITES_PER_DECISION or not (self.may_defer or self._config.auto_replay):
            return
        entry = self.entries.get(variable.name)
        if entry is None or self._is_paused or entry.is_pinned:
            return
        point = ProgramPoint("write", increments, variable.name)
        if self._config.auto_replay:
            self._follow(point)
        else:
            self._agree(point, is_decision=True)

    # -- what they agree on ------------------------------------------------------------------------

    def _due_at(self, number: int, check_every: int) -> list[RegistryEntry]:
        """Return what is compared in the run, or at the step outside runs, of this number; the same on all replicas."""
        if check_every <= 0:
            return []
        if self._lots_are_of != check_every:
            self._lots_are_of = check_every
            self._lots.clear()
            for entry in self.entries.values():
                self._lots.setdefault(-entry.lot % check_every, []).append(entry)
        return self._lots.get(number % check_every, [])

    def _agree(
        self,
        point: ProgramPoint,
        *,
        is_decision: bool,
        checked: Container[int] = frozenset(),
        mended: Container[int] = frozenset(),
    ) -> None:
        asked = [
            one
            for one in self.entries.values()
            if one.number in checked or (is_decision and one.is_open)
        ]
        variables = [one.variable() for one in asked]  # so they live until this has ended
        pairs = list(zip(asked, variables, strict=True))
        autos = [pair for pair in pairs if pair[0].is_open] if is_decision else []
        queue = self.owner.queue
        sends = 0 if queue is None else queue.sends
        counts = [sends - self._sends, *[int(variable is None) for variable in variables]]
        counted = [(0, 0, 0) if variable is None else variable.counts() for _, variable in autos]
        for (entry, _), (increments, turns, others) in zip(autos, counted, strict=True):
            before = entry.counted
            counts += (increments - before[0], turns - before[1] + max(others - before[2], 0))
        try:
            largest = agree(
                self.owner.communicator,
                _WHAT,
                "max",
                np.array(counts, np.int64),
                self.owner.timeout,
            ).tolist()
        except MismatchError as error:
            if point.at == "write":
                raise
            # An exception has left the run on another replica, say, and none has agreed. A program that does not wait for
            # that one in its run is not to hear of it here: it is tried again, or compared the next time.
            _log.debug("the replicas have not agreed at the end of run %d: %s", point.step, error)
            return
        if checked and point.at == "write":
            self._outside = []  # what differs is told, and not looked at again before the next write
        for (entry, _), now in zip(autos, counted, strict=True):
            entry.counted = now
        gone = {
            entry.name for entry, is_gone in zip(asked, largest[1:], strict=False) if is_gone
        }  # on some replica
        self.forget(gone)
        if is_decision:
            self._sends = sends
            rows = largest[1 + len(asked) :]
            self._decide(
                point, autos, list(zip(rows[0::2], rows[1::2], strict=True)), largest[0], gone
            )
        found = [
            (one, variable)
            for one, variable in pairs
            if variable is not None
            and one.number in checked
            and one.name not in gone
            and one.number not in mended
        ]
        self._looks, self.until = True, _AT_ONCE  # unless nothing is told
        compare(self.owner, found, f"{point.at} {point.step}")

    # -- decisions ---------------------------------------------------------------------------------

    def _decide(
        self,
        point: ProgramPoint,
        autos: Sequence[tuple[RegistryEntry, Variable | None]],
        rows: Sequence[tuple[int, int]],
        sends: int,
        gone: set[str],
    ) -> None:
        costs = self._costs
        pairs = [
            (variable, SampleWindow(entry.nbytes, variable.is_deferred, increments, breaks))
            for (entry, variable), (increments, breaks) in zip(autos, rows, strict=True)
            if variable is not None and entry.name not in gone
        ]
        is_idle = not any(window.increments for _, window in pairs)
        runs = self.runs - self._decided
        self._decided = self.runs
        self._decision = self.runs + period(costs, len(pairs), is_idle=is_idle)
        if is_idle:
            return
        choices, self._bar = choose([window for _, window in pairs], runs, sends, self._bar, costs)
        self._apply(
            point,
            [(variable, choice) for (variable, _), choice in zip(pairs, choices, strict=True)],
        )

    def _apply(
        self, point: ProgramPoint, chosen: Sequence[tuple[Variable, DeferralDecision]]
    ) -> None:
        changes = []
        for variable, choice in chosen:
            if choice.is_deferred == variable.is_deferred:
                variable.decided(point.step, choice.why)
                continue
            before, after = ("eager", "deferred") if choice.is_deferred else ("deferred", "eager")
            variable.change_pace(after, point.step, choice.why)
            changes.append(DeferralChange(point, variable.name, before, after, choice.why))
        communicator = self.owner.communicator
        if communicator.member_rank == 0:
            for one in changes:
                _log.info(
                    "AUTO, %s %d: variable %r %s -> %s: %s",
                    point.at,
                    point.step,
                    one.variable,
                    one.before,
                    one.after,
                    one.why,
                )
            if self._logs:  # a file with a hole would mislead whoever replays it
                path, begins = self._config.auto_log, not self._has_begun
                self._logs = append(path, communicator.identity, changes, begins=begins)
                self._has_begun = True

    def _follow(self, point: ProgramPoint) -> None:
        """Do what was recorded for this point of the program."""
        if self._replay is None:
            self._replay = self._recorded()
        for name, pace in self._replay.get(point, ()):
            entry = self.entries.get(name)
            variable = None if entry is None or entry.is_pinned else entry.variable()
            if variable is not None and variable.is_deferred != (pace == "deferred"):
                variable.change_pace(pace, point.step, "replayed")
        self._decision = min(
            (one.step for one in self._replay if one.at == "run" and one.step > self.runs),
            default=_NEVER,
        )

    def _recorded(self) -> dict[ProgramPoint, list[tuple[str, str]]]:
        """Return what the first rank reads in the file."""
        owner = self.owner
        communicator = owner.communicator

        def mine() -> Any:
            return (
                read(self._config.auto_replay, communicator.identity)
                if communicator.member_rank == 0
                else []
            )

        found: dict[ProgramPoint, list[tuple[str, str]]] = {}
        for at, step, of, name, pace in gather_objects(
            communicator, "recorded decisions of AUTO", mine, owner.timeout
        )[0]:
            found.setdefault(ProgramPoint(at, step, of), []).append((name, pace))
        return found
