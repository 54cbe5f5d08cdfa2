"""All-reduce: every rank ends with the combination of all ranks' values."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.arena.mapping import Block
from syncvar.collectives._arguments import (
    arrays_of,
    as_array,
    checked_output,
    flatten,
    fresh,
    is_structure,
    unflatten,
)
from syncvar.collectives._kinds import given_back, in_kind, is_foreign
from syncvar.collectives._preparing import begun, form_of, key_of, prepare
from syncvar.collectives._reducing import (
    checked_scale,
    contribution,
    described_reduction,
    described_together,
    outcome,
    reduction_of,
)
from syncvar.collectives._tree import summed
from syncvar.collectives.groups import communicator_of
from syncvar.engine.executor import Prepared
from syncvar.engine.group import Request
from syncvar.engine.operation import Stage
from syncvar.engine.timeouts import is_seconds
from syncvar.errors import ConfigError
from syncvar.execution.kernels import Reduction, divided, finish, quiet, reduction
from syncvar.execution.pieces import store_pieces
from syncvar.execution.reductions import Vector
from syncvar.execution.rounds import Published
from syncvar.joining import finite
from syncvar.joining.context import entered_natively
from syncvar.kernel import remember
from syncvar.loading import unexpected

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator

__all__ = ["all_reduce", "owns_itself", "reduce_request", "reduce_together", "tree_combined", "tree_sum"]


def all_reduce(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    reproducible: bool = False,
    prescale: float | None = None,
    postscale: float | None = None,
    weight: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Combine the values of all ranks and give every rank the result.

    Args:
        x: Array of any shape, number, or a nested dict/list/tuple/dataclass of them; the same shapes and dtypes on every rank.
        op: A member of `sv.ReduceOp`, or a name: "sum", "mean", "prod", "min", "max"; "and", "or", "xor" (logical on
            bools, bitwise on integers); "minloc", "maxloc" (the result is a pair of arrays: values, and the lowest ranks
            that bring them); or the name of an op made by `sv.register_op`.
        out: Array of the result's shape and dtype (or a structure of them) to write to; it may be `x` itself, and then
            arrays of `sv.empty` are reduced in place. After an error of the arguments it is as it was; after PeerLost
            or DeadlineExceeded it may be half written.
        group: Ranks that take part; None means the world.
        async_op: Return a `Work` at once. The value of `x` is taken when the call is made.
        timeout: Seconds; None means the job's default.
        reproducible: Combine by the tree T(lo, hi) = T(lo, mid) + T(mid, hi), mid = lo + the largest power of two
            below hi - lo, over ranks: the same bits whatever the sizes, hosts and transports.
        prescale: This rank's value is multiplied by it first; may differ between ranks. Not for integers.
        postscale: The result is multiplied by it, before half types are rounded; the same on every rank.
        weight: Of a mean: this rank's weight; the result is the sum of weight * x divided by the sum of the weights. What
            a rank of weight 0 brings does not count, even if it is NaN.
        algorithm: Force one of `syncvar plan all_reduce`; the same on every rank.

    Returns:
        An array of the shape and dtype of `x` (the mean of integers is float64), or the same structure of arrays; a tensor of
        another library (PyTorch, JAX, any with DLPack and an array namespace) where `x` is one, here and in every collective.

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError and the group stays usable.
        MismatchError: The ranks do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: ring, 2(n-1) rounds and 2(n-1)/n of the buffer sent by each rank; small buffers take fewer rounds.
    Order: fixed by count and number of ranks; the bytes are equal on every rank.
    Source: Patarasuk and Yuan 2009 (ring); Thakur, Rabenseifner, Gropp 2005 (tree).

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.all_reduce(np.array([1.0, 2.0]))
        array([1., 2.])
        >>> sv.all_reduce({"loss": 0.5, "n": 3}, "mean")["n"]
        array(3.)
    """
    if _foreign:
        raise unexpected(all_reduce, _foreign)
    communicator = communicator_of(group)
    is_plain = communicator.channel is not None and (timeout is None or is_seconds(timeout))
    is_plain = is_plain and prescale is None and postscale is None and weight is None and algorithm is None
    form = None
    if is_plain and isinstance(op, str) and type(reproducible) is bool:
        form = x if type(x) is np.ndarray else form_of(x)
        if type(form) is np.ndarray:
            key: Hashable = ("all_reduce", op, form.dtype, form.shape, reproducible)
        elif form is not None:
            key = key_of("all_reduce", op, form, reproducible)
    if form is not None:
        ready = communicator.prepared_calls.get(key)
        if ready is not None:
            result = begun(ready, form, out, timeout) if async_op else ready(form, out, None, timeout)
            if result is not None:
                return result
    if is_foreign(x, out):
        call = partial(
            all_reduce, op=op, group=group, async_op=async_op, timeout=timeout, reproducible=reproducible,
            prescale=prescale, postscale=postscale, weight=weight, algorithm=algorithm,
        )  # fmt: skip
        return in_kind(call, x, out)
    result = communicator.perform(
        "all_reduce",
        partial(_request, communicator, x, op, out, reproducible, async_op, prescale, postscale, weight, algorithm),
        timeout,
        async_op=async_op,
    )
    if form is not None:
        prepare(communicator, key, x, form, op, "all_reduce", reproducible=reproducible)
        # An entrance looks at dtypes, and what the mean of integers puts in shared memory is not of theirs.
        if group is None and not reproducible and type(form) is np.ndarray and form.dtype == reduction_of(form, op).result:
            remember(all_reduce, op, communicator.prepared_calls.get(key), communicator.prepared_calls)
    return result


