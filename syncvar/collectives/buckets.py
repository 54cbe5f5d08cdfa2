"""All-reduce of one array or several inside a call: arrays of one reduction form one bucket.

`all_reduce` and variables use it. In shared memory the ranks combine the arrays in place; over
links they combine a copy. Both write each result to its target. Invariant: no target is written
while an input that overlaps it is still to be read; `_copy_overlapping` copies such inputs first.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.algorithms.compile_schedule import LinkSchedule
from syncvar.collectives.reduce_args import contribution, kinds_of, outcome, sizes_of
from syncvar.core.reduce_ops import divide_mean
from syncvar.runtime.arithmetic import store, store_parts
from syncvar.runtime.planner import Published
from syncvar.runtime.request import Stage
from syncvar.runtime.shm_reduce import ReduceBuffers, flat, in_one_exchange
from syncvar.shm.segment import SegmentBlock

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.reduce_args import BucketLimits, ReduceOptions
    from syncvar.core.reduce_ops import Reduction
    from syncvar.runtime.communicator import Communicator


def reduce_together(
    communicator: Communicator,
    arrays: list[NDArray[Any]],
    reducers: list[Reduction],
    targets: Sequence[NDArray[Any] | None],
    options: ReduceOptions,
    *,
    no_overlap: bool = False,
    opens: bool = False,
) -> Generator[Stage, None, list[Any]]:
    """Reduce several arrays with one transfer for each kind of reduction; return the results.

    A target of None means a new array. `no_overlap`: no input overlaps the target of another one.
    With limits in `options`, there is one transfer for each bucket. In shared memory the arrays are
    combined where they are, so there they are not divided.
    `opens`: these are the first stages of their call; then several kinds of short arrays share one
    transfer.
    """
    if not no_overlap:
        arrays = _copy_overlapping(arrays, targets)
    kinds = kinds_of(reducers)
    results: list[Any] = [None] * len(arrays)
    reproducible, algorithm, apply = options[:3]
    if opens and len(kinds) > 1 and apply is None and algorithm is None:
        sizes = sizes_of(kinds, arrays)
        plan = communicator.plan("all_reduce", sum(sizes), 1, reproducible=reproducible)
        are_at_once, longest = in_one_exchange(sizes, communicator.size)
        if are_at_once and all(_is_shared(plan, reducer) for reducer in kinds):
            size = communicator.size
            yield from _side_by_side(plan, kinds, longest, arrays, targets, size, results)
            return results
    for reducer, places in _divided(communicator, kinds, arrays, options.limits):
        if len(places) == 1:
            one = arrays[places[0]], reducer, targets[places[0]]
            results[places[0]] = yield from reduce_one(communicator, *one, options)
            continue
        some, outs = [arrays[index] for index in places], [targets[index] for index in places]
        outputs = yield from _fused(communicator, some, reducer, outs, options)
        for index, result in zip(places, outputs, strict=True):
            results[index] = result
    return results


def _divided(
    communicator: Communicator,
    kinds: dict[Reduction, list[int]],
    arrays: list[NDArray[Any]],
    limits: BucketLimits | None,
) -> list[tuple[Reduction, list[int]]]:
    """Return the reduction of each bucket, and the places of its arrays."""
    if limits is None or communicator.is_shared:
        return list(kinds.items())
    order = [(reducer, place) for reducer, places in kinds.items() for place in places]
    buckets = limits.divide((arrays[place].nbytes, reducer) for reducer, place in order)
    return [(order[one[0]][0], [order[index][1] for index in one]) for one in buckets]


def _plan(
    communicator: Communicator, count: int, reducer: Reduction, options: ReduceOptions
) -> Any:
    return communicator.plan(
        "all_reduce",
        count,
        reducer.accumulate.itemsize,
        reproducible=options.reproducible or not reducer.commutes,
        algorithm=options.algorithm,
    )


def _fused(
    communicator: Communicator,
    arrays: list[NDArray[Any]],
    reducer: Reduction,
    targets: list[NDArray[Any] | None],
    options: ReduceOptions,
) -> Generator[Stage, None, list[Any]]:
    size = communicator.size
    count = sum([reducer.count(array) for array in arrays])
    plan = _plan(communicator, count, reducer, options)
    if _is_shared(plan, reducer) or not (
        reducer.is_packed or any(target is None for target in targets)
    ):
        return (yield from _stored(plan, arrays, reducer, targets, size, options.apply))
    rank = communicator.home_rank
    work = np.concatenate([contribution(array, reducer, rank) for array in arrays])
    yield Stage(plan, work, reducer.ufunc)
    outputs = []
    start = 0
    for array, target in zip(arrays, targets, strict=True):
        stop = start + reducer.count(array)
        outputs.append(outcome(reducer, work[start:stop], size, array.shape, target))
        start = stop
    return outputs


def _side_by_side(
    plan: Any,
    kinds: dict[Reduction, list[int]],
    longest: int | None,
    arrays: list[NDArray[Any]],
    targets: Sequence[NDArray[Any] | None],
    size: int,
    results: list[Any],
) -> Generator[Stage, None, None]:
    """Reduce short arrays of several kinds in one exchange, with the long ones of one kind."""
    vectors, stored = [], []
    for reducer, places in kinds.items():
        sources = [arrays[index] for index in places]
        outputs = _results(reducer, sources, [targets[index] for index in places])
        outs = list(map(flat, outputs))
        divisor = size if reducer.is_mean else 0
        sums = reducer.ufunc, reducer.accumulate, divisor
        vectors.append(ReduceBuffers.of(list(map(flat, sources)), outs, *sums))
        stored += list(zip(places, outputs, outs, strict=True))
    vector = None if longest is None else vectors.pop(longest)
    yield Stage(plan, np.empty(0, np.uint8), vector=vector, several=vectors)
    for index, one, out in stored:
        results[index] = _back(one, out)


def _is_shared(plan: Any, reducer: Reduction) -> bool:
    """Return whether the ranks combine these arrays directly in shared memory."""
    return isinstance(plan, Published) and plan.reduces and not reducer.is_packed


def _stored(
    plan: Any,
    arrays: list[NDArray[Any]],
    reducer: Reduction,
    targets: Sequence[NDArray[Any] | None],
    size: int,
    apply: np.ufunc | None,
) -> Generator[Stage, None, list[Any]]:
    """Reduce arrays as one vector, and store the results in their targets."""
    results = _results(reducer, arrays, targets)
    outs, sources = list(map(flat, results)), list(map(flat, arrays))
    if _is_shared(plan, reducer):
        divisor = size if reducer.is_mean else 0
        vector = ReduceBuffers.of(sources, outs, reducer.ufunc, reducer.accumulate, divisor, apply)
        yield Stage(plan, np.empty(0, reducer.accumulate), reducer.ufunc, vector)
    else:
        work = np.concatenate(sources, dtype=reducer.accumulate, casting="unsafe")
        yield Stage(plan, work, reducer.ufunc)
        store_parts(outs, divide_mean(reducer, work, size), apply)
    return [_back(one, out) for one, out in zip(results, outs, strict=True)]


def _results(
    reducer: Reduction, arrays: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any] | None]
) -> list[NDArray[Any]]:
    return [
        np.empty(array.shape, reducer.result) if target is None else target
        for array, target in zip(arrays, targets, strict=True)
    ]


def _back(one: NDArray[Any], flat: NDArray[Any]) -> NDArray[Any]:
    """Return `one` after its elements were stored in `flat`, a copy if `one` is not contiguous."""
    if one is not flat and not one.flags.c_contiguous:
        one[...] = flat.reshape(one.shape)
    return one


def reduce_one(
    communicator: Communicator,
    array: NDArray[Any],
    reducer: Reduction,
    target: NDArray[Any] | None,
    options: ReduceOptions,
) -> Generator[Stage, None, Any]:
    """Reduce one array, as `reduce_together` does. minloc and maxloc return two arrays."""
    size, apply = communicator.size, options.apply
    plan = _plan(communicator, reducer.count(array), reducer, options)
    if _is_shared(plan, reducer):
        if (
            target is not None
            and array is not target
            and np.may_share_memory(array, target)
            and not _are_same(array, target)
        ):
            array = array.copy()
        (result,) = yield from _stored(plan, [array], reducer, [target], size, apply)
        return result
    if (
        isinstance(plan, LinkSchedule)
        and plan.in_place is not None
        and array.flags.c_contiguous
        and array.dtype == reducer.accumulate
        and not reducer.is_packed
    ):
        flat = array.reshape(-1)
        if target is not None and _takes_sums(target, flat, reducer, size) and apply is None:
            yield Stage(plan, target.reshape(-1), reducer.ufunc, send_buffer=flat)
            return target
        work = np.empty(flat.size, reducer.accumulate)
        yield Stage(plan, work, reducer.ufunc, send_buffer=flat)
    else:
        work = contribution(array, reducer, communicator.home_rank)
        yield Stage(plan, work, reducer.ufunc)
    if apply is not None and target is not None:
        store(target, divide_mean(reducer, work, size).reshape(array.shape), apply)
        return target
    return outcome(reducer, work, size, array.shape, target)


def _takes_sums(target: NDArray[Any], source: NDArray[Any], reducer: Reduction, size: int) -> bool:
    """Return whether messages may be combined in the target, which a mismatch must not change.

    With two ranks the first frame proves that they agree; with more ranks it proves less. A mean is
    not combined in place, because its sum may still be on its way.
    """
    is_plain = (
        size == 2
        and not reducer.is_mean
        and target.dtype == reducer.accumulate
        and target.flags.c_contiguous
    )
    return is_plain and (
        not np.may_share_memory(source, target) or _are_same(source, target.reshape(-1))
    )


def _copy_overlapping(
    arrays: list[NDArray[Any]], targets: Sequence[NDArray[Any] | None]
) -> list[NDArray[Any]]:
    """Return the inputs; those that overlap the target of another array as copies."""
    if _are_separate(arrays, targets):
        return arrays
    written = sorted(
        (*np.lib.array_utils.byte_bounds(target), index)
        for index, target in enumerate(targets)
        if target is not None
    )
    if not written:
        return arrays
    starts = [low for low, _, _ in written]
    reach = list(accumulate((high for _, high, _ in written), max))
    outputs = []
    for index, array in enumerate(arrays):
        low, high = np.lib.array_utils.byte_bounds(array)
        last = bisect_left(starts, high)
        first = bisect_right(reach, low, 0, last)
        places = [place for place in range(first, last) if written[place][1] > low]
        reached = {written[place][2] for place in places if array.size}
        target = targets[index]
        if target is not None and array.strides == target.strides and _are_same(array, target):
            reached.discard(index)
        outputs.append(array.copy() if reached else array)
    return outputs


def _are_separate(arrays: list[NDArray[Any]], targets: Sequence[NDArray[Any] | None]) -> bool:
    """Return whether memory owners prove that no input overlaps the target of another."""
    owners: dict[int, int] = {}
    for index, target in enumerate(targets):
        if target is not None:
            owner = target if target.base is None else _owner(target)
            if not isinstance(owner, SegmentBlock | mmap.mmap) and not owns_itself(owner):
                return False
            owners[id(owner)] = index if owners.get(id(owner), index) == index else -1
    for index, array in enumerate(arrays):
        owner = array if array.base is None else _owner(array)
        if not (type(owner) is SegmentBlock or owns_itself(owner)):
            return False
        if id(owner) in owners and (owners[id(owner)] != index or array is not targets[index]):
            return False
    return True


def owns_itself(value: Any) -> bool:
    """Return whether a value is an array that is not a view."""
    return type(value) is np.ndarray and value.base is None and value.flags.owndata


def _owner(array: NDArray[Any]) -> Any:
    """Return the object that owns the memory of an array, as far as it is known."""
    found: Any = array
    while True:
        base = found.obj if type(found) is memoryview else getattr(found, "base", None)
        if base is None:
            return found
        found = base


def _are_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two arrays are the same elements; each is then read before it is written."""
    place, theirs = one.__array_interface__["data"][0], other.__array_interface__["data"][0]
    return bool(place == theirs and one.dtype == other.dtype and one.size == other.size)
