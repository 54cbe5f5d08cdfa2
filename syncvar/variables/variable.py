"""The public class of replicated variables, and its explanation.

Its reads and writes follow the table in `policy`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from syncvar._native.constants import StoreResult
from syncvar.collectives.stage_builders import meet
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.html_table import html_table, preview
from syncvar.core.lazy_import import MigrationHintsMixin
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.variables import variable_reads, variable_writes
from syncvar.variables.create import (
    VariableInit,
    VariableSpec,
    agree_on_variable,
    init_in_world,
)
from syncvar.variables.policy import AccessKind, VariableAggregation, VariableSynchronization
from syncvar.variables.values import ArrayProtocol
from syncvar.variables.variable_compression import VariableCompression
from syncvar.variables.variable_owner import current_owner, current_scope
from syncvar.variables.variable_state import PLAIN_WRITES, VariableState, state_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.collectives.compressors import Codec, PowerSGD
    from syncvar.variables.variable_owner import RemoteOptimizer
    from syncvar.variables.variable_state import Write

COPIED = "syncvar: functions to call with each copied variable"
"""Key of a deep copy's memo: functions that optimizers want called with (variable, copy)."""

_ASSIGN, _ADD, _SUB = AccessKind.ASSIGN, AccessKind.ASSIGN_ADD, AccessKind.ASSIGN_SUB
_STORED: int = StoreResult.STORED
_PACES = ("eager", "deferred")
_NAME_MAX = 128


