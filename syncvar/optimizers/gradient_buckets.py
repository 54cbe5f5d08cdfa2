"""The gradients of one list of variables, in flat arrays that travel.

All gradients that replicas combine are in one flat array for float32 and half types, and one for
float64. So they travel together, are combined in place, and are clipped as a whole. Gradients of
NONE variables are in an array of their own, which never travels. The arrays are kept from step to
step.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.reduce_args import UNLIMITED
from syncvar.core.errors import ConfigError, UsageError
from syncvar.optimizers.slots import is_replica_local
from syncvar.optimizers.update_rules import BLOCK, compute_dtype, is_half, norm
from syncvar.variables.grouped_writes import change_copies
from syncvar.variables.policy import VariableSynchronization
from syncvar.variables.storage import Storage
from syncvar.variables.values import operand_array
from syncvar.variables.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.reduce_args import BucketLimits
    from syncvar.optimizers.slots import OptimizerSlots, SlotState
    from syncvar.variables.variable_owner import VariableOwner

_NO_PAIRS = (
    "apply_gradients takes pairs of a gradient and a variable, gradient first, for instance "
    "zip(gradients, variables), not {}"
)


def listed(grads_and_vars: Any) -> list[Any]:
    """Return the pairs as a list."""
    try:
        return list(grads_and_vars)
    except TypeError:
        raise ConfigError(_NO_PAIRS.format(repr(grads_and_vars)[:100])) from None


def checked_pairs(grads_and_vars: Any) -> tuple[list[Any], list[Variable]]:
    """Return gradients (None if there is none) and their variables."""
    try:
        pairs = [tuple(pair) for pair in listed(grads_and_vars)]
    except TypeError:
        raise ConfigError(_NO_PAIRS.format(repr(grads_and_vars)[:100])) from None
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[1], Variable):
            raise ConfigError(_no_pair(pair))
    if all(gradient is None for gradient, _ in pairs):
        raise ConfigError(
            "apply_gradients got no gradient at all: pass [(gradient, variable), …]; a None "
            "gradient leaves its variable as it is, but one of them must be an array"
        )
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]


def _no_pair(pair: tuple[Any, ...]) -> str:
    if len(pair) == 2 and not isinstance(pair[0], Variable) and hasattr(pair[1], "dtype"):
        from syncvar.core.migration_hints import hint_for

        kind = type(pair[1])
        remedy = hint_for("sv", "DistributedOptimizer")
        if kind.__module__.partition(".")[0] == "numpy":
            remedy = "make it with sv.Variable(array)"
        return (
            "apply_gradients steps variables of sv, and the second of a pair is a "
            f"{kind.__module__}.{kind.__qualname__}: {remedy}"
        )
    return _NO_PAIRS.format(repr(pair)[:100])


def checked_variables(variables: Sequence[Variable]) -> VariableOwner:
    """Return the common strategy of variables that an optimizer can step."""
    owner: VariableOwner = variables[0].strategy
    seen: set[int] = set()
    for variable in variables:
        name = variable.name
        if variable.synchronization is VariableSynchronization.ON_READ:
            raise ConfigError(
                f"variable {name!r} is ON_READ: its copies differ, and a step of each has no "
                "meaning for their aggregate. Make weights with "
                "synchronization=sv.VariableSynchronization.ON_WRITE (or NONE, to step each "
                "replica's own copy)"
            )
        if variable.dtype.kind not in "fV":
            raise ConfigError(
                f"variable {name!r} is {variable.dtype.name}; an optimizer steps real floating "
                "numbers: make it with dtype='float32'"
            )
        if id(variable) in seen:
            raise ConfigError(
                f"the variable {name!r} is named twice in one call; add its gradients first"
            )
        seen.add(id(variable))
        if variable.strategy is not owner:
            raise UsageError(
                f"the variables {variables[0].name!r} and {name!r} belong to different strategies; "
                "make an optimizer for each"
            )
    return owner


class BucketPart:
    """One variable's part of a bucket."""

    __slots__ = (
        "accumulator",
        "changed",
        "compute",
        "error",
        "factor",
        "gradient",
        "is_half",
        "is_replica_local",
        "scratch",
        "shape",
        "variable",
    )

    def __init__(
        self, variable: Variable, state: SlotState, gradient: NDArray[Any], scratch: NDArray[Any]
    ) -> None:
        self.variable = variable
        self.shape = variable.shape
        self.is_replica_local = is_replica_local(variable)
        self.compute = gradient.dtype
        self.is_half = is_half(variable.dtype)
        self.gradient = gradient
        self.scratch = scratch
        self.changed, self.accumulator, self.error, self.factor = state

    def load(self, value: Any, factor: float | None, call: int, calls: int, *, mean: bool) -> None:
        """Check a gradient, and copy it to the flat array or accumulate it."""
        gradient = value
        if (
            type(value) is not np.ndarray
            or value.shape != self.shape
            or value.dtype != self.compute
        ):
            gradient = operand_array(
                value, self.shape, self.compute, f"gradient of variable {self.variable.name!r}"
            )
        if self.accumulator is None:
            _scaled(gradient, factor, self.gradient)
            return
        change_copies([self.accumulator], self._accumulate, gradient, factor, call)
        if call == calls - 1:
            change_copies([self.accumulator], self._take, calls if mean else 1)

    def _accumulate(
        self, arrays: list[NDArray[Any]], gradient: NDArray[Any], factor: float | None, call: int
    ) -> None:
        if call == 0:
            _scaled(gradient, factor, arrays[0])
            return
        _scaled(gradient, factor, self.gradient)
        np.add(arrays[0], self.gradient, out=arrays[0])

    def _take(self, arrays: list[NDArray[Any]], divisor: int) -> None:
        np.divide(arrays[0], divisor, out=self.gradient)


