"""Writing many variables in one call: sums and means travel together, in few transfers.

Small variables that are often written together are a flat bucket: a grouped write is one all-reduce
of one flat array. After the first one, each replica keeps the copies of these variables one after
another in one piece of memory, which the call changes in place. If a view of a copy is alive, the
result is copied to each variable instead. From time to time the copies then move into a new flat
array.

`change_copies` is a local change of several copies, for optimizers and checkpoints only. `assign`
compares or combines what the replicas pass, because it may differ. A step has combined the
gradients already, so every copy changes in the same way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native import group_of, which
from syncvar.collectives.all_reduce import AllReduceCall
from syncvar.collectives.buckets import owns_itself, reduce_together
from syncvar.collectives.compressors import signature_of
from syncvar.collectives.reduce_args import ReduceOptions, reduction_of
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.reduce_ops import reduction
from syncvar.runtime.collective_spec import CollectiveSpec, names_text
from syncvar.runtime.communicator import CheckedCall
from syncvar.runtime.persistent_reduce import ReduceForm, persist_reduction
from syncvar.runtime.shm_reduce import is_direct
from syncvar.variables.create import VariableSpec, agree_on_variable
from syncvar.variables.policy import AccessKind, Action, CallContext, Effect, Travel
from syncvar.variables.storage import marked_as_written, refuse_overlap, write_once
from syncvar.variables.variable import Variable
from syncvar.variables.variable_compression import (
    CompressedUpdates,
    CompressedWrite,
    VariableUpdate,
)
from syncvar.variables.variable_state import UFUNCS, state_of
from syncvar.variables.variable_writes import checked_operand

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from syncvar._native import VariableCounters
    from syncvar.core.reduce_ops import Reduction
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage
    from syncvar.variables.storage import Storage
    from syncvar.variables.variable_owner import VariableOwner
    from syncvar.variables.variable_state import VariableState

SMALL_BYTES = 64 << 10  # larger variables are reduced in place, each by itself
_TOGETHER_BYTES = 16 << 20
_REPLICA = CallContext.REPLICA


def assign_all(pairs: Iterable[tuple[Variable, Any]]) -> None:
    """Set several variables, each as `variable.assign(x)`, with as few transfers as possible.

    Args:
        pairs: (variable, value); variables of one strategy, each at most once, the same on every
            replica.

    Raises:
        ConfigError: A wrong value, or a variable twice; nothing is written anywhere, the other
            replicas raise MismatchError.
        UsageError: Variables of different strategies.
        NoAggregation: As `assign`.
        MismatchError: The replicas write different variables.

    Cost: one all-reduce for all variables of one dtype and aggregation that are combined on
        writing; variables of other kinds are written one after another.

    Example:
        >>> import syncvar as sv
        >>> v, w = sv.Variable(1.0), sv.Variable([2.0, 3.0])
        >>> sv.assign_all([(v, 5.0), (w, [6.0, 7.0])])
        >>> float(v), w.numpy()
        (5.0, array([6., 7.], dtype=float32))
    """
    _write(AccessKind.ASSIGN, "assign_all", pairs)


def assign_add_all(pairs: Iterable[tuple[Variable, Any]]) -> None:
    """Add to several variables, each as `variable.assign_add(x)`; see `assign_all`.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable(1.0)
        >>> sv.assign_add_all([(v, 2.0)])
        >>> float(v)
        3.0
    """
    _write(AccessKind.ASSIGN_ADD, "assign_add_all", pairs)


def assign_sub_all(pairs: Iterable[tuple[Variable, Any]]) -> None:
    """Subtract from several variables, each as `variable.assign_sub(x)`; see `assign_all`.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable(1.0)
        >>> sv.assign_sub_all([(v, 2.0)])
        >>> float(v)
        -1.0
    """
    _write(AccessKind.ASSIGN_SUB, "assign_sub_all", pairs)


def change_copies(
    variables: Sequence[Variable], change: Callable[..., None], *arguments: Any
) -> None:
    """Call `change([array, …], *arguments)` to change this replica's copies in place.

    This sends nothing; if the replicas of a host share copies, they meet, and each shared copy
    changes once. A view that a program has read before does not change; a one-sided read sees the
    whole change or nothing. `change` must do the same on every replica for replicated variables,
    and must not keep the arrays. Locks are taken in the order of the variables.

    Example:
        >>> import syncvar as sv
        >>> v = sv.Variable([1.0, 2.0])
        >>> change_copies([v], lambda arrays: arrays[0].fill(3.0))
        >>> v.numpy()
        array([3., 3.], dtype=float32)
    """
    states = [state_of(variable) for variable in variables]
    for state in states:  # deferred writes come first
        state.flush()
    storages = [state.storage for state in states]
    shared = next((state for state in states if state.storage.is_shared), None)
    gate = nullcontext() if shared is None else write_once(shared.owner, storages)
    with gate, ExitStack() as changing:
        for storage in storages:
            changing.enter_context(storage)
        change([storage.writable() for storage in storages], *arguments)


def copy_of(variable: Variable) -> NDArray[Any]:
    """Return this replica's copy itself, to read now and not to keep; does not count as a read."""
    return state_of(variable).storage.array