if not TYPE_CHECKING:
    all_reduce = entered_natively(all_reduce, second="op", usual="sum", positions=2)


def _request(
    communicator: Communicator,
    x: Any,
    op: str,
    out: Any,
    reproducible: bool,
    keep: bool,
    prescale: Any,
    postscale: Any,
    weight: Any,
    algorithm: str | None,
) -> Request:
    """Return the request of a public call; scales make new contributions and results around the plain one."""
    if prescale is None and postscale is None and weight is None:
        for leaf in (flatten(x)[1] if is_structure(x) else [x]) if finite.is_on else ():
            finite.look(as_array(leaf), "all_reduce")
        return reduce_request(
            communicator, x, op, out=out, reproducible=reproducible, keep=keep, algorithm=algorithm
        )
    if is_structure(x):
        raise ConfigError("prescale, postscale and weight take one array; call all_reduce for each leaf")
    array = as_array(x)
    how = reduction_of(array, op)
    for name, scale in (("prescale", prescale), ("postscale", postscale), ("weight", weight)):
        if scale is not None:
            checked_scale(name, scale, array)
    if weight is not None and not how.is_mean:
        raise ConfigError(f"weight belongs to the mean, not to {how.name}; use prescale")
    target = None if out is None else checked_output(out, array.shape, how.result)
    if weight is None or weight:  # what a rank of weight 0 brings does not count
        finite.look(array, "all_reduce")
    work = contribution(array, how, communicator.home_rank, prescale)
    if how.element_shape:
        work, how = work.view(how.result), how._replace(element_shape=())
    brought: Any = work.reshape(array.shape)
    inner = how.name
    if weight is not None:
        factor = np.asarray(weight, work.dtype)
        # The mean over an empty batch is NaN; its weight is 0, and it takes no part.
        brought, inner = [brought * factor if weight else np.zeros_like(brought), factor.reshape(())], "sum"
    scaled = f", scaled{'' if weight is None else ', weighted'}"
    name = f"all_reduce{scaled} of {how.source}" + ("" if postscale is None else f" by {postscale!r}")
    request = reduce_request(
        communicator, brought, inner, reproducible=reproducible, name=name, algorithm=algorithm
    )
    first = request.body

    def body() -> Generator[Stage, None, Any]:
        total = yield from first
        if weight is not None:
            total = total[0] / total[1]  # nan where all weights are 0
        return outcome(how._replace(is_mean=False), np.asarray(total).reshape(-1), 1, array.shape, target, postscale)

    return Request(request.what, request.digest, body())


