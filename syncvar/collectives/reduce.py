"""Reduce, reduce-scatter, scan and exclusive scan.

The root ends with the combination of all ranks' values, or each rank with its piece of it. In a
scan rank r ends with the combination of the ranks up to r (before r).
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.algorithms.schedule import even_chunks
from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.dispatch import make_call, native_dispatch
from syncvar.collectives.groups import checked_root
from syncvar.collectives.reduce_args import (
    ReduceArgs,
    ReduceOptions,
    check_finite,
    contribution,
    describe_reduction,
    outcome,
    release_others,
    run_plan,
)
from syncvar.collectives.transfer_args import (
    TransferArgs,
    fits_out,
    moves,
    place_of,
    plain_form,
    result_buffer,
)
from syncvar.core.array_arguments import as_array, checked_output, deliver
from syncvar.core.errors import ConfigError, UsageError
from syncvar.core.pytree import arrays_in, private_copy, unflatten
from syncvar.core.reduce_ops import OPS, identity, op_name
from syncvar.runtime.block_transfer import Blocks, TransferLayout
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.compile_reduce import ResultPlacement

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.core.reduce_ops import Reduction
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


@native_dispatch(second="op", usual="sum", positions=2)
def reduce(  # noqa: PLR0913  (public signature)
    x: Any,
    op: str = "sum",
    root: int = 0,
    *,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Combine the values of all ranks on one of them.

    Args:
        x: Array of any shape, number, or a nested dict/list/tuple/dataclass of them. Shapes and
            dtypes must be the same on every rank.
        op: As for `all_reduce`.
        root: Rank of the group that gets the result.
        out: On the root, an array of the result's shape and dtype to write to. Not for pytrees.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        On the root a new array (or pytree of arrays), None on the other ranks.

    Raises:
        ConfigError, MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory one round: the root combines short arrays, and of long ones each rank
        combines a part. Over links ceil(log2 n) rounds by a binomial tree, and as many empty frames
        back, because no rank returns before all have entered.
    Order: lower ranks are left operands; fixed by the number of ranks.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.reduce(np.array([1.0, 2.0]), root=0)
        array([1., 2.])
    """
    rest = (op_name(op), root, algorithm)
    return make_call(
        reduce, plain_form, _checked_reduce, x, out, group, async_op, timeout, _foreign, rest
    )


def _checked_reduce(
    communicator: Communicator,
    x: Any,
    out: Any,
    op: str,
    root: int,
    algorithm: str | None,
    *,
    keep: bool,
) -> ReduceArgs:
    """Check the arguments; the input is copied now, with `keep` its tree."""
    target = checked_root(root, communicator)
    is_root = communicator.member_rank == target
    structure, arrays = arrays_in(x, out)
    for array in arrays:
        check_finite(array, "reduce")
    parts = [
        describe_reduction(array, op, "reduce", ReduceOptions(algorithm=algorithm), root=target)
        for array in arrays
    ]
    reducers = [reducer for reducer, _ in parts]
    if out is not None:
        out = checked_output(out, arrays[0].shape, reducers[0].result) if is_root else None
    like = private_copy(structure, x) if keep else x
    works = [
        contribution(array, reducer, communicator.home_rank)
        for array, reducer in zip(arrays, reducers, strict=True)
    ]

    def body() -> Generator[Stage, None, Any]:
        left = []
        for reducer, work in zip(reducers, works, strict=True):
            rest = run_plan(communicator, "reduce", work, reducer, root=target, algorithm=algorithm)
            left.append((yield from rest))
        yield from release_others(communicator, target)
        if not is_root:
            return None
        results = [
            outcome(reducer, work, communicator.size, array.shape, out)
            for array, reducer, work in zip(arrays, left, works, strict=True)
        ]
        return results[0] if structure is None else unflatten(structure, results, like)

    if structure is not None:
        # Ranks may spell the op differently.
        spec = CollectiveSpec(
            "reduce",
            reducers[0].name if reducers else "",
            target,
            structure=structure,
            options=tuple(part[1].fingerprint for part in parts),
            shown=(op, f"{len(arrays)} arrays", f"root {target}"),
        )
        return ReduceArgs(spec, body())
    ((reducer, spec),) = parts
    ends = ResultPlacement("reduce", target)
    is_dispatched = arrays[0].dtype == reducer.result
    return ReduceArgs(spec, body(), ends, is_dispatched=is_dispatched)


@native_dispatch(second="op", usual="sum", positions=2)
def scan(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
) -> Any:
    """Combine the values of the ranks 0 to r on rank r.

    Args:
        x: Array of any shape, or number; the same shape and dtype on every rank.
        op: As for `all_reduce`; the mean on rank r is over r + 1 values.
        out: Array of the result's shape and dtype to write to.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        A new array of the shape of `x`: x0 op … op xr.

    Raises:
        ConfigError, MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory one round. Over links ceil(log2 n) rounds with the whole array, and as
        many empty frames back, because no rank returns before all have entered.
    Order: lower ranks are left operands.

    Example:
        >>> import syncvar as sv
        >>> sv.scan([1.0, 2.0])
        array([1., 2.])
    """
    rest = (op_name(op), algorithm)
    return make_call(scan, plain_form, _checked_scan, x, out, group, async_op, timeout, {}, rest)


