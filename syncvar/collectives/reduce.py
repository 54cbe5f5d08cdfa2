"""Reduce: the root ends with the combination of all ranks' values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Never

from syncvar.collectives._arguments import (
    arrays_of,
    as_array,
    checked_output,
    checked_root,
    flatten,
    fresh,
    is_structure,
    unflatten,
)
from syncvar.collectives._kinds import in_kind, is_foreign
from syncvar.collectives._reducing import contribution, described, outcome, run_plan, tell_that_all_came
from syncvar.collectives.groups import communicator_of
from syncvar.engine.group import Request, fingerprint
from syncvar.errors import ConfigError
from syncvar.joining import finite
from syncvar.loading import unexpected

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator
    from syncvar.engine.operation import Stage
    from syncvar.execution.kernels import Reduction

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

    Cost: over links ceil(log2 n) rounds by a binomial tree, and as many empty frames back: no rank returns before all
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
    if is_foreign(x, out):
        call = partial(
            reduce, op=op, root=root, group=group, async_op=async_op, timeout=timeout, algorithm=algorithm
        )
        return in_kind(call, x, out)

    def check() -> Request:
        target = checked_root(root, communicator)
        is_root = communicator.member_rank == target
        if is_structure(x):
            if out is not None:
                raise ConfigError("out cannot be given with a structure")
            structure, leaves = flatten(x)
        else:
            structure, leaves = None, [x]
        arrays = arrays_of(x, leaves) if structure is not None else [as_array(x)]
        for array in arrays:
            finite.look(array, "reduce")
        parts = [described(array, op, "reduce", target, algorithm, shown=f", root {target}") for array in arrays]
        hows = [how for how, _, _ in parts]
        into = None
        if out is not None and is_root:
            into = checked_output(out, arrays[0].shape, hows[0].result)
        like = fresh(structure, x) if async_op else x
        works = [contribution(array, how, communicator.home_rank) for array, how in zip(arrays, hows, strict=True)]

        def body() -> Generator[Stage, None, Any]:
            results = []
            for array, how, work in zip(arrays, hows, works, strict=True):
                results.append((yield from _one(communicator, array, how, work, target, into, algorithm)))
            yield from tell_that_all_came(communicator, target)
            if not is_root:
                return None
            return results[0] if structure is None else unflatten(structure, results, like)

        digest = parts[0][1] if structure is None else fingerprint(structure, *(part[1] for part in parts))
        what = parts[0][2] if structure is None else f"reduce({op}, {len(arrays)} arrays, root {target})"
        return Request(what, digest, body())

    return communicator.perform("reduce", check, timeout, async_op=async_op)


def _one(
    communicator: Communicator,
    array: NDArray[Any],
    how: Reduction,
    work: NDArray[Any],
    root: int,
    out: NDArray[Any] | None,
    algorithm: str | None,
) -> Generator[Stage, None, Any]:
    yield from run_plan(communicator, "reduce", work, how, root=root, algorithm=algorithm)
    return outcome(how, work, communicator.size, array.shape, out) if communicator.member_rank == root else None
