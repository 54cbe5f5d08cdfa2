"""Persistent calls that move blocks in shared memory; see `persistent_builder`."""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import InternalError, SyncvarError
from syncvar.core.reduce_ops import quiet
from syncvar.runtime.arithmetic import folder, gil_monitor
from syncvar.runtime.block_transfer import (
    NOTHING,
    Movement,
    add_native_programs,
    move_published,
    move_shared,
    take_blocks,
)
from syncvar.runtime.call_record import UNRECORDED
from syncvar.runtime.persistent_builder import (
    PersistentCallBuilder,
    builder_for,
    run_while_spinning,
)
from syncvar.runtime.request import stage_steps
from syncvar.shm.channel_table import CHECK, MASK, SPREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.runtime.block_transfer import Blocks, TransferLayout
    from syncvar.runtime.communicator import CollectiveSpec, Communicator, PreparedCall
    from syncvar.runtime.request import Stage
    from syncvar.shm.group_channel import GroupChannel

    Front = Callable[[NDArray[Any], Any], Blocks | None]
    General = Callable[[NDArray[Any], Any], Generator[Stage, None, Any]]


def prepare_move(  # noqa: C901  (closures over what is fixed for all calls)
    communicator: Communicator,
    request: CollectiveSpec,
    layout: TransferLayout,
    front: Front,
    general: General | None,
    example: NDArray[Any],
) -> PreparedCall | None:
    """Build the persistent call of transfers, or return None if there is none.

    Args:
        communicator: The group.
        request: Such a call, as on the slow path.
        layout: Layout of the blocks.
        front: Function of (x, out) that returns the arrays of a call; None, or an error, for the
            slow path.
        general: Function of (x, out) that returns the body of the call, without its first stage,
            for inputs that differ between ranks.
        example: Example input of this rank.
    """
    ground = builder_for(communicator, request.label, request.digest, layout.nbytes, "shm")
    if ground is None:
        return None
    _, channel, engine, call_info = ground
    digest, add = call_info.fingerprint, engine.recorder.add
    small = _SmallBlocks(channel, layout) if layout.goes_by_slots(channel) else None

    def arrays_of(x: NDArray[Any], out: Any) -> tuple[NDArray[Any], Any, Blocks] | None:
        try:
            blocks = front(x, out)
            if blocks is not None and blocks.outgoing and small is None:
                channel.reserve_segments()
        except SyncvarError:  # the slow path informs the group
            return None
        return None if blocks is None else (x, out, blocks)

    def attempt(
        number: int, check: int, arrays: tuple[NDArray[Any], Any, Blocks]
    ) -> tuple[Any, Any, int, Movement | None]:
        x, out, blocks = arrays
        if small is not None and small(number, check, blocks):
            return blocks.result, None, 0, None
        movement = Movement(layout, blocks)
        if small is not None:
            need, steps = channel.last, take_blocks(channel, check, movement)
        else:
            steps = move_shared(channel, (number, check), movement)
            reached = run_while_spinning(channel, steps, number)
            if reached is None and movement.is_done:
                return blocks.result, None, 0, None
            need = channel.last if reached is None else reached
        return None, continue_move(x, out, steps, movement), need, movement

    def continue_move(
        x: NDArray[Any], out: Any, steps: Any, movement: Movement
    ) -> Generator[Any, None, Any]:
        """Continue a transfer, on the slow path if the inputs of the ranks differ."""
        yield from steps
        if movement.is_done:
            return movement.blocks.result
        if general is None:
            raise InternalError(f"{call_info.label}: the inputs of the ranks differ, but must not")
        output = yield from stage_steps(
            UNRECORDED, general(x, out), channel, None, has_published=True
        )
        # None would mean that nothing was done.
        return movement.blocks.output if output is None else output

    def later(
        number: int,
        begin: int,
        x: NDArray[Any],
        out: Any,
        output: NDArray[Any],
        _label: None,
        run: Any,
        _native: Any,
    ) -> tuple[bool, Any]:
        """Continue a call that C has published; return (is over, result or steps)."""
        blocks = front(x, output)
        if blocks is None:
            raise InternalError(
                f"{call_info.label}: the output of the C extension does not fit the call"
            )
        check = (digest + number * SPREAD) & MASK
        if small is not None and small.finish(check, channel.last, blocks):
            add((call_info, number, begin, monotonic_ns(), get_ident()))
            return True, blocks.result
        movement = Movement(layout, blocks)
        if small is None:
            steps = move_published(channel, check, movement, run)
        else:
            steps = take_blocks(channel, check, movement)
        return False, continue_move(x, out, steps, movement)

    call = ground.build_python(arrays_of, attempt, notes=True)
    return _build_native(ground, call, later, layout, front, example) or call