@native_dispatch(second="op", usual="sum", positions=2)
def exscan(
    x: Any,
    op: str = "sum",
    *,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
) -> Any:
    """Combine the values of the ranks 0 to r-1 on rank r; rank 0 gets the identity of the op.

    Args:
        x: Array of any shape, or number; the same shape and dtype on every rank.
        op: As for `all_reduce`, but not minloc, maxloc or a registered op, which have no identity.
            The mean on rank 0 is 0.
        out: Array of the result's shape and dtype to write to.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        A new array of the shape of `x`: x0 op … op x(r-1).

    Raises:
        ConfigError, MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: that of `scan`.
    Order: lower ranks are left operands.

    Example:
        >>> import syncvar as sv
        >>> sv.exscan([1.0, 2.0], "prod")
        array([1., 1.])
    """
    rest = (op_name(op), algorithm)
    return make_call(
        exscan, plain_form, _checked_exscan, x, out, group, async_op, timeout, {}, rest
    )


def _checked_prefix(
    name: str,
    communicator: Communicator,
    x: Any,
    out: Any,
    op: str,
    algorithm: str | None,
    **_keep: bool,
) -> ReduceArgs:
    """Check the arguments; the input is copied now."""
    array = as_array(x)
    check_finite(array, name)
    reducer, spec = describe_reduction(array, op, name, ReduceOptions(algorithm=algorithm))
    neutral = identity(reducer) if name == "exscan" else None
    into = None if out is None else checked_output(out, array.shape, reducer.result)
    rank = communicator.member_rank
    work = contribution(array, reducer, communicator.home_rank)
    count = rank if name == "exscan" else rank + 1

    def body() -> Generator[Stage, None, Any]:
        left = yield from run_plan(communicator, name, work, reducer, algorithm=algorithm)
        yield from release_others(communicator, communicator.size - 1)
        if count:
            return outcome(left, work, count, array.shape, into)
        return deliver(np.full(array.shape, neutral, reducer.result), into)

    ends, is_dispatched = ResultPlacement(name), array.dtype == reducer.result
    return ReduceArgs(spec, body(), ends, is_dispatched=is_dispatched)


_checked_scan = partial(_checked_prefix, "scan")
_checked_exscan = partial(_checked_prefix, "exscan")


