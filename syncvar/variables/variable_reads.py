"""Reads of a variable: its local copy, all copies combined, or another replica's copy."""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.compressed_reduce import compressed_sum, flat_values, with_compressor
from syncvar.collectives.gather import AllGatherCall
from syncvar.collectives.reduce_args import ReduceOptions, persistent_reduction
from syncvar.collectives.sharded_sums import tree_combined
from syncvar.core.array_types import dtype_from_index
from syncvar.core.errors import (
    ConfigError,
    DeadlineExceeded,
    MismatchError,
    PeerLost,
    SyncvarError,
    UsageError,
    error_message,
)
from syncvar.core.reduce_ops import quiet, reduction
from syncvar.protocol.object_codec import unpack_object
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.communicator import CheckedCall
from syncvar.variables.policy import AccessKind, CallContext, Travel, VariableSynchronization
from syncvar.variables.replica_call import checked_call, combine
from syncvar.variables.variable_compression import ReadHistory
from syncvar.variables.variable_owner import context_here
from syncvar.variables.variable_state import copy_key, persistent_reads, read_only

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.compressed_reduce import AnySum
    from syncvar.runtime.request import Stage
    from syncvar.variables.replica_call import ReplicaAccess
    from syncvar.variables.variable_compression import VariableCompression
    from syncvar.variables.variable_owner import VariableOwner
    from syncvar.variables.variable_state import VariableState

_SUMS = (Travel.SUM, Travel.MEAN)
_ON_READ = VariableSynchronization.ON_READ


def read_value(state: VariableState, *, copy: bool) -> NDArray[Any]:
    """Return the value: by the persistent read if there is one, else by the policy table."""
    try:
        value = state.look(copy)
    except (MismatchError, DeadlineExceeded, PeerLost) as error:
        _advise_reader(state, AccessKind.READ, error)
        raise
    return read(state, AccessKind.READ, copy=copy) if value is None else value


def read(state: VariableState, operation: AccessKind, *, copy: bool = True) -> NDArray[Any]:
    """Return the value as the policy table says, and cache how to read it in this context."""
    where = operation, context_here(state.owner)
    cached = state.reading.get(where)
    if cached is None and state.decide(operation).travel is Travel.NOTHING:
        cached = state.reading[where] = state.storage.read
    state.flush()
    state.count_read()
    try:
        value = None if cached is None else cached(copy)
        return _read_together(state, where) if value is None else value
    except (MismatchError, DeadlineExceeded, PeerLost) as error:
        _advise_reader(state, operation, error)
        raise


def read_from(state: VariableState, rank: int) -> NDArray[Any]:
    """Return the copy of one replica."""
    action = state.decide(AccessKind.READ_FROM)
    state.flush()
    label = f"read_from({rank!r}) of variable {state.name!r}"
    replica = checked_replica(rank, state.replicas, label)
    state.count_read()
    if action.travel is Travel.QUESTION and replica != state.owner.communicator.home_rank:
        return fetch(state.owner, state.namespace, state.name, replica, label)
    return state.storage.expose()


def exact_value(state: VariableState) -> NDArray[Any]:
    """Return the value as `sync` does, and exactly even if reads travel compressed."""
    if state.compression is None or state.synchronization is not _ON_READ:
        return read(state, AccessKind.SYNC)
    state.flush()
    state.count_read()
    return _read_together(state, (AccessKind.SYNC, context_here(state.owner)), is_exact=True)


def _read_together(
    state: VariableState,
    where: tuple[AccessKind, CallContext | None],
    *,
    is_exact: bool = False,
) -> NDArray[Any]:
    """Read by a collective of all replicas, and cache the next read."""
    owner, operation = state.owner, where[0]
    communicator = owner.communicator
    array, held = state.storage.held()  # while `held` is referenced, nobody writes to `array`
    action = state.decide(operation)
    travel = action.travel
    label = (
        f"{operation.value} of {state.synchronization.name} variable {state.name!r} (collective on "
        "every replica; local_value() is not)"
    )

    def operand() -> NDArray[Any]:
        if travel in _SUMS:
            state.check_sum(state.describe(operation))
        return array

    if communicator.uneven is not None and state.synchronization is _ON_READ:
        communicator.agree_on_members(label, owner.timeout)
        if len(communicator.whole) > communicator.size:
            return read_only(combine_with_absent(state, operand(), travel, label))
    name = CollectiveSpec(label, variable=state.name, access=operation.value)
    if state.compression is not None and travel in _SUMS:
        request = partial(CompressedRead, state.compression, is_exact=is_exact)
        return read_only(combine(state, action, name, operand, request).commit())
    value = combine(state, action, name, operand, checked_call)
    del held
    if travel is Travel.MEETING:
        return state.storage.expose()
    if travel in _SUMS:
        op = "sum" if travel is Travel.SUM else "mean"
        options = ReduceOptions(owner.reproducible)
        call = persistent_reduction(communicator, array, op, name, options)
        if call is not None:
            cached, look = persistent_reads(owner, state.storage, state.tally, call)
            state.reading[where] = cached
            if operation is AccessKind.READ and state.queue is None:
                state.look = look
    return read_only(value)


