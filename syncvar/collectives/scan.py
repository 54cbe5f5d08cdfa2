"""Scan and exclusive scan: each rank ends with the combination of the values of the ranks up to it, or before it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives._arguments import as_array, checked_output, deliver
from syncvar.collectives._kinds import call_generally
from syncvar.collectives._preparing import call_reduction
from syncvar.collectives._reducing import contribution, described, outcome, run_plan, tell_that_all_came
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request
from syncvar.execution.kernels import identity
from syncvar.execution.lower_reduce import Ends
from syncvar.joining import finite
from syncvar.joining.process import entered_natively

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator
    from syncvar.engine.operation import Stage

__all__ = ["exscan", "scan"]

_SCAN, _EXSCAN = Ends("scan"), Ends("exscan")


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
        group: Ranks that take part; None means the world.
        async_op: Return a `Work` at once. The value of `x` is taken when the call is made.
        timeout: Seconds; None means the job's default.
        algorithm: Force one of `syncvar plan scan`; the same on every rank.

    Returns:
        A new array of the shape of `x`: x0 op … op xr.

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError and the group stays usable.
        MismatchError: The ranks do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: over links ceil(log2 n) rounds with the whole array, and as many empty frames back: no rank returns before all
        have come; one round in shared memory.
    Order: lower ranks are left operands.

    Example:
        >>> import syncvar as sv
        >>> sv.scan([1.0, 2.0])
        array([1., 2.])
    """
    return _prefix(scan, _SCAN, x, op, out, group=group, async_op=async_op, timeout=timeout, algorithm=algorithm)


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

    The arguments are those of `scan`, with an op that has an identity: minloc, maxloc and registered ops have none. The mean on
    rank 0 is 0.

    Returns:
        A new array of the shape of `x`: x0 op … op x(r-1).

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError and the group stays usable.
        MismatchError: The ranks do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: that of `scan`.

    Example:
        >>> import syncvar as sv
        >>> sv.exscan([1.0, 2.0], "prod")
        array([1., 1.])
    """
    return _prefix(exscan, _EXSCAN, x, op, out, group=group, async_op=async_op, timeout=timeout, algorithm=algorithm)


if not TYPE_CHECKING:
    scan = entered_natively(scan, second="op", usual="sum", positions=2)
    exscan = entered_natively(exscan, second="op", usual="sum", positions=2)


def _prefix(
    public: Callable[..., Any], ends: Ends, x: Any, op: str, out: Any, *,
    group: Group | None, async_op: bool, timeout: float | None, algorithm: str | None,
) -> Any:  # fmt: skip
    """Make a scan or an exscan, by its prepared call where it has one."""
    communicator = communicator_of(group)
    if algorithm is None and not async_op:
        result = call_reduction(communicator, ends, x, op, out, timeout, None, public=public)
        if result is not None:
            return result
    request = partial(_request, ends.collective)
    return call_generally(
        public, communicator, request, x, out, group=group, timeout=timeout, async_op=async_op, op=op, algorithm=algorithm
    )


def _request(name: str, communicator: Communicator, x: Any, op: str, out: Any, algorithm: str | None, *, keep: bool) -> Request:  # noqa: ARG001
    """Check the arguments and return the request; what this rank brings is taken now, so there is nothing more to keep."""
    array = as_array(x)
    finite.look(array, name)
    how, digest, what = described(array, op, name, algorithm)
    neutral = identity(how) if name == "exscan" else None
    into = None if out is None else checked_output(out, array.shape, how.result)
    rank = communicator.member_rank
    work = contribution(array, how, communicator.home_rank)
    count = rank if name == "exscan" else rank + 1

    def body() -> Generator[Stage, None, Any]:
        left = yield from run_plan(communicator, name, work, how, algorithm=algorithm)
        yield from tell_that_all_came(communicator, communicator.size - 1)
        if count:
            return outcome(left, work, count, array.shape, into)
        return deliver(np.full(array.shape, neutral, how.result), into)

    return Request(what, digest, body())