@dataclass(frozen=True, slots=True)
class Explanation:
    """Mode and counters of a variable, with reasons; `Variable.explain()` returns it.

    Args:
        mode: The synchronization in force. For an AUTO variable also its pace, eager or deferred,
            and whether the program has pinned it.
        requested: The synchronization that the program asked for.
        rule: Why the mode in force is that one.
        numbers: Counters of this replica: replicas, reads, writes, collectives, nbytes (of the
            value). Where AUTO may defer, also increments (writes that can wait), turns (reads that
            came after one) and pending (that wait now).
        changes: (step, from, to, why) of each change of pace. The step is the number of the
            strategy's run at whose end the pace changed. Outside every scope it is the number of
            the variable's increment. After `pin` it is the number of the run or write before.
        reason: For an AUTO variable, what AUTO decided last, when, and from which numbers; or why
            there is nothing to decide.

    Example:
        >>> import syncvar as sv
        >>> explanation = sv.Variable(0.0, synchronization="ON_READ", name="seen").explain()
        >>> explanation.mode, explanation.numbers["writes"]
        ('ON_READ', 0)
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
        lines += ["step {}: {} -> {}, {}".format(*change) for change in self.changes]
        lines += [f"now: {self.reason}"] if self.reason else []
        return "\n".join(lines)


def move_variable(variable: Variable) -> None:
    """Move a variable to the world to which its strategy has moved; each copy keeps its value.

    Sends nothing, except for shared copies: the replicas of a host meet to make one. All replicas
    move their variables in the same order.
    """
    state = variable._state  # noqa: SLF001  (its own class)
    if state.context is not state.owner.context:
        variable._move()  # noqa: SLF001  (its own class)


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


class Variable(MigrationHintsMixin, ArrayProtocol):
    """A value with one copy on each replica. Its mode says when the copies are made equal.

    Creating one is collective, except under NONE. It belongs to the current strategy: that of the
    innermost scope, or outside every scope the default strategy, which spans the world.

    Args:
        initial_value: Array, number, another variable (its value), or a callable. The chief alone
            calls it (under NONE each replica). Every replica takes the chief's value, except under
            NONE. A callable with a parameter `shard_info` makes the value part by part, see
            `sv.ShardInfo`: for a variable on servers one part for each shard, else one part for
            the whole. `shape` and `dtype` then describe the whole.
        trainable: None means True, but False for ON_READ.
        name: 1 to 128 of `A-Z a-z 0-9 _ . / -`; a name taken twice gets `_1`, `_2`.
        dtype: None means that of the value; Python floats make float32, ints int64.
        synchronization: When the copies are made equal; a `VariableSynchronization` or its name.
        aggregation: How values of several replicas become one; a `VariableAggregation` or its name.
        shape: Required shape of the initial value; None for any.
        compress: "float16", "bfloat16", "int8", "topk", "powersgd", or a compressor of
            `sv.compressors`, the same on every replica. What the replicas add up then travels in
            fewer bytes: the operands of ON_WRITE writes, and the copies of ON_READ reads. For real
            floating numbers with SUM or MEAN. Rows of scatter writes and cross context stay exact.
            What "topk" and "powersgd" leave out of a write, the next writes add.

    Raises:
        ConfigError: A wrong argument; the other replicas raise MismatchError.
        MismatchError: The replicas ask for different variables.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable([1.0, 2.0], aggregation="SUM")
        >>> v.assign_add([1.0, 1.0]).numpy()
        array([2., 3.], dtype=float32)
    """

    stepper: RemoteOptimizer | None = None  # applies optimizer steps to a remote value
    _persistent_writes: dict[AccessKind, Write] = PLAIN_WRITES  # the same dict as the state's

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Return an instance of the class that the current strategy uses for variables."""
        place = current_scope() if cls is Variable and (arguments or options) else None
        if place is None:
            return object.__new__(cls)
        return object.__new__(place.owner.variable_class(options.get("synchronization")) or cls)

    def __init__(  # noqa: PLR0913  (public signature)
        self,
        initial_value: Any,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: Any = VariableSynchronization.AUTO,
        aggregation: Any = VariableAggregation.NONE,
        shape: Any = None,
        compress: str | Codec | PowerSGD | None = None,
    ) -> None:
        mode = synchronization, aggregation
        spec = VariableSpec(initial_value, trainable, name, dtype, *mode, shape, compress)
        self._init_from(agree_on_variable(current_owner(), spec, stacklevel=2))

    def _init_from(self, init: VariableInit) -> None:
        state = self._state = VariableState(init)
        self._persistent_writes = state.persistent_writes
        self._owner, self._name, self._trainable = init.owner, init.name, init.trainable
        self._shape, self._dtype = state.shape, state.dtype
        self._requested, self._synchronization = state.requested, state.synchronization
        self._aggregation = state.aggregation
        if init.compressor is not None:
            state.compression = self._compression(init.compressor)

    def _compression(self, compressor: Codec | PowerSGD) -> VariableCompression:
        """Return the compression of its sums, with the variables that it needs. Collective."""
        compression = VariableCompression(self._state, compressor)
        for slot, (shape, mode) in compression.missing.items():
            name = f"{self._name[: _NAME_MAX - 1 - len(slot)]}/{slot}"
            value, is_trainable = np.zeros(shape, np.float32), False
            modes = mode, VariableAggregation.NONE
            spec = VariableSpec(value, is_trainable, name, None, *modes)
            variable = Variable.from_init(agree_on_variable(self._owner, spec))
            compression.add(slot, variable, state_of(variable))
        return compression

    @classmethod
    def from_init(cls, init: VariableInit) -> Variable:
        """Return a variable with values that the replicas have agreed on; for this package only."""
        variable = Variable.__new__(Variable)
        variable._init_from(init)  # noqa: SLF001  (its own class)
        return variable

    def _move(self) -> None:
        old = self._state
        value, mode = old.storage.array.copy(), (old.requested, old.aggregation)
        init = VariableInit(old.owner, old.namespace, old.name, value, self._trainable, *mode)
        self._init_from(init_in_world(init))
        self._state.are_parts = old.are_parts
        if old.pin is not None:
            self._state.set_pin(old.pin, 0)
        compression = old.compression
        if compression is not None:
            for slot, variable in compression.variables.items():
                move_variable(variable)
                compression.add(slot, variable, state_of(variable))
            compression.restart()
            self._state.compression, self._state.rule = compression, old.rule

    # -- properties --------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name, unique among the variables of the same ranks."""
        return self._name

    @property
    def trainable(self) -> bool:
        """Whether optimizers and users should treat it as a weight; nothing here depends on it."""
        return self._trainable

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, fixed at creation."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type, fixed at creation."""
        return self._dtype

    @property
    def synchronization(self) -> VariableSynchronization:
        """The mode in force (ON_WRITE, ON_READ or NONE)."""
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
        """The strategy that created it."""
        return self._owner

    def __repr__(self) -> str:
        value = self._state.storage.expose()
        shown = np.array2string(value, threshold=20, separator=", ")
        return (
            f"<sv.Variable {self.name!r} {self._synchronization.name} + {self._aggregation.name} "
            f"shape={self._shape} dtype={self._dtype.name} local={shown}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("synchronization", self._synchronization.name),
            ("aggregation", self._aggregation.name),
            ("dtype", self._dtype.name),
            ("shape", self._shape),
            ("copy of this rank", preview(self._state.storage.expose())),
        ]
        return html_table(f"sv.Variable {self.name}", rows)

    # -- reading -----------------------------------------------------------------------------------

    def read_value(self, copy: bool = True) -> NDArray[Any]:  # noqa: FBT001, FBT002  (public signature)
        """Return the value, read-only. Later writes of the variable do not change it.

        Collective for ON_READ outside `run`; never for ON_WRITE and NONE. Reading copies no bytes.

        Other threads of the process may write meanwhile: the read then returns the value before a
        write or after it. There is one exception: during a collective write (ON_WRITE) a read
        may return a partly written value.

        Args:
            copy: With False, the result is a view that is valid until the next write. With True,
                the next write goes to new memory while the result or a view of it exists.

        Raises:
            NoAggregation: ON_READ with aggregation NONE, outside `run`.

        Example:
            >>> import syncvar as sv
            >>> v = sv.Variable(2.0)
            >>> v.read_value(), float(v), v * 2
            (array(2., dtype=float32), 2.0, np.float32(4.0))
        """
        return variable_reads.read_value(self._state, copy=copy)

    def value(self) -> NDArray[Any]:
        """Return `read_value()`."""
        return self.read_value()

    def numpy(self) -> NDArray[Any]:
        """Return `read_value()`."""
        return self.read_value()

    def local_value(self) -> NDArray[Any]:
        """Return this replica's copy, read-only; sends and copies nothing, in every context.

        Example:
            >>> import syncvar as sv
            >>> sv.Variable(1, synchronization="ON_READ").local_value()
            array(1)
        """
        return variable_reads.read(self._state, AccessKind.LOCAL)

    def sync(self) -> NDArray[Any]:
        """Wait for all replicas and return the value; collective in every context (not for NONE).

        Raises:
            NoAggregation: ON_READ with aggregation NONE.
        """
        return variable_reads.read(self._state, AccessKind.SYNC)

    def read_from(self, rank: int) -> NDArray[Any]:
        """Return the copy of another replica, read-only; for ON_WRITE the value. One-sided.

        The other replica's engine answers while its program computes. The result never changes. It
        is the copy at some moment during this call; for ON_WRITE see `read_value`. NONE variables
        are found by their name.

        Args:
            rank: Replica of the variable's strategy; this one's own copy needs no message.

        Raises:
            ConfigError: There is no such replica.
            UsageError: It has no such variable (a NONE variable may exist on some replicas only).
            DeadlineExceeded: It did not answer in time. Only this call fails, the group stays
                usable.

        Example:
            >>> import syncvar as sv
            >>> v = sv.Variable(3.0, synchronization="NONE")
            >>> v.read_from(0)
            array(3., dtype=float32)
        """
        return variable_reads.read_from(self._state, rank)

    # -- writing -----------------------------------------------------------------------------------

    def assign(self, x: Any) -> Variable:
        """Set the value, as the mode says for this context. Returns the variable.

        Raises:
            NoAggregation: ON_WRITE with aggregation NONE, inside `run`.
            ConfigError: Wrong shape or dtype. If the write communicates, no replica writes
                anything.
            MismatchError: Another replica's write differs.

        Example:
            >>> import syncvar as sv
            >>> float(sv.Variable(0.0).assign(3.0))
            3.0
        """
        result = self._persistent_writes[_ASSIGN](x)
        return self if result == _STORED else self._assign(_ASSIGN, x, result)

    def assign_add(self, x: Any) -> Variable:
        """Add to the value; as `assign`."""
        result = self._persistent_writes[_ADD](x)
        return self if result == _STORED else self._assign(_ADD, x, result)

    def assign_sub(self, x: Any) -> Variable:
        """Subtract from the value; as `assign`."""
        result = self._persistent_writes[_SUB](x)
        return self if result == _STORED else self._assign(_SUB, x, result)

    def scatter_add(self, indices: Any, values: Any) -> Variable:
        """Add to rows, in the order of (replica, position). Returns the variable.

        A row that is named twice is added to twice.

        Args:
            indices: Integers in [0, rows), of any shape S.
            values: Shape S + shape[1:].

        Raises:
            RowOutOfRange: An index outside the variable. If the write communicates, no replica
                writes anything.
            UsageError: The mode does not allow it: scatter_mul, scatter_div and scatter_update of
                ON_WRITE with SUM or MEAN in replica context.

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
        """Replace rows by the minimum of them and the values; as `scatter_add`."""
        return self._scatter(AccessKind.SCATTER_MIN, indices, values)

    def scatter_max(self, indices: Any, values: Any) -> Variable:
        """Replace rows by the maximum of them and the values; as `scatter_add`."""
        return self._scatter(AccessKind.SCATTER_MAX, indices, values)

    def scatter_update(self, indices: Any, values: Any) -> Variable:
        """Replace rows; a row that is named twice takes the last value. As `scatter_add`."""
        return self._scatter(AccessKind.SCATTER_UPDATE, indices, values)

    def _assign(self, operation: AccessKind, x: Any, result: int) -> Variable:
        """Finish a write that the persistent write has answered with `result`."""
        variable_writes.assign(self._state, operation, x, result)
        return self

    def _scatter(self, operation: AccessKind, indices: Any, values: Any) -> Variable:
        variable_writes.ScatterOp(self._state, operation, indices, values).execute()
        return self

    # -- explaining and steering -------------------------------------------------------------------

    def explain(self) -> Explanation:
        """Return modes, rule, counters and changes of this variable; sends nothing.

        Example:
            >>> import syncvar as sv
            >>> print(sv.Variable(0.0, name="explained").explain())
            mode ON_WRITE (eager), requested AUTO
            rule: AUTO behaves as ON_WRITE; only when its communication happens may differ
            numbers: replicas 1, reads 0, writes 0, collectives 0, nbytes 4
            now: eager: with one replica nothing has to travel
        """
        return explain(self._state)

    def pin(self, mode: str | None) -> None:
        """Fix whether an AUTO variable defers increments; None lets AUTO decide again. Collective.

        Eager, each increment is combined with the other replicas' at once. Deferred, it waits for a
        read of the variable, the end of the run, or any other call, and travels with the others
        that wait. AUTO starts eager. It samples writes and reads at the ends of every few runs
        (outside every scope: at every 64th increment). It changes on all replicas at the same
        point.

        Args:
            mode: "eager", "deferred" or None.

        Raises:
            ConfigError: Another mode.
            UsageError: The variable was not created with AUTO.
        """
        state = self._state
        owner, registry = state.owner, state.owner.registry
        owner.context.refuse_in_block("v.pin")
        if self._requested is not VariableSynchronization.AUTO:
            raise UsageError(
                f"variable {self.name!r} was asked as {self._requested.name}, which never changes; "
                "pin is for sv.Variable(…, synchronization=sv.VariableSynchronization.AUTO)"
            )

        def check() -> None:
            if mode is not None and mode not in _PACES:
                raise ConfigError(
                    f"there is no pace {mode!r}: write v.pin('eager'), v.pin('deferred') or "
                    "v.pin(None)"
                )

        label = f"pin variable {self.name!r} to {mode}"
        spec = CollectiveSpec(label, variable=self.name, access="pin")
        meet(owner.communicator, spec, owner.timeout, check)
        if mode != state.pin:
            step = state.tally.writes if registry is None or not registry.runs else registry.runs
            state.set_pin(mode, step)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Variable:
        state = self._state
        state.flush()
        value, mode = state.storage.expose(), (self._requested, self._aggregation)
        compression = state.compression
        compressor = None if compression is None else compression.compressor
        spec = VariableSpec(value, self.trainable, self.name, None, *mode, None, compressor)
        copied = memo[id(self)] = Variable.from_init(agree_on_variable(state.owner, spec, own=True))
        if compression is not None:
            compression.copy_to(state_of(copied).compression)
        for note in memo.get(COPIED, ()):
            note(self, copied)
        return copied
