"""Reducing and gathering values of all replicas: what `Strategy.reduce` and the replica context share."""

from __future__ import annotations

import contextlib
import operator
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from syncvar.collectives.all_gather import gather_request
from syncvar.collectives.all_reduce import reduce_request
from syncvar.collectives.dispatch import call_prepared, entered
from syncvar.collectives.reduce_args import ReduceArgs, form_of
from syncvar.collectives.tensors import given_back
from syncvar.core.array_arguments import as_array
from syncvar.core.errors import ConfigError
from syncvar.core.pytree import (
    TreeDef,
    arrays_of,
    describe,
    flatten,
    is_dataclass,
    parts_of,
    rebuilt,
    unflatten,
)
from syncvar.core.reduce_ops import identity, quiet, reduction
from syncvar.runtime.communicator import CollectiveSpec
from syncvar.runtime.flight_recorder.call_record import CallFields, CallLabel, collective_of
from syncvar.variables.policy import as_member
from syncvar.variables.values import DistributedValues
from syncvar.variables.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage
    from syncvar.strategies.base import Strategy

__all__ = ["ReduceOp", "gather_values", "local_part", "own_part", "reduce_values"]


class ReduceOp(StrEnum):
    """How values of several replicas, or of several ranks, are combined: names of an op.

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


_NO_AXIS = "axis must be an integer, a tuple of integers or None, not {!r}: write axis=0, axis=(0, 1) or axis=None"


def own_part(value: Any) -> Any:
    """Return this process's part of a DistributedValues, also inside structures; anything else as it is."""
    if isinstance(value, DistributedValues):
        return value.values[0]
    if _is_nested(value) and _holds(parts_of(value)):
        return rebuilt(value, [own_part(part) for part in parts_of(value)])
    return value


def local_part(value: Any) -> Any:
    """Return this process's part of a structure, leaf by leaf; a variable gives its own copy."""
    if isinstance(value, Variable):
        return value.local_value()
    if isinstance(value, DistributedValues):
        return local_part(value.values[0])
    if _is_nested(value):
        parts = parts_of(value)
        made = [local_part(part) for part in parts]
        return value if all(map(operator.is_, made, parts)) else rebuilt(value, made)
    return value


class _Brought(NamedTuple):
    """What a replica brings to a reduction, and what becomes of the result."""

    op: str
    name: str
    structure: TreeDef  # of the value
    arrays: list[NDArray[Any]]
    finish: Callable[[list[NDArray[Any]]], Any]  # of what has been combined

    def request(
        self, communicator: Communicator, reproducible: bool, *, is_finished: bool = True
    ) -> ReduceArgs:
        """Return the request that combines the arrays; its result is the value's, or a list of theirs."""
        request = reduce_request(
            communicator, self.arrays, self.op, reproducible=reproducible, name=self.name
        )
        whole = _structured(
            request, self.finish if is_finished else list, self.structure, self.name, self.arrays
        )
        return ReduceArgs(
            whole.what, whole.digest, whole.body, self.op, is_entered=request.is_entered
        )


def reduce_values(strategy: Strategy, reduce_op: Any, value: Any, axis: Any) -> Any:
    """Reduce a value or structure over replicas: first along `axis` of this replica's part, then across.

    Args:
        strategy: Has the replicas.
        reduce_op: A ReduceOp or its name.
        value: This replica's array or structure of arrays.
        axis: int, tuple of ints, or None for elementwise over the replicas.
    """
    if axis is None:
        return (_elementwise if strategy.reproducible else _elementwise_entered)(
            value, reduce_op, group=strategy, timeout=strategy.timeout
        )
    communicator, reproducible = strategy.communicator, strategy.reproducible
    brought: _Brought | None = None
    if communicator.channel is not None:
        with (
            contextlib.suppress(Exception),
            quiet(),
        ):  # whatever it is: the general way raises it again, and tells the others
            brought = _brought(reduce_op, value, axis)
    form = None if brought is None else form_of(brought.arrays)
    if brought is not None and form is not None:
        key = (brought.name, brought.structure, reproducible, form.dtype, form.shape)
        make = partial(brought.request, communicator, reproducible, is_finished=False)
        made = call_prepared(
            communicator, key, form, None, strategy.timeout, lambda _x, _out: make()
        )
        if made is not None:
            with quiet():
                return brought.finish(made)
    return communicator.perform(
        "strategy.reduce",
        lambda: _brought(reduce_op, value, axis).request(communicator, reproducible),
        strategy.timeout,
    )


def _elementwise(value: Any, reduce_op: Any, *, group: Strategy, timeout: float | None) -> Any:
    """Combine values of all replicas of a strategy; its `reproducible` calls have no entrance of their own."""
    communicator, reproducible = group.communicator, group.reproducible

    def request_of(_value: Any = None, _out: Any = None) -> ReduceArgs:
        return _brought(reduce_op, value, None).request(communicator, reproducible)

    form = (
        form_of(value) if communicator.channel is not None and isinstance(reduce_op, str) else None
    )
    if form is not None:
        key = ("strategy.reduce", reduce_op, reproducible, form.dtype, form.shape)
        public = None if reproducible else _elementwise_entered
        result = call_prepared(
            communicator, key, form, None, timeout, request_of, public=public, how=(reduce_op,)
        )
        if result is not None:
            return result
    return communicator.perform("strategy.reduce", request_of, timeout)


_elementwise_entered = entered(second="reduce_op", positions=2)(_elementwise)


