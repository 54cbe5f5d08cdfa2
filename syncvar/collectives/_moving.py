"""What the collectives that only move, or move and combine, put side by side in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.engine.group import fingerprint
from syncvar.engine.operation import Stage
from syncvar.engine.prepared_moves import prepare_move
from syncvar.errors import SyncvarError
from syncvar.execution.moves import NOTHING, Blocks, Layout, Movement
from syncvar.execution.rounds import SIDE_BY_SIDE
from syncvar.kernel import remember

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.engine.group import Communicator, Request
    from syncvar.engine.prepared_moves import Front, General

    Prepare = Callable[..., tuple[Request, Layout, Front, General | None] | None]

__all__ = ["UNMOVED", "call_prepared", "detail_of", "fits_out", "moved", "moves", "place_of", "result_buffer"]


def moves(communicator: Communicator, collective: str, algorithm: str | None) -> bool:
    """Return whether a collective is moved side by side where the ranks bring the same; the same on all ranks."""
    return communicator.is_shared and algorithm is None and communicator.forced(collective) is None


def moved(layout: Layout, blocks: Blocks) -> Generator[Stage, None, bool]:
    """Move, as the first stage of a call; returns False where the ranks do not bring the same."""
    movement = Movement(layout, blocks)
    yield Stage(SIDE_BY_SIDE, NOTHING, movement=movement)
    return movement.is_done


UNMOVED = Layout(0, NOTHING.dtype), Blocks(NOTHING)
"""What a rank moves that brings something else than an array of one kind: nothing, and so does nobody."""


def call_prepared(
    communicator: Communicator, key: Any, x: NDArray[Any], out: Any, timeout: float | None, prepare: Prepare, *how: Any, public: Any = None
) -> Any:
    """Make a call by its prepared way; None where nothing has been done, because there is none or it does not serve.

    Args:
        communicator: The group.
        key: Of the call.
        x: What this rank brings.
        out: As the caller gave it.
        timeout: In seconds, None for the job's default; `is_seconds` holds of it.
        prepare: Of (communicator, x, *how): returns (request of such a call, layout, front, general), see
            `prepare_move`, or None; used once.
        how: What else the call is made with.
        public: The public function, where it is called with `how` beside `x`; None elsewhere.
    """
    ready = communicator.prepared_calls.get(key)
    if ready is None:
        if not communicator.prepares or not communicator.is_shared or not x.dtype.isnative or not moves(communicator, key[0], None):
            return None
        try:
            prepared = prepare(communicator, x, *how)
        except SyncvarError:  # the long way tells the others what is wrong
            return None
        if prepared is None:
            return None
        request, layout, front, general = prepared
        request.body.close()
        ready = communicator.keep_prepared(key, prepare_move(communicator, request, layout, front, general, x))
        if public is not None:
            remember(public, how[0], ready, communicator.prepared_calls)
    return None if ready is None else ready(x, out, None, timeout)


def detail_of(dtype: np.dtype[Any], shape: tuple[int, ...], *more: Any) -> int:
    """Return what must be the same on all ranks for arrays to be moved side by side; never 0."""
    return fingerprint("detail", dtype.name, shape, *more) or 1


def result_buffer(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *sources: NDArray[Any]) -> NDArray[Any]:
    """Return where a result goes: `out` if it can be written piece by piece while `sources` are read, else a new array."""
    is_fit = type(out) is np.ndarray and out.shape == shape and out.dtype == dtype and out.flags.carray
    if is_fit and not any(np.may_share_memory(out, source) for source in sources):
        return out  # type: ignore[no-any-return]
    return np.empty(shape, dtype)


def fits_out(blocks: Blocks, out: Any) -> Blocks | None:
    """Return the arrays of a call if the result lies where the caller wants it."""
    return blocks if out is None or blocks.made is out else None


def place_of(source: int, dest: int) -> int:
    """Return the place of the block for `dest` among those that `source` puts for the others, in rank order.

    Example:
        >>> [place_of(1, dest) for dest in (0, 2, 3)]
        [0, 1, 2]
    """
    return dest if dest < source else dest - 1
