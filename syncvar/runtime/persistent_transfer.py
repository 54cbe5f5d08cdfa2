"""Persistent calls that move blocks in shared memory; see `persistent_call`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import InternalError
from syncvar.runtime.block_transfer import (
    NOTHING,
    Movement,
    add_native_programs,
    move_published,
    move_shared,
    slots_of_blocks,
    take_blocks,
)
from syncvar.runtime.call_record import UNRECORDED
from syncvar.runtime.persistent_call import NativeCallSpec, PersistentCall, may_persist
from syncvar.runtime.request import stage_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from syncvar.runtime.block_transfer import Blocks, TransferLayout
    from syncvar.runtime.collective_spec import CollectiveSpec
    from syncvar.runtime.communicator import Communicator, PreparedCall
    from syncvar.runtime.program_runner import SlotProgram
    from syncvar.runtime.request import Stage
    from syncvar.shm.group_channel import GroupChannel

    Front = Callable[[NDArray[Any], Any], Blocks | None]
    SlowPath = Callable[[NDArray[Any], Any], Generator[Stage, None, Any]]


def prepare_move(
    communicator: Communicator,
    spec: CollectiveSpec,
    layout: TransferLayout,
    front: Front,
    slow_path: SlowPath,
    example: NDArray[Any],
) -> PreparedCall | None:
    """Build the persistent call of transfers, or return None if there is none.

    Args:
        communicator: The group.
        spec: Description of the call, as on the slow path.
        layout: Layout of the blocks.
        front: Function of (x, out) that returns the arrays of a call; None, or an error, for the
            slow path.
        slow_path: Function of (x, out) that returns the stages of a call after the first one, for
            inputs that differ between ranks.
        example: Example input of this rank.
    """
    if not may_persist(communicator):
        return None
    assert communicator.channel is not None
    info = communicator.call_info(spec, layout.nbytes, "shm")
    program = MoveProgram(communicator.channel, layout, front, slow_path)
    call = PersistentCall(communicator, info, program, is_timed=True)
    return program.build_native(call, example) or call


class BoundMove:
    """The arrays of one transfer."""

    __slots__ = ("held", "out", "program", "x")

    def __init__(self, program: MoveProgram, x: NDArray[Any], out: Any, blocks: Blocks) -> None:
        self.program, self.x, self.out = program, x, out
        self.held = Movement(program.layout, blocks, program.slots_of(blocks))

    @property
    def inputs_differ(self) -> bool:
        """Whether the ranks have published different details, so that nobody has moved anything."""
        return not self.held.is_done

    @property
    def result(self) -> Any:
        """The caller's result."""
        return self.held.blocks.result

    def slow_path(self) -> Generator[Any, None, Any]:
        """Return the steps of the same call with a header, which inputs that differ need."""
        program = self.program
        stages = program.slow_path(self.x, self.out)
        output = yield from stage_steps(
            UNRECORDED, stages, program.channel, None, has_published=True
        )
        # None would mean that nothing was done.
        return self.held.blocks.output if output is None else output


