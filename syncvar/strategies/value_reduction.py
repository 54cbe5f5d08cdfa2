"""Reduce and gather values of all replicas, for `Strategy` and the replica context."""

from __future__ import annotations

import contextlib
import math
import operator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from syncvar.collectives.all_reduce import AllReduceCall
from syncvar.collectives.dispatch import call_persistent, native_dispatch
from syncvar.collectives.gather import AllGatherCall
from syncvar.collectives.reduce_args import ReduceOptions, plain_operand
from syncvar.collectives.tensors import convert_back
from syncvar.core.array_arguments import as_array
from syncvar.core.errors import ConfigError
from syncvar.core.pytree import (
    LEAF,
    TreeDef,
    arrays_of,
    children_of,
    flatten,
    is_dataclass,
    rebuild,
    unflatten,
)
from syncvar.core.reduce_ops import identity, quiet, reduction
from syncvar.variables.policy import as_member
from syncvar.variables.values import DistributedValues
from syncvar.variables.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


_CALL = "strategy.reduce"
_SHOWN_ARRAYS = 4  # in labels


class ReplicaGroup(Protocol):
    """What reductions and distributed datasets need of a `Strategy`."""

    strict: bool
    reproducible: bool
    timeout: float | None

    @property
    def communicator(self) -> Communicator:
        """The communicator of the replicas."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""


@dataclass(frozen=True, slots=True)
class ValueContext:
    """The replica for which `experimental_distribute_values_from_function` makes a value.

    Example:
        >>> import syncvar as sv
        >>> sv.ValueContext().num_replicas_in_sync
        1
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class ReduceOp(StrEnum):
    """The ops that combine values of several replicas, or of several ranks.

    Example:
        >>> import syncvar as sv
        >>> sv.get_strategy().reduce(sv.ReduceOp.SUM, [1.0, 2.0], axis=0)
        array(3.)
        >>> sv.all_reduce(2.0, sv.ReduceOp.MEAN)
        array(2.)
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PROD = "prod"


def own_part(value: Any) -> Any:
    """Return this process's part of a DistributedValues, also inside pytrees, or the value."""
    if isinstance(value, DistributedValues):
        return value.values[0]
    if _is_nested(value) and _holds(children_of(value)):
        return rebuild(value, [own_part(part) for part in children_of(value)])
    return value


def local_part(value: Any) -> Any:
    """Return this process's part of a pytree, leaf by leaf; a variable gives its own copy."""
    if isinstance(value, Variable):
        return value.local_value()
    if isinstance(value, DistributedValues):
        return local_part(value.values[0])
    if _is_nested(value):
        parts = children_of(value)
        own = [local_part(part) for part in parts]
        return value if all(map(operator.is_, own, parts)) else rebuild(value, own)
    return value


class _Reduction(NamedTuple):
    """A replica's input to a reduction, and the function that makes the result of the sums."""

    op: str
    options: tuple[str, tuple[int, ...] | None]  # op and axes as the caller gives them
    treedef: TreeDef
    arrays: list[NDArray[Any]]
    finish: Callable[[list[NDArray[Any]]], Any]


class ValueReductionCall(AllReduceCall):
    """A call that combines the arrays of a reduction; its result is the value."""

    def __init__(self, strategy: ReplicaGroup, reduction: _Reduction) -> None:
        arrays, options = reduction.arrays, ReduceOptions(strategy.reproducible)
        super().__init__(strategy.communicator, arrays, reduction.op, name=_CALL, options=options)
        self._finish = reduction.finish
        spec = self.spec._replace(
            op="",
            structure=reduction.treedef,
            options=(reduction.op, *reduction.options, *self.spec.options),
            size=-1,
            shown=reduction.options,
            text=_label,
        )
        self.spec = spec.with_array(arrays[0]) if arrays else spec

    def stages(self) -> Generator[Stage, None, Any]:
        """Yield the stages of the all-reduce, and make the value."""
        return self._finish((yield from super().stages()))


def _label(spec: CollectiveSpec) -> str:
    op, axes = spec.shown
    kinds = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in spec.kinds[:_SHOWN_ARRAYS])
    more = ", …" if len(spec.kinds) > _SHOWN_ARRAYS else ""
    inside = "" if spec.structure == LEAF else f" in {spec.tree}"
    return f"{spec.collective}({op}, axis={axes}) of {kinds}{more}{inside}"


def reduce_values(strategy: ReplicaGroup, reduce_op: Any, value: Any, axis: Any) -> Any:
    """Reduce a value or pytree over replicas: first this part along `axis`, then across replicas.

    With `axis=None`, the reduction is elementwise over the replicas.
    """
    if axis is None:
        reduce_all = _elementwise if strategy.reproducible else _elementwise_native
        return reduce_all(value, reduce_op, group=strategy, timeout=strategy.timeout)
    communicator = strategy.communicator
    make_checked = partial(_checked, strategy, reduce_op, value, axis)
    prepared: _Reduction | None = None
    if communicator.channel is not None:
        # The slow path raises the same error again, and sends it to the other replicas.
        with contextlib.suppress(Exception), quiet():
            prepared = _prepare(reduce_op, value, axis)
    array = None if prepared is None else plain_operand(prepared.arrays)
    if prepared is not None and array is not None:
        key = (_CALL, prepared.options, prepared.treedef, strategy.reproducible)
        sums = call_persistent(communicator, key, array, None, strategy.timeout, make_checked)
        if sums is not None:
            with quiet():
                return prepared.finish(sums)
    return communicator.perform(_CALL, make_checked, strategy.timeout)


