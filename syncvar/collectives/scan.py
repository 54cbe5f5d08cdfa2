"""Scan and exclusive scan: each rank ends with the combination of the values of the ranks up to it, or before it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives._arguments import as_array, checked_output
from syncvar.collectives._kinds import in_kind, is_foreign
from syncvar.collectives._reducing import contribution, described, outcome, run_plan, tell_that_all_came
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request
from syncvar.execution.kernels import identity
from syncvar.joining import finite

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncvar.collectives.groups import Group
    from syncvar.engine.operation import Stage

__all__ = ["exscan", "scan"]


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
    return _prefix("scan", x, op, out, group, async_op, timeout, algorithm)


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
        x: As for `scan`.
        op: As for `scan`, and one with an identity: minloc, maxloc and registered ops have none. The mean on rank 0 is 0.
        out: As for `scan`.
        group: As for `scan`.
        async_op: As for `scan`.
        timeout: As for `scan`.
        algorithm: As for `scan`.

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
    return _prefix("exscan", x, op, out, group, async_op, timeout, algorithm)


def _prefix(
    name: str,
    x: Any,
    op: str,
    out: Any,
    group: Group | None,
    async_op: bool,
    timeout: float | None,
    algorithm: str | None,
) -> Any:
    communicator = communicator_of(group)
    if is_foreign(x, out):
        call = partial(
            scan if name == "scan" else exscan, op=op, group=group, async_op=async_op, timeout=timeout, algorithm=algorithm
        )
        return in_kind(call, x, out)

    def check() -> Request:
        array = as_array(x)
        finite.look(array, name)
        how, digest, what = described(array, op, name, algorithm)
        neutral = identity(how) if name == "exscan" else None
        into = None if out is None else checked_output(out, array.shape, how.result)
        rank = communicator.member_rank
        work = contribution(array, how, communicator.home_rank)
        count = rank if name == "exscan" else rank + 1

        def body() -> Generator[Stage, None, Any]:
            yield from run_plan(communicator, name, work, how, algorithm=algorithm)
            yield from tell_that_all_came(communicator, communicator.size - 1)
            if count:
                return outcome(how, work, count, array.shape, into)
            made = np.full(array.shape, neutral, how.result)
            if into is None:
                return made
            into[...] = made
            return into

        return Request(what, digest, body())

    return communicator.perform(name, check, timeout, async_op=async_op)
