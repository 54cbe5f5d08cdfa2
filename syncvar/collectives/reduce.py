"""Reduce, reduce-scatter, scan and exclusive scan.

The root ends with the combination of all ranks' values, or each rank with its piece of it. In a
scan rank r ends with the combination of the ranks up to r (before r).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.algorithms.schedule import even_chunks
from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.dispatch import make_call, native_dispatch, plain_input
from syncvar.collectives.groups import checked_root
from syncvar.collectives.reduce_args import (
    ReduceOptions,
    ReductionCall,
    check_finite,
    contribution,
    describe_reduction,
    outcome,
    release_others,
    run_plan,
)
from syncvar.collectives.transfer_args import (
    TransferCall,
    even_parts,
    moves,
    place_of,
)
from syncvar.core.array_arguments import as_array, checked_output, deliver, result_buffer
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
    Order: lower ranks are left operands; fixed by size, number of ranks and hosts.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.reduce(np.array([1.0, 2.0]), root=0)
        array([1., 2.])
    """
    options = (op_name(op), root, algorithm)
    return make_call(reduce, _ReduceCall, x, out, group, async_op, timeout, _foreign, options)


class _ReduceCall(ReductionCall):
    """A reduce; the input is copied now, and with `keep` its tree."""

    persistent_input = staticmethod(plain_input)

    def __init__(
        self, communicator: Communicator, x: Any, out: Any, *options: Any, keep: bool
    ) -> None:
        op, root, algorithm = options
        root = checked_root(root, communicator)
        is_root = communicator.member_rank == root
        structure, arrays = arrays_in(x, out)
        for array in arrays:
            check_finite(array, "reduce")
        options = ReduceOptions(algorithm=algorithm)
        parts = [describe_reduction(array, op, "reduce", options, root=root) for array in arrays]
        self._reducers = [reducer for reducer, _ in parts]
        if out is not None:
            shape, dtype = arrays[0].shape, self._reducers[0].result
            out = checked_output(out, shape, dtype) if is_root else None
        self._out, self._structure = out, structure
        self._like = private_copy(structure, x) if keep else x
        self._root, self._algorithm = root, algorithm
        self._shapes = [array.shape for array in arrays]
        self._works = [
            contribution(array, reducer, communicator.home_rank)
            for array, reducer in zip(arrays, self._reducers, strict=True)
        ]
        if structure is None:
            spec, self.ends = parts[0][1], ResultPlacement("reduce", root)
        else:
            # Ranks may spell the op differently.
            spec = CollectiveSpec(
                "reduce",
                self._reducers[0].name if parts else "",
                root,
                structure=structure,
                options=tuple(part.fingerprint for _, part in parts),
                shown=(op, f"{len(arrays)} arrays", f"root {root}"),
            )
        is_dispatched = structure is None and arrays[0].dtype == self._reducers[0].result
        super().__init__(communicator, spec, is_dispatched=is_dispatched)

    def stages(self) -> Generator[Stage, None, Any]:
        communicator, root, left = self.communicator, self._root, []
        options = {"root": root, "algorithm": self._algorithm}
        for reducer, work in zip(self._reducers, self._works, strict=True):
            rest = yield from run_plan(communicator, "reduce", work, reducer, **options)
            left.append(rest)
        yield from release_others(communicator, root)
        if communicator.member_rank != root:
            return None
        results = [
            outcome(reducer, work, communicator.size, shape, self._out)
            for reducer, work, shape in zip(left, self._works, self._shapes, strict=True)
        ]
        if self._structure is None:
            return results[0]
        return unflatten(self._structure, results, self._like)


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
    options = (op_name(op), algorithm)
    return make_call(scan, _ScanCall, x, out, group, async_op, timeout, {}, options)


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
    options = (op_name(op), algorithm)
    return make_call(exscan, _ExscanCall, x, out, group, async_op, timeout, {}, options)


class _ScanCall(ReductionCall):
    """A scan; the input is copied now."""

    name = "scan"
    ends = ResultPlacement(name)
    persistent_input = staticmethod(plain_input)

    def __init__(
        self, communicator: Communicator, x: Any, out: Any, *options: Any, **_keep: bool
    ) -> None:
        op, algorithm = options
        array = as_array(x)
        check_finite(array, self.name)
        options = ReduceOptions(algorithm=algorithm)
        reducer, spec = describe_reduction(array, op, self.name, options)
        super().__init__(communicator, spec, is_dispatched=array.dtype == reducer.result)
        is_exscan = self.name == "exscan"
        self._neutral = identity(reducer) if is_exscan else None  # raises if there is none
        self._count = communicator.member_rank + (not is_exscan)  # inputs that are combined
        self._out = None if out is None else checked_output(out, array.shape, reducer.result)
        self._work = contribution(array, reducer, communicator.home_rank)
        self._reducer, self._shape, self._algorithm = reducer, array.shape, algorithm

    def stages(self) -> Generator[Stage, None, Any]:
        communicator, work, reducer = self.communicator, self._work, self._reducer
        left = yield from run_plan(
            communicator, self.name, work, reducer, algorithm=self._algorithm
        )
        yield from release_others(communicator, communicator.size - 1)
        if self._count:
            return outcome(left, work, self._count, self._shape, self._out)
        return deliver(np.full(self._shape, self._neutral, reducer.result), self._out)


