"""The short way of a blocking call that moves blocks in shared memory, as `shortcut` has it of an all-reduce."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from syncvar.arena.channels import CHECK, MASK, SPREAD, TARGET
from syncvar.errors import SyncvarError
from syncvar.runtime.crowd import crowd
from syncvar.runtime.kernels import quiet
from syncvar.runtime.phases import DISAGREE, NEVER
from syncvar.runtime.published import staged
from syncvar.runtime.shared_moves import (
    Movement,
    Said,
    are_taken_in_place,
    folded,
    put_blocks,
    said_of,
    take_blocks,
    take_where_they_lie,
    tell,
)
from syncvar.runtime.shortcut import ground_of
from syncvar.runtime.whereabouts import Gone

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.runtime.group import Communicator, Request
    from syncvar.runtime.operation import Stage
    from syncvar.runtime.shared_moves import Blocks, Layout
    from syncvar.runtime.shortcut import Shortcut

    Front = Callable[[NDArray[Any], Any], Blocks | None]
    General = Callable[[NDArray[Any], Any], Generator[Stage, None, Any]]

__all__ = ["Front", "General", "move_shortcut"]


def move_shortcut(
    communicator: Communicator, request: Request, layout: Layout, front: Front, general: General | None
) -> Shortcut | None:
    """Return the shortcut of calls that move blocks side by side, or None where there is none.

    Args:
        communicator: The group.
        request: Such a call, as the long way makes it.
        layout: What these calls have in common.
        front: Of (x, out): the arrays of a call; None, or an error, where the long way has to be taken.
        general: Of (x, out): the body of the call where the ranks do not bring the same, without its first stage.
    """
    nbytes = layout.elements * layout.blocks * layout.dtype.itemsize
    ground = ground_of(communicator, request.what, request.digest, nbytes, "arena")
    if ground is None:
        return None
    _, channel, engine, told = ground
    queue, busy = channel.queue, communicator.busy
    digest, add = told.fingerprint, engine.recorder.add
    attempt = (_small_blocks if layout.is_small else _long_blocks)(channel, layout)

    def call(x: NDArray[Any], out: Any, timeout: float | None = None) -> Any:
        if not (engine.is_quiet and channel.is_settled) or queue or busy.locked():
            return None
        try:
            blocks = front(x, out)
        except SyncvarError:  # the long way tells the others what is wrong
            return None
        if blocks is None:
            return None
        if blocks.outgoing and not layout.is_small:
            try:
                channel.reserve_segments()
            except SyncvarError:
                return None
        with busy:
            if queue:
                return None
            number = communicator.next_call
            communicator.next_call = number + 1
            begin = monotonic_ns()
            try:
                movement, need, steps = attempt(number, (digest + number * SPREAD) & MASK, blocks)
                if steps is None or (movement.is_done and need == channel.last):
                    add((told, number, begin, monotonic_ns(), get_ident()))
                    return blocks.made
            except BaseException as error:
                ground.interrupt(number, begin, error)
                raise
            body = None if general is None else partial(general, x, out)
            steps = _moved_or_else(channel, steps, movement, body, number, digest)
            made = ground.go_on(number, begin, steps, need, movement, timeout=timeout)
            crowd.note((monotonic_ns() - begin) / 1e9, nbytes)
            return made

    return call


def _small_blocks(channel: Channel, layout: Layout) -> Any:
    """Return what tries to make a call in one phase: (None, 0, None), or what has to be gone on with."""
    others, words, wait, rank = channel.others, channel.words, channel.wait, channel.rank
    shape, dtype, detail, fold = layout.shape, layout.dtype, layout.detail, layout.fold
    count = layout.elements
    mine, theirs = [], []
    for side in (0, 1):
        own = channel.small(rank, side, count * layout.blocks, dtype)
        mine.append([own[place * count : (place + 1) * count].reshape(shape) for place in range(layout.blocks)])
        theirs.append([
            channel.small(peer, side, count * (place + 1), dtype)[place * count :].reshape(shape)
            for peer, place in layout.takes
        ])  # fmt: skip
    checks = [tuple(other + CHECK + side for other in others) for side in (0, 1)]

    def attempt(number: int, check: int, blocks: Blocks) -> tuple[Movement | None, int, Any]:
        side = channel.side ^ 1
        for slot, block in zip(mine[side], blocks.outgoing):  # noqa: B905  (not every rank puts as many)
            slot[...] = block
        full = check if detail is None else (check + detail) & MASK
        target = channel.begin(number, full, check)
        for other in others:
            if words[other] < target and not wait(others, target):
                break
        else:
            for place in checks[side]:
                if words[place] != full:
                    break
            else:
                if fold is not None:
                    with quiet():
                        folded(fold, dtype, rank, theirs[side], blocks.own, blocks.targets[0])
                    return None, 0, None
                if blocks.own_target is not None:
                    blocks.own_target[...] = blocks.own
                for into, slot in zip(blocks.targets, theirs[side], strict=True):
                    into[...] = slot
                return None, 0, None
        movement = Movement(layout, blocks)
        return movement, target, take_blocks(channel, said_of(layout, check), movement)

    return attempt


def _long_blocks(channel: Channel, layout: Layout) -> Any:
    """Return what makes a call where the blocks lie, or by windows: (movement, need, steps) as of a small one."""
    others, words, detail = channel.others, channel.words, layout.detail or 0
    marks = [tuple((other + CHECK + side, other + TARGET + side) for other in others) for side in (0, 1)]
    tables = [[channel.told_word(peer, side) + place for peer, place in layout.takes] for side in (0, 1)]

    def attempt(number: int, check: int, blocks: Blocks) -> tuple[Movement | None, int, Any]:
        wait = channel.hold if crowd.holds() else channel.wait
        movement: Movement | None = None
        try:
            offer = tell(channel, layout, blocks.outgoing)
            if offer:
                said = Said(check, (check + detail) & MASK, channel.tail ^ 1, offer)
            else:
                movement = Movement(layout, blocks)
                said = put_blocks(channel, check, movement)
            need = channel.begin(number, said.full, check, said.mark)
            limit = need + 2
            if wait(others, need, limit):
                side, full = channel.side, said.full
                for place, mark in marks[side]:
                    # A rank that has not been given up a call has what it says on the same side.
                    offer = offer & words[mark] if words[place] == full else 0
                if are_taken_in_place(offer):
                    take_where_they_lie(channel, layout, [words[place] for place in tables[side]], blocks)
                    need = channel.publish()
                    if wait(others, need, limit):
                        return None, 0, None
                    movement = Movement(layout, blocks)
                    movement.is_done = True
                    return movement, need, iter(())
            movement = movement or Movement(layout, blocks)
            steps = take_blocks(channel, said, movement)
            if channel.is_reached(need):
                need = _as_far_as_possible(channel, steps, wait, limit)
        except Gone:
            return Movement(layout, blocks), NEVER, iter(())
        except BaseException:
            channel.keep(blocks)
            raise
        return movement, need, steps

    return attempt


def _as_far_as_possible(channel: Channel, steps: Iterator[int], wait: Any, limit: int) -> int:
    """Go on as long as the others come soon; returns what they have to reach then."""
    with quiet():
        for need in steps:
            if need == DISAGREE or not wait(channel.others, need, limit):
                return need
    return channel.last  # which all have reached


def _moved_or_else(
    channel: Channel, steps: Any, movement: Movement, general: Any, number: int, digest: int
) -> Generator[int, None, Any]:
    """Go on with a movement; where the ranks do not bring the same, with the general body."""
    yield from steps
    if movement.is_done:
        return movement.blocks.made
    return (yield from staged(channel, number, digest, general(), is_begun=True))