def reduce_request(
    communicator: Communicator,
    x: Any,
    op: str,
    *,
    out: Any = None,
    reproducible: bool = False,
    name: str = "all_reduce",
    apply: np.ufunc | None = None,
    keep: bool = False,
    algorithm: str | None = None,
) -> Request:
    """Check the arguments of an all-reduce and return the request.

    Args:
        communicator: The group.
        x: This rank's array or structure.
        op: The op.
        out: Where the result goes, or None for new arrays.
        reproducible: Sum by the tree.
        name: What is compared, and told.
        apply: `out`, a single array, becomes apply(out, result); half types are rounded once, after that.
        keep: Take a copy of `x` now: the caller may change it before the call ends.
        algorithm: Forced, or None.
    """
    if not is_structure(x):
        array = as_array(x)
        how, digest, what = described_reduction(array, op, name, reproducible, algorithm)
        if how.is_locating and out is not None:
            raise ConfigError(f"{how.name} gives two arrays; out cannot be given")
        target = None if out is None else checked_output(out, array.shape, how.result)
        array = array.copy() if keep else array
        return Request(what, digest, _one(communicator, array, how, target, reproducible, apply, algorithm))
    structure, leaves = flatten(x)
    arrays = arrays_of(x, leaves)
    hows = [reduction_of(array, op) for array in arrays]
    targets: list[NDArray[Any] | None] = [None] * len(arrays)
    if out is not None:
        shape_of_out, outs = flatten(out)
        if shape_of_out != structure:
            raise ConfigError("out must have the same structure as the value")
        targets = [
            checked_output(one, array.shape, how.result) for one, array, how in zip(outs, arrays, hows, strict=True)
        ]
    digest, what = described_together(structure, arrays, hows, op, name, reproducible, algorithm)
    like = x
    if keep:
        arrays, like = [array.copy() for array in arrays], fresh(structure, x)

    def body() -> Generator[Stage, None, Any]:
        results = yield from reduce_together(communicator, arrays, hows, targets, reproducible, algorithm=algorithm)
        return unflatten(structure, results, like)

    return Request(what, digest, body())


def reduce_together(
    communicator: Communicator,
    arrays: list[NDArray[Any]],
    hows: list[Reduction],
    targets: Sequence[NDArray[Any] | None],
    reproducible: bool,
    apply: np.ufunc | None = None,
    algorithm: str | None = None,
    *,
    are_apart: bool = False,
) -> Generator[Stage, None, list[Any]]:
    """Reduce several arrays with as few transfers as there are kinds of reduction among them.

    Args:
        communicator: The group.
        arrays: What this rank brings.
        hows: How each is reduced.
        targets: Where each result goes, None for a new array.
        reproducible: Sum by the tree.
        apply: A target becomes apply(target, result).
        algorithm: Forced, or None.
        are_apart: It is known that no array lies where the result of another one goes.

    Returns:
        The results, in order.
    """
    if not are_apart:
        arrays = _apart(arrays, targets)
    kinds: dict[Reduction, list[int]] = {}
    if len(set(map(id, hows))) == 1:
        kinds[hows[0]] = list(range(len(hows)))
    else:
        for index, how in enumerate(hows):
            kinds.setdefault(how, []).append(index)
    results: list[Any] = [None] * len(arrays)
    for how, places in kinds.items():
        if len(places) == 1:
            index = places[0]
            results[index] = yield from _one(
                communicator, arrays[index], how, targets[index], reproducible, apply, algorithm
            )
            continue
        made = yield from _fused(
            communicator, [arrays[index] for index in places], how, [targets[index] for index in places],
            reproducible, apply, algorithm,
        )  # fmt: skip
        for index, result in zip(places, made, strict=True):
            results[index] = result
    return results


def _apart(arrays: list[NDArray[Any]], targets: Sequence[NDArray[Any] | None]) -> list[NDArray[Any]]:
    """Return the arrays, with a copy of each that lies where the result of another one goes, or its own at another place."""
    if _are_strangers(arrays, targets):
        return arrays
    written = sorted(
        (*np.lib.array_utils.byte_bounds(target), index) for index, target in enumerate(targets) if target is not None
    )
    if not written:
        return arrays
    starts = [low for low, _, _ in written]
    reach = list(accumulate((high for _, high, _ in written), max))
    made = []
    for index, array in enumerate(arrays):
        low, high = np.lib.array_utils.byte_bounds(array)
        last = bisect_left(starts, high)
        first = bisect_right(reach, low, 0, last)
        reached = {written[place][2] for place in range(first, last) if written[place][1] > low and array.size}
        target = targets[index]
        if target is not None and array.strides == target.strides and _is_same(array, target):
            reached.discard(index)
        made.append(array.copy() if reached else array)
    return made


