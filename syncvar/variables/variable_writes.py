"""Writes of a variable by the policy table: `assign`, increments, scatter operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native.constants import StoreResult
from syncvar.collectives.compressed_reduce import with_compressor
from syncvar.collectives.reduce_args import (
    ReduceOptions,
    check_finite,
    describe_reduction,
    persistent_reduction,
)
from syncvar.core.errors import ConfigError, error_line
from syncvar.core.reduce_ops import quiet, reduction
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint
from syncvar.variables.policy import (
    AccessKind,
    CallContext,
    Effect,
    Travel,
    VariableSynchronization,
)
from syncvar.variables.replica_call import RowsCall, checked_call, combine
from syncvar.variables.storage import SharedCopy, marked_as_written, write_once
from syncvar.variables.values import (
    ArrayProtocol,
    RowSelection,
    apply_rows,
    check_rows,
    number_array,
    operand_array,
)
from syncvar.variables.variable_compression import (
    CompressedUpdates,
    CompressedWrite,
    VariableUpdate,
)
from syncvar.variables.variable_owner import context_here, context_of
from syncvar.variables.variable_state import UFUNCS, PersistentWrite, plain_write

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.variables.deferred_writes import WriteQueue
    from syncvar.variables.replica_call import ReplicaAccess
    from syncvar.variables.variable_state import VariableState

_SUMS = (Travel.SUM, Travel.MEAN)
_ON_READ = VariableSynchronization.ON_READ
_NO_SHARE = "the copies of a bool variable have no sum to be split from; make it with dtype='int64'"


def assign(state: VariableState, operation: AccessKind, x: Any, result: int) -> None:
    """Finish a write that the persistent write has not finished."""
    if result == StoreResult.STORED_AND_SAMPLE:
        state.sample_deferral()
        return
    queue = state.queue
    if queue is not None:
        if _is_deferrable(state, operation):
            state.check_replicas()
            _defer(state, queue, operation, x)
            return
        state.flush()
    WriteOp(state, operation, x).run()


def checked_operand(
    target: Any, operation: AccessKind, x: Any, *, is_reduced: bool
) -> NDArray[Any]:
    """Return the operand of a write as an array of the variable's shape and dtype."""
    label = f"{operation.value} of variable {target.name!r}"
    dtype, shape = target.dtype, target.shape
    is_bool = dtype.kind == "b"
    if type(x) is np.ndarray and x.dtype == dtype and x.shape == shape and not is_bool:
        check_finite(x, label)
        return x
    if is_bool and operation is not AccessKind.ASSIGN:
        raise ConfigError(
            f"{label}: bool has no sum; write v.assign(x), or make it with dtype='int64'"
        )
    if is_reduced:
        target.check_sum(label)
    array = operand_array(_value_of(x), shape, dtype, label)
    check_finite(array, label)
    return array


def _value_of(x: Any) -> Any:
    return x.read_value() if isinstance(x, ArrayProtocol) else x


# -- deferred increments ---------------------------------------------------------------------------


def _is_deferrable(state: VariableState, operation: AccessKind) -> bool:
    """Return whether this write, here and now, is an increment that the replicas combine."""
    known = state.increments.get(operation.value)
    if known is not None and context_here(state.owner) is known[0]:
        return True
    if operation is AccessKind.ASSIGN or state.storage.is_shared:
        return False
    travel = state.decide(operation).travel
    if travel not in _SUMS:
        return False
    op = "sum" if travel is Travel.SUM else "mean"
    digest = fingerprint(state.name, operation.value, op, state.dtype.name, state.shape)
    context = context_of(state.owner, operation.value)
    state.increments[operation.value] = context, op, digest
    return True


def _defer(state: VariableState, queue: WriteQueue, operation: AccessKind, x: Any) -> None:
    """Queue an increment. The queue also carries a rejected one, so that the others learn of it."""
    context, op, digest = state.increments[operation.value]
    tally = state.tally
    tally.added += 1
    state.count_step()  # counts rejected increments too, as `added` does
    try:
        array = checked_operand(state, operation, x, is_reduced=True)
    except Exception as error:
        queue.refuse(state, operation, op, digest, error_line(error))
        raise
    tally.writes += 1
    queue.add(state, operation, op, digest, array)
    if context is CallContext.SPMD and state.is_counted:
        state.sample_deferral()


