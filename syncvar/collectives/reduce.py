"""Reduce: the root ends with the combination of all ranks' values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

from syncvar.collectives._arguments import arrays_in, checked_output, checked_root, fresh, unflatten
from syncvar.collectives._kinds import call_generally
from syncvar.collectives._preparing import call_reduction
from syncvar.collectives._reducing import contribution, described, outcome, run_plan, tell_that_all_came
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request, fingerprint
from syncvar.execution.lower_reduce import Ends
from syncvar.joining import finite
from syncvar.joining.process import entered_natively
from syncvar.loading import unexpected

if TYPE_CHECKING:
    from collections.abc import Generator

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator
    from syncvar.engine.operation import Stage

__all__ = ["reduce"]


def reduce(
    x: Any,
    op: str = "sum",
    *,
    root: int = 0,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Combine the values of all ranks on one of them.

    Args:
        x: Array of any shape, number, or a nested dict/list/tuple/dataclass of them; the same shapes and dtypes on every rank.
        op: As for `all_reduce`.
        root: Rank of the group that gets the result.
        out: On the root, an array of the result's shape and dtype to write to; not for structures.
        group: Ranks that take part; None means the world.
        async_op: Return a `Work` at once. The value of `x` is taken when the call is made.
        timeout: Seconds; None means the job's default.
        algorithm: Force one of `syncvar plan reduce`; the same on every rank.

    Returns:
        On the root a new array (or structure of arrays), None on the other ranks.

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError and the group stays usable.
        MismatchError: The ranks do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: in shared memory each rank brings its value once, and the root, or of long values each rank for its part, combines. Over links ceil(log2 n) rounds by a binomial tree, and as many empty frames back: no rank returns before all
        have come, as in shared memory, where it is one round.
    Order: lower ranks are left operands; fixed by the number of ranks.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.reduce(np.array([1.0, 2.0]), root=0)
        array([1., 2.])
    """
    if _foreign:
        raise unexpected(reduce, _foreign)
    communicator = communicator_of(group)
    if type(root) is int and algorithm is None and not async_op:
        ends = Ends("reduce", root)
        public = None if root else reduce
        result = call_reduction(communicator, ends, x, op, out, timeout, root, None, public=public, shown=f", root {root}")
        if result is not None:
            return result if communicator.rank == root else None
    return call_generally(
        reduce, communicator, _request, x, out, group=group, timeout=timeout, async_op=async_op, op=op, root=root, algorithm=algorithm
    )


if not TYPE_CHECKING:
    reduce = entered_natively(reduce, second="op", usual="sum", positions=2)


def _request(communicator: Communicator, x: Any, op: str, root: int, out: Any, algorithm: str | None, *, keep: bool) -> Request:
    """Check the arguments and return the request; what this rank brings is taken now, and `keep` also its containers."""
    target = checked_root(root, communicator)
    is_root = communicator.member_rank == target
    structure, arrays = arrays_in(x, out)
    for array in arrays:
        finite.look(array, "reduce")
    parts = [described(array, op, "reduce", target, algorithm, shown=f", root {target}") for array in arrays]
    hows = [how for how, _, _ in parts]
    into = None
    if out is not None and is_root:
        into = checked_output(out, arrays[0].shape, hows[0].result)
    like = fresh(structure, x) if keep else x
    works = [contribution(array, how, communicator.home_rank) for array, how in zip(arrays, hows, strict=True)]

    def body() -> Generator[Stage, None, Any]:
        left = []
        for how, work in zip(hows, works, strict=True):
            left.append((yield from run_plan(communicator, "reduce", work, how, root=target, algorithm=algorithm)))
        yield from tell_that_all_came(communicator, target)
        if not is_root:
            return None
        results = [outcome(how, work, communicator.size, array.shape, into) for array, how, work in zip(arrays, left, works, strict=True)]
        return results[0] if structure is None else unflatten(structure, results, like)

    digest = parts[0][1] if structure is None else fingerprint(structure, *(part[1] for part in parts))
    what = parts[0][2] if structure is None else f"reduce({op}, {len(arrays)} arrays, root {target})"
    return Request(what, digest, body())
