"""Calls that move blocks side by side in shared memory, where all ranks bring the like, and go a general way elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives.dispatch import Cacheable, never
from syncvar.runtime.communicator import fingerprint
from syncvar.runtime.persistent.persistent_transfer import prepare_move
from syncvar.runtime.programs.block_transfer import NOTHING, Blocks, Movement, TransferLayout
from syncvar.runtime.programs.round_runner import SIDE_BY_SIDE
from syncvar.runtime.request import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.collectives.dispatch import Make
    from syncvar.runtime.communicator import Communicator, PreparedCall
    from syncvar.runtime.persistent.persistent_transfer import Front

__all__ = ["UNMOVED", "TransferArgs", "detail_of", "fits_out", "moves", "place_of", "result_buffer"]

UNMOVED = TransferLayout(0, NOTHING.dtype)
"""How a rank moves that brings something else than an array of one kind: nothing, and so does nobody."""


def moves(communicator: Communicator, collective: str, algorithm: str | None = None) -> bool:
    """Return whether a collective is moved side by side where the ranks bring the same; the same on all ranks."""
    return communicator.is_shared and algorithm is None and communicator.forced(collective) is None


class TransferArgs(Cacheable):
    """A checked call that moves.

    Args:
        what: The call in words.
        digest: Its fingerprint.
        layout: How blocks are moved; `UNMOVED` where what this rank brings cannot be, None where the group moves none.
        arrange: Returns the arrays of this call; None for `UNMOVED`.
        finish: Of what has been made of these: the result.
        general: The stages where the ranks do not bring the same; None where nothing may differ.
        front: Of (x, out): the arrays of any such call, or None where `out` does not serve; None where such calls are not prepared.
    """

    __slots__ = ("_front", "_layout", "general")

    def __init__(
        self,
        what: str,
        digest: int,
        layout: TransferLayout | None,
        arrange: Callable[[], Blocks | None],
        finish: Callable[[Any], Any],
        general: Callable[[], Generator[Stage, None, Any]] | None,
        front: Front | None = None,
    ) -> None:
        self._layout, self.general, self._front = layout, general, front
        super().__init__(what, digest, self._stages(arrange, finish))

    def _stages(
        self, arrange: Callable[[], Blocks | None], finish: Callable[[Any], Any]
    ) -> Generator[Stage, None, Any]:
        layout = self._layout
        if layout is not None:
            blocks = None if layout is UNMOVED else arrange()
            movement = (
                Movement(UNMOVED, Blocks(NOTHING)) if blocks is None else Movement(layout, blocks)
            )
            yield Stage(SIDE_BY_SIDE, NOTHING, movement=movement)
            if movement.is_done:
                return finish(movement.blocks.made)
        return None if self.general is None else (yield from self.general())

    def prepared(
        self, communicator: Communicator, like: NDArray[Any], make: Make
    ) -> PreparedCall | None:
        """Return what makes calls that are alike; see `Cacheable`."""
        if self._layout is None or self._front is None or not like.dtype.isnative:
            return never

        def general(x: NDArray[Any], out: Any) -> Generator[Stage, None, Any]:
            request = make(x, out)
            request.body.close()
            assert isinstance(request, TransferArgs)
            assert request.general is not None
            return request.general()

        return prepare_move(
            communicator,
            self,
            self._layout,
            self._front,
            None if self.general is None else general,
            like,
        )


def detail_of(dtype: np.dtype[Any], shape: tuple[int, ...], *more: Any) -> int:
    """Return what must be the same on all ranks for arrays to be moved side by side; never 0."""
    return fingerprint("detail", dtype.name, shape, *more) or 1


def result_buffer(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *sources: NDArray[Any]
) -> NDArray[Any]:
    """Return where a result goes: `out` if it can be written piece by piece while `sources` are read, else a new array."""
    is_fit = (
        type(out) is np.ndarray and out.shape == shape and out.dtype == dtype and out.flags.carray
    )
    if is_fit and not any(np.may_share_memory(out, source) for source in sources):
        return out  # type: ignore[no-any-return]
    return np.empty(shape, dtype)


def fits_out(blocks: Blocks, out: Any) -> Blocks | None:
    """Return the arrays of a call if the result, where there is one, lies where the caller wants it."""
    return blocks if out is None or blocks.made is out or blocks.made is NOTHING else None


def place_of(source: int, dest: int) -> int:
    """Return the place of the block for `dest` among those that `source` puts for the others, in rank order.

    Example:
        >>> [place_of(1, dest) for dest in (0, 2, 3)]
        [0, 1, 2]
    """
    return dest if dest < source else dest - 1
