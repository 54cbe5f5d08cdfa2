"""The synchronized variable: one write path and one read path, both driven by the table in `policy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from syncvar._native import VariableCounters
from syncvar.collectives import nan_check
from syncvar.collectives.reduce_args import prepared_reduction
from syncvar.collectives.sync_points import meet
from syncvar.core.errors import (
    ConfigError,
    DeadlineExceeded,
    MismatchError,
    PeerLost,
    SyncvarError,
    UsageError,
)
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.core.reduce_ops import quiet, reduction
from syncvar.runtime.communicator import fingerprint
from syncvar.runtime.flight_recorder.call_record import CallFields, CallLabel
from syncvar.variables.array_protocol import ArrayProtocol
from syncvar.variables.coercion import number_array, operand_array
from syncvar.variables.collective_requests import (
    alike_request,
    are_alike,
    is_compared_first,
    request_of,
    rows_request,
)
from syncvar.variables.create import VariableInit, VariableSpec, make_on_replicas
from syncvar.variables.deferred_writes import WriteQueue, queue_of
from syncvar.variables.exact_split import share_of
from syncvar.variables.mode_explanation import Explanation
from syncvar.variables.persistent_access import (
    DECIDE,
    DONE,
    UNDONE,
    prepared_look,
    prepared_read,
    prepared_write,
    sealed,
    unlooked,
    unprepared,
)
from syncvar.variables.policy import (
    AccessKind,
    Action,
    CallContext,
    Effect,
    Travel,
    VariableAggregation,
    VariableSynchronization,
    decide,
    resolve,
)
from syncvar.variables.remote_read import checked_replica, fetch, publish, with_absent
from syncvar.variables.row_updates import RowSelection, applied, checked_rows
from syncvar.variables.scope import (
    RemoteOptimizer,
    context_here,
    context_of,
    current_owner,
    current_place,
    places,
)
from syncvar.variables.shared_copy import SharedCopy, written_once
from syncvar.variables.storage import being_written

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.variables.flat_bucket import FlatBucket
    from syncvar.variables.persistent_access import Look, Read, Write

__all__ = ["COPIED", "Variable"]

COPIED = "syncvar: functions to call with each copied variable"
"""Where a deep copy's memo has the functions that its optimizers want called with (variable, copy)."""


UFUNCS: dict[AccessKind, Any] = {
    AccessKind.ASSIGN: None,
    AccessKind.ASSIGN_ADD: np.add,
    AccessKind.ASSIGN_SUB: np.subtract,
}
_ASSIGN, _ADD, _SUB = UFUNCS
_READ, _LOCAL, _SYNC = AccessKind.READ, AccessKind.LOCAL, AccessKind.SYNC
_UNPREPARED: dict[AccessKind, Write] = dict.fromkeys(UFUNCS, unprepared)
_PACES = ("eager", "deferred")
_NO_SHARE = "the copies of a bool variable have no sum to be split from; make it with dtype='int64'"


