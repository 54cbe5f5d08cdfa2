"""Variables with `compress=`: what travels of their sums, and what replicas keep for the next one.

Invariant of ON_WRITE: what the replicas have passed is the copy, plus the sum (or the mean) of what
each replica keeps (`compression_error`). An increment adds what the replica keeps to its operand.
`assign` sends the operand without the copy's share, which is small if the value changes slowly.

ON_READ keeps what has travelled of this replica's copy, and the value of the last read. A read
sends the difference of the copy. So reads of a copy that does not change come closer to the exact
value. Source: Richtarik, Sokolov, Fatkhullin 2021 (EF21). Reads are exact, and all of this begins
anew, after creation, a write in cross context, a save and a restore.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from syncvar.collectives.compressed_reduce import compressed_sum, flat_values
from syncvar.collectives.compressors import PowerSGD, signature_of
from syncvar.core.reduce_ops import quiet
from syncvar.runtime.communicator import CheckedCall
from syncvar.variables.policy import AccessKind, VariableSynchronization

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from syncvar._native import VariableCounters
    from syncvar.collectives.compressed_reduce import AnySum
    from syncvar.collectives.compressors import Codec, Values
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage
    from syncvar.variables.storage import Storage

ERROR, FACTOR = "compression_error", "compression_factor"


class CompressedTarget(Protocol):
    """A variable as its compression sees it."""

    name: str
    shape: tuple[int, ...]
    synchronization: VariableSynchronization
    storage: Storage
    tally: VariableCounters
    compression: VariableCompression | None
    are_parts: bool

    def keep(self, value: NDArray[Any]) -> None:
        """Make `value` this replica's copy."""

    def apply(self, operation: AccessKind, total: NDArray[Any]) -> None:
        """Apply an increment to the copy."""


class ReadHistory(NamedTuple):
    """What earlier reads of an ON_READ variable leave for the next one."""

    sent: NDArray[Any]  # what has travelled of this replica's copy
    value: NDArray[Any]  # of the last read, the same on all replicas
    factor: Values | None = None  # directions of a matrix (PowerSGD)


class VariableCompression:
    """The compression of one variable's sums.

    Attributes:
        compressor: The compressor.
        missing: Shape and mode of the variables that it needs, by slot.
        variables: These variables, by slot. A checkpoint saves them.
        keeps_error: Whether an encoded array of this shape leaves anything for the next one.
        error: What encoding has lost of this replica's operands; None if it is not kept.
        factor: Directions of a matrix (PowerSGD), the same on all replicas.
        history: Of an ON_READ variable; None if the next read is exact.
    """

    def __init__(self, state: CompressedTarget, compressor: Codec | PowerSGD) -> None:
        self.compressor = compressor
        self.keeps_error = compressor.keeps_error
        self.missing: dict[str, tuple[tuple[int, ...], VariableSynchronization]] = {}
        self.variables: dict[str, Any] = {}
        self.error: CompressedTarget | None = None
        self.factor: CompressedTarget | None = None
        self.history: ReadHistory | None = None
        shape, is_written = state.shape, state.synchronization is VariableSynchronization.ON_WRITE
        if isinstance(compressor, PowerSGD):
            factor_shape = compressor.factor_shape(shape)
            self.keeps_error = factor_shape is not None
            if factor_shape is not None and is_written:
                self.missing[FACTOR] = factor_shape, VariableSynchronization.ON_WRITE
        if self.keeps_error and is_written:
            self.missing[ERROR] = shape, VariableSynchronization.ON_READ

    def add(self, slot: str, variable: Any, state: CompressedTarget) -> None:
        """Take a variable that was missing, and its state."""
        self.variables[slot] = variable
        if slot == ERROR:
            self.error, state.are_parts = state, True
        else:
            self.factor = state

    def copy_to(self, other: VariableCompression | None) -> None:
        """Give the compression of a copied variable what this one keeps."""
        for mine, theirs in (
            () if other is None else ((self.error, other.error), (self.factor, other.factor))
        ):
            if mine is not None and theirs is not None:
                theirs.keep(mine.storage.array)

    def restart(self) -> None:
        """Let the next read be exact: all replicas have got new copies."""
        self.history = None

    def begin_anew(self, rows: Any = ...) -> None:
        """Forget what is kept of the past: all replicas have written the same value, or rows."""
        self.restart()
        if self.error is not None:
            with self.error.storage:
                self.error.storage.writable()[rows] = 0

    def last_factor(self) -> Values | None:
        """Return the directions of the last sum."""
        if self.factor is not None:
            return self.factor.storage.array
        return None if self.history is None else self.history.factor


