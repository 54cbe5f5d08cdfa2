"""One call of `apply_gradients`: its checked arguments and its request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.all_reduce import reduce_request
from syncvar.collectives.dispatch import call_persistent
from syncvar.collectives.reduce_args import ReduceOptions
from syncvar.core.errors import ConfigError
from syncvar.optimizers.slots import is_replica_local
from syncvar.optimizers.update_rules import compute_dtype
from syncvar.runtime.communicator import CollectiveSpec, fingerprint
from syncvar.variables.policy import (
    AccessKind,
    CallContext,
    VariableAggregation,
    VariableSynchronization,
    decide,
)
from syncvar.variables.replica_call import request_of
from syncvar.variables.values import check_rows, operand_array
from syncvar.variables.variable import Variable
from syncvar.variables.variable_owner import current_owner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.reduce_args import ReduceArgs
    from syncvar.optimizers.gradient_buckets import BucketPlan
    from syncvar.variables.variable_owner import VariableOwner


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

    Raises:
        RowOutOfRange: An index outside [0, rows).
        ConfigError: Indices that are not integers, values of a wrong shape or dtype.
    """
    shape = variable.shape
    pair = rows_of(gradient, shape)
    if pair is None:
        return gradient
    dtype = compute_dtype(variable.dtype)
    what = f"gradient of variable {variable.name!r}"
    rows = check_rows(AccessKind.SCATTER_ADD, *pair, shape, dtype, what)
    made = np.zeros(shape, dtype)
    np.add.at(made, rows.indices, rows.values)
    return made


_MODE = VariableSynchronization.ON_WRITE, VariableAggregation.NONE, CallContext.CROSS
_SAME, _MEETING = decide(*_MODE, AccessKind.ASSIGN), decide(*_MODE, AccessKind.SYNC)
_NOTHING = np.empty(0, np.uint8)
_NAME = "apply_gradients"
_HINT = (
    "Gradients that are used as given must be the same on every replica. Pass each replica's own "
    "inside strategy.run, or outside every scope, with reduce='mean'"
)


class Call(NamedTuple):
    """One checked call.

    Args:
        owner: The variables' strategy.
        gradients: The gradients without the Nones.
        variables: The variables that have a gradient.
        travels: Other replicas take part: some named variable is not NONE.
        op: "mean" or "sum", for replicas and for the calls of one step.
        is_given: The gradients are the same everywhere already.
        weight: Weight of this replica's gradients, or None.
        base: Signature of all that does not change from step to step.
        shown: Names of the variables, for descriptions.
        shards: Id -> a gradient for each variable; None without shards.
    """

    owner: VariableOwner
    gradients: list[Any]
    variables: list[Variable]
    travels: bool
    op: str
    is_given: bool
    weight: float | None
    base: int
    shown: str
    shards: dict[Any, list[NDArray[Any]]] | None = None


def checked_shards(
    gradients: Sequence[Any], variables: Sequence[Variable]
) -> dict[Any, list[NDArray[Any]]]:
    """Return id -> a gradient for each variable, in the dtypes in which they are stepped."""
    made: dict[Any, list[NDArray[Any]]] = {}
    for place, (given, variable) in enumerate(zip(gradients, variables, strict=True)):
        what = f"gradient of variable {variable.name!r}"
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{what}: with shards=True it must be a dict of id -> gradient, not "
                f"{type(given).__name__}"
            )
        if place and given.keys() != made.keys():
            raise ConfigError(
                f"{what} is of the shards {sorted(given, key=str)}, that of variable "
                f"{variables[0].name!r} of {sorted(made, key=str)}: each shard has a gradient for "
                "every variable"
            )
        for number, gradient in given.items():
            dense = dense_gradient(gradient, variable)
            array = operand_array(
                dense,
                variable.shape,
                compute_dtype(variable.dtype),
                f"shard {number!r} of the {what}",
            )
            made.setdefault(number, []).append(array)
    return made


def describe_variables(
    settings: tuple[Any, ...], variables: Sequence[Variable], everything: Sequence[Variable]
) -> tuple[int, str]:
    """Return the signature of the variables that replicas share, and their names in words."""
    present = {id(one) for one in variables}
    shared = [one for one in everything if not is_replica_local(one) and id(one) in present]
    absent = [
        one.name for one in everything if not is_replica_local(one) and id(one) not in present
    ]
    kinds = tuple((one.name, one.shape, one.dtype.name) for one in shared)
    shown = ", ".join(repr(one.name) for one in shared[:3])
    if len(shared) > 3:
        shown += f", … ({len(shared)} variables)"
    if absent:
        shown += f"; no gradient for {', '.join(map(repr, absent[:3]))}" + (
            " …" if len(absent) > 3 else ""
        )
    return fingerprint("apply_gradients", settings, kinds, tuple(absent)), shown


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


def combining_request(
    owner: VariableOwner, plan: BucketPlan, op: str, what: str, digest: int, *, weighted: bool
) -> CollectiveSpec:
    """Return the request that combines the gradients of all replicas in place, or compares them."""
    communicator = owner.communicator
    if not plan.shared:
        request = request_of(_MEETING, communicator, _NOTHING, what, "", reproducible=False)
    elif not op:
        together = np.concatenate([bucket.flat.view(np.uint8) for bucket in plan.shared])
        request = request_of(_SAME, communicator, together, what, _HINT, reproducible=False)
    else:
        first, *others = plan.shared
        arrays = [first.whole if weighted else first.flat, *(bucket.flat for bucket in others)]
        value: Any = arrays if others else arrays[0]
        options = ReduceOptions(owner.reproducible)
        request = reduce_request(communicator, value, op, out=value, name=what, options=options)
    return CollectiveSpec(what, digest, request.body)


def combine_cached(
    owner: VariableOwner, plan: BucketPlan, op: str, what: str, digest: int, *, weighted: bool
) -> bool:
    """Combine the gradients by a cached call; False if there is none, and nothing was done.

    Description and signature change from step to step, because they hold the step and the learning
    rate. The arguments are those of `combining_request`.
    """
    if not op or len(plan.shared) != 1:
        return False
    communicator, array = owner.communicator, _flat_array(plan, weighted=weighted)

    def make(x: Any, out: Any) -> ReduceArgs:
        options = ReduceOptions(owner.reproducible)
        return reduce_request(communicator, x, op, out=out, name=_NAME, options=options)

    key = (_NAME, op, array.dtype, array.shape, owner.reproducible)
    return (
        call_persistent(communicator, key, array, array, owner.timeout, make, (what, digest))
        is not None
    )


def _flat_array(plan: BucketPlan, *, weighted: bool) -> NDArray[Any]:
    """Return the one array that travels; the last element of the whole is the weight."""
    (bucket,) = plan.shared
    return bucket.whole if weighted else bucket.flat