def _build_native(  # noqa: PLR0914  (one spec object will replace them)
    ground: PersistentCallBuilder,
    call: PreparedCall,
    later: Any,
    layout: TransferLayout,
    front: Front,
    like: NDArray[Any],
) -> PreparedCall | None:
    """Build such calls in C, or return None; an example call shows the offsets of all blocks."""
    x, channel, folds = np.empty(like.shape, like.dtype), ground.channel, layout.ufunc is not None
    blocks = front(x, None)
    if (
        blocks is None
        or type(blocks.output) is not np.ndarray
        or not blocks.output.flags.c_contiguous
    ):
        return None
    output, takes_nothing = blocks.output, blocks.output is NOTHING
    nbytes = layout.elements * layout.dtype.itemsize
    keeps = blocks.own is not None and (folds or blocks.own_target is not None)
    sources = [_offset(block, x) for block in (*blocks.outgoing, *([blocks.own] if keeps else ()))]
    own_target = [blocks.own_target] if keeps and not folds else []
    targets = [_offset(target, output) for target in (*blocks.targets, *own_target)]
    is_plain = x.dtype == layout.dtype and (takes_nothing or output.dtype == layout.dtype)
    if None in sources or None in targets or not is_plain:
        return None
    like_all: dict[str, Any] = {
        "input_form": (x.dtype, x.shape),
        "output_form": (output.dtype, output.shape),
        "detail": layout.detail or 0,
        "publishes_check": True,
        "parts": blocks.parts,
        "nothing": NOTHING if takes_nothing else None,
    }
    if not layout.goes_by_slots(channel):
        if not channel.are_native:
            return None
        puts = tuple([(start, 0, 0, channel.rank) for start in sources[: len(blocks.outgoing)]])
        native: Any = ground.build_native(
            call,
            later,
            puts=puts,
            gil_monitor=gil_monitor,
            reads=layout.is_read(channel),
            **like_all,
        )
        itemsize = layout.dtype.itemsize
        starts = [tuple([start // itemsize for start in part]) for part in (sources, targets)]
        is_known = native is not None and add_native_programs(
            channel, layout, blocks, (starts[0], starts[1]), native
        )
        return native if is_known else None
    places = enumerate(sources[: len(blocks.outgoing)])
    puts = tuple([(start, place * nbytes, nbytes, channel.rank) for place, start in places])
    outputs = targets * len(layout.takes) if folds else targets[: len(layout.takes)]
    others = [
        (place * nbytes, target, nbytes, peer)
        for (peer, place), target in zip(layout.takes, outputs, strict=True)
    ]
    own = [(sources[-1], targets[-1], nbytes, -1)] if keeps else []
    if folds:
        like_all["terms"] = (*others[: channel.rank], *own, *others[channel.rank :])
        like_all["divisor"] = np.asarray(layout.divisor, layout.dtype) if layout.divisor else None
    else:
        like_all["takes"] = (*own, *others)
    return ground.build_native(call, later, puts=puts, fold=layout.ufunc, **like_all)


def _offset(part: NDArray[Any] | None, whole: NDArray[Any]) -> Any:
    """Return the offset of a contiguous part of an array in bytes; None if it is not one."""
    if (
        part is None
        or not part.flags.c_contiguous
        or (part.size and not np.may_share_memory(part, whole))
    ):
        return None
    here, start = part.__array_interface__["data"][0], whole.__array_interface__["data"][0]
    return int(here - start) if part.size else 0


class _SmallBlocks:
    """Makes a call in one phase; returns False if the others are late or differ."""

    __slots__ = ("_channel", "_checks", "_layout", "_mine", "_theirs")

    def __init__(self, channel: GroupChannel, layout: TransferLayout) -> None:
        shape, dtype, count = layout.shape, layout.dtype, layout.elements
        self._channel, self._layout = channel, layout

        def slots(rank: int, place: int) -> list[NDArray[Any]]:
            """Return a block's place in a rank's slot, on both sides."""
            flat = [channel.small(rank, side, count * (place + 1), dtype) for side in (0, 1)]
            return [one[place * count :].reshape(shape) for one in flat]

        self._mine = list(
            zip(*[slots(channel.rank, place) for place in range(layout.blocks)], strict=True)
        ) or [(), ()]
        self._theirs = list(zip(*[slots(*take) for take in layout.takes], strict=True)) or [(), ()]
        self._checks = [tuple(other + CHECK + side for other in channel.others) for side in (0, 1)]

    def __call__(self, number: int, check: int, blocks: Blocks) -> bool:
        channel = self._channel
        for slot, block in zip(self._mine[channel.side ^ 1], blocks.outgoing):  # noqa: B905  (not every rank puts as many)
            slot[...] = block
        return self.finish(
            check, channel.begin(number, self._layout.check_of(check), check), blocks
        )

    def finish(self, check: int, target: int, blocks: Blocks) -> bool:
        """Continue a published call."""
        channel, layout = self._channel, self._layout
        words, wait, others, side = channel.words, channel.wait, channel.others, channel.side
        for other in others:
            if words[other] < target and not wait(others, target):
                return False
        full = layout.check_of(check)
        for place in self._checks[side]:
            if words[place] != full:
                return False
        if layout.ufunc is not None:
            self._combine(self._theirs[side], blocks.own, blocks.targets[0])
            return True
        if blocks.own_target is not None:
            blocks.own_target[...] = blocks.own
        for into, slot in zip(blocks.targets, self._theirs[side], strict=True):
            into[...] = slot
        return True

    def _combine(self, theirs: Sequence[NDArray[Any]], own: Any, target: NDArray[Any]) -> None:
        dtype, rank = self._layout.dtype, self._channel.rank
        terms = [*theirs[:rank], own if own.dtype == dtype else own.astype(dtype), *theirs[rank:]]
        output = target if target.dtype == dtype else np.empty(target.shape, dtype)
        with quiet():
            folder(self._layout.arithmetic)(terms, output)
            if output is not target:
                target[...] = output