def replace_copy(variable: Variable, value: NDArray[Any]) -> None:
    """Replace this replica's copy, for restored or copied state; sends nothing."""
    state = state_of(variable)
    state.keep(value)
    if state.compression is not None:
        state.compression.restart()


def are_parts(variable: Variable) -> bool:
    """Return whether the copies are parts of a whole; see `create_for_strategy`."""
    return state_of(variable).are_parts


def create_for_strategy(
    owner: VariableOwner, spec: VariableSpec, *, parts: bool = False
) -> Variable:
    """Create a variable of any strategy. Collective, except under NONE.

    With `parts` the copies are parts of a whole: restored on another number of replicas, each takes
    the mean.
    """
    result = Variable.from_init(agree_on_variable(owner, spec, stacklevel=2))
    state_of(result).are_parts = parts
    return result


def _write(operation: AccessKind, name: str, pairs: Iterable[tuple[Variable, Any]]) -> None:
    # Anything else is rejected below as an invalid pair.
    chosen = (
        pairs if type(pairs) is list else list(pairs) if isinstance(pairs, Iterable) else [pairs]
    )
    if not chosen:
        return
    if type(chosen[0]) is tuple and chosen[0] and type(chosen[0][0]) is Variable:
        prepared = state_of(chosen[0][0]).groups.get((operation, len(chosen)))
        if prepared is not None and prepared.write(chosen):
            return
    variables = _checked_variables(name, chosen)
    if (remote := variables[0].stepper) is not None:
        with remote.transaction():
            for variable, x in chosen:
                getattr(variable, operation.value)(x)
        return
    GroupedWrite(operation, name, chosen).execute()


def _checked_variables(name: str, pairs: list[Any]) -> list[Variable]:
    """Return the variables of pairs, which are of one strategy and each named once."""
    is_plain = set(map(type, pairs)) == {tuple} and set(map(len, pairs)) == {2}
    kinds = {type(variable) for variable, _ in pairs} if is_plain else set()
    is_checked = kinds == {Variable} and len({id(one) for one, _ in pairs}) == len(pairs)
    seen: set[int] = set()
    for pair in () if is_checked else pairs:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], Variable):
            raise ConfigError(
                f"{name} takes pairs of a variable and a value, for instance [(v, 1.0), (w, x)], "
                f"not {pair!r:.100}"
            )
        if id(pair[0]) in seen:
            raise ConfigError(
                f"{name}: the variable {pair[0].name!r} is named twice; combine its values first"
            )
        seen.add(id(pair[0]))
    first, *others = variables = [variable for variable, _ in pairs]
    stranger = next((one for one in others if one.strategy is not first.strategy), None)
    if stranger is not None:
        raise UsageError(
            f"{name}: {stranger.name!r} belongs to another strategy than {first.name!r}; call it "
            "for each"
        )
    return variables


class PyFlatBucket:
    """Checks and loads the variables of a group; `_native/variable_access.c` does the same in C."""

    def __init__(
        self,
        variables: Sequence[weakref.ref[Any]],
        storages: Sequence[Storage],
        tallies: Sequence[VariableCounters],
        parts: Sequence[NDArray[Any]],
    ) -> None:
        self._members = list(zip(variables, parts, strict=True))
        self._storages, self._tallies = storages, tallies
        self._moves = [-1] * len(storages)

    def load(self, pairs: Any) -> bool:
        """Copy the values of (variable, value) pairs to the flat input; False if one is unusual."""
        if type(pairs) is not list or len(pairs) != len(self._members):
            return False
        for pair, (reference, part) in zip(pairs, self._members, strict=True):
            if type(pair) is not tuple or len(pair) != 2 or pair[0] is not reference():
                return False
            x = pair[1]
            if type(x) is not np.ndarray or x.dtype is not part.dtype or x.shape != part.shape:
                return False
            part[...] = x
        return True

    def lay(self) -> None:
        """Record that the copies lie one after another."""
        self._moves = [-1 if storage.moves % 2 else storage.moves for storage in self._storages]

    def begin(self) -> bool:
        """Mark the copies as being written; False if they are not flat or a view is alive."""
        for number, storage in enumerate(self._storages):
            if not storage.mark():  # another thread is writing it
                for one in self._storages[:number]:
                    one.is_being_written = False
                return False
        for storage, moves in zip(self._storages, self._moves, strict=True):
            if storage.moves != moves or storage.is_exposed:
                self.end(is_done=False)
                return False
        return True

    def end(self, is_done: bool) -> None:  # noqa: FBT001  (as in C)
        """Remove the marks, and count the write if it was made."""
        for storage in self._storages:
            storage.is_being_written = False
        if is_done:
            for tally in self._tallies:
                tally.writes += 1
                tally.collectives += 1