# -- writes by the policy table --------------------------------------------------------------------


class ReplicaWrite(ABC):
    """One write by the policy table: `operand` checks the input, `store` applies the result."""

    is_direct = False  # the collective itself writes the copy

    def __init__(self, state: VariableState, operation: AccessKind) -> None:
        self.state, self.operation = state, operation
        self.action = state.decide(operation)
        self.label = state.describe(operation)
        self.name = CollectiveSpec(self.label, variable=state.name, access=operation.value)

    def request(self) -> Any:
        """Return the function that builds the collective from the input."""
        return checked_call

    @abstractmethod
    def operand(self) -> Any:
        """Return the checked input of this replica."""

    @abstractmethod
    def store(self, together: Any) -> None:
        """Apply the result of the collective to the copy."""

    def execute(self) -> None:
        """Make the write."""
        state, action, storage = self.state, self.action, self.state.storage
        is_on_read = state.synchronization is _ON_READ
        if is_on_read and action.travel is not Travel.NOTHING:
            state.owner.communicator.require_all(self.label)
        if isinstance(storage, SharedCopy) and not storage.is_staging:
            with write_once(state.owner, [storage]):
                self.execute()
            return
        is_unchecked = action.travel is Travel.SAME and not state.owner.check_cross_writes
        is_local = is_unchecked and action.effect is not Effect.SPLIT_ANEW
        is_local = is_local or action.travel is Travel.NOTHING
        if is_local:
            state.count_step()  # also if `operand` raises: no other replica notices that
            together = self.operand()
        elif not self.is_direct:
            together = self._combine()
        elif state.replicas == 1:
            with storage:
                together = self._combine()
        else:
            with marked_as_written(state.owner.communicator, self.label, (storage,)):
                together = self._combine()
        if not is_local:
            state.count_step()
        self.store(together)
        state.tally.writes += 1
        is_new = self.operation is AccessKind.ASSIGN or state.synchronization is _ON_READ
        if state.compression is not None and action.travel is Travel.SAME and is_new:
            state.compression.begin_anew()

    def _combine(self) -> Any:
        return combine(self.state, self.action, self.name, self.operand, self.request())