class VariableUpdate(NamedTuple):
    """What this replica passes to a write that the replicas combine."""

    state: CompressedTarget
    operation: AccessKind
    x: NDArray[Any]  # of the variable's shape, in the dtype of its sum
    op: str  # "sum" or "mean"


class CompressedUpdates:
    """Updates of several variables: one compressed sum for each compressor and op.

    `commit` changes the copies; nothing changes before.
    """

    def __init__(self, communicator: Communicator, updates: Sequence[VariableUpdate]) -> None:
        groups: dict[Any, list[VariableUpdate]] = {}
        for one in updates:
            groups.setdefault((signature_of(_of(one).compressor), one.op), []).append(one)
        self._groups = list(groups.values())
        with quiet():
            self._sums = [_sum_of(communicator, group) for group in self._groups]
        self._totals: list[Values] = []

    def stages(self) -> Generator[Stage, None, CompressedUpdates]:
        """Yield the stages, which end with this object."""
        for one in self._sums:
            self._totals.append((yield from one.stages()))
        return self

    def commit(self) -> list[CompressedTarget]:
        """Change the copies, and keep what has not travelled; return the changed variables."""
        with quiet():
            for group, one, total in zip(self._groups, self._sums, self._totals, strict=True):
                start, lost = 0, one.error()
                factors = getattr(one, "factors", [None] * len(group))
                for update, factor in zip(group, factors, strict=True):
                    stop, shape = start + prod(update.state.shape), update.state.shape
                    _store(update, total[start:stop].reshape(shape), lost[start:stop], factor)
                    start = stop
        return [update.state for group in self._groups for update in group]


class CompressedWrite(CheckedCall):
    """A call of its own for updates; its result is the `CompressedUpdates` to commit."""

    def __init__(self, spec: CollectiveSpec, updates: CompressedUpdates) -> None:
        super().__init__(spec)
        self._updates = updates

    def stages(self) -> Generator[Stage, None, CompressedUpdates]:
        """Return the stages of the sums."""
        return self._updates.stages()


def _of(update: VariableUpdate) -> VariableCompression:
    compression = update.state.compression
    assert compression is not None
    return compression


def _sum_of(communicator: Communicator, group: list[VariableUpdate]) -> AnySum:
    values = flat_values([_outgoing(one, communicator.size) for one in group])
    return compressed_sum(
        communicator,
        values,
        [one.state.shape for one in group],
        _of(group[0]).compressor,
        mean=group[0].op == "mean",
        factors=[_of(one).last_factor() for one in group],
    )


def _outgoing(update: VariableUpdate, size: int) -> NDArray[Any]:
    """Return the operand, with what this replica keeps."""
    state, operation, x, op = update
    error = _of(update).error
    if error is None:
        return x
    if operation is AccessKind.ASSIGN:
        share = _finite_copy(state, x.dtype) / np.asarray(1 if op == "mean" else size, x.dtype)
    elif operation is AccessKind.ASSIGN_ADD:
        share = -error.storage.array
    else:
        share = error.storage.array
    result: NDArray[Any] = x - share
    return result


def _finite_copy(state: CompressedTarget, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return this replica's copy with 0 for NaN and infinity, to which no difference leads back."""
    copy: NDArray[Any] = state.storage.array.astype(dtype)
    copy[~np.isfinite(copy)] = 0
    return copy


def _store(update: VariableUpdate, total: Values, lost: Values, factor: Values | None) -> None:
    """Change the copy of one variable, and keep what encoding has lost."""
    state, operation = update.state, update.operation
    compression = _of(update)
    if compression.error is not None:
        lost = lost.reshape(state.shape)
        compression.error.keep(-lost if operation is AccessKind.ASSIGN_SUB else lost)
    if compression.factor is not None and factor is not None:
        compression.factor.keep(factor)
    if operation is not AccessKind.ASSIGN:
        state.apply(operation, total)
    elif compression.error is None:
        state.keep(total)
    else:
        state.keep(_finite_copy(state, update.x.dtype) + total)