def _checked(strategy: ReplicaGroup, reduce_op: Any, value: Any, axis: Any) -> ValueReductionCall:
    """Check the arguments of a reduction, and return the call."""
    return ValueReductionCall(strategy, _prepare(reduce_op, value, axis))


def _elementwise(value: Any, reduce_op: Any, *, group: ReplicaGroup, timeout: float | None) -> Any:
    """Combine values of all replicas elementwise; the cached path of `reproducible` calls."""
    communicator, reproducible = group.communicator, group.reproducible
    make_checked = partial(_checked, group, reduce_op, value, None)
    can_cache = communicator.channel is not None and isinstance(reduce_op, str)
    array = plain_operand(value) if can_cache else None
    if array is not None:
        key = (_CALL, reduce_op, reproducible)
        public = None if reproducible else _elementwise_native
        arguments = communicator, key, array, None, timeout, make_checked
        result = call_persistent(*arguments, public=public, options=(reduce_op,))
        if result is not None:
            return result
    return communicator.perform(_CALL, make_checked, timeout)


_elementwise_native = native_dispatch(second="reduce_op", positions=2)(_elementwise)


def _prepare(reduce_op: Any, value: Any, axis: Any) -> _Reduction:
    """Check the arguments of a reduction, and reduce this replica's part along its axes."""
    op = as_member(ReduceOp, reduce_op, "reduce_op")
    axes = _checked_axes(axis)
    part = local_part(value)
    treedef, leaves = flatten(part)
    arrays = arrays_of(part, leaves, "the value")

    def assemble(results: list[NDArray[Any]]) -> Any:
        return convert_back(part, unflatten(treedef, results, part))

    options = op.name, axes
    if axes is None:
        return _Reduction(op.value, options, treedef, arrays, assemble)
    own_axes = [_normalized(axes, array.ndim) for array in arrays]
    pairs = list(zip(arrays, own_axes, strict=True))
    parts = [_reduce_along(op.value, array, along) for array, along in pairs]
    dtypes = [reduction(op.value, array.dtype).result for array in arrays]

    def finish(sums: list[NDArray[Any]]) -> Any:
        return assemble([np.asarray(one, dtype) for one, dtype in zip(sums, dtypes, strict=True)])

    if op is not ReduceOp.MEAN:
        return _Reduction(op.value, options, treedef, parts, finish)
    counts = [np.asarray(_count(array, along)) for array, along in pairs]

    def means(sums: list[NDArray[Any]]) -> Any:
        totals, numbers = sums[: len(parts)], sums[len(parts) :]
        # The mean of no element is NaN.
        return finish([np.asarray(total / n) for total, n in zip(totals, numbers, strict=True)])

    return _Reduction("sum", options, treedef, [*parts, *counts], means)


def gather_values(
    communicator: Communicator, value: Any, axis: Any, timeout: float | None, name: str
) -> Any:
    """Concatenate a value or pytree over replicas, in their order, along `axis`."""
    make_checked = partial(ValueGatherCall, communicator, value, axis, name)
    return communicator.perform(name, make_checked, timeout)


class ValueGatherCall(AllGatherCall):
    """A call that concatenates a value of all replicas."""

    def __init__(self, communicator: Communicator, value: Any, axis: Any, name: str) -> None:
        self._part = part = local_part(value)
        if any(as_array(leaf).ndim == 0 for leaf in flatten(part)[1]):
            raise ConfigError(
                f"{name} concatenates along an axis, and a scalar has none; pass "
                "np.reshape(x, (1,))"
            )
        super().__init__(communicator, part, axis=axis, name=name)

    def stages(self) -> Generator[Stage, None, Any]:
        """Yield the stages of the gather, and convert the result."""
        return convert_back(self._part, (yield from super().stages()))


def _checked_axes(axis: Any) -> tuple[int, ...] | None:
    if axis is None:
        return None
    axes = axis if isinstance(axis, tuple) else (axis,)
    try:
        if not any(isinstance(one, bool | np.bool_) for one in axes):
            return tuple(operator.index(one) for one in axes)
    except TypeError:
        pass
    raise ConfigError(
        f"axis must be an integer, a tuple of integers or None, not {axis!r}: write axis=0, "
        "axis=(0, 1) or axis=None"
    )


def _normalized(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    for axis in axes:
        if not -ndim <= axis < ndim:
            text = f"axis {axis} is outside a value of {ndim} dimensions"
            raise ConfigError(f"{text}; axis=None combines elementwise")
    positive = tuple(axis % ndim for axis in axes)
    distinct = tuple(sorted(set(positive)))
    if len(distinct) != len(positive):
        raise ConfigError(f"axis {axes} names a dimension twice; write axis={distinct}")
    return positive


def _reduce_along(op: str, array: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    rule = reduction(op, array.dtype)
    ufunc = cast("np.ufunc", rule.ufunc)  # every ReduceOp has one
    if rule.name in ("min", "max"):
        if _count(array, axes) == 0:
            shape = tuple(length for axis, length in enumerate(array.shape) if axis not in axes)
            return np.full(shape, identity(rule), array.dtype)
        return np.asarray(ufunc.reduce(array, axis=axes))
    return np.asarray(ufunc.reduce(array, axis=axes, dtype=rule.accumulate))


def _count(array: NDArray[Any], axes: tuple[int, ...]) -> int:
    return math.prod(array.shape[axis] for axis in axes)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple) or is_dataclass(value)


def _holds(items: Any) -> bool:
    return any(
        isinstance(item, DistributedValues) or (_is_nested(item) and _holds(children_of(item)))
        for item in items
    )
