"""Gather: the root ends with the values of all ranks, in rank order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

from syncvar.collectives.all_gather import gather_form, gather_request
from syncvar.collectives.dispatch import make_call, native_dispatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.collectives.transfer_args import TransferArgs
    from syncvar.runtime.communicator import Communicator


@native_dispatch(second="root", usual=0, positions=2)
def gather(
    x: Any,
    root: int = 0,
    *,
    axis: int = 0,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Concatenate the arrays of all ranks, in rank order, on the root.

    Args:
        x: Array or pytree as for `all_gather`: lengths along `axis` may differ and may be 0.
        root: Rank of the group that gets the result.
        axis: Axis along which to concatenate; may be negative.
        out: On the root, an array of the result's shape and dtype to write to. Not for pytrees.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        On the root the concatenation (or the same pytree of concatenations), None on the other
        ranks.

    Raises:
        MismatchError: The arrays of the ranks do not fit together.
        ConfigError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory, with one shape on all ranks, one direct copy of each block. Else a
        header round of small frames, then each block once to the root.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.gather(np.arange(3))
        array([0, 1, 2])
    """
    return make_call(
        gather, _form, _request, x, out, group, async_op, timeout, _foreign, (root, axis, algorithm)
    )


def _form(
    _communicator: Communicator, x: Any, _out: Any, how: tuple[Any, ...]
) -> NDArray[Any] | None:
    root, axis, algorithm = how
    return gather_form(x, axis) if type(root) is int and algorithm is None else None


def _request(
    communicator: Communicator,
    x: Any,
    out: Any,
    keep: bool,
    root: int,
    axis: int,
    algorithm: str | None,
) -> TransferArgs:
    return gather_request(communicator, x, out, keep, axis, algorithm, name="gather", root=root)
