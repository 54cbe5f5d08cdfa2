"""Reduce: the root ends with the combination of all ranks' values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

from syncvar.collectives import nan_check
from syncvar.collectives.dispatch import make_call, native_dispatch, plain_array
from syncvar.collectives.groups import checked_root
from syncvar.collectives.reduce_args import (
    ReduceArgs,
    contribution,
    described,
    outcome,
    release_others,
    run_plan,
)
from syncvar.core.array_arguments import checked_output
from syncvar.core.pytree import arrays_in, private_copy, unflatten
from syncvar.core.reduce_ops import op_name
from syncvar.runtime.call_record import CallFields, CallLabel
from syncvar.runtime.communicator import fingerprint
from syncvar.runtime.compile_reduce import ResultPlacement

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


@native_dispatch(second="op", usual="sum", positions=2)
def reduce(
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
    how = (op_name(op), root, algorithm)
    return make_call(reduce, _form, _request, x, out, group, async_op, timeout, _foreign, how)


def _form(
    _communicator: Communicator, x: Any, _out: Any, how: tuple[Any, ...]
) -> NDArray[Any] | None:
    op, root, algorithm = how
    return (
        plain_array(x) if isinstance(op, str) and type(root) is int and algorithm is None else None
    )


def _request(
    communicator: Communicator,
    x: Any,
    out: Any,
    keep: bool,
    op: str,
    root: int,
    algorithm: str | None,
) -> ReduceArgs:
    """Check the arguments and return the request; the input is copied now, with `keep` its tree."""
    target = checked_root(root, communicator)
    is_root = communicator.member_rank == target
    structure, arrays = arrays_in(x, out)
    for array in arrays:
        nan_check.look(array, "reduce")
    parts = [
        described(array, op, "reduce", target, algorithm, shown=f", root {target}", root=target)
        for array in arrays
    ]
    hows = [how for how, _, _ in parts]
    into = None
    if out is not None and is_root:
        into = checked_output(out, arrays[0].shape, hows[0].result)
    like = private_copy(structure, x) if keep else x
    works = [
        contribution(array, how, communicator.home_rank)
        for array, how in zip(arrays, hows, strict=True)
    ]

    def body() -> Generator[Stage, None, Any]:
        left = []
        for how, work in zip(hows, works, strict=True):
            rest = run_plan(communicator, "reduce", work, how, root=target, algorithm=algorithm)
            left.append((yield from rest))
        yield from release_others(communicator, target)
        if not is_root:
            return None
        results = [
            outcome(how, work, communicator.size, array.shape, into)
            for array, how, work in zip(arrays, left, works, strict=True)
        ]
        return results[0] if structure is None else unflatten(structure, results, like)

    if structure is not None:
        digest = fingerprint(structure, *(part[1] for part in parts))
        text = f"reduce({op}, {len(arrays)} arrays, root {target})"
        label = CallLabel(text, CallFields("reduce", op, root=target))
        return ReduceArgs(label, digest, body(), op)
    ((how, digest, what),) = parts
    is_entered, ends = arrays[0].dtype == how.result, ResultPlacement("reduce", target)
    return ReduceArgs(what, digest, body(), op, ends, is_entered=is_entered)