def _are_strangers(arrays: list[NDArray[Any]], targets: Sequence[NDArray[Any] | None]) -> bool:
    """Return whether it is plain from who owns the memory that no array lies where a result goes, but its own in place."""
    owners: dict[int, int] = {}
    for index, target in enumerate(targets):
        if target is not None:
            owner = target if target.base is None else _owner(target)
            if not isinstance(owner, Block | mmap.mmap) and not owns_itself(owner):
                return False
            owners[id(owner)] = index if owners.get(id(owner), index) == index else -1
    for index, array in enumerate(arrays):
        owner = array if array.base is None else _owner(array)
        if not (type(owner) is Block or owns_itself(owner)):
            return False
        if id(owner) in owners and (owners[id(owner)] != index or array is not targets[index]):
            return False
    return True


def owns_itself(value: Any) -> bool:
    """Return whether a value is an array that is no view of anything."""
    return type(value) is np.ndarray and value.base is None and value.flags.owndata


def _owner(array: NDArray[Any]) -> Any:
    """Return the object that an array's memory belongs to, as far as it is known."""
    found: Any = array
    while True:
        base = found.obj if type(found) is memoryview else getattr(found, "base", None)
        if base is None:
            return found
        found = base


def _fused(
    communicator: Communicator,
    arrays: list[NDArray[Any]],
    how: Reduction,
    targets: list[NDArray[Any] | None],
    reproducible: bool,
    apply: np.ufunc | None,
    algorithm: str | None,
) -> Generator[Stage, None, list[Any]]:
    size = communicator.size
    count = sum([how.count(array) for array in arrays])
    plan = communicator.plan(
        "all_reduce", count, how.accumulate.itemsize, reproducible=reproducible or not how.commutes, algorithm=algorithm
    )
    is_published = isinstance(plan, Published) and plan.reduces and not how.is_packed
    if is_published or not (how.is_packed or any(target is None for target in targets)):
        results = [
            np.empty(array.shape, how.result) if target is None else target
            for array, target in zip(arrays, targets, strict=True)
        ]
        outs, sources = _flat(results), _flat(arrays)
        if is_published:
            vector = Vector(sources, outs, how.ufunc, how.accumulate, size if how.is_mean else 0, apply)
            yield Stage(plan, np.empty(0, how.accumulate), how.ufunc, vector)
        else:
            work = np.concatenate(sources, dtype=how.accumulate, casting="unsafe")
            yield Stage(plan, work, how.ufunc)
            store_pieces(outs, divided(how, work, size), apply)
        for one, out in zip(results, outs, strict=True):
            if one is not out and not one.flags.c_contiguous:
                one[...] = out.reshape(one.shape)
        return results
    rank = communicator.home_rank
    work = np.concatenate([contribution(array, how, rank) for array in arrays])
    yield Stage(plan, work, how.ufunc)
    made = []
    start = 0
    for array, target in zip(arrays, targets, strict=True):
        stop = start + how.count(array)
        made.append(outcome(how, work[start:stop], size, array.shape, target))
        start = stop
    return made