class FlatBucket:
    """Variables of one dtype that are written together, by one operation and op."""

    def __init__(
        self,
        owner: VariableOwner,
        variables: Sequence[Any],
        name: str,
        op: str,
        ufunc: np.ufunc | None,
    ) -> None:
        self._owner, self._op, self._ufunc = owner, op, ufunc
        states = [state_of(one) for one in variables]
        self._storages = tuple([state.storage for state in states])
        self._tallies = tuple([state.tally for state in states])
        shapes = tuple([state.shape for state in states])
        ends = [0, *accumulate(storage.array.size for storage in self._storages)]
        self._places = list(pairwise(ends))
        self._staging = self._memory(ends[-1])
        self._scratch = np.empty_like(self._staging)
        self._flat = self._scratch  # the copies, while they lie one after another
        parts = [self._staging[start:stop] for start, stop in self._places]
        self._parts = tuple(
            [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        )
        references = tuple([weakref.ref(one) for one in variables])
        members = references, self._storages, self._tallies, self._parts
        is_native = which(owner.context.config.call_runner) == "c"
        self._group: Any = (group_of(*members) if is_native else None) or PyFlatBucket(*members)
        self._failures = 0
        self._turn = threading.Lock()  # held by the thread that uses `_staging`
        communicator = owner.communicator
        self._communicator, self._channel = communicator, communicator.channel
        names = tuple([state.name for state in states])
        staging = self._staging
        kinds = tuple([(staging.dtype.name, shape) for shape in shapes])
        self._spec = _spec(name, names, kinds, (op,), reproducible=owner.reproducible)
        rule = reduction_of(staging, op)
        is_small = is_direct(staging.size * rule.accumulate.itemsize, communicator.size)
        form = ReduceForm([(rule, [0])], staging.shape, is_small, apply=ufunc)
        self._call = persist_reduction(communicator, form, self._spec)

    @staticmethod
    def takes(owner: VariableOwner, states: Sequence[VariableState], ops: Sequence[str]) -> bool:
        """Return whether variables can be written so; the same answer on every replica."""
        communicator = owner.communicator
        is_single = communicator.size == 1 or len(states) < 2
        if is_single or communicator.channel is None or communicator.uneven is not None:
            return False
        storages = [state.storage for state in states]
        sizes = [storage.array.nbytes for storage in storages]
        dtypes = {state.dtype for state in states}
        is_plain = (
            len(set(ops)) == len(dtypes) == 1
            and dtypes.pop().kind != "b"
            and not any(storage.is_shared for storage in storages)
        )
        return is_plain and max(sizes) <= SMALL_BYTES and 0 < sum(sizes) <= _TOGETHER_BYTES

    def is_of(self, states: Sequence[VariableState]) -> bool:
        """Return whether these are its variables."""
        return len(states) == len(self._storages) and all(
            state.storage is storage for state, storage in zip(states, self._storages, strict=True)
        )

    def _memory(self, count: int) -> NDArray[Any]:
        first = self._storages[0]
        return first.memory((count,), first.array.dtype)

    def write(self, pairs: Any) -> bool:
        """Make a persistent write; False if nothing was done: the policy table makes it."""
        owner, call = self._owner, self._call
        stack, registry = owner.places.stack, owner.registry
        if stack:
            is_here = stack[-1].owner is owner and stack[-1].context is _REPLICA
        else:
            is_here = owner.is_default
        if call is None or not is_here or self._communicator.channel is not self._channel:
            return False
        tally = self._tallies[0]
        is_counted = registry is not None and not registry.is_free
        if is_counted and tally.steps >= registry.until:  # type: ignore[union-attr]
            return False
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if not self._group.load(pairs):
                return False
            is_done, is_flat = False, self._group.begin()
            target = self._flat if is_flat else self._gather_copies()
            try:
                is_done = call(self._staging, target, None, owner.timeout) is not None
            finally:
                if is_flat:
                    self._group.end(is_done)
            if is_done and not is_flat:
                self._spread()
            if is_done and is_counted:
                registry.count(tally)  # type: ignore[union-attr]
            return is_done
        finally:
            self._turn.release()

    def perform(self, name: str, operand: Callable[[int], NDArray[Any]]) -> None:
        """Make the checked write by the same call."""
        owner = self._owner
        if not self._turn.acquire(blocking=False):
            refuse_overlap(owner.communicator, name)
        try:
            owner.communicator.perform(name, partial(self._checked, operand), owner.timeout)
            self._spread()
        finally:
            self._turn.release()

    def _checked(self, operand: Callable[[int], NDArray[Any]]) -> AllReduceCall:
        """Load the operands, and return the call that writes them."""
        for number, part in enumerate(self._parts):
            part[...] = operand(number)
        options = ReduceOptions(self._owner.reproducible, apply=self._ufunc)
        copies, communicator = self._gather_copies(), self._owner.communicator
        call = AllReduceCall(communicator, self._staging, self._op, out=copies, options=options)
        call.spec = self._spec
        return call

    def _gather_copies(self) -> NDArray[Any]:
        """Return an array with the values of all copies, if the operation needs them."""
        if self._ufunc is not None:
            for storage, (start, stop) in zip(self._storages, self._places, strict=True):
                self._scratch[start:stop] = storage.array.reshape(-1)
        return self._scratch

    def _spread(self) -> None:
        """Copy the result to each variable.

        At the failures 1, 2, 4, 8, ... also move the copies into a new flat array.
        """
        self._failures += 1
        is_time = not self._failures & (self._failures - 1)
        flat = self._memory(self._scratch.size) if is_time else self._scratch
        for storage, tally, (start, stop) in zip(
            self._storages, self._tallies, self._places, strict=True
        ):
            value = self._scratch[start:stop].reshape(storage.array.shape)
            with storage:
                if is_time:
                    storage.move_to(flat[start:stop].reshape(storage.array.shape), value)
                else:
                    storage.writable(keep=False)[...] = value
            tally.writes += 1
            tally.collectives += 1
        if is_time:
            self._flat = flat
            self._group.lay()


class GroupedWrite:
    """One write of several variables: sums and means travel together, the others one by one."""

    def __init__(self, operation: AccessKind, name: str, pairs: list[tuple[Variable, Any]]) -> None:
        self._operation, self._name = operation, name
        states = [state_of(variable) for variable, _ in pairs]
        self._owner = states[0].owner
        op_of: dict[str, str] = {}
        for state in states:
            if state.kind not in op_of:
                op_of[state.kind] = _op(state.decide(operation))
        found = [
            (pair, state, op_of[state.kind]) for pair, state in zip(pairs, states, strict=True)
        ]
        self._single = [pair for pair, _, op in found if not op]
        self._compressed = [one for one in found if one[2] and one[1].compression is not None]
        plain = [one for one in found if one[2] and one[1].compression is None]
        self._together = [pair for pair, *_ in plain]
        self._states = [state for _, state, _ in plain]
        self._ops = [op for *_, op in plain]
        # Written after the others; a wrong value of theirs is found before.
        self._others = self._single + [pair for pair, *_ in self._compressed]

    def execute(self) -> None:
        """Make the write."""
        if self._together:
            self._write_together()
        if self._compressed:
            self._write_compressed()
        for variable, x in self._single:
            getattr(variable, self._operation.value)(x)

    def _operand(self, number: int) -> NDArray[Any]:
        x = self._together[number][1]
        return checked_operand(self._states[number], self._operation, x, is_reduced=True)

    def _write_together(self) -> None:
        owner, name, states = self._owner, self._name, self._states
        first, registry = states[0], owner.registry
        if registry is not None and not registry.is_free and registry.is_due(first.tally):
            registry.before_write(states)
        if not self._others and FlatBucket.takes(owner, states, self._ops):
            self._bucket().perform(name, self._operand)
            first.count_step()
            return
        storages = [state.storage for state in states]
        with marked_as_written(owner.communicator, name, storages), write_once(owner, storages):
            owner.communicator.perform(name, self._checked, owner.timeout)
        first.count_step()
        for state in states:
            state.count_write()

    def _write_compressed(self) -> None:
        owner, states = self._owner, [state for _, state, _ in self._compressed]
        for state in states:
            state.check_replicas()
        storages = [state.storage for state in states]
        with write_once(owner, storages):
            owner.communicator.perform(self._name, self._checked_compressed, owner.timeout).commit()
        for state in states:
            state.count_step()
            state.count_write()

    def _checked_compressed(self) -> CompressedWrite:
        """Check the operands, and return the call that sends them compressed."""
        owner, updates, kinds, options = self._owner, [], [], []
        for (_, x), state, op in self._compressed:
            assert state.compression is not None
            options.append((op, *signature_of(state.compression.compressor)))
            array = checked_operand(state, self._operation, x, is_reduced=True)
            wide = array.astype(reduction(op, array.dtype).accumulate, copy=False)
            updates.append(VariableUpdate(state, self._operation, wide, op))
            kinds.append((array.dtype.name, array.shape))
        for variable, x in self._single:
            checked_operand(variable, self._operation, x, is_reduced=False)
        names = tuple([one.state.name for one in updates])
        spec = _spec(self._name, names, tuple(kinds), tuple(options), reproducible=False)
        return CompressedWrite(spec, CompressedUpdates(owner.communicator, updates))

    def _bucket(self) -> FlatBucket:
        """Return the flat bucket of these variables; create it at their first grouped write."""
        operation, states = self._operation, self._states
        groups, key = states[0].groups, (operation, len(states))
        found: FlatBucket | None = groups.get(key)
        if found is None or not found.is_of(states):
            variables = [variable for variable, _ in self._together]
            found = groups[key] = FlatBucket(
                self._owner, variables, self._name, self._ops[0], UFUNCS[operation]
            )
        return found

    def _checked(self) -> _GroupedWriteCall:
        """Check the operands, and return the call that writes the variables."""
        owner, ops = self._owner, self._ops
        arrays = [self._operand(number) for number in range(len(self._states))]
        for variable, x in self._others:
            checked_operand(variable, self._operation, x, is_reduced=False)
        targets = [state.storage.writable() for state in self._states]
        names = tuple([state.name for state in self._states])
        dtypes = [array.dtype for array in arrays]
        if len(set(dtypes)) == len(set(ops)) == 1:
            rules = [reduction(ops[0], dtypes[0])] * len(arrays)
        else:
            rules = [reduction(op, dtype) for op, dtype in zip(ops, dtypes, strict=True)]
        kinds = tuple([(rule.source, x.shape) for rule, x in zip(rules, arrays, strict=True)])
        spec = _spec(self._name, names, kinds, tuple(ops), reproducible=owner.reproducible)
        options = ReduceOptions(owner.reproducible, apply=UFUNCS[self._operation])
        return _GroupedWriteCall(spec, owner.communicator, arrays, rules, targets, options)


class _GroupedWriteCall(CheckedCall):
    """A call that reduces arrays to their targets, with one transfer for each dtype and op."""

    def __init__(
        self,
        spec: CollectiveSpec,
        communicator: Communicator,
        arrays: list[NDArray[Any]],
        rules: list[Reduction],
        targets: list[NDArray[Any]],
        options: ReduceOptions,
    ) -> None:
        super().__init__(spec)
        self._arguments = communicator, arrays, rules, targets, options
        # An array that owns its memory cannot overlap a copy.
        self._no_overlap = all(map(owns_itself, arrays))

    def stages(self) -> Generator[Stage, None, Any]:
        return reduce_together(*self._arguments, no_overlap=self._no_overlap)


def _spec(
    name: str,
    names: tuple[str, ...],
    kinds: tuple[tuple[str, tuple[int, ...]], ...],
    ops: tuple[Any, ...],
    *,
    reproducible: bool,
) -> CollectiveSpec:
    """Return the description of a grouped write of variables of these names and kinds."""
    more = f", … ({len(names)} variables)" if len(names) > 3 else ""
    label = f"{name} of {', '.join(map(repr, names[:3]))}{more}"
    return CollectiveSpec(
        label,
        reproducible=reproducible,
        kinds=kinds,
        options=(names, ops),
        variable=names_text(names),
        access=name,
    )


def _op(action: Action) -> str:
    """Return by which op a write is combined, or "" where it is not."""
    if action.travel not in (Travel.SUM, Travel.MEAN) or action.effect is Effect.SHARE:
        return ""
    return "sum" if action.travel is Travel.SUM else "mean"