class _ExscanCall(_ScanCall):
    """An exclusive scan; the input is copied now."""

    name = "exscan"
    ends = ResultPlacement(name)


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
    Order: lower ranks are left operands; fixed by shape, number of ranks and hosts.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.reduce_scatter(np.arange(3.0))
        array([0., 1., 2.])
    """
    options = (op_name(op), lengths, algorithm)
    return make_call(
        reduce_scatter, _ReduceScatterCall, x, out, group, async_op, timeout, _foreign, options
    )


class _ReduceScatterCall(TransferCall):
    """A reduce-scatter; `keep` copies the input.

    In shared memory equal pieces are moved, and combined on the way.
    """

    @staticmethod
    def persistent_input(
        communicator: Communicator, x: Any, _out: Any, options: Any
    ) -> NDArray[Any] | None:
        op, lengths, algorithm = options
        is_plain = (
            type(x) is np.ndarray and isinstance(op, str) and lengths is None and algorithm is None
        )
        return x if is_plain and x.ndim and x.shape[0] % communicator.size == 0 else None

    def __init__(
        self, communicator: Communicator, x: Any, out: Any, *options: Any, keep: bool
    ) -> None:
        op, lengths, algorithm = options
        array = as_array(x)
        check_finite(array, "reduce_scatter")
        if array.ndim == 0:
            raise ConfigError(
                "reduce_scatter cuts along axis 0, and a scalar has none; "
                "pass np.reshape(x, (1,)), or use all_reduce"
            )
        self._rows = rows = _rows(lengths, array.shape[0], communicator)
        options = ReduceOptions(algorithm=algorithm)
        reducer, spec = describe_reduction(array, op, "reduce_scatter", options, rows=rows)
        if len(reducer.element_shape) == array.ndim:
            raise ConfigError(
                f"reduce_scatter cuts along axis 0, and x is one element of the op "
                f"{reducer.name!r}: stack several elements along axis 0"
            )
        self._reducer, self._algorithm = reducer, algorithm
        self._shape = (rows[communicator.member_rank], *array.shape[1:])
        into = None if out is None else checked_output(out, self._shape, reducer.result)
        # Registered ops may be replaced, and locating ops need pairs: both take the slow path.
        is_moved = (
            len(set(rows)) == 1
            and moves(communicator, "reduce_scatter", algorithm)
            and reducer.name in OPS
            and not reducer.is_locating
        )
        layout = self._layout(communicator) if is_moved else None
        if not is_moved:
            array = contribution(array, reducer, communicator.home_rank)
        elif keep:
            array = array.copy()
        super().__init__(communicator, spec, layout, [array], into)

    def _layout(self, communicator: Communicator) -> TransferLayout:
        size, rank, reducer = communicator.size, communicator.member_rank, self._reducer
        takes = tuple((peer, place_of(peer, rank)) for peer in range(size) if peer != rank)
        sums = reducer.ufunc, size if reducer.is_mean else 0
        shape, dtype = self._shape, reducer.accumulate
        return TransferLayout(None, dtype, shape, size - 1, takes, ufunc=sums[0], divisor=sums[1])

    def blocks_of(self, parts: list[NDArray[Any]], out: Any) -> Blocks:
        rank, blocks = self.rank, even_parts(parts[0], self.size)
        output = result_buffer(out, self._shape, self._reducer.result, *parts)
        others = (*blocks[:rank], *blocks[rank + 1 :])
        return Blocks(output, others, (output,), np.ascontiguousarray(blocks[rank]))

    def slow_path(self) -> Generator[Stage, None, Any]:
        (work,), reducer, shape, rows = self.inputs, self._reducer, self._shape, self._rows
        width = prod(shape[1:]) // prod(reducer.element_shape)
        counts = tuple(row * width for row in rows)
        options = {"counts": counts, "algorithm": self._algorithm}
        yield from run_plan(self.communicator, "reduce_scatter", work, reducer, **options)
        start = sum(counts[: self.rank])
        mine = work[start : start + counts[self.rank]]
        return outcome(reducer, mine, self.size, shape, self.out)


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