def _brought(reduce_op: Any, value: Any, axis: Any) -> _Brought:
    """Check the arguments of a reduction, and reduce this replica's part along its axes."""
    op = as_member(ReduceOp, reduce_op, "reduce_op")
    axes = _checked_axes(axis)
    part = local_part(value)
    structure, leaves = flatten(part)
    arrays = arrays_of(part, leaves, "the value")

    def together(made: list[NDArray[Any]]) -> Any:
        return given_back(part, unflatten(structure, made, part))

    name = CallLabel(
        f"strategy.reduce({op.name}, axis={axes})", CallFields("strategy.reduce", op.name)
    )
    if axes is None:
        return _Brought(op.value, name, structure, arrays, together)
    places = [_normalized(axes, array.ndim) for array in arrays]
    parts = [_along(op.value, array, place) for array, place in zip(arrays, places, strict=True)]
    if op is not ReduceOp.MEAN:
        return _Brought(
            op.value, name, structure, parts, lambda made: together(_as_asked(made, op, arrays))
        )
    counts = [np.asarray(_count(array, place)) for array, place in zip(arrays, places, strict=True)]

    def means(made: list[NDArray[Any]]) -> Any:
        totals, numbers = made[: len(parts)], made[len(parts) :]
        divided = [
            np.asarray(total / number) for total, number in zip(totals, numbers, strict=True)
        ]  # NaN of no element
        return together(_as_asked(divided, op, arrays))

    return _Brought("sum", name, structure, [*parts, *counts], means)


def gather_values(
    communicator: Communicator, value: Any, axis: Any, timeout: float | None, name: str
) -> Any:
    """Concatenate a value or structure over replicas, in their order; lengths along `axis` may differ.

    Args:
        communicator: The replicas' group.
        value: This replica's array or structure of arrays.
        axis: Where to concatenate; may be negative.
        timeout: Seconds.
        name: The public call.
    """

    def check() -> CollectiveSpec:
        part = local_part(value)
        for leaf in flatten(part)[1]:
            if as_array(leaf).ndim == 0:
                raise ConfigError(
                    f"{name} concatenates along an axis, and a scalar has none; pass np.reshape(x, (1,))"
                )
        request = gather_request(communicator, part, axis=axis, name=name)
        body = request.body

        def run() -> Generator[Stage, None, Any]:
            return given_back(part, (yield from body))

        return CollectiveSpec(request.what, request.digest, run())

    return communicator.perform(name, check, timeout)


def _structured(
    request: CollectiveSpec, finish: Any, structure: Any, name: str, parts: list[NDArray[Any]]
) -> CollectiveSpec:
    """Return the request with its result put together, and the structure among what is compared and told."""
    body = request.body

    def run() -> Generator[Stage, None, Any]:
        return finish((yield from body))

    digest = request.digest ^ (hash_of(structure) & ((1 << 64) - 1))
    kinds = ", ".join(f"{part.dtype.name}{list(part.shape)}" for part in parts[:4]) + (
        ", …" if len(parts) > 4 else ""
    )
    inside = "" if structure.kind == "leaf" else f" in {describe(structure)}"
    text = f"{name} of {kinds}{inside}"
    collective = collective_of(name) if isinstance(name, CallLabel) else text
    fields = CallFields(collective)
    if parts:
        first = parts[0]
        dtype = first.dtype.name
        fields = CallFields(collective, "", dtype, first.shape, first.size, first.nbytes)
    return CollectiveSpec(CallLabel(text, fields), digest, run())


def hash_of(structure: Any) -> int:
    """Return a digest of a structure that is the same in every process."""
    from syncvar.runtime.communicator import fingerprint

    return fingerprint("structure", structure)


def _checked_axes(axis: Any) -> tuple[int, ...] | None:
    if axis is None:
        return None
    given = axis if isinstance(axis, tuple) else (axis,)
    if any(isinstance(one, bool | np.bool_) for one in given):
        raise ConfigError(_NO_AXIS.format(axis))
    try:
        return tuple(operator.index(one) for one in given)
    except TypeError:
        raise ConfigError(_NO_AXIS.format(axis)) from None


def _normalized(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    for axis in axes:
        if not -ndim <= axis < ndim:
            raise ConfigError(
                f"axis {axis} is outside a value of {ndim} dimensions; axis=None combines elementwise"
            )
    places = tuple(axis % ndim for axis in axes)
    if len(set(places)) != len(places):
        raise ConfigError(
            f"axis {axes} names a dimension twice; write axis={tuple(sorted(set(places)))}"
        )
    return places


def _along(op: str, array: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    how = reduction(op, array.dtype)
    ufunc = cast("np.ufunc", how.ufunc)  # the ops of a ReduceOp are
    if how.name in ("min", "max"):
        if _count(array, axes) == 0:
            shape = tuple(length for place, length in enumerate(array.shape) if place not in axes)
            return np.full(shape, identity(how), array.dtype)
        return np.asarray(ufunc.reduce(array, axis=axes))
    return np.asarray(ufunc.reduce(array, axis=axes, dtype=how.accumulate))


def _count(array: NDArray[Any], axes: tuple[int, ...]) -> int:
    count = 1
    for axis in axes:
        count *= array.shape[axis]
    return count


def _as_asked(
    parts: list[NDArray[Any]], op: ReduceOp, arrays: list[NDArray[Any]]
) -> list[NDArray[Any]]:
    return [
        np.asarray(part, reduction(op.value, array.dtype).result)
        for part, array in zip(parts, arrays, strict=True)
    ]


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple) or is_dataclass(value)


def _holds(items: Any) -> bool:
    return any(
        isinstance(item, DistributedValues) or (_is_nested(item) and _holds(parts_of(item)))
        for item in items
    )
