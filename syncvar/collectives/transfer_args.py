"""Arguments of the collectives that move blocks: layout, arrays, persistent call and slow path."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from syncvar.collectives.dispatch import Persistable, never_persistent, plain_input
from syncvar.core.array_arguments import deliver
from syncvar.core.errors import InternalError
from syncvar.runtime.block_transfer import NO_RESULT, Blocks, Movement, TransferLayout
from syncvar.runtime.collective_spec import fingerprint
from syncvar.runtime.persistent_transfer import persist_move
from syncvar.runtime.planner import SIDE_BY_SIDE
from syncvar.runtime.request import Stage

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy as np
    from numpy.typing import NDArray

    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator, Persistent

UNMOVED = TransferLayout(0, NO_RESULT.dtype)
"""Layout of an input that cannot be moved as blocks of one shape: no rank moves any block then."""


def moves(communicator: Communicator, collective: str, algorithm: str | None = None) -> bool:
    """Return whether a collective moves blocks through shared memory; the same on all ranks."""
    return communicator.is_shared and algorithm is None and communicator.forced(collective) is None


class TransferCall(Persistable):
    """A checked call that moves blocks. A subclass is one collective.

    Args:
        communicator: The group.
        spec: Description of the call.
        layout: Layout of the blocks; `UNMOVED` if the input has none, None without shared memory.
        inputs: Arrays of this rank.
        out: The caller's output, or None.
    """

    persistent_input = staticmethod(plain_input)

    def __init__(
        self,
        communicator: Communicator,
        spec: CollectiveSpec,
        layout: TransferLayout | None,
        inputs: list[NDArray[Any]],
        out: Any = None,
    ) -> None:
        super().__init__(spec)
        self.communicator, self.layout, self.inputs, self.out = communicator, layout, inputs, out
        self.size, self.rank = communicator.size, communicator.member_rank

    def parts_of(self, x: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the `inputs` of a persistent call; this object has none then, and no `out`."""
        return [x]

    def blocks_of(self, parts: list[NDArray[Any]], out: Any) -> Blocks:
        """Return the arrays of a call with such inputs."""
        raise NotImplementedError

    def arrange(self) -> Blocks | None:
        """Return the arrays of this call; None if they cannot be moved as blocks."""
        return self.blocks_of(self.inputs, self.out)

    def bind(self, x: NDArray[Any], out: Any) -> Blocks | None:
        """Return the arrays of a persistent call, or None if `out` does not serve."""
        blocks = self.blocks_of(self.parts_of(x), out)
        is_fit = out is None or blocks.output is out or blocks.output is NO_RESULT
        return blocks if is_fit else None

    def finish(self, output: Any) -> Any:
        """Return the result of the call from the output of its blocks."""
        return deliver(output, self.out)

    def slow_path(self) -> Generator[Stage, None, Any]:
        """Return the stages for links, and for inputs that differ between ranks."""
        raise InternalError(f"{self.spec}: the inputs of the ranks differ, but must not")

    def slow_path_of(self, x: NDArray[Any], out: Any) -> Generator[Stage, None, Any]:
        """Return the slow path of a persistent call."""
        call = copy(self)
        call.inputs, call.out = self.parts_of(x), out
        return call.slow_path()

    def stages(self) -> Generator[Stage, None, Any]:
        """Yield the movement, then the slow path if nothing has been moved."""
        layout = self.layout
        if layout is not None:
            blocks = None if layout is UNMOVED else self.arrange()
            movement = (
                Movement(UNMOVED, Blocks(NO_RESULT)) if blocks is None else Movement(layout, blocks)
            )
            yield Stage(SIDE_BY_SIDE, NO_RESULT, movement=movement)
            if movement.is_done:
                return self.finish(movement.blocks.output)
        return (yield from self.slow_path())

    def persistent(self, like: NDArray[Any]) -> Persistent | None:
        """Build the persistent call of such calls; see `Persistable`."""
        if self.layout is None or not like.dtype.isnative:
            return never_persistent
        self.inputs, self.out = [], None  # the persistent call keeps this object
        paths = self.bind, self.slow_path_of
        return persist_move(self.communicator, self.spec, self.layout, *paths, like)


def detail_of(dtype: np.dtype[Any], shape: tuple[int, ...], *more: Any) -> int:
    """Return the value that ranks compare before they move blocks; never 0."""
    return fingerprint("detail", dtype.name, shape, *more) or 1


def even_parts(x: NDArray[Any], size: int) -> list[NDArray[Any]]:
    """Return the parts of an array that is cut along axis 0, all of one shape."""
    rows = x.shape[0] // size
    return [x[rows * place : rows * (place + 1)] for place in range(size)]


def place_of(source: int, dest: int) -> int:
    """Return the index of the block for `dest` among the blocks of `source` for other ranks.

    Example:
        >>> [place_of(1, dest) for dest in (0, 2, 3)]
        [0, 1, 2]
    """
    return dest if dest < source else dest - 1