class MoveProgram:
    """The program of a transfer on this rank; see `SharedProgram`."""

    def __init__(
        self, channel: GroupChannel, layout: TransferLayout, front: Front, slow_path: SlowPath
    ) -> None:
        self.channel, self.layout = channel, layout
        self.front, self.slow_path = front, slow_path
        self.is_small = layout.goes_by_slots(channel)
        # By whether a call keeps its own block: a root whose `out` is `x` does not.
        self._slots: dict[bool, SlotProgram] = {}

    def bind(self, x: Any, out: Any) -> BoundMove | None:
        """Return the arrays of a call; None, or an error, for the slow path."""
        blocks = self.front(x, out)
        if blocks is None:
            return None
        if blocks.outgoing and not self.is_small:
            self.channel.reserve_segments()
        return BoundMove(self, x, out, blocks)

    def bind_copy(self, x: Any, out: Any) -> BoundMove | None:
        """Return the arrays of an asynchronous call, which has a copy of the input."""
        return self.bind(x.copy(), out)

    def bind_output(self, x: Any, out: Any, output: Any) -> BoundMove:
        """Return the arrays of a call that the C extension has begun."""
        blocks = self.front(x, output)
        if blocks is None:
            raise InternalError("the output of the C extension does not fit the call")
        return BoundMove(self, x, out, blocks)

    def run(self, opening: tuple[int, int], arrays: BoundMove) -> Iterator[int]:
        """Return the steps of a whole call."""
        return move_shared(self.channel, opening, arrays.held)

    def resume(self, check: int, arrays: BoundMove, suspended: Any, native: Any) -> Iterator[int]:
        """Return the rest of a call that the C extension has published."""
        if self.is_small:
            return take_blocks(self.channel, check, arrays.held)
        return move_published(self.channel, check, arrays.held, suspended)

    def slots_of(self, blocks: Blocks) -> SlotProgram | None:
        """Return the program of the small blocks of a call; None for long blocks."""
        if not self.is_small:
            return None
        keeps = blocks.own_target is not None
        slots = self._slots.get(keeps)
        if slots is None:
            slots = self._slots[keeps] = slots_of_blocks(self.channel, self.layout, blocks)
        return slots

    # -- the C extension ---------------------------------------------------------------------------

    def build_native(self, call: PersistentCall, example: NDArray[Any]) -> PreparedCall | None:
        """Return such calls in C, or None; an example call shows the offsets of all blocks."""
        layout = self.layout
        x, folds = np.empty(example.shape, example.dtype), layout.ufunc is not None
        blocks = self.front(x, None)
        if (
            blocks is None
            or type(blocks.output) is not np.ndarray
            or not blocks.output.flags.c_contiguous
        ):
            return None
        output, takes_nothing = blocks.output, blocks.output is NOTHING
        is_plain = x.dtype == layout.dtype and (takes_nothing or output.dtype == layout.dtype)
        keeps = blocks.own is not None and (folds or blocks.own_target is not None)
        own, own_target = [blocks.own] * keeps, [blocks.own_target] * (keeps and not folds)
        sources = [_offset(block, x) for block in (*blocks.outgoing, *own)]
        targets = [_offset(target, output) for target in (*blocks.targets, *own_target)]
        if None in sources or None in targets or not is_plain:
            return None
        spec = NativeCallSpec(
            call,
            (x.dtype, x.shape),
            (output.dtype, output.shape),
            detail=layout.detail or 0,
            publishes_check=True,
            parts=blocks.parts,
            nothing=NOTHING if takes_nothing else None,
        )
        starts = sources, targets
        if self.is_small:
            return self._build_small(spec, blocks, starts, keeps=keeps)
        return self._build_long(spec, blocks, starts)

    def _build_long(
        self, spec: NativeCallSpec, blocks: Blocks, starts: tuple[list[int], list[int]]
    ) -> PreparedCall | None:
        layout, channel = self.layout, self.channel
        if not channel.are_native:
            return None
        outgoing = starts[0][: len(blocks.outgoing)]
        native: PreparedCall | None = replace(
            spec,
            puts=[(start, 0, 0, channel.rank) for start in outgoing],
            is_long=True,
            reads=layout.is_read(channel),
        ).build()
        itemsize = layout.dtype.itemsize
        sources, targets = (tuple([start // itemsize for start in part]) for part in starts)
        is_known = native is not None and add_native_programs(
            channel, layout, blocks, (sources, targets), native
        )
        return native if is_known else None

    def _build_small(
        self,
        spec: NativeCallSpec,
        blocks: Blocks,
        starts: tuple[list[int], list[int]],
        *,
        keeps: bool,
    ) -> PreparedCall | None:
        layout, rank, folds = self.layout, self.channel.rank, self.layout.ufunc is not None
        sources, targets = starts
        nbytes = layout.elements * layout.dtype.itemsize
        outgoing = enumerate(sources[: len(blocks.outgoing)])
        outputs = targets * len(layout.takes) if folds else targets[: len(layout.takes)]
        others = [
            (place * nbytes, target, nbytes, peer)
            for (peer, place), target in zip(layout.takes, outputs, strict=True)
        ]
        own = [(sources[-1], targets[-1], nbytes, -1)] if keeps else []
        native: PreparedCall | None = replace(
            spec,
            arithmetic=layout.arithmetic.native if folds else None,
            puts=[(start, place * nbytes, nbytes, rank) for place, start in outgoing],
            takes=() if folds else (*own, *others),
            terms=(*others[:rank], *own, *others[rank:]) if folds else (),
        ).build()
        return native


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
