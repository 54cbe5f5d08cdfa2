"""Arguments of the collectives that move blocks: layout, arrays, persistent call and slow path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.dispatch import Persistable, never_persistent, plain_array
from syncvar.runtime.block_transfer import NO_RESULT, Blocks, Movement, TransferLayout
from syncvar.runtime.collective_spec import fingerprint
from syncvar.runtime.persistent_transfer import persist_move
from syncvar.runtime.planner import SIDE_BY_SIDE
from syncvar.runtime.request import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.collectives.dispatch import Make
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator, Persistent
    from syncvar.runtime.persistent_transfer import Front

UNMOVED = TransferLayout(0, NO_RESULT.dtype)
"""Layout of an input that cannot be moved as blocks of one shape: no rank moves any block then."""


def moves(communicator: Communicator, collective: str, algorithm: str | None = None) -> bool:
    """Return whether a collective moves blocks through shared memory; the same on all ranks."""
    return communicator.is_shared and algorithm is None and communicator.forced(collective) is None


def plain_form(
    _communicator: Communicator, x: Any, _out: Any, rest: tuple[Any, ...]
) -> NDArray[Any] | None:
    """Return the array of a call with an op, a root, or both, and no algorithm; else None."""
    *options, algorithm = rest
    is_plain = all(isinstance(one, str) or type(one) is int for one in options)
    return plain_array(x) if is_plain and algorithm is None else None


class TransferArgs(Persistable):
    """A checked call that moves blocks.

    Args:
        spec: Description of the call.
        layout: Layout of the blocks; `UNMOVED` if the input has none, None without shared memory.
        arrange: Function that returns the arrays of this call; None for `UNMOVED`.
        finish: Function of the outputs that returns the result.
        general: Stages for inputs that differ between ranks; None if they may not differ.
        front: Function of (x, out) that returns the arrays of a persistent call, or None if `out`
            does not serve. None if there are no persistent calls.
    """

    __slots__ = ("_front", "_layout", "general")

    def __init__(
        self,
        spec: CollectiveSpec,
        layout: TransferLayout | None,
        arrange: Callable[[], Blocks | None],
        finish: Callable[[Any], Any],
        general: Callable[[], Generator[Stage, None, Any]] | None,
        front: Front | None = None,
    ) -> None:
        self._layout, self.general, self._front = layout, general, front
        super().__init__(spec, self._stages(arrange, finish))

    def _stages(
        self, arrange: Callable[[], Blocks | None], finish: Callable[[Any], Any]
    ) -> Generator[Stage, None, Any]:
        layout = self._layout
        if layout is not None:
            blocks = None if layout is UNMOVED else arrange()
            movement = (
                Movement(UNMOVED, Blocks(NO_RESULT)) if blocks is None else Movement(layout, blocks)
            )
            yield Stage(SIDE_BY_SIDE, NO_RESULT, movement=movement)
            if movement.is_done:
                return finish(movement.blocks.output)
        return None if self.general is None else (yield from self.general())

    def persistent(
        self, communicator: Communicator, like: NDArray[Any], make: Make
    ) -> Persistent | None:
        """Build the persistent call of such calls; see `Persistable`."""
        if self._layout is None or self._front is None or not like.dtype.isnative:
            return never_persistent

        def general(x: NDArray[Any], out: Any) -> Generator[Stage, None, Any]:
            checked = make(x, out)
            checked.body.close()
            assert isinstance(checked, TransferArgs)
            assert checked.general is not None
            return checked.general()

        body = None if self.general is None else general
        return persist_move(communicator, self.spec, self._layout, self._front, body, like)


def detail_of(dtype: np.dtype[Any], shape: tuple[int, ...], *more: Any) -> int:
    """Return the value that ranks compare before they move blocks; never 0."""
    return fingerprint("detail", dtype.name, shape, *more) or 1


def result_buffer(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *sources: NDArray[Any]
) -> NDArray[Any]:
    """Return `out` if it can be written while `sources` are read, else a new array."""
    is_fit = (
        type(out) is np.ndarray and out.shape == shape and out.dtype == dtype and out.flags.carray
    )
    if is_fit and not any(np.may_share_memory(out, source) for source in sources):
        return out  # type: ignore[no-any-return]
    return np.empty(shape, dtype)


def fits_out(blocks: Blocks, out: Any) -> Blocks | None:
    """Return the arrays of a call if its result, where there is one, is in `out`."""
    return blocks if out is None or blocks.output is out or blocks.output is NO_RESULT else None


def place_of(source: int, dest: int) -> int:
    """Return the index of the block for `dest` among the blocks of `source` for other ranks.

    Example:
        >>> [place_of(1, dest) for dest in (0, 2, 3)]
        [0, 1, 2]
    """
    return dest if dest < source else dest - 1