class Variable(MigrationHintsMixin, ArrayProtocol):
    """A value with one copy on each replica, kept in step as its mode says.

    Making one is collective, except under NONE. It belongs to the strategy in force: the scope's, or outside every
    scope the default strategy, which spans the world.

    Args:
        initial_value: Array, number, another variable (its value), or a callable (called once, on the chief; under
            NONE by each replica). Every replica takes the chief's, except under NONE. A callable with a parameter `shard_info`
            makes the value part by part, see `sv.ShardInfo`: of a variable on servers each shard by itself, elsewhere all as
            one part. `shape` and `dtype` then say what the whole is.
        trainable: None means True, but False for ON_READ.
        name: 1 to 128 of `A-Z a-z 0-9 _ . / -`; a name taken twice gets `_1`, `_2`.
        dtype: None means that of the value; Python floats make float32, ints int64.
        synchronization: When the copies are made to agree.
        aggregation: How values of several replicas become one.
        shape: What the initial value must have; None for any.

    Raises:
        ConfigError: A wrong argument; the other replicas raise MismatchError.
        MismatchError: The replicas ask for different variables.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable([1.0, 2.0], aggregation="SUM")
        >>> v.assign_add([1.0, 1.0]).numpy()
        array([2., 3.], dtype=float32)
    """

    stepper: RemoteOptimizer | None = (
        None  # who makes an optimizer's steps of it, where its value is elsewhere
    )
    _prepared: dict[AccessKind, Write] = _UNPREPARED  # of writes where each replica passes its own

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Make a variable of the kind that the strategy in force has."""
        place = current_place() if cls is Variable and (arguments or options) else None
        kind = None
        if place is not None:
            kind_of = place.owner._kind_of_variable  # noqa: SLF001  (as variables see it)
            kind = kind_of(options.get("synchronization"))
        return object.__new__(kind or cls)

    def __init__(
        self,
        initial_value: Any,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: Any = VariableSynchronization.AUTO,
        aggregation: Any = VariableAggregation.NONE,
        shape: Any = None,
    ) -> None:
        wish = VariableSpec(
            initial_value, trainable, name, dtype, synchronization, aggregation, shape
        )
        self._take(make_on_replicas(current_owner(), wish, stacklevel=2))

    def _take(self, made: VariableInit) -> None:
        self._owner = made.owner
        self._namespace, self._name = made.namespace, made.name
        self._trainable = made.trainable
        self._replicas = made.owner.communicator.size
        self._requested = made.requested
        self._synchronization, self._rule = resolve(made.requested)
        self._aggregation = made.aggregation
        self._kind = f"{self._synchronization.name} {self._aggregation.name}"  # all that decides, beside the context
        self._shape, self._dtype = made.value.shape, made.value.dtype
        self._tally = VariableCounters()
        self._groups: dict[
            tuple[AccessKind, int], FlatBucket
        ] = {}  # grouped writes that begin with it, by the number of variables
        self._pace = "eager"
        self._is_pinned = False
        self._are_parts = False  # its copies are parts of a whole, which a checkpoint gives to any number of replicas
        self._reading: dict[
            tuple[AccessKind, CallContext | None], Read
        ] = {}  # prepared reads, by where they are made
        self._queue: WriteQueue | None = None  # while it is deferred
        self._increments: dict[
            str, tuple[CallContext, str, int]
        ] = {}  # deferred: where it was made, op and digest
        self._changes: list[tuple[int, str, str, str]] = []
        self._decided: tuple[int, str] | None = None  # when AUTO has decided last, and why
        make = made.owner._make_storage  # noqa: SLF001  (as variables see it)
        self._storage = make(made.value, self._synchronization)
        self._look = self._prepared_look()
        action = decide(
            self._synchronization, self._aggregation, CallContext.CROSS, AccessKind.READ_FROM
        )
        if action.travel is Travel.QUESTION:
            publish(made.owner, made.namespace, self)
        is_mirrored = self._synchronization is VariableSynchronization.ON_WRITE
        self._entry = (
            made.owner.roster.attach(self)
            if is_mirrored and made.owner.roster is not None
            else None
        )
        self._is_counted = self._entry is not None and self._entry.is_auto

    # -- what it is --------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name, unique among the variables of the same ranks."""
        return self._name

    @property
    def trainable(self) -> bool:
        """Whether optimizers and users should take it for a weight; nothing here depends on it."""
        return self._trainable

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, fixed for ever."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type, fixed for ever."""
        return self._dtype

    @property
    def synchronization(self) -> VariableSynchronization:
        """The mode in force: ON_WRITE, ON_READ or NONE."""
        return self._synchronization

    @property
    def requested_synchronization(self) -> VariableSynchronization:
        """The mode that the program asked for; may be AUTO."""
        return self._requested

    @property
    def aggregation(self) -> VariableAggregation:
        """How values of several replicas become one."""
        return self._aggregation

    @property
    def strategy(self) -> Any:
        """The strategy that made it."""
        return self._owner

    def __repr__(self) -> str:
        shown = np.array2string(self._storage.expose(), threshold=20, separator=", ")
        return (
            f"<sv.Variable {self.name!r} {self._synchronization.name} + {self._aggregation.name} shape={self._shape} "
            f"dtype={self._dtype.name} local={shown}>"
        )

    # -- reading -----------------------------------------------------------------------------------

    def read_value(self, copy: bool = True) -> NDArray[Any]:
        """Return the value, read-only; it never changes when the variable is written later. No bytes are copied.

        Collective for ON_READ outside `run`; never for ON_WRITE and NONE.

        Other threads of the process may write meanwhile: a copy is read as it was before a write or after it. Only of
        a write that other replicas take part in at this moment (ON_WRITE), a read may see a part.

        Args:
            copy: False returns a view that is valid until the next write. True, as long as the array or a part of it
                is kept, makes the next write go to new memory.

        Raises:
            NoAggregation: ON_READ with aggregation NONE, outside `run`.

        Example:
            >>> import syncvar as sv
            >>> v = sv.Variable(2.0)
            >>> v.read_value(), float(v), v * 2
            (array(2., dtype=float32), 2.0, np.float32(4.0))
        """
        try:
            value = self._look(copy)
        except (MismatchError, DeadlineExceeded, PeerLost) as error:
            self._advise_reader(_READ, error)
            raise
        return self._read(_READ, copy) if value is None else value

    def value(self) -> NDArray[Any]:
        """Return `read_value()`."""
        return self.read_value()

    def numpy(self) -> NDArray[Any]:
        """Return `read_value()`."""
        return self.read_value()

    def local_value(self) -> NDArray[Any]:
        """Return this replica's copy, read-only; sends nothing, in every context, and copies nothing.

        Example:
            >>> import syncvar as sv
            >>> sv.Variable(1, synchronization="ON_READ").local_value()
            array(1)
        """
        return self._read(_LOCAL)

    def sync(self) -> NDArray[Any]:
        """Meet all replicas and return the variable's value; collective in every context (not for NONE).

        Raises:
            NoAggregation: ON_READ with aggregation NONE.
        """
        return self._read(_SYNC)

    def read_from(self, rank: int) -> NDArray[Any]:
        """Return another replica's copy, read-only, without its taking part; for ON_WRITE the value.

        One-sided: the other replica's engine answers while its program computes. The copy never changes, and is
        as it was at some moment during this call; of ON_WRITE, as in `read_value`. NONE variables are found by their name.

        Args:
            rank: Replica of the variable's strategy; this one's own copy needs no message.

        Raises:
            ConfigError: There is no such replica.
            UsageError: It has no such variable (a NONE variable may exist on some replicas only).
            DeadlineExceeded: It did not answer in time. Only this call fails, the group stays usable.

        Example:
            >>> import syncvar as sv
            >>> v = sv.Variable(3.0, synchronization="NONE")
            >>> v.read_from(0)
            array(3., dtype=float32)
        """
        action = self._decide(AccessKind.READ_FROM)
        self._settle()
        what = f"read_from({rank!r}) of variable {self.name!r}"
        replica = checked_replica(rank, self._replicas, what)
        self._count_read()
        if action.travel is Travel.QUESTION and replica != self._owner.communicator.home_rank:
            return fetch(self._owner, self._namespace, self.name, replica, what)
        return self._storage.expose()

    # -- writing -----------------------------------------------------------------------------------

    def assign(self, x: Any) -> Variable:
        """Set the value; see `policy` for what each mode does in each context. Returns the variable.

        Raises:
            NoAggregation: ON_WRITE with aggregation NONE, inside `run`.
            ConfigError: Wrong shape or dtype; nothing is written anywhere if the write communicates.
            MismatchError: Another replica's write differs.

        Example:
            >>> import syncvar as sv
            >>> float(sv.Variable(0.0).assign(3.0))
            3.0
        """
        done = self._prepared[_ASSIGN](x)
        return self if done == DONE else self._assign(_ASSIGN, x, done)

    def assign_add(self, x: Any) -> Variable:
        """Add to the value; as `assign`."""
        done = self._prepared[_ADD](x)
        return self if done == DONE else self._assign(_ADD, x, done)

    def assign_sub(self, x: Any) -> Variable:
        """Subtract from the value; as `assign`."""
        done = self._prepared[_SUB](x)
        return self if done == DONE else self._assign(_SUB, x, done)

    def scatter_add(self, indices: Any, values: Any) -> Variable:
        """Add to rows. Rows named twice are added twice, in the order of (replica, position). Returns the variable.

        Args:
            indices: Integers in [0, rows), of any shape S.
            values: Shape S + shape[1:].

        Raises:
            RowOutOfRange: An index outside the variable; nothing is written anywhere if the write communicates.
            UsageError: The mode has no meaning for it: scatter_mul, scatter_div and scatter_update of ON_WRITE with
                SUM or MEAN in replica context.

        Example:
            >>> import syncvar as sv
            >>> v = sv.Variable([1.0, 2.0, 3.0], synchronization="NONE")
            >>> v.scatter_add([0, 0], [10.0, 10.0]).numpy()
            array([21.,  2.,  3.], dtype=float32)
        """
        return self._scatter(AccessKind.SCATTER_ADD, indices, values)

    def scatter_sub(self, indices: Any, values: Any) -> Variable:
        """Subtract from rows; as `scatter_add`."""
        return self._scatter(AccessKind.SCATTER_SUB, indices, values)

    def scatter_mul(self, indices: Any, values: Any) -> Variable:
        """Multiply rows; as `scatter_add`."""
        return self._scatter(AccessKind.SCATTER_MUL, indices, values)

    def scatter_div(self, indices: Any, values: Any) -> Variable:
        """Divide rows, integers truncated toward zero; as `scatter_add`."""
        return self._scatter(AccessKind.SCATTER_DIV, indices, values)

    def scatter_min(self, indices: Any, values: Any) -> Variable:
        """Make rows the smaller of themselves and the values; as `scatter_add`."""
        return self._scatter(AccessKind.SCATTER_MIN, indices, values)

    def scatter_max(self, indices: Any, values: Any) -> Variable:
        """Make rows the larger of themselves and the values; as `scatter_add`."""
        return self._scatter(AccessKind.SCATTER_MAX, indices, values)

    def scatter_update(self, indices: Any, values: Any) -> Variable:
        """Replace rows; of a row named twice the last value remains. As `scatter_add`."""
        return self._scatter(AccessKind.SCATTER_UPDATE, indices, values)

    # -- explaining and steering -------------------------------------------------------------------

    def explain(self) -> Explanation:
        """Return the mode in force, the requested one, the rule, numbers and changes; sends nothing.

        Example:
            >>> import syncvar as sv
            >>> print(sv.Variable(0.0, name="explained").explain())
            mode ON_WRITE (eager), requested AUTO
            rule: AUTO behaves as ON_WRITE; only when its communication happens may differ
            numbers: replicas 1, reads 0, writes 0, collectives 0, nbytes 4
            now: eager: with one replica nothing has to travel
        """
        auto = self._requested is VariableSynchronization.AUTO
        numbers = {
            "replicas": self._replicas,
            "reads": self._tally.reads,
            "writes": self._tally.writes,
            "collectives": self._tally.collectives,
            "nbytes": self._storage.view.nbytes,
        }
        if self._is_counted:
            pending = 0 if self._queue is None else self._queue.waiting(self)
            numbers |= {
                "increments": self._tally.added,
                "turns": self._tally.turns,
                "pending": pending,
            }
        mode = self._synchronization.name + (
            f" ({self._pace}{', pinned' if self._is_pinned else ''})" if auto else ""
        )
        reason = f"{self._pace}: {self._why()}" if auto else ""
        return Explanation(
            mode, self._requested.name, self._rule, numbers, list(self._changes), reason
        )

    def _why(self) -> str:
        """Return why an AUTO variable's pace is what it is."""
        if self._replicas == 1:
            return "with one replica nothing has to travel"
        if self._is_pinned:
            return f"v.pin({self._pace!r}) fixes it"
        if not self._is_counted:
            return f"{self._dtype.name} with aggregation {self._aggregation.name} has no increments that could wait"
        is_left = self._owner.context.is_closed
        if (
            not is_left
            and self._owner.roster is not None
            and not self._owner.roster.may_defer
            and self._decided is None
        ):
            return "in shared memory an increment is sent in less time than it takes to let it wait"
        if self._decided is None:
            return "nothing was decided yet; AUTO looks at the ends of every few runs, outside every scope at every 64th increment"
        return "decided at step {}: {}".format(*self._decided)

    def decided(self, step: int, why: str) -> None:
        """Take note why AUTO has left the pace as it is; for AUTO only."""
        self._decided = step, why

    def pin(self, mode: str | None) -> None:
        """Fix the pace of an AUTO variable: "eager", "deferred", or None to let AUTO decide again. Collective.

        Eager, an increment is combined with the other replicas' at once. Deferred, it waits until the variable is read, or
        the run ends, or any other call is made, and travels with the others that wait. AUTO starts eager, looks at what was
        written and read at the ends of every few runs (outside every scope: at every 64th increment), and changes on all
        replicas at the same point.

        Raises:
            ConfigError: Another mode.
            UsageError: The variable was not asked as AUTO.
        """
        self._owner.context.refuse_in_block("v.pin")
        if self._requested is not VariableSynchronization.AUTO:
            raise UsageError(
                f"variable {self.name!r} was asked as {self._requested.name}, which never changes; pin is for "
                f"sv.Variable(…, synchronization=sv.VariableSynchronization.AUTO)"
            )

        def check() -> None:
            if mode is not None and mode not in _PACES:
                raise ConfigError(
                    f"there is no pace {mode!r}: write v.pin('eager'), v.pin('deferred') or v.pin(None)"
                )

        what = f"pin variable {self.name!r} to {mode}"
        meet(self._owner.communicator, what, ("pin", self.name, mode), self._owner.timeout, check)
        if mode == (self._pace if self._is_pinned else None):
            return
        self._is_pinned = mode is not None
        roster = self._owner.roster
        step = self._tally.writes if roster is None or not roster.runs else roster.runs
        self.change_pace(mode or "eager", step, "pinned" if mode else "pin taken off")
        if self._is_counted and roster is not None and self._entry is not None:
            roster.pinned(self._entry, self.counts(), is_pinned=self._is_pinned)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Variable:
        self._settle()
        made = Variable.__new__(Variable)
        memo[id(self)] = made
        wish = VariableSpec(
            self._storage.expose(),
            self.trainable,
            self.name,
            None,
            self._requested,
            self._aggregation,
        )
        made._take(make_on_replicas(self._owner, wish, own=True))  # noqa: SLF001  (one of its own)
        for note in memo.get(COPIED, ()):
            note(self, made)
        return made

    # -- the two paths -----------------------------------------------------------------------------

    def _decide(self, operation: AccessKind) -> Action:
        context = context_here(self._owner)
        if context is None:
            context = context_of(
                self._owner, f"{operation.value} of variable {self.name!r}"
            )  # raises
        action = decide(self._synchronization, self._aggregation, context, operation)
        if action.error is not None:
            call = f"{self.name}.{operation.value}(…)"
            raise action.error(
                f"{operation.value} of variable {self.name!r} ({self._synchronization.name}, aggregation "
                f"{self._aggregation.name}) in {context.value} context: {action.rule}. Write instead:\n    "
                + action.fix.format(name=self.name, call=call)
            )
        return action

    @property
    def _copy(self) -> NDArray[Any]:
        return self._storage.array

    def _settle(self) -> None:
        """Send the writes of this variable that wait, if there are any."""
        if self._queue is not None:
            self._queue.settle(self)

    def _read(self, operation: AccessKind, copy: bool = True) -> NDArray[Any]:
        """Read as it was prepared, or else by the table."""
        where = operation, context_here(self._owner)
        read = self._reading.get(where)
        if read is None and self._decide(operation).travel is Travel.NOTHING:
            read = self._reading[where] = self._storage.read
        if self._queue is not None:
            self._queue.settle(self)
        self._count_read()
        try:
            value = None if read is None else read(copy)
            return self._read_together(where) if value is None else value
        except (MismatchError, DeadlineExceeded, PeerLost) as error:
            self._advise_reader(operation, error)
            raise

    def _count_read(self) -> None:
        """Count a read, also as one that comes after an increment."""
        tally = self._tally
        if tally.added != tally.turned:
            tally.turned = tally.added
            tally.turns += 1
        tally.reads += 1

    def _prepared_look(self) -> Look:
        """Return the prepared read of this replica's copy, where reading never sends anything."""
        actions = [
            decide(self._synchronization, self._aggregation, context, _READ)
            for context in CallContext
        ]
        is_own = all(action.travel is Travel.NOTHING and action.error is None for action in actions)
        return prepared_look(self._owner, self._storage, self._tally) if is_own else unlooked

    def _read_together(self, where: tuple[AccessKind, CallContext | None]) -> NDArray[Any]:
        """Read by a call in which all replicas take part, and prepare the next one."""
        owner, operation = self._owner, where[0]
        communicator = owner.communicator
        array, held = self._storage.held()  # as long as the second lives, the first is not written
        action = self._decide(operation)
        travel = action.travel
        kind = self._synchronization.name
        collective = f"{operation.value} of {kind} variable {self.name!r}"
        what = CallLabel(
            f"{collective} (collective on every replica; local_value() is not)",
            CallFields(collective),
        )

        def mine() -> NDArray[Any]:
            if travel in (Travel.SUM, Travel.MEAN):
                self._check_sum(f"{operation.value} of variable {self.name!r}")
            return array

        if (
            communicator.uneven is not None
            and self._synchronization is VariableSynchronization.ON_READ
        ):
            communicator.roll(what, owner.timeout)
            if len(communicator.whole) > communicator.size:
                return sealed(with_absent(owner, self._namespace, self.name, mine(), travel, what))
        value = self._travel(action, what, mine, request_of)
        del held
        if travel is Travel.MEETING:
            return self._storage.expose()
        if travel in (Travel.SUM, Travel.MEAN):
            op = "sum" if travel is Travel.SUM else "mean"
            call = prepared_reduction(communicator, array, op, what, owner.reproducible)
            if call is not None:
                self._reading[where], look = prepared_read(owner, self._storage, self._tally, call)
                if operation is _READ and self._queue is None:
                    self._look = look
        return sealed(value)

    def _advise_reader(self, operation: AccessKind, error: SyncvarError) -> None:
        """Add to the error of a collective read what to write instead: some ranks only may have read."""
        if isinstance(error, PeerLost) and error.reason != "finished":
            return
        doing = "Reading" if operation is AccessKind.READ else "sync() of"
        call = f"{self.name}.numpy()" if operation is AccessKind.READ else f"{self.name}.sync()"
        advice = (
            f"\n{doing} {self._synchronization.name} {self.name!r} is collective: every replica has to take part. Read on "
            f"every rank, and use it where you like:\n    value = {call}\n    if sv.rank() == 0: print(value)\n"
            f"or take this replica's copy, which needs no other:\n    {self.name}.local_value()"
        )
        text = str(error)
        if advice not in text:
            error.args = (text + advice,)

    @property
    def is_deferred(self) -> bool:
        """Whether its increments wait in a queue; for AUTO only, `explain()` tells people."""
        return self._queue is not None

    def counts(self) -> tuple[int, int, int]:
        """Return (increments, reads that came after one, other writes); for AUTO only."""
        return self._tally.added, self._tally.turns, self._tally.writes - self._tally.added

    def change_pace(self, pace: str, step: int, why: str) -> None:
        """Let increments travel at once or wait, from now on; on all replicas at the same point; for AUTO only."""
        self._changes.append((step, self._pace, pace, why))
        self._pace, self._decided = pace, (step, why)
        self.defers(is_deferred=pace == "deferred" and self._replicas > 1)

    def defers(self, *, is_deferred: bool) -> None:
        """Let increments wait, or not, without a word about it; by itself for a roster that pauses only."""
        self._queue = queue_of(self._owner) if is_deferred else None
        self._prepared = _UNPREPARED  # what waits is not prepared
        self._look = unlooked if is_deferred else self._prepared_look()  # a read sends what waits

    def _is_deferrable(self, operation: AccessKind) -> bool:
        """Return whether a write, made here and now, is an increment that the replicas combine."""
        known = self._increments.get(operation.value)
        if known is not None and context_here(self._owner) is known[0]:
            return True
        if operation is AccessKind.ASSIGN or self._storage.is_shared:
            return False
        travel = self._decide(operation).travel
        if travel not in (Travel.SUM, Travel.MEAN):
            return False
        op = "sum" if travel is Travel.SUM else "mean"
        digest = fingerprint(self._name, operation.value, op, self._dtype.name, self._shape)
        context = context_of(self._owner, operation.value)
        self._increments[operation.value] = context, op, digest
        return True

    def _defer(self, queue: WriteQueue, operation: AccessKind, x: Any) -> Variable:
        """Put an increment into the queue; one that is refused here is told to the others when their turn comes."""
        context, op, digest = self._increments[operation.value]
        tally = self._tally
        tally.added += 1
        self._count_step()  # as `added`, also of one that is refused
        try:
            array = self._operand(operation, x, reduced=True)
        except Exception as error:
            queue.refuse(self, operation, op, digest, f"{type(error).__name__}: {error}")
            raise
        tally.writes += 1
        queue.add(self, operation, op, digest, array)
        if context is CallContext.SPMD and self._is_counted:
            self._look_at_pace()
        return self

    def apply_queued(self, operation: AccessKind, total: NDArray[Any]) -> None:
        """Write what an increment of all replicas has come to; for the queue only."""
        with self._storage:
            target = self._storage.writable()
            UFUNCS[operation](target, total, out=target, casting="same_kind")
        self._tally.collectives += 1

    def _assign(self, operation: AccessKind, x: Any, done: int = UNDONE) -> Variable:
        """Make a write by the table; nothing is left to do but to look at the pace of one that has been made (`done`)."""
        if done == DECIDE:
            self._look_at_pace()
            return self
        queue = self._queue
        if queue is not None:
            if self._is_deferrable(operation):
                self._watch()
                return self._defer(queue, operation, x)
            self._settle()
        owner = self._owner
        action = self._decide(operation)
        self._watch()
        if isinstance(x, Variable):
            x = x.read_value()
        is_reduced = action.travel in (Travel.SUM, Travel.MEAN)
        is_in_place = is_reduced and action.effect is not Effect.SHARE
        prepared = self._prepared[operation]
        if is_in_place and prepared is not unprepared:
            array = self._made_plain(operation, x)
            done = UNDONE if array is None else prepared(array, is_seen=True)
            if done != UNDONE:
                return self if done == DONE else self._assign(operation, x, done)
        what = f"{operation.value} of variable {self.name!r}"
        ufunc = UFUNCS[operation]

        def mine() -> NDArray[Any]:
            if self._dtype.kind == "b" and action.effect is Effect.SHARE:
                raise ConfigError(f"{what}: {_NO_SHARE}")
            array = self._operand(operation, x, reduced=is_reduced)
            # Half types are summed in float32 and rounded once, after they are added to the copy.
            is_wide = is_in_place or not is_reduced
            return (
                array
                if is_wide
                else array.astype(reduction("sum", array.dtype).accumulate, copy=False)
            )

        def store(together: NDArray[Any]) -> None:
            if is_in_place:
                return  # the call has written it
            if action.effect is Effect.SHARE:
                together = self._share(together)
            with self._storage, np.errstate(over="ignore", invalid="ignore"):
                target = self._storage.writable(keep=ufunc is not None)
                if ufunc is None:
                    target[...] = together
                else:
                    ufunc(target, together, out=target, casting="same_kind")

        def request(*arguments: Any, **options: Any) -> Any:
            if not is_in_place:
                return request_of(*arguments, **options)
            out = (
                self._storage.writable()
            )  # keeps what it holds, for the case that the replicas disagree
            return request_of(*arguments, **options, out=out, apply=ufunc)

        self._write(action, what, mine, request, store, is_in_place=is_in_place)
        if is_in_place:
            is_counted = self._is_counted and operation is not _ASSIGN
            if prepared is unprepared and not self._storage.is_shared:
                op = "sum" if action.travel is Travel.SUM else "mean"
                call = prepared_reduction(
                    owner.communicator, self._copy, op, what, owner.reproducible, ufunc
                )
                if call is not None:
                    made = prepared_write(
                        owner, self._storage, self._tally, call, counts=is_counted
                    )
                    self._prepared = {**self._prepared, operation: made}
            if is_counted:
                self._tally.added += 1
                if context_here(owner) is CallContext.SPMD:
                    self._look_at_pace()
        return self

    def _made_plain(self, operation: AccessKind, x: Any) -> NDArray[Any] | None:
        """Return the operand of a prepared write; None where the long way has to refuse it, and to tell the others."""
        number = None if self._shape else number_array(x, self._dtype)
        if number is not None:
            return number
        try:
            with quiet():
                return self._operand(operation, x, reduced=True)
        except Exception:
            return None

    def _look_at_pace(self) -> None:
        """Let AUTO decide, if it is time, after an increment outside every scope."""
        if self._owner.roster is not None:
            self._owner.roster.after_write(self, self._tally.added)

    def _watch(self) -> None:
        """Let the copies be compared before a write, if it is time."""
        roster = self._owner.roster
        if roster is not None and not roster.is_free and roster.is_due(self._tally):
            roster.before_write((self,))

    def _count_step(self) -> None:
        """Count a write for the comparisons of the copies."""
        roster = self._owner.roster
        if roster is not None and not roster.is_free:
            roster.count(self._tally)

    def _operand(self, operation: AccessKind, x: Any, *, reduced: bool) -> NDArray[Any]:
        """Return the operand of a write as an array of the variable's shape and dtype.

        Raises:
            ConfigError: It cannot be one.
        """
        what = f"{operation.value} of variable {self.name!r}"
        if (
            type(x) is np.ndarray
            and x.dtype == self._dtype
            and x.shape == self._shape
            and self._dtype.kind != "b"
        ):
            nan_check.look(x, what)
            return x
        if self._dtype.kind == "b" and operation is not AccessKind.ASSIGN:
            raise ConfigError(
                f"{what}: bool has no sum; write v.assign(x), or make it with dtype='int64'"
            )
        if reduced:
            self._check_sum(what)
        array = operand_array(
            x.read_value() if isinstance(x, Variable) else x, self._shape, self._dtype, what
        )
        nan_check.look(array, what)
        return array

    def _count_write(self) -> None:
        self._tally.writes += 1
        self._tally.collectives += 1

    def _scatter(self, operation: AccessKind, indices: Any, values: Any) -> Variable:
        action = self._decide(operation)
        self._watch()
        self._settle()
        what = f"{operation.value} of variable {self.name!r}"
        indices = indices.read_value() if isinstance(indices, Variable) else indices
        values = values.read_value() if isinstance(values, Variable) else values
        is_split = action.effect is Effect.SPLIT_ANEW

        def mine() -> tuple[NDArray[Any], RowSelection]:
            if is_split and self._dtype.kind == "b":
                raise ConfigError(f"{what}: {_NO_SHARE}")
            copy = self._storage.expose() if is_split else self._copy
            return copy, checked_rows(operation, indices, values, self._shape, self._dtype, what)

        def store(together: tuple[NDArray[Any], RowSelection]) -> None:
            total, rows = together
            divisor = self._owner.communicator.size if action.travel is Travel.MEAN_ROWS else 1
            with self._storage:
                made = applied(operation, total if is_split else self._copy, rows, divisor=divisor)
                self._keep(self._share(made) if is_split else made)

        return self._write(action, what, mine, rows_request, store)

    def _write(
        self,
        action: Action,
        what: str,
        mine: Any,
        request: Any,
        store: Any,
        *,
        is_in_place: bool = False,
    ) -> Variable:
        """Make a write: `mine` checks the operand, `request` carries it, `store` puts what came into the copy.

        Args:
            action: What the table says.
            what: The write in words.
            mine: Returns what this replica brings.
            request: Makes the call.
            store: Takes what has come, and locks the copy while it writes.
            is_in_place: The call writes the copy by itself.
        """
        storage = self._storage
        if (
            self._synchronization is VariableSynchronization.ON_READ
            and action.travel is not Travel.NOTHING
        ):
            self._owner.communicator.require_all(what)
        if isinstance(storage, SharedCopy) and not storage.is_staging:
            with written_once(self._owner, [storage]):
                return self._write(action, what, mine, request, store, is_in_place=is_in_place)
        is_free = action.travel is Travel.SAME and not self._owner.check_cross_writes
        is_alone = action.travel is Travel.NOTHING or (
            is_free and action.effect is not Effect.SPLIT_ANEW
        )
        if is_alone:
            self._count_step()  # also of a write that is refused: no other replica hears of it
            together = mine()
        elif not is_in_place:
            together = self._travel(action, what, mine, request)
        else:
            with (
                storage
                if self._replicas == 1
                else being_written(self._owner.communicator, what, (storage,))
            ):
                together = self._travel(action, what, mine, request)
        if not is_alone:
            self._count_step()
        store(together)
        self._tally.writes += 1
        return self

    def _travel(self, action: Action, what: str, mine: Any, request: Any) -> Any:
        """Make one call of the group; a rank whose `mine` raises tells the others, and no copy changes."""
        owner = self._owner
        hint = "Write the same on every replica, for instance x = strategy.reduce('MEAN', x, axis=None); or "
        if self._aggregation is VariableAggregation.NONE:
            hint += (
                "give the variable an aggregation that combines (it has NONE): "
                "aggregation=sv.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
            )
        elif owner.is_default and places(owner.context):
            hint += (
                "make the variable under `with strategy.scope():`. It belongs to the default strategy, and is written in another "
                "strategy's run as outside of it"
            )
        else:
            taken = (
                "replica 0's"
                if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA
                else "each replica's own"
            )
            hint += f"write inside strategy.run, where aggregation {self._aggregation.name} takes {taken} value"

        def check() -> Any:
            return request(
                action, owner.communicator, mine(), what, hint, reproducible=owner.reproducible
            )

        self._tally.collectives += 1
        if (
            action.travel is Travel.SAME
            and request is not rows_request
            and is_compared_first(owner.communicator)
        ):
            together = self._same_everywhere(what, mine)
            if together is not None:
                return together
            self._tally.collectives += 1
        return owner.communicator.perform(what, check, owner.timeout)

    def _same_everywhere(self, what: str, mine: Any) -> NDArray[Any] | None:
        """Return what all replicas bring; None, on all of them, where they bring different values."""
        communicator, timeout = self._owner.communicator, self._owner.timeout
        brought: list[NDArray[Any]] = []
        are_same: bool | None = None
        try:
            with quiet():
                brought.append(mine())
        except Exception:  # noqa: S110  (the long way tells the others)
            pass
        else:
            are_same = are_alike(communicator, brought[0], what, timeout)

        def check() -> Any:
            if not brought:
                brought.append(mine())
            return alike_request(communicator, brought[0], what)

        if are_same is None:
            are_same = communicator.perform(what, check, timeout)
        return brought[0] if are_same else None

    def _check_sum(self, what: str) -> None:
        """Raise ConfigError if the variable's dtype cannot be summed."""
        if self._dtype.kind == "b":
            raise ConfigError(
                f"{what}: bool has no {self._aggregation.name.lower()}; make the variable with dtype='int64', or with "
                f"aggregation=sv.VariableAggregation.ONLY_FIRST_REPLICA"
            )

    def _share(self, value: NDArray[Any]) -> NDArray[Any]:
        communicator = self._owner.communicator
        return share_of(value, communicator.size, communicator.member_rank)

    def _keep(self, value: NDArray[Any]) -> None:
        """Make `value` this replica's copy."""
        with self._storage:
            self._storage.writable(keep=False)[...] = value