def _flat(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return flat views of arrays, and flat copies of those that are not contiguous."""
    return [
        array if array.ndim == 1 and array.flags.c_contiguous else np.ascontiguousarray(array).reshape(-1) for array in arrays
    ]


def _one(
    communicator: Communicator,
    array: NDArray[Any],
    how: Reduction,
    target: NDArray[Any] | None,
    reproducible: bool,
    apply: np.ufunc | None = None,
    algorithm: str | None = None,
) -> Generator[Stage, None, Any]:
    size = communicator.size
    plan = communicator.plan(
        "all_reduce", how.count(array), how.accumulate.itemsize, reproducible=reproducible or not how.commutes, algorithm=algorithm
    )
    if isinstance(plan, Published) and plan.reduces and not how.is_packed:
        made = np.empty(array.shape, how.result) if target is None else target
        is_flat = made.flags.c_contiguous
        out = made.reshape(-1) if is_flat else np.empty(array.size, how.result if apply is None else how.accumulate)
        flat = out if array is made and is_flat else np.ascontiguousarray(array).reshape(-1)
        if flat is not out and target is not None and np.may_share_memory(flat, out) and not _is_same(flat, out):
            flat = flat.copy()
        vector = Vector([flat], [out], how.ufunc, how.accumulate, size if how.is_mean else 0, apply if is_flat else None)
        yield Stage(plan, flat, how.ufunc, vector)
        if not is_flat:
            _store(made, out.reshape(array.shape), apply)
        return made
    if isinstance(plan, Prepared) and plan.apart is not None and array.flags.c_contiguous and array.dtype == how.accumulate and not how.is_packed:
        flat = array.reshape(-1)
        if target is not None and _takes_sums(target, flat, how, size) and apply is None:
            yield Stage(plan, target.reshape(-1), how.ufunc, brought=flat)
            return target
        work = np.empty(flat.size, how.accumulate)
        yield Stage(plan, work, how.ufunc, brought=flat)
    else:
        work = contribution(array, how, communicator.home_rank)
        yield Stage(plan, work, how.ufunc)
    if apply is not None and target is not None:
        _store(target, divided(how, work, size).reshape(array.shape), apply)
        return target
    return outcome(how, work, size, array.shape, target)


def _takes_sums(target: NDArray[Any], brought: NDArray[Any], how: Reduction, size: int) -> bool:
    """Return whether a plan over links may work where the result goes, which must be as it was if the ranks disagree.

    Of two ranks the first frame tells that they agree, and nothing is written before it; of more, it tells of one rank.
    A mean is not made in place: what it is made of may still be on its way.
    """
    is_plain = size == 2 and not how.is_mean and target.dtype == how.accumulate and target.flags.c_contiguous
    return is_plain and (not np.may_share_memory(brought, target) or _is_same(brought, target.reshape(-1)))


def _is_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two flat arrays are the same elements: then each is read before it is written."""
    place, theirs = one.__array_interface__["data"][0], other.__array_interface__["data"][0]
    return bool(place == theirs and one.dtype == other.dtype and one.size == other.size)


def _store(target: NDArray[Any], value: NDArray[Any], apply: np.ufunc | None) -> None:
    if apply is None:
        target[...] = value
    else:
        apply(target, value, out=target, casting="same_kind")


def tree_sum(parts: Sequence[Any]) -> Any:
    """Sum parts by the reproducible tree, locally.

    It gives the bits of `all_reduce_shards` of the same parts, whichever ranks bring them.

    Args:
        parts: At least one array or structure of arrays; all of one shape and dtype.

    Returns:
        T(0, len(parts)), a new array or structure.

    Raises:
        ConfigError: No parts, or parts that do not fit together.

    Order: T(lo, hi) = T(lo, mid) + T(mid, hi), mid = lo + the largest power of two below hi - lo.

    Example:
        >>> import syncvar as sv
        >>> sv.tree_sum([1.0, 2.0, 4.0])
        array(7.)
    """
    parts = list(parts)
    if not parts:
        raise ConfigError("tree_sum needs at least one part")
    flat = [flatten(part) for part in parts]
    if any(structure != flat[0][0] for structure, _ in flat):
        raise ConfigError("the parts of tree_sum must have the same structure")
    sums = []
    for leaves in zip(*(leaves for _, leaves in flat), strict=True):
        arrays = [as_array(leaf, "a part") for leaf in leaves]
        first = arrays[0]
        if any(array.shape != first.shape or array.dtype != first.dtype for array in arrays):
            raise ConfigError("the parts of tree_sum must have the same shape and dtype")
        sums.append(tree_combined(arrays, "sum"))
    return given_back(parts[0], unflatten(flat[0][0], sums, parts[0]))


def tree_combined(arrays: Sequence[NDArray[Any]], op: str) -> NDArray[Any]:
    """Return the "sum" or "mean" of arrays of one shape and dtype, by the reproducible tree."""
    first = arrays[0]
    how = reduction(op, first.dtype)
    total = np.empty(first.size, how.accumulate)
    items = {(number, number + 1): np.ascontiguousarray(array).reshape(-1) for number, array in enumerate(arrays)}
    summed(items, 0, len(arrays), total, 0)
    with quiet():
        return finish(how, total, len(arrays)).reshape(first.shape)
