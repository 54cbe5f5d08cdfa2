"""Scan and exclusive scan: rank r combines the values of the ranks up to r, or before r."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives import nan_check
from syncvar.collectives.dispatch import make_call, native_dispatch, plain_array
from syncvar.collectives.reduce_args import (
    ReduceArgs,
    contribution,
    described,
    outcome,
    release_others,
    run_plan,
)
from syncvar.core.array_arguments import as_array, checked_output, deliver
from syncvar.core.reduce_ops import identity, op_name
from syncvar.runtime.compile_reduce import ResultPlacement

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


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
    return make_call(
        scan, _form, _scan_request, x, out, group, async_op, timeout, {}, (op_name(op), algorithm)
    )


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
    how = (op_name(op), algorithm)
    return make_call(exscan, _form, _exscan_request, x, out, group, async_op, timeout, {}, how)


def _form(
    _communicator: Communicator, x: Any, _out: Any, how: tuple[Any, ...]
) -> NDArray[Any] | None:
    op, algorithm = how
    return plain_array(x) if isinstance(op, str) and algorithm is None else None


def _request(
    name: str,
    communicator: Communicator,
    x: Any,
    out: Any,
    _keep: bool,
    op: str,
    algorithm: str | None,
) -> ReduceArgs:
    """Check the arguments and return the request; the input is copied now."""
    array = as_array(x)
    nan_check.look(array, name)
    how, digest, what = described(array, op, name, algorithm)
    neutral = identity(how) if name == "exscan" else None
    into = None if out is None else checked_output(out, array.shape, how.result)
    rank = communicator.member_rank
    work = contribution(array, how, communicator.home_rank)
    count = rank if name == "exscan" else rank + 1

    def body() -> Generator[Stage, None, Any]:
        left = yield from run_plan(communicator, name, work, how, algorithm=algorithm)
        yield from release_others(communicator, communicator.size - 1)
        if count:
            return outcome(left, work, count, array.shape, into)
        return deliver(np.full(array.shape, neutral, how.result), into)

    return ReduceArgs(
        what, digest, body(), op, ResultPlacement(name), is_entered=array.dtype == how.result
    )


_scan_request, _exscan_request = partial(_request, "scan"), partial(_request, "exscan")
