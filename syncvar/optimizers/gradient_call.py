"""One call of `apply_gradients`: its checked arguments and its request.

A gradient may name rows, as (indices, values) or an object that has both, like tf.IndexedSlices.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.all_reduce import AllReduceCall
from syncvar.collectives.dispatch import call_persistent
from syncvar.collectives.reduce_args import ReduceOptions
from syncvar.collectives.stage_builders import MeetingCall
from syncvar.core.errors import ConfigError
from syncvar.optimizers.slots import is_replica_local
from syncvar.optimizers.update_rules import compute_dtype
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint, names_text
from syncvar.variables.policy import (
    AccessKind,
    CallContext,
    VariableAggregation,
    VariableSynchronization,
    decide,
)
from syncvar.variables.replica_call import ReplicaAccess, checked_call
from syncvar.variables.values import check_rows, operand_array
from syncvar.variables.variable import Variable
from syncvar.variables.variable_owner import current_owner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.optimizers.gradient_buckets import BucketPlan
    from syncvar.runtime.communicator import CheckedCall
    from syncvar.variables.variable_owner import VariableOwner

_MODE = VariableSynchronization.ON_WRITE, VariableAggregation.NONE, CallContext.CROSS
_SAME = decide(*_MODE, AccessKind.ASSIGN)
_NAME = "apply_gradients"
_HINT = (
    "Gradients that are used as given must be the same on every replica. Pass each replica's own "
    "inside strategy.run, or outside every scope, with reduce='mean'"
)


class Call(NamedTuple):
    """One checked call."""

    owner: VariableOwner
    gradients: list[Any]  # without the Nones
    variables: list[Variable]  # that have a gradient
    travels: bool  # other replicas take part: some named variable is not NONE
    op: str  # "mean" or "sum", for replicas and for the calls of one step
    is_combined: bool  # the gradients are the same everywhere already
    weight: float | None  # of this replica's gradients
    base: int  # signature of all that does not change from step to step
    shown: str  # names of the variables, for descriptions
    names: str  # the same for `CollectiveSpec.variable`
    shards: dict[Any, list[NDArray[Any]]] | None = None  # id -> a gradient for each variable


def rows_of(gradient: Any, shape: tuple[int, ...]) -> tuple[Any, Any] | None:
    """Return the indices and values of a sparse gradient, None for a dense one.

    Example:
        >>> rows_of(([0, 2], np.ones((2, 3))), (5, 3))[0], rows_of(([1, 2], [3, 4]), (2, 2))
        ([0, 2], None)
    """
    pair = getattr(gradient, "indices", None), getattr(gradient, "values", None)
    # Tensors of PyTorch have methods of these names.
    if not any(one is None or callable(one) for one in pair):
        return pair
    if not isinstance(gradient, tuple) or len(gradient) != 2:
        return None
    is_dense = shape[:1] == (2,) and all(_has_shape(one, shape[1:]) for one in gradient)
    return None if is_dense else gradient


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    try:
        return bool(np.shape(value) == shape)
    except ValueError:  # of lists of unlike lengths
        return False


def dense_gradient(gradient: Any, variable: Variable) -> Any:
    """Return a sparse gradient as an array of the variable's shape; a dense one unchanged.

    Values of a row that is named several times are added.
    """
    shape = variable.shape
    pair = rows_of(gradient, shape)
    if pair is None:
        return gradient
    dtype = compute_dtype(variable.dtype)
    label = f"gradient of variable {variable.name!r}"
    rows = check_rows(AccessKind.SCATTER_ADD, *pair, shape, dtype, label)
    result = np.zeros(shape, dtype)
    np.add.at(result, rows.indices, rows.values)
    return result


def checked_shards(
    gradients: Sequence[Any], variables: Sequence[Variable]
) -> dict[Any, list[NDArray[Any]]]:
    """Return id -> a gradient for each variable, in the dtypes in which they are stepped."""
    result: dict[Any, list[NDArray[Any]]] = {}
    for place, (value, variable) in enumerate(zip(gradients, variables, strict=True)):
        label = f"gradient of variable {variable.name!r}"
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{label}: with shards=True it must be a dict of id -> gradient, not "
                f"{type(value).__name__}"
            )
        if place and value.keys() != result.keys():
            raise ConfigError(
                f"{label} is of the shards {sorted(value, key=str)}, that of variable "
                f"{variables[0].name!r} of {sorted(result, key=str)}: each shard has a gradient "
                "for every variable"
            )
        for number, gradient in value.items():
            dense, dtype = dense_gradient(gradient, variable), compute_dtype(variable.dtype)
            shard = f"shard {number!r} of the {label}"
            array = operand_array(dense, variable.shape, dtype, shard)
            result.setdefault(number, []).append(array)
    return result


def describe_variables(
    settings: tuple[Any, ...], variables: Sequence[Variable], everything: Sequence[Variable]
) -> tuple[int, str, str]:
    """Return the signature of the variables that replicas share, and their names in words.

    The last is `CollectiveSpec.variable`.
    """
    present = {id(one) for one in variables}
    common = [one for one in everything if not is_replica_local(one)]
    shared = [one for one in common if id(one) in present]
    absent = [one.name for one in common if id(one) not in present]
    kinds = tuple((one.name, one.shape, one.dtype.name) for one in shared)
    shown = ", ".join(repr(one.name) for one in shared[:3])
    if len(shared) > 3:
        shown += f", … ({len(shared)} variables)"
    if absent:
        shown += f"; no gradient for {', '.join(map(repr, absent[:3]))}"
        shown += " …" if len(absent) > 3 else ""
    names = names_text([one.name for one in shared])
    return fingerprint("apply_gradients", settings, kinds, tuple(absent)), shown, names


def strategy_of_pairs(pairs: Any) -> tuple[VariableOwner, bool]:
    """Return the strategy of invalid pairs, and whether other replicas take part in the call."""
    found = [
        one
        for pair in (pairs if isinstance(pairs, list) else [])
        for one in (pair if isinstance(pair, tuple | list) else ())
        if isinstance(one, Variable)
    ]
    if not found:
        return current_owner(), True
    owner: VariableOwner = found[0].strategy
    return owner, any(not is_replica_local(one) for one in found)


def combining_call(
    owner: VariableOwner, plan: BucketPlan, op: str, spec: CollectiveSpec, *, weighted: bool
) -> CheckedCall:
    """Return the request that combines the gradients of all replicas in place, or compares them."""
    communicator = owner.communicator
    if not plan.shared:
        call: CheckedCall = MeetingCall(communicator, spec)
    elif not op:
        together = np.concatenate([bucket.flat.view(np.uint8) for bucket in plan.shared])
        same = ReplicaAccess(_SAME, communicator, spec.label, _HINT, reproducible=False)
        call = checked_call(same, together)
    else:
        first, *others = plan.shared
        arrays = [first.whole if weighted else first.flat, *(bucket.flat for bucket in others)]
        value: Any = arrays if others else arrays[0]
        options = ReduceOptions(owner.reproducible, limits=plan.limits)
        call = AllReduceCall(communicator, value, op, out=value, name=_NAME, options=options)
    call.spec = spec
    return call


def combine_persistent(
    owner: VariableOwner, plan: BucketPlan, op: str, spec: CollectiveSpec, *, weighted: bool
) -> bool:
    """Combine the gradients by a persistent call; False if there is none, and nothing was done.

    The description changes from step to step, because it holds the step and the learning rate. The
    arguments are those of `combining_call`.
    """
    if not op or len(plan.shared) != 1:
        return False
    communicator, bucket = owner.communicator, plan.shared[0]
    array = bucket.whole if weighted else bucket.flat  # the last element of `whole` is the weight
    options = ReduceOptions(owner.reproducible)
    check = partial(AllReduceCall, communicator, array, op, out=array, name=_NAME, options=options)
    key = (_NAME, op, owner.reproducible)
    found = call_persistent(communicator, key, array, array, owner.timeout, check, spec)
    return found is not None