class CompressedRead(CheckedCall):
    """A read of an ON_READ variable; its result is this call, whose `commit` returns the value."""

    def __init__(
        self,
        compression: VariableCompression,
        access: ReplicaAccess,
        x: NDArray[Any],
        *,
        is_exact: bool = False,
    ) -> None:
        plain = checked_call(access, x)
        compressor, history = compression.compressor, compression.history
        self._compression, self._dtype, self._shape = compression, x.dtype, x.shape
        self._wide = x.astype(reduction("sum", x.dtype).accumulate)
        is_exact = is_exact or (compression.keeps_error and history is None)
        self._plain = plain if is_exact else None
        super().__init__(plain.spec if is_exact else with_compressor(plain.spec, compressor))
        self._outgoing, self._value = flat_values([]), self._wide
        self._sum: AnySum | None = None
        if is_exact:
            return
        with quiet():
            self._outgoing = flat_values(
                [self._wide if history is None else self._wide - history.sent]
            )
        communicator, mean = access.communicator, access.action.travel is Travel.MEAN
        values, factors = self._outgoing, [compression.last_factor()]
        self._sum = compressed_sum(
            communicator, values, [x.shape], compressor, mean=mean, factors=factors
        )

    def stages(self) -> Generator[Stage, None, CompressedRead]:
        """Yield the stages, which end with this call."""
        if self._plain is not None:
            self._value = yield from self._plain.stages()
        else:
            assert self._sum is not None
            self._value = (yield from self._sum.stages()).reshape(self._shape)
        return self

    def commit(self) -> NDArray[Any]:
        """Remember what has travelled, and return the value."""
        compression, history = self._compression, self._compression.history
        value: NDArray[Any] = np.asarray(self._value, self._wide.dtype)
        sent, factor = self._wide, None
        with quiet():
            if self._sum is not None and history is not None:
                value = history.value + value
                travelled = (self._outgoing - self._sum.error()).reshape(self._shape)
                sent = history.sent + travelled
                factor = getattr(self._sum, "factors", [None])[0]
            result = np.array(value, self._dtype)
        # A difference to NaN or infinity would never become finite again.
        is_usable = compression.keeps_error and bool(np.isfinite(value).all())
        compression.history = ReadHistory(sent, value, factor) if is_usable else None
        return result


def _advise_reader(state: VariableState, operation: AccessKind, error: SyncvarError) -> None:
    """Extend the error of a collective read: perhaps only some ranks have read."""
    if isinstance(error, PeerLost) and error.reason != "finished":
        return
    name = state.name
    is_read = operation is AccessKind.READ
    doing, method = ("Reading", "numpy") if is_read else ("sync() of", "sync")
    advice = (
        f"\n{doing} {state.synchronization.name} {name!r} is collective: every replica has to take "
        "part. Read on every rank, and use it where you like:\n"
        f"    value = {name}.{method}()\n    if sv.rank() == 0: print(value)\n"
        f"or take this replica's copy, which needs no other:\n    {name}.local_value()"
    )
    text = error_message(error)
    if advice not in text:
        error.args = (text + advice,)


def fetch(
    owner: VariableOwner, namespace: Any, name: str, replica: int, label: str
) -> NDArray[Any]:
    """Return another replica's copy, read-only. If it does not answer, the group stays usable."""
    communicator = owner.communicator
    engine = communicator.engine
    assert engine is not None
    rank = communicator.whole[replica]
    spec = CollectiveSpec(label, variable=name, access=AccessKind.READ_FROM.value)
    answer = engine.ask(rank, copy_key(namespace, name), spec, owner.timeout)
    if answer is None:
        raise UsageError(
            f"{label}: replica {replica} (rank {rank}) has no variable of this name and mode now. "
            "Make it there too (a NONE variable may exist on some replicas only), under the same "
            f"name: name={name!r}"
        )
    index, shape = unpack_object(answer[0])
    result: NDArray[Any] = np.frombuffer(answer[1], dtype_from_index(index)).reshape(shape)
    result.flags.writeable = False
    return result


def combine_with_absent(
    state: VariableState, mine: NDArray[Any], travel: Travel, label: str
) -> NDArray[Any]:
    """Return the aggregate of all copies, where some replicas have left a block of sv.uneven.

    Collective over the active replicas; the others' copies are fetched.
    """
    owner, namespace, name = state.owner, state.namespace, state.name
    communicator = owner.communicator

    def check() -> CheckedCall:
        return AllGatherCall(communicator, mine[np.newaxis], name=label).about(
            name, AccessKind.READ.value
        )

    gathered = communicator.perform(label, check, owner.timeout)
    copies: dict[int, NDArray[Any]] = dict(zip(communicator.present, gathered, strict=True))
    for replica in [0] if travel is Travel.FIRST else range(len(communicator.whole)):
        if replica not in copies:
            copies[replica] = fetch(owner, namespace, name, replica, label)
    if travel is Travel.FIRST:
        return copies[0].copy()
    ordered = [copies[replica] for replica in sorted(copies)]
    return tree_combined(ordered, "sum" if travel is Travel.SUM else "mean")


def checked_replica(rank: Any, count: int, label: str) -> int:
    """Return a replica's number."""
    try:
        replica = operator.index(rank)
    except TypeError:
        raise ConfigError(f"{label}: rank must be an integer, not {rank!r}") from None
    if isinstance(rank, bool | np.bool_) or not 0 <= replica < count:
        raise ConfigError(
            f"{label}: rank must be 0 to {count - 1} (a replica of the variable's strategy), not "
            f"{rank!r}"
        )
    return replica
