"""One collective of the replicas for one access of a variable; reads and writes both use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.all_reduce import checked_reduce
from syncvar.collectives.broadcast import checked_broadcast
from syncvar.collectives.dispatch import call_persistent, key_of
from syncvar.collectives.gather import checked_gather, gathered_blocks, gathered_layout
from syncvar.collectives.reduce_args import ReduceOptions
from syncvar.collectives.stage_builders import exchange
from syncvar.collectives.transfer_args import TransferArgs, moves
from syncvar.core.errors import InternalError, MismatchError
from syncvar.core.reduce_ops import quiet
from syncvar.protocol.fixed_records import array_record
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.communicator import CheckedCall
from syncvar.runtime.request import Stage
from syncvar.variables.policy import Action, Effect, Travel, VariableAggregation
from syncvar.variables.storage import digest_of
from syncvar.variables.values import RowSelection
from syncvar.variables.variable_owner import scope_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.runtime.communicator import Communicator
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
    """Return the checked call that carries `x`; its result combines the inputs of all replicas."""
    action, communicator, label, hint, reproducible = access
    travel = action.travel
    if travel is Travel.SUM or travel is Travel.MEAN:
        op = "sum" if travel is Travel.SUM else "mean"
        options = ReduceOptions(reproducible, apply=apply)
        return checked_reduce(communicator, x, op, out=out, name=label, options=options)
    if travel is Travel.FIRST:
        return checked_broadcast(communicator, x, root=communicator.present[0], name=label)
    if travel is Travel.SAME:
        return _checked_same(communicator, x, label, hint)
    if travel is Travel.MEETING:
        return _checked_meeting(communicator, x, label)
    raise InternalError(f"{label}: no call carries {travel}")


def checked_rows(access: ReplicaAccess, x: tuple[NDArray[Any], RowSelection]) -> CheckedCall:
    """Return the checked call that carries rows; its result is (copy to change, rows to apply)."""
    action, communicator, label, hint, reproducible = access
    travel = action.travel
    copy, rows = x
    inputs: Any = {"indices": rows.indices, "values": rows.values}
    if travel in (Travel.ALL_ROWS, Travel.MEAN_ROWS):
        checked: CheckedCall = checked_gather(communicator, inputs, name=label)
    elif travel is Travel.FIRST_ROWS:
        mine = inputs if communicator.rank == 0 else None
        checked = checked_broadcast(communicator, mine, root=communicator.present[0], name=label)
    elif travel is Travel.SAME:
        joined = np.concatenate([part.reshape(-1).view(np.uint8) for part in rows])
        checked = _checked_same(communicator, joined, label, hint)
    else:
        raise InternalError(f"{label}: no call carries {travel}")
    first = checked.body
    second = None
    if action.effect is Effect.SPLIT_ANEW:
        options = ReduceOptions(reproducible)
        second = checked_reduce(communicator, copy, "sum", name=label, options=options).body

    def body() -> Generator[Stage, None, tuple[NDArray[Any], RowSelection]]:
        together = yield from first
        total = copy if second is None else (yield from second)
        return total, rows if travel is Travel.SAME else RowSelection(
            together["indices"], together["values"]
        )

    return CheckedCall(checked.spec, body())


def _checked_same(
    communicator: Communicator, x: NDArray[Any], label: str, hint: str
) -> CheckedCall:
    """Return the checked call that compares the digests of all inputs; its result is `x`."""
    record = array_record(x, digest_of(x))

    def body() -> Generator[Stage, None, NDArray[Any]]:
        records = yield from exchange(communicator, record)
        if any(one != records[0] for one in records):
            table = {
                communicator.members[replica]: f"{one.describe()} with digest {one.nbytes:016x}"
                for replica, one in enumerate(records)
            }
            raise MismatchError(
                f"{label}: the replicas pass different values, nothing was written. {hint}", table
            )
        return x

    return CheckedCall(_same_spec("same", label, x), body())


def _same_spec(kind: str, label: str, x: NDArray[Any]) -> CollectiveSpec:
    """Return the description of a call that compares the inputs, by a method named `kind`."""
    spec = CollectiveSpec(label, options=(kind,), is_uniform=False, text=_same_label)
    return spec.with_array(x)


def _same_label(spec: CollectiveSpec) -> str:
    return f"{spec.collective}(same on all replicas, {spec.array})"


def is_compared_first(communicator: Communicator) -> bool:
    """Return whether a persistent call first compares digests of inputs that must be equal."""
    return moves(communicator, "all_gather")


def checked_equality(communicator: Communicator, x: NDArray[Any], label: str) -> TransferArgs:
    """Return the checked call whose result is whether all replicas have the same input.

    A persistent call can make it. If the inputs differ, another call has to exchange them.
    """
    digest = np.array([digest_of(x)], np.uint64)
    size, rank = communicator.size, communicator.member_rank
    return TransferArgs(
        _same_spec("alike", label, x),
        gathered_layout(digest, 0, size, rank),
        arrange=lambda: gathered_blocks(digest, None, size, rank),
        finish=lambda result: bool((result == digest).all()),
        general=None,
        front=lambda digest, out: gathered_blocks(digest, out, size, rank),
    )


def are_equal(
    communicator: Communicator, x: NDArray[Any], label: str, timeout: float | None
) -> bool | None:
    """Return the result of `checked_equality` by a persistent call; None if nothing was done."""
    key, digest, known = (
        ("alike", label),
        np.array([digest_of(x)], np.uint64),
        communicator.persistent_calls,
    )
    if key_of(key, digest) not in known and len(known) >= _ALIKE_MAX:
        return None
    found = call_persistent(
        communicator,
        key,
        digest,
        None,
        timeout,
        lambda _x, _out: checked_equality(communicator, x, label),
    )
    return None if found is None else bool((found == digest).all())


def _checked_meeting(communicator: Communicator, x: NDArray[Any], label: str) -> CheckedCall:
    def body() -> Generator[Stage, None, NDArray[Any]]:
        yield Stage(communicator.plan("barrier", 0), np.empty(0, np.uint8))
        return x

    return CheckedCall(CollectiveSpec(label, options=("meet",)), body())


def combine(
    state: VariableState, action: Action, label: str, operand: Callable[[], Any], checker: Any
) -> Any:
    """Make one collective of the replicas, and return its result.

    If `operand` raises on a rank, that rank informs the others and no copy changes.
    """
    owner = state.owner
    communicator = owner.communicator

    def check() -> Any:
        x, hint = operand(), _difference_hint(state)
        return checker(ReplicaAccess(action, communicator, label, hint, owner.reproducible), x)

    state.tally.collectives += 1
    is_same = action.travel is Travel.SAME and checker is not checked_rows
    if is_same and is_compared_first(communicator):
        together = _same_everywhere(state, label, operand)
        if together is not None:
            return together
        state.tally.collectives += 1
    return communicator.perform(label, check, owner.timeout)


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
    state: VariableState, label: str, operand: Callable[[], NDArray[Any]]
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
        are_same = are_equal(communicator, inputs[0], label, timeout)

    def check() -> Any:
        if not inputs:
            inputs.append(operand())
        return checked_equality(communicator, inputs[0], label)

    if are_same is None:
        are_same = communicator.perform(label, check, timeout)
    return inputs[0] if are_same else None