@native_dispatch(second="op", usual="sum", positions=2)
def reduce_scatter(  # noqa: PLR0913  (public signature)
    x: Any,
    op: str = "sum",
    *,
    lengths: Sequence[int] | None = None,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Combine the values of all ranks and give each rank its piece of axis 0.

    Args:
        x: Array of at least one dimension, of the same shape and dtype on every rank.
        op: As for `all_reduce`.
        lengths: Rows of axis 0 for each rank, the same list on every rank. None cuts evenly; the
            first pieces are longer.
        out: Array of the piece's shape and dtype to write to.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        A new array: this rank's rows of the combination.

    Raises:
        ConfigError, MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: n-1 rounds over links, in which each rank sends (n-1)/n of the array. In shared memory
        each rank reads its pieces directly from arrays of `sv.empty`; other arrays are copied cell
        by cell.
    Order: lower ranks are left operands; fixed by shape and number of ranks.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.reduce_scatter(np.arange(3.0))
        array([0., 1., 2.])
    """
    rest = (op_name(op), lengths, algorithm)
    return make_call(
        reduce_scatter, _cut_form, _checked_cut, x, out, group, async_op, timeout, _foreign, rest
    )


def _cut_form(
    communicator: Communicator, x: Any, _out: Any, rest: tuple[Any, ...]
) -> NDArray[Any] | None:
    op, lengths, algorithm = rest
    is_plain = (
        type(x) is np.ndarray and isinstance(op, str) and lengths is None and algorithm is None
    )
    return x if is_plain and x.ndim and x.shape[0] % communicator.size == 0 else None


def _checked_cut(
    communicator: Communicator,
    x: Any,
    out: Any,
    op: str,
    lengths: Any,
    algorithm: str | None,
    *,
    keep: bool,
) -> TransferArgs:
    """Check the arguments; `keep` copies the input."""
    array = as_array(x)
    check_finite(array, "reduce_scatter")
    if array.ndim == 0:
        raise ConfigError(
            "reduce_scatter cuts along axis 0, and a scalar has none; "
            "pass np.reshape(x, (1,)), or use all_reduce"
        )
    rows = _rows(lengths, array.shape[0], communicator)
    reducer, spec = describe_reduction(
        array, op, "reduce_scatter", ReduceOptions(algorithm=algorithm), rows=rows
    )
    rank = communicator.member_rank
    if len(reducer.element_shape) == array.ndim:
        raise ConfigError(
            f"reduce_scatter cuts along axis 0, and x is one element of the op {reducer.name!r}: "
            f"stack several elements along axis 0"
        )
    shape = (rows[rank], *array.shape[1:])
    into = None if out is None else checked_output(out, shape, reducer.result)

    # Registered ops may be replaced, and locating ops need pairs: both take the slow path.
    is_moved = (
        len(set(rows)) == 1
        and moves(communicator, "reduce_scatter", algorithm)
        and reducer.name in OPS
        and not reducer.is_locating
    )
    if is_moved:
        operand = array.copy() if keep else array
        return _checked_shared(communicator, operand, into, reducer, shape, spec)
    work = contribution(array, reducer, communicator.home_rank)
    width = prod(array.shape[1:]) // prod(reducer.element_shape)
    counts = tuple(row * width for row in rows)
    start = sum(counts[:rank])

    def general() -> Generator[Stage, None, Any]:
        options = {"counts": counts, "algorithm": algorithm}
        yield from run_plan(communicator, "reduce_scatter", work, reducer, **options)
        return outcome(reducer, work[start : start + counts[rank]], communicator.size, shape, into)

    return TransferArgs(spec, None, lambda: None, lambda output: output, general)


def _checked_shared(
    communicator: Communicator,
    operand: NDArray[Any],
    into: NDArray[Any] | None,
    reducer: Reduction,
    shape: tuple[int, ...],
    spec: CollectiveSpec,
) -> TransferArgs:
    """Return the checked call of a reduce-scatter with equal pieces in shared memory."""
    size, rank = communicator.size, communicator.member_rank

    def blocks_of(x: NDArray[Any], out: Any) -> Blocks:
        output = result_buffer(out, shape, reducer.result, x)
        length = shape[0]
        blocks = [x[length * peer : length * (peer + 1)] for peer in range(size)]
        others = (*blocks[:rank], *blocks[rank + 1 :])
        return Blocks(output, others, (output,), np.ascontiguousarray(blocks[rank]))

    takes = tuple((peer, place_of(peer, rank)) for peer in range(size) if peer != rank)
    divisor = size if reducer.is_mean else 0
    layout = TransferLayout(
        None, reducer.accumulate, shape, size - 1, takes, ufunc=reducer.ufunc, divisor=divisor
    )
    return TransferArgs(
        spec,
        layout,
        arrange=lambda: blocks_of(operand, into),
        finish=lambda output: deliver(output, into),
        general=None,
        front=lambda x, out: fits_out(blocks_of(x, out), out),
    )


def _rows(lengths: Any, total: int, communicator: Communicator) -> tuple[int, ...]:
    if lengths is None:
        return tuple(chunk.count for chunk in even_chunks(total, communicator.size))
    size = len(communicator.whole)
    rows = tuple(lengths)
    if len(rows) != size or any(
        isinstance(row, bool) or not isinstance(row, int | np.integer) or row < 0 for row in rows
    ):
        raise ConfigError(
            f"lengths must be {size} integers >= 0, one for each rank, not {lengths!r}"
        )
    if sum(rows) != total:
        raise ConfigError(f"lengths {list(rows)} add up to {sum(rows)}, axis 0 has {total}")
    absent = [rank for rank in range(size) if rows[rank] and rank not in communicator.present]
    if absent:
        raise UsageError(
            f"lengths {list(rows)} has rows for rank {absent[0]}, which has left its loop in "
            f"sv.uneven: give it 0 rows"
        )
    return tuple(int(rows[rank]) for rank in communicator.present)


register(
    Collective(
        (reduce,), CollectiveKind.REDUCE, gives="an array",
        gets="root: the combination of all ranks' arrays; others: None",
        cost="one round; over links ceil(log2 n) rounds of the array",
        wanted=lambda case: case.at_root(case.combined()), in_place=True,
    ),
    Collective(
        (reduce_scatter,), CollectiveKind.REDUCE, gives="an array",
        gets="rank r: piece r of the combination, cut along axis 0",
        cost="one round; over links n-1 rounds, (n-1)/n of the array sent",
        wanted=lambda case: case.piece(case.combined()), layout="cut",
    ),
    Collective(
        (scan,), CollectiveKind.REDUCE, gives="an array",
        gets="rank r: the combination of ranks 0 to r",
        cost="one round; over links ceil(log2 n) rounds of the array",
        wanted=lambda case: case.combined(case.rank + 1), in_place=True,
    ),
    Collective(
        (exscan,), CollectiveKind.REDUCE, gives="an array",
        gets="rank r: the combination of ranks 0 to r-1; rank 0: the op's identity",
        cost="as `scan`", wanted=lambda case: case.combined(case.rank), in_place=True,
    ),
)  # fmt: skip