def _scaled(source: NDArray[Any], factor: float | None, target: NDArray[Any]) -> None:
    """Store factor * source; factor 0 gives zeros, even for NaN (the mean of an empty batch)."""
    if factor is None:
        target[...] = source
    elif factor == 0.0:
        target[...] = 0
    else:
        np.multiply(source, factor, out=target)


class BucketPlan:
    """The buckets of a list of variables."""

    def __init__(
        self,
        owner: VariableOwner,
        variables: Sequence[Variable],
        slots: OptimizerSlots,
        limits: BucketLimits | None = None,
    ) -> None:
        self.limits = None if owner.communicator.is_shared else limits
        self.parts: list[BucketPart] = []
        self._scratch: dict[np.dtype[Any], NDArray[Any]] = {}
        shared = [one for one in variables if not is_replica_local(one)]
        local = [one for one in variables if is_replica_local(one)]
        self.shared = self._pack(owner, shared, slots, travels=True)
        self.local = self._pack(owner, local, slots, travels=False)
        largest = max(bucket.flat.size for bucket in (*self.shared, *self.local))
        self.room = np.empty(min(BLOCK, largest), np.float64)
        by_variable = {id(part.variable): part for part in self.parts}
        self.parts = [by_variable[id(variable)] for variable in variables]
        self.key = tuple([id(variable) for variable in variables])

    def _pack(
        self,
        owner: VariableOwner,
        variables: list[Variable],
        slots: OptimizerSlots,
        *,
        travels: bool,
    ) -> list[Bucket]:
        result: list[Bucket] = []
        dtypes = [compute_dtype(variable.dtype) for variable in variables]
        order = [
            (variable, dtype)
            for kind in dict.fromkeys(dtypes)
            for variable, dtype in zip(variables, dtypes, strict=True)
            if dtype == kind
        ]
        limits = (self.limits if travels else None) or UNLIMITED
        sizes = ((prod(variable.shape) * dtype.itemsize, dtype) for variable, dtype in order)
        for places in limits.divide(sizes):
            chosen, dtype = [order[place][0] for place in places], order[places[0]][1]
            count = sum(prod(variable.shape) for variable in chosen)
            whole = np.zeros(count + 1, dtype)
            if travels:  # in shared memory, where it is combined in place
                whole = Storage(owner.context, whole).array
            start = 0
            parts = []
            for variable in chosen:
                state = slots.state(variable)
                assert state is not None
                size = prod(variable.shape)
                gradient = whole[start : start + size].reshape(variable.shape)
                scratch = self._scratch_of(dtype, size)
                if size <= BLOCK:
                    scratch = scratch.reshape(variable.shape)
                parts.append(BucketPart(variable, state, gradient, scratch))
                start += size
            self.parts += parts
            result.append(Bucket(whole, parts))
        return result

    def _scratch_of(self, dtype: np.dtype[Any], size: int) -> NDArray[Any]:
        if dtype not in self._scratch:
            self._scratch[dtype] = np.empty(BLOCK, dtype)
        return self._scratch[dtype][: min(size, BLOCK)]


class Bucket:
    """Gradients of one dtype, one after another."""

    def __init__(self, whole: NDArray[Any], parts: list[BucketPart]) -> None:
        self.whole = whole
        self.flat = whole[:-1]
        self.parts = parts

    def first_nonfinite(self) -> BucketPart | None:
        """Return the first part with a gradient that is not finite, or None."""
        if bool(np.isfinite(self.flat).all()):
            return None
        return next(part for part in self.parts if not np.isfinite(part.gradient).all())


class Clipping(NamedTuple):
    """Limits of gradients."""

    norm_max: float | None  # maximum 2-norm of all of them
    value_max: float | None  # maximum absolute value of an element
    skips: bool  # leave out steps whose gradients hold an infinity or NaN

    def apply(
        self, buckets: list[Bucket], plan: BucketPlan, weight: float | None, *, divide: bool
    ) -> bool:
        """Scale and clip gradients in place; return whether to make a step with them."""
        flats = [bucket.flat for bucket in buckets]
        if weight is not None:
            if weight == 0.0:
                return False
            if divide:
                for flat in flats:
                    np.divide(flat, weight, out=flat)
        if self.skips and not all(bool(np.isfinite(flat).all()) for flat in flats):
            return False
        self._clip(flats, plan)
        return True

    def _clip(self, flats: list[NDArray[Any]], plan: BucketPlan) -> None:
        if self.value_max is not None:
            for flat in flats:
                np.minimum(flat, self.value_max, out=flat)
                np.maximum(flat, -self.value_max, out=flat)
        if self.norm_max is not None:
            length = norm(flats, plan.room)
            if length > self.norm_max:
                for flat in flats:
                    np.multiply(flat, self.norm_max / length, out=flat)
