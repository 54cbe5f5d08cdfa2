"""The short way of a blocking call that moves blocks in shared memory, as `prepared_reductions` has it of an all-reduce."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.arena.channels import CHECK, MASK, SPREAD
from syncvar.engine.host_steps import host_steps
from syncvar.engine.preparation import Preparation, as_far_as_others_come, preparation_of
from syncvar.errors import InternalError, SyncvarError
from syncvar.execution.gil import crowd
from syncvar.execution.kernels import quiet
from syncvar.execution.moves import (
    NOTHING,
    Movement,
    move_published,
    move_shared,
    said_of,
    take_blocks,
    teach_moves,
)
from syncvar.execution.reductions import folder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.arena.channel import Channel
    from syncvar.engine.group import Communicator, PreparedCall, Request
    from syncvar.engine.operation import Stage
    from syncvar.execution.moves import Blocks, Layout

    Front = Callable[[NDArray[Any], Any], Blocks | None]
    General = Callable[[NDArray[Any], Any], Generator[Stage, None, Any]]

__all__ = ["Front", "General", "prepare_move"]


def prepare_move(
    communicator: Communicator, request: Request, layout: Layout, front: Front, general: General | None, brought: NDArray[Any]
) -> PreparedCall | None:
    """Return the prepared call of calls that move blocks side by side, or None where there is none.

    Args:
        communicator: The group.
        request: Such a call, as the long way makes it.
        layout: What these calls have in common.
        front: Of (x, out): the arrays of a call; None, or an error, where the long way has to be taken.
        general: Of (x, out): the body of the call where the ranks do not bring the same, without its first stage.
        brought: What this rank brings to such a call.
    """
    nbytes = layout.elements * layout.blocks * layout.dtype.itemsize
    ground = preparation_of(communicator, request.what, request.digest, nbytes, "arena")
    if ground is None:
        return None
    _, channel, engine, told = ground
    digest, add = told.fingerprint, engine.recorder.add
    small = _SmallBlocks(channel, layout) if layout.goes_by_slots(channel) else None

    def arrays_of(x: NDArray[Any], out: Any) -> tuple[NDArray[Any], Any, Blocks] | None:
        try:
            blocks = front(x, out)
            if blocks is not None and blocks.outgoing and small is None:
                channel.reserve_segments()
        except SyncvarError:  # the general way tells the others what is wrong
            return None
        return None if blocks is None else (x, out, blocks)

    def attempt(number: int, check: int, arrays: tuple[NDArray[Any], Any, Blocks]) -> tuple[Any, Any, int, Movement | None]:
        x, out, blocks = arrays
        if small is not None:
            movement, need, steps = small(number, check, blocks)
        else:
            movement = Movement(layout, blocks)
            steps = move_shared(channel, (number, check), movement)
            reached = as_far_as_others_come(channel, steps, number)
            if reached is None:
                need, steps = channel.last, None if movement.is_done else iter(())
            else:
                need = reached
        if steps is None or movement is None:
            return blocks.result, None, 0, None
        return None, followed(x, out, steps, movement, number), need, movement

    def followed(x: NDArray[Any], out: Any, steps: Any, movement: Movement, number: int) -> Generator[int, None, Any]:
        body = None if general is None else partial(general, x, out)
        return _moved_or_else(channel, steps, movement, body, number, digest)

    def later(number: int, begin: int, x: NDArray[Any], out: Any, made: NDArray[Any], _said: None, run: Any, _native: Any) -> tuple[bool, Any]:
        """Go on with what the C runner has published: the result, or (False, steps) where the engine has to go on."""
        blocks = front(x, made)
        if blocks is None:
            raise InternalError(f"{told.what}: the result does not go where it was said to go")
        check = (digest + number * SPREAD) & MASK
        if small is None:
            moving = Movement(layout, blocks)
            return False, followed(x, out, move_published(channel, check, moving, run), moving, number)
        movement, _, steps = small.taken(check, channel.last, blocks)
        if movement is None:
            add((told, number, begin, monotonic_ns(), get_ident()))
            return True, blocks.result
        return False, followed(x, out, steps, movement, number)

    call = ground.plainly(arrays_of, attempt, notes=True)
    return _natively(ground, call, later, layout, front, brought) or call


def _natively(ground: Preparation, call: PreparedCall, later: Any, layout: Layout, front: Front, like: NDArray[Any]) -> PreparedCall | None:
    """Return what runs such calls in C, or None: where a block goes is seen from the arrays of such a call."""
    x = np.empty(like.shape, like.dtype)
    blocks = front(x, None)
    if blocks is None or type(blocks.made) is not np.ndarray or not blocks.made.flags.c_contiguous:
        return None
    rank, nbytes, fold = ground.channel.rank, layout.elements * layout.dtype.itemsize, layout.fold
    puts = [(_offset(block, x), place * nbytes, nbytes, rank) for place, block in enumerate(blocks.outgoing)]
    own: list[tuple[Any, Any, int, int]] = [] if blocks.own is None else [(_offset(blocks.own, x), 0 if fold else _offset(blocks.own_target, blocks.made), nbytes, -1)]
    if fold is None and blocks.own_target is None:
        own = []
    others: list[tuple[Any, Any, int, int]] = [
        (place * nbytes, 0 if fold else _offset(target, blocks.made), nbytes, peer)
        for (peer, place), target in zip(layout.takes, [None] * len(layout.takes) if fold else blocks.targets, strict=True)
    ]
    if any(None in copy for copy in (*puts, *own, *others)) or (fold and not x.dtype == layout.dtype == blocks.made.dtype):
        return None
    if fold:
        others.insert(rank, own[0])
        own = []
    if not layout.goes_by_slots(ground.channel):
        return _long_natively(ground, call, later, layout, blocks, x)
    takes, terms = ([], others) if fold else ([*own, *others], [])
    return ground.natively(
        call, later, brought=(x.dtype, x.shape), made=(blocks.made.dtype, blocks.made.shape), puts=tuple(puts), takes=tuple(takes), terms=tuple(terms),
        fold=fold.ufunc if fold else None, divisor=np.asarray(fold.divisor, layout.dtype) if fold and fold.divisor else None,
        detail=layout.detail or 0, tells=True, parts=blocks.parts, nothing=NOTHING if blocks.made is NOTHING else None,
    )  # fmt: skip


def _long_natively(ground: Preparation, call: PreparedCall, later: Any, layout: Layout, blocks: Blocks, x: NDArray[Any]) -> PreparedCall | None:
    channel, itemsize = ground.channel, layout.dtype.itemsize
    takes_nothing = blocks.made is NOTHING
    if not channel.are_native or x.dtype != layout.dtype or not (takes_nothing or blocks.made.dtype == layout.dtype):
        return None
    brought = blocks.outgoing if blocks.own is None else (*blocks.outgoing, blocks.own)
    targets = blocks.targets if blocks.own_target is None else (*blocks.targets, blocks.own_target)
    starts = tuple([(_offset(block, x) or 0) // itemsize for block in brought]), tuple([(_offset(block, blocks.made) or 0) // itemsize for block in targets])
    native: Any = ground.natively(
        call, later, brought=(x.dtype, x.shape), made=(blocks.made.dtype, blocks.made.shape),
        puts=tuple([(_offset(block, x), 0, 0, channel.rank) for block in blocks.outgoing]),
        detail=layout.detail or 0, tells=True, parts=blocks.parts, crowd=crowd, reads=layout.is_read(channel), nothing=NOTHING if takes_nothing else None,
    )  # fmt: skip
    return native if native is not None and teach_moves(channel, layout, blocks, starts, native) else None


def _offset(part: NDArray[Any] | None, whole: NDArray[Any]) -> int | None:
    """Return where a part of an array begins in it, in bytes; None where it is no part in one piece."""
    if part is None or not part.flags.c_contiguous or (part.size and not np.may_share_memory(part, whole)):
        return None
    here, start = part.__array_interface__["data"][0], whole.__array_interface__["data"][0]
    return int(here - start) if part.size else 0


class _SmallBlocks:
    """Tries to make a call in one phase: (None, 0, None), or what has to be gone on with.

    Args:
        channel: This rank's end.
        layout: What such calls have in common.
    """

    __slots__ = ("_channel", "_checks", "_layout", "_mine", "_theirs")

    def __init__(self, channel: Channel, layout: Layout) -> None:
        rank, shape, dtype, count = channel.rank, layout.shape, layout.dtype, layout.elements
        self._channel, self._layout = channel, layout
        self._mine: list[list[NDArray[Any]]] = []
        self._theirs: list[list[NDArray[Any]]] = []
        for side in (0, 1):
            own = channel.small(rank, side, count * layout.blocks, dtype)
            self._mine.append([own[place * count : (place + 1) * count].reshape(shape) for place in range(layout.blocks)])
            self._theirs.append([
                channel.small(peer, side, count * (place + 1), dtype)[place * count :].reshape(shape)
                for peer, place in layout.takes
            ])  # fmt: skip
        self._checks = [tuple(other + CHECK + side for other in channel.others) for side in (0, 1)]

    def __call__(self, number: int, check: int, blocks: Blocks) -> tuple[Movement | None, int, Any]:
        channel = self._channel
        for slot, block in zip(self._mine[channel.side ^ 1], blocks.outgoing):  # noqa: B905  (not every rank puts as many)
            slot[...] = block
        return self.taken(check, channel.begin(number, said_of(self._layout, check).full, check), blocks)

    def taken(self, check: int, target: int, blocks: Blocks) -> tuple[Movement | None, int, Any]:
        """Go on with a call that has been published."""
        channel, layout = self._channel, self._layout
        words, wait, others, side = channel.words, channel.wait, channel.others, channel.side
        said = said_of(layout, check)
        for other in others:
            if words[other] < target and not wait(others, target):
                break
        else:
            for place in self._checks[side]:
                if words[place] != said.full:
                    break
            else:
                theirs, fold = self._theirs[side], layout.fold
                if fold is not None:
                    self._combine(theirs, blocks.own, blocks.targets[0])
                    return None, 0, None
                if blocks.own_target is not None:
                    blocks.own_target[...] = blocks.own
                for into, slot in zip(blocks.targets, theirs, strict=True):
                    into[...] = slot
                return None, 0, None
        movement = Movement(layout, blocks)
        return movement, target, take_blocks(channel, said, movement)

    def _combine(self, theirs: list[NDArray[Any]], own: Any, target: NDArray[Any]) -> None:
        dtype = self._layout.dtype
        terms = list(theirs)
        terms.insert(self._channel.rank, own if own.dtype == dtype else own.astype(dtype))
        made = target if target.dtype == dtype else np.empty(target.shape, dtype)
        with quiet():
            folder(self._layout.arithmetic)(terms, made)
            if made is not target:
                target[...] = made


def _moved_or_else(
    channel: Channel, steps: Any, movement: Movement, general: Any, number: int, digest: int
) -> Generator[int, None, Any]:
    """Go on with a movement; where the ranks do not bring the same, with the general body."""
    yield from steps
    if movement.is_done:
        return movement.blocks.result
    made = yield from host_steps(channel, number, digest, general(), is_begun=True)
    return movement.blocks.made if made is None else made  # who gets nothing has made the call