class WriteOp(ReplicaWrite):
    """`assign`, `assign_add` or `assign_sub` by the policy table."""

    def __init__(self, state: VariableState, operation: AccessKind, x: Any) -> None:
        super().__init__(state, operation)
        state.check_replicas()
        self._x = _value_of(x)
        self._ufunc = UFUNCS[operation]
        self._is_reduced = self.action.travel in _SUMS
        self._is_combined = self._is_reduced and self.action.effect is not Effect.SHARE
        self._is_compressed = self._is_combined and state.compression is not None
        self.is_direct = self._is_combined and not self._is_compressed
        self._op = "sum" if self.action.travel is Travel.SUM else "mean"

    def run(self) -> None:
        """Make the write, and cache the next one."""
        state, operation = self.state, self.operation
        cached = state.persistent_writes[operation]
        if self.is_direct and cached is not plain_write:
            array = self._plain_operand()
            result: int = StoreResult.FALLBACK
            if array is not None:
                result = cached(array, is_seen=True)
            if result == StoreResult.STORED_AND_SAMPLE:
                state.sample_deferral()
            if result != StoreResult.FALLBACK:
                return
        self.execute()
        if not self._is_combined:
            return
        is_counted = state.is_counted and operation is not AccessKind.ASSIGN
        if self.is_direct and cached is plain_write and not state.storage.is_shared:
            self._persist_next_write(is_counted=is_counted)
        if is_counted:
            state.tally.added += 1
            if context_here(state.owner) is CallContext.SPMD:
                state.sample_deferral()

    def _persist_next_write(self, *, is_counted: bool) -> None:
        state = self.state
        owner, storage = state.owner, state.storage
        options = ReduceOptions(owner.reproducible, apply=self._ufunc)
        call = persistent_reduction(owner.communicator, storage.array, self._op, self.name, options)
        if call is not None:
            write = PersistentWrite(owner, storage, state.tally, call, counts=is_counted)
            state.persistent_writes[self.operation] = write.build()

    def _plain_operand(self) -> NDArray[Any] | None:
        """Return the operand of a persistent write; None if the slow path has to reject it."""
        state = self.state
        number = None if state.shape else number_array(self._x, state.dtype)
        if number is not None:
            return number
        try:
            with quiet():
                return checked_operand(state, self.operation, self._x, is_reduced=True)
        except Exception:
            return None

    def request(self) -> Any:
        """Return the function that builds the collective from the input."""
        if self._is_compressed:
            return self._build_compressed
        return self._build_in_place if self.is_direct else checked_call

    def _build_compressed(self, access: ReplicaAccess, x: NDArray[Any]) -> CompressedWrite:
        compression = self.state.compression
        assert compression is not None
        _, spec = describe_reduction(x, self._op, access.label, ReduceOptions())
        update = VariableUpdate(self.state, self.operation, x, self._op)
        updates = CompressedUpdates(access.communicator, [update])
        return CompressedWrite(with_compressor(spec, compression.compressor), updates)

    def _build_in_place(self, *arguments: Any, **options: Any) -> Any:
        # Keeps the old content: the replicas may disagree.
        out = self.state.storage.writable()
        return checked_call(*arguments, **options, out=out, apply=self._ufunc)

    def operand(self) -> NDArray[Any]:
        """Return the checked input of this replica."""
        state = self.state
        if state.dtype.kind == "b" and self.action.effect is Effect.SHARE:
            raise ConfigError(f"{self.label}: {_NO_SHARE}")
        array = checked_operand(state, self.operation, self._x, is_reduced=self._is_reduced)
        if self.is_direct or not self._is_reduced:
            return array
        # Half types are summed in float32, and rounded once after the copy was added.
        return array.astype(reduction("sum", array.dtype).accumulate, copy=False)

    def store(self, together: Any) -> None:
        """Apply the result of the collective to the copy."""
        if self._is_compressed:
            together.commit()
            return
        if self.is_direct:
            return  # the collective has written the copy
        state, ufunc = self.state, self._ufunc
        if self.action.effect is Effect.SHARE:
            together = state.share(together)
        with state.storage, np.errstate(over="ignore", invalid="ignore"):
            target = state.storage.writable(keep=ufunc is not None)
            if ufunc is None:
                target[...] = together
            else:
                ufunc(target, together, out=target, casting="same_kind")


class ScatterOp(ReplicaWrite):
    """A write of rows by the policy table."""

    def __init__(
        self, state: VariableState, operation: AccessKind, indices: Any, values: Any
    ) -> None:
        super().__init__(state, operation)
        state.check_replicas()
        state.flush()
        self._indices, self._values = _value_of(indices), _value_of(values)
        self._is_split = self.action.effect is Effect.SPLIT_ANEW

    def request(self) -> Any:
        """Return the function that builds the collective from the input."""
        return RowsCall

    def operand(self) -> tuple[NDArray[Any], RowSelection]:
        """Return the checked input of this replica."""
        state = self.state
        if self._is_split and state.dtype.kind == "b":
            raise ConfigError(f"{self.label}: {_NO_SHARE}")
        copy = state.storage.expose() if self._is_split else state.storage.array
        form = state.shape, state.dtype
        return copy, check_rows(self.operation, self._indices, self._values, *form, self.label)

    def store(self, together: tuple[NDArray[Any], RowSelection]) -> None:
        """Apply the result of the collective to the copy."""
        state, (total, rows) = self.state, together
        is_mean = self.action.travel is Travel.MEAN_ROWS
        divisor = state.owner.communicator.size if is_mean else 1
        with state.storage:
            copy = total if self._is_split else state.storage.array
            changed = apply_rows(self.operation, copy, rows, divisor=divisor)
            state.keep(state.share(changed) if self._is_split else changed)
        is_same = self.action.travel is Travel.SAME
        is_new = is_same and self.operation is AccessKind.SCATTER_UPDATE
        if is_new and state.compression is not None:
            state.compression.begin_anew(rows.indices)
