"""One collective of the replicas for one access of a variable; reads and writes both use it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.all_reduce import AllReduceCall
from syncvar.collectives.broadcast import BroadcastCall
from syncvar.collectives.dispatch import call_persistent, key_of
from syncvar.collectives.gather import AllGatherCall, gathered_blocks, gathered_layout
from syncvar.collectives.reduce_args import ReduceOptions
from syncvar.collectives.stage_builders import MeetingCall, exchange
from syncvar.collectives.transfer_args import TransferCall, moves
from syncvar.core.errors import InternalError, MismatchError
from syncvar.core.reduce_ops import quiet
from syncvar.protocol.fixed_records import array_record
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.communicator import CheckedCall
from syncvar.variables.policy import Action, Effect, Travel, VariableAggregation
from syncvar.variables.storage import digest_of
from syncvar.variables.values import RowSelection
from syncvar.variables.variable_owner import scope_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.runtime.block_transfer import Blocks
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage
    from syncvar.variables.variable_state import VariableState

# Limit of persistent calls of a group: with a large model each new one would evict another.
_ALIKE_MAX = 256


class ReplicaAccess(NamedTuple):
    """One access of a variable in which all replicas take part."""

    action: Action
    communicator: Communicator
    label: str  # its name in errors and call records
    hint: str  # what to write instead when the replicas pass different values
    reproducible: bool


def checked_call(
    access: ReplicaAccess,
    x: NDArray[Any],
    *,
    out: NDArray[Any] | None = None,
    apply: np.ufunc | None = None,
) -> CheckedCall:
    """Return the request that carries `x`; its result combines the inputs of all replicas."""
    action, communicator, label, hint, reproducible = access
    travel = action.travel
    if travel is Travel.SUM or travel is Travel.MEAN:
        op = "sum" if travel is Travel.SUM else "mean"
        options = ReduceOptions(reproducible, apply=apply)
        return AllReduceCall(communicator, x, op, out=out, name=label, options=options)
    if travel is Travel.FIRST:
        return BroadcastCall(communicator, x, root=communicator.present[0], name=label)
    if travel is Travel.SAME:
        return _SameCall(communicator, x, label, hint)
    if travel is Travel.MEETING:
        return MeetingCall(communicator, CollectiveSpec(label, options=("meet",)))
    raise InternalError(f"{label}: no request carries {travel}")


class RowsCall(CheckedCall):
    """A call that carries rows; its result is (copy to change, rows to apply)."""

    def __init__(self, access: ReplicaAccess, x: tuple[NDArray[Any], RowSelection]) -> None:
        action, communicator, label, _, reproducible = access
        travel = action.travel
        self._copy, self._rows = x
        self._is_same = travel is Travel.SAME
        inputs: Any = {"indices": self._rows.indices, "values": self._rows.values}
        if travel in (Travel.ALL_ROWS, Travel.MEAN_ROWS):
            self._first: CheckedCall = AllGatherCall(communicator, inputs, name=label)
        elif travel is Travel.FIRST_ROWS:
            mine, root = inputs if communicator.rank == 0 else None, communicator.present[0]
            self._first = BroadcastCall(communicator, mine, root=root, name=label)
        elif self._is_same:
            joined = np.concatenate([part.reshape(-1).view(np.uint8) for part in self._rows])
            self._first = checked_call(access, joined)
        else:
            raise InternalError(f"{label}: no request carries {travel}")
        self._second = None
        if action.effect is Effect.SPLIT_ANEW:
            options = ReduceOptions(reproducible)
            self._second = AllReduceCall(
                communicator, self._copy, "sum", name=label, options=options
            )
        super().__init__(self._first.spec)

    def stages(self) -> Generator[Stage, None, tuple[NDArray[Any], RowSelection]]:
        """Yield the stages of the rows, then those of the whole copy."""
        together = yield from self._first.stages()
        total = self._copy if self._second is None else (yield from self._second.stages())
        if self._is_same:
            return total, self._rows
        return total, RowSelection(together["indices"], together["values"])


class _SameCall(CheckedCall):
    """A call that compares the digests of all inputs; its result is `x`."""

    def __init__(self, communicator: Communicator, x: NDArray[Any], label: str, hint: str) -> None:
        super().__init__(_same_spec("same", label, x))
        self._communicator, self._x, self._label, self._hint = communicator, x, label, hint
        self._record = array_record(x, digest_of(x))

    def stages(self) -> Generator[Stage, None, NDArray[Any]]:
        records = yield from exchange(self._communicator, self._record)
        if any(one != records[0] for one in records):
            table = {
                member: f"{one.describe()} with digest {one.nbytes:016x}"
                for member, one in zip(self._communicator.members, records, strict=True)
            }
            raise MismatchError(
                f"{self._label}: the replicas pass different values, nothing was written. "
                f"{self._hint}",
                table,
            )
        return self._x


def _same_spec(kind: str, label: str, x: NDArray[Any]) -> CollectiveSpec:
    """Return the description of a call that compares the inputs, by a method named `kind`."""
    spec = CollectiveSpec(label, options=(kind,), is_uniform=False, text=_same_label)
    return spec.with_array(x)


def _same_label(spec: CollectiveSpec) -> str:
    return f"{spec.collective}(same on all replicas, {spec.array})"


def is_compared_first(communicator: Communicator) -> bool:
    """Return whether a persistent call first compares digests of inputs that must be equal."""
    return moves(communicator, "all_gather")


class _EqualityCall(TransferCall):
    """A call whose result is whether all replicas have the same input.

    A persistent call can make it. If the inputs differ, another call has to exchange them.
    """

    def __init__(self, communicator: Communicator, x: NDArray[Any], name: CollectiveSpec) -> None:
        digest = np.array([digest_of(x)], np.uint64)
        layout = gathered_layout(digest, 0, communicator.size, communicator.member_rank)
        spec = _same_spec("alike", name.collective, x)
        super().__init__(communicator, spec, layout, [digest])
        self.about(name.variable, name.access)

    def blocks_of(self, parts: list[NDArray[Any]], out: Any) -> Blocks:
        return gathered_blocks(parts[0], out, self.size, self.rank)

    def finish(self, output: NDArray[Any]) -> bool:
        return bool((output == self.inputs[0]).all())


def are_equal(
    communicator: Communicator, x: NDArray[Any], name: CollectiveSpec, timeout: float | None
) -> bool | None:
    """Return the result of `_EqualityCall` by a persistent call; None if nothing was done."""
    key, digest = ("alike", name.collective), np.array([digest_of(x)], np.uint64)
    known = communicator.persistent_calls
    if key_of(key, digest) not in known and len(known) >= _ALIKE_MAX:
        return None
    check = partial(_EqualityCall, communicator, x, name)
    found = call_persistent(communicator, key, digest, None, timeout, check)
    return None if found is None else bool((found == digest).all())


def combine(
    state: VariableState,
    action: Action,
    name: CollectiveSpec,
    operand: Callable[[], Any],
    request: Any,
) -> Any:
    """Make one collective of the replicas, and return its result.

    `name` has the name of the call, its variable and the access.

    If `operand` raises on a rank, that rank informs the others and no copy changes.
    """
    owner = state.owner
    communicator = owner.communicator

    def check() -> Any:
        x, hint = operand(), _difference_hint(state)
        access = ReplicaAccess(action, communicator, name.collective, hint, owner.reproducible)
        return request(access, x).about(name.variable, name.access)

    state.tally.collectives += 1
    is_same = action.travel is Travel.SAME and request is not RowsCall
    if is_same and is_compared_first(communicator):
        together = _same_everywhere(state, name, operand)
        if together is not None:
            return together
        state.tally.collectives += 1
    return communicator.perform(name, check, owner.timeout)


def _difference_hint(state: VariableState) -> str:
    """Return what to write instead when replicas assign different values outside `run`."""
    owner, aggregation = state.owner, state.aggregation
    same = "x = strategy.reduce('MEAN', x, axis=None)"
    hint = f"Write the same on every replica, for instance {same}; or "
    if aggregation is VariableAggregation.NONE:
        return hint + (
            "give the variable an aggregation that combines (it has NONE): "
            "aggregation=sv.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
        )
    if owner.is_default and scope_stack(owner.context):
        return hint + (
            "make the variable under `with strategy.scope():`. It belongs to the default "
            "strategy, and is written in another strategy's run as outside of it"
        )
    is_first = aggregation is VariableAggregation.ONLY_FIRST_REPLICA
    used = "replica 0's" if is_first else "each replica's own"
    return hint + (
        f"write inside strategy.run, where aggregation {aggregation.name} takes {used} value"
    )


def _same_everywhere(
    state: VariableState, name: CollectiveSpec, operand: Callable[[], NDArray[Any]]
) -> NDArray[Any] | None:
    """Return the common input of all replicas; None, on all of them, if the inputs differ."""
    communicator, timeout = state.owner.communicator, state.owner.timeout
    inputs: list[NDArray[Any]] = []
    are_same: bool | None = None
    try:
        with quiet():
            inputs.append(operand())
    except Exception:  # noqa: S110  (the slow path raises it again, and informs the others)
        pass
    else:
        are_same = are_equal(communicator, inputs[0], name, timeout)

    def check() -> Any:
        if not inputs:
            inputs.append(operand())
        return _EqualityCall(communicator, inputs[0], name)

    if are_same is None:
        are_same = communicator.perform(name, check, timeout)
    return inputs[0] if are_same else None
