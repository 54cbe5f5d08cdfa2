"""Run programs: compare phase 0, look up the memories, and run the steps in C or in Python.

The Python interpreter always works, and tests compare the C extension (`syncvar._native`) with it.

The **location** of an array that other ranks can read is a number that ranks publish. It is an
offset in shared memory, or an address in its rank's process with the bit `ADDRESS`. None: its rank
has to copy it. Invariant: a published array must neither change nor be freed before all ranks have
published that they are done with it. A rank that leaves such a call early keeps the array forever
(`GroupChannel.keep`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native import open_program, run
from syncvar._native import program as native_program
from syncvar._native.constants import ADDRESS, MemoryKind, Need
from syncvar.core.errors import InternalError, SyncvarError
from syncvar.runtime.arithmetic import copier, folder, gil_monitor, storer
from syncvar.runtime.instructions import AWAIT, COMBINE, COPY, STORE
from syncvar.shm.segment_file import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from syncvar.runtime.arithmetic import Arithmetic, Copier
    from syncvar.runtime.instructions import CompiledProgram
    from syncvar.shm.group_channel import GroupChannel

    # Flat input and output arrays of a rank.
    Arrays: TypeAlias = "tuple[Sequence[NDArray[Any]], Sequence[NDArray[Any]]]"


_MISSING = object()
_FOUND_MAX = 1024
_VIEWS_MAX = 256  # placements of slots: two sides, and the ring of slots
_EMPTY: NDArray[Any] = np.empty(0, np.uint8)  # for a memory that is not used yet
_SOURCE, _TARGET, _SCRATCH = map(int, (MemoryKind.SOURCE, MemoryKind.TARGET, MemoryKind.SCRATCH))


def run_opening(code: CompiledProgram, memories: Sequence[NDArray[Any]], copy: Copier) -> None:
    """Make the copies of an opening; `copy` is a function of (target, value)."""
    for parts, target, start in code.joins:
        values = [memories[source][first : first + count] for source, first, count in parts]
        into = memories[target][start : start + sum(map(len, values))]
        if len(values) == 1:
            copy(into, values[0])
        else:
            np.concatenate(values, out=into, casting="same_kind")


def interpret(
    channel: GroupChannel,
    steps: Iterable[tuple[Any, ...]],
    memories: Sequence[NDArray[Any]],
    copy: Copier,
    store: Copier,
    fold: Callable[[list[NDArray[Any]], NDArray[Any]], Any],
) -> Iterator[int]:
    """Run the steps of a program on flat arrays; yield the needs.

    `copy` and `store` are functions of (target, value), `fold` one of (terms, target), where the
    target may be the first term.
    """
    for step in steps:
        kind = step[0]
        if kind == COMBINE:
            _, terms, target, start, count = step
            fold(
                [memories[term][first : first + count] for term, first in terms],
                memories[target][start : start + count],
            )
        elif kind in (COPY, STORE):
            _, source, first, target, start, count = step
            into = memories[target][start : start + count]
            value = memories[source][first : first + count]
            (copy if kind == COPY else store)(into, value)
        elif kind == AWAIT:
            yield step[1] - channel.phase
        else:
            channel.publish()


class ShmRef(NamedTuple):
    """Start of an array in shared memory: offset in bytes, and the dtype of its elements."""

    offset: int
    dtype: np.dtype[Any]


class RemoteRef:
    """Start of a readable array in the process of another rank."""

    __slots__ = ("dtype", "place", "rank")

    def __init__(self, rank: int, place: int, dtype: np.dtype[Any]) -> None:
        self.rank, self.place, self.dtype = rank, place, dtype

    def __getitem__(self, part: slice) -> RemoteRef:
        """Return the elements of a slice."""
        return RemoteRef(self.rank, self.place + part.start * self.dtype.itemsize, self.dtype)


class PeerEnded(Exception):  # noqa: N818  (no error: the launcher will report the failure)
    """The process whose memory is read has ended."""


def place_of(channel: GroupChannel, array: NDArray[Any]) -> int | None:
    """Return the location of an array that this rank keeps alive; None if others cannot read it."""
    offset = channel.shm.locate(array)
    if offset is not None:
        return offset
    reach = channel.reach
    if reach is None or not array.flags.c_contiguous:
        return None
    address: int = array.__array_interface__["data"][0]
    ground = array
    while not ground.flags.owndata:
        if not isinstance(ground.base, np.ndarray):
            # Memory of another library, or of a device that others cannot read.
            is_readable = reach.can_read(channel.rank, address, array.nbytes)
            return ADDRESS | address if is_readable else None
        ground = ground.base
    return ADDRESS | address


def read(channel: GroupChannel, rank: int, place: int, target: NDArray[Any], *, hold: bool) -> None:
    """Copy from another rank's memory into a contiguous array; PeerEnded if its process ended."""
    if channel.reach is None:
        raise InternalError("this process cannot read the memory of other ranks")
    try:
        is_there = channel.reach.read(rank, place ^ ADDRESS, target, hold=hold)
    except SyncvarError:
        if not channel.shm.is_aborted:
            raise
        is_there = False
    if not is_there:
        raise PeerEnded


def settled(channel: GroupChannel, *, to_its_end: bool = True) -> Iterator[int]:
    """After an abandoned call, wait until the others are past what this rank has published.

    `to_its_end`: the ranks agreed on the call, so all come to its last phase. A call that also
    needs other hosts only waits until all have entered it, so that no rank is two ahead.
    """
    if not channel.is_settled:
        if channel.last:  # it has published something
            yield -channel.phase if channel.phase and to_its_end else channel.last
        channel.is_settled = True


def agreed(channel: GroupChannel, check: int, reached: int) -> Iterator[int]:
    """Wait for phase 0 of all ranks, and compare the checks."""
    yield reached
    if channel.disagreeing(check):
        yield Need.DISAGREE


def native_of(code: CompiledProgram, arithmetic: Arithmetic) -> Any:
    """Return a program for the C extension, or None if it has no loop for the arithmetic."""
    found = code.natives.get(arithmetic, _MISSING)
    if found is _MISSING:
        # A registered op may be any callable.
        is_known = arithmetic.ufunc is None or isinstance(arithmetic.ufunc, np.ufunc)
        found = code.natives[arithmetic] = (
            native_program(*code.numbers(), arithmetic.native) if is_known else None
        )
    return found


def open_code(
    channel: GroupChannel,
    code: CompiledProgram,
    arithmetic: Arithmetic,
    arrays: Arrays,
    side: int,
) -> None:
    """Make the copies of phase 0 into cells or the slot of this side; see `run_code`."""
    found = _found(channel, code, arithmetic, arrays, channel.own_side(side))
    native, hold = _native(channel, code, arithmetic, found), gil_monitor.holds()
    if native is not None:
        open_program(native, channel, tuple(found), _offsets(found), keeps_lock=hold)
    elif code.opening:
        run_opening(code, _views(channel, code, found), copier(hold=hold))


def run_code(
    channel: GroupChannel,
    code: CompiledProgram,
    arithmetic: Arithmetic,
    arrays: Arrays,
    sides: tuple[int, ...],
    slots: tuple[int, ...] | None = None,
    location_of: Callable[[int, int, int], ShmRef | RemoteRef] | None = None,
) -> Iterator[int]:
    """Run the steps of a program; yield the needs.

    Args:
        channel: This rank's channel.
        code: The program.
        arithmetic: Its arithmetic.
        arrays: (SOURCEs, TARGETs).
        sides: Side of the first cells of each rank; from bit 1 on the page at which they begin.
        slots: Offsets of the slots of all ranks in shared memory; None for those of the sides.
        location_of: Function of (kind, rank, place): location of an array of another rank.
    """
    found = _found(channel, code, arithmetic, arrays, sides, slots, location_of)
    native, hold = _native(channel, code, arithmetic, found), gil_monitor.holds()
    if native is not None:
        steps = run(native, channel, tuple(found), _offsets(found), keeps_lock=hold)
        yield from reading(
            channel, steps, [(one.rank, one.place) for one in found if type(one) is RemoteRef]
        )
        return
    copy, fold = copier(hold=hold), folder(arithmetic, hold=hold)
    store = storer(arithmetic, copy)
    if RemoteRef in map(type, found):
        store = _reading(channel, store, hold=hold)
    try:
        yield from interpret(channel, code.steps, _views(channel, code, found), copy, store, fold)
    except PeerEnded:
        yield Need.PEER_ENDED


def reading(
    channel: GroupChannel, steps: Iterable[int], places: Iterable[tuple[int, int]]
) -> Iterator[int]:
    """Continue a run of the C extension; raise the error if reading another process failed."""
    for need in steps:
        if need != Need.UNREAD:
            yield need
            continue
        try:
            for rank, place in places:
                read(channel, rank, place, np.empty(1, np.uint8), hold=True)
        except PeerEnded:
            yield Need.PEER_ENDED
        raise InternalError("reading the memory of another rank failed once, but works now")


def _reading(channel: GroupChannel, store: Copier, *, hold: bool) -> Copier:
    """Return a store that also reads from other processes; it may raise `PeerEnded`."""

    def stored(target: NDArray[Any], value: Any) -> None:
        if type(value) is RemoteRef:
            read(channel, value.rank, value.place, target, hold=hold)
        else:
            store(target, value)

    return stored


class SlotProgram:
    """Programs of vectors that go through one slot of each rank, for repeated calls.

    Args:
        channel: This rank's channel.
        parts: The program of each vector, its arithmetic, and its start in the slot in bytes.
        ring_bytes: Bytes of the vector, if the C extension of a rank may put it into the ring of
            slots; 0 if it is in the fixed slot.
    """

    def __init__(
        self,
        channel: GroupChannel,
        parts: Sequence[tuple[CompiledProgram, Arithmetic, int]],
        ring_bytes: int = 0,
    ) -> None:
        self.channel, self._parts, self._ring_bytes = channel, parts, ring_bytes
        # By whether loops keep the GIL
        self._loops: dict[bool, tuple[Copier, list[tuple[Copier, Any]]]] = {}
        # By the offsets of all slots: the memories of each part that are slots, else None.
        self._views: dict[tuple[int, ...], list[list[Any]]] = {}

    def put(self, arrays: Sequence[Arrays]) -> None:
        """Write the flat (SOURCEs, TARGETs) of each part into the slot that comes next."""
        channel, copy = self.channel, copier(hold=gil_monitor.holds())
        own = channel.small_offset(channel.rank, channel.side ^ 1)
        all_views = self._views_at((own,) * channel.size)
        for (code, _, _), views, both in zip(self._parts, all_views, arrays, strict=True):
            run_opening(code, memories_of(code, views, both), copy)

    def run(self, arrays: Sequence[Arrays]) -> None:
        """Run the programs, after all ranks have written their slots."""
        channel, hold = self.channel, gil_monitor.holds()
        copy, all_loops = self._loops.get(hold) or self._loops_now(hold)
        all_views = self._views_at(channel.slots_now(self._ring_bytes))
        for (code, arithmetic, _), loops, views, both in zip(
            self._parts, all_loops, all_views, arrays, strict=True
        ):
            memories = memories_of(code, views, both, arithmetic.wire)
            store, fold = loops
            for _ in interpret(channel, code.steps, memories, copy, store, fold):
                raise InternalError("a program of slots must not wait")

    def _loops_now(self, hold: bool) -> tuple[Copier, list[tuple[Copier, Any]]]:  # noqa: FBT001
        """Return the copier, and the store and the fold of each part; `hold` keeps the GIL."""
        copy = copier(hold=hold)
        loops = [(storer(one, copy), folder(one, hold=hold)) for _, one, _ in self._parts]
        self._loops[hold] = copy, loops
        return copy, loops

    def _views_at(self, slots: tuple[int, ...]) -> list[list[Any]]:
        found = self._views.get(slots)
        if found is None:
            found = [self._views_of(slots, *part) for part in self._parts]
            if self.channel.shm.is_checked:  # each use is checked anew
                return found
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            self._views[slots] = found
        return found

    def _views_of(
        self, slots: tuple[int, ...], code: CompiledProgram, arithmetic: Arithmetic, start: int
    ) -> list[Any]:
        views: list[Any] = [None] * len(code.sizes)
        for number, memory in code.shared:
            offset, count = slots[memory.rank] + start, code.sizes[memory]
            views[number] = self.channel.resident(offset, count, arithmetic.wire)
        return views


def _found(
    channel: GroupChannel,
    code: CompiledProgram,
    arithmetic: Arithmetic,
    arrays: Arrays,
    sides: tuple[int, ...],
    slots: tuple[int, ...] | None = None,
    location_of: Callable[[int, int, int], ShmRef | RemoteRef] | None = None,
) -> list[Any]:
    """Return the memories of a program: arrays, `ShmRef`, `RemoteRef`, or None if not known yet."""
    wire = arithmetic.wire
    key = code, sides, wire, slots
    shared = channel.found.get(key)
    if shared is None:
        if len(channel.found) >= _FOUND_MAX:
            channel.found.clear()
        shared = channel.found[key] = _found_shared(channel, code, sides, wire, slots)
    found = memories_of(code, shared, arrays, wire)
    if location_of is not None:
        for number, kind, rank, place, _ in code.own:
            if kind not in (_SOURCE, _TARGET, _SCRATCH):
                found[number] = location_of(kind, rank, place)
    return found


def memories_of(
    code: CompiledProgram, shared: list[Any], arrays: Arrays, wire: np.dtype[Any] | None = None
) -> list[Any]:
    """Return the memories of a program: those in `shared`, with this rank's own ones.

    `wire` is the dtype of scratch memory; None if the caller needs none.
    """
    sources, targets = arrays
    memories = shared.copy()
    for number, kind, _, place, count in code.own:
        if kind == _SOURCE:
            memories[number] = sources[place]
        elif kind == _TARGET:
            memories[number] = targets[place]
        elif kind == _SCRATCH and wire is not None:
            memories[number] = np.empty(count, wire)
    return memories


def _found_shared(
    channel: GroupChannel,
    code: CompiledProgram,
    sides: tuple[int, ...],
    dtype: np.dtype[Any],
    slots: tuple[int, ...] | None,
) -> list[Any]:
    """Return the memories of a program in which ranks write for each other; None for all others."""
    found: list[Any] = [None] * len(code.sizes)
    for number, (kind, rank, place) in code.shared:
        side = sides[rank]
        if side < 0:
            continue
        if kind == MemoryKind.SLOT:
            offset = channel.small_offset(rank, side) if slots is None else slots[rank]
        elif kind == MemoryKind.CELLS:
            offset = channel.segment_offset(rank, (side & 1) ^ place) + (side >> 1) * PAGE_BYTES
        else:
            offset = channel.segment_offset(rank, 2 + place)
        found[number] = ShmRef(offset, dtype)
    return found


def _native(
    channel: GroupChannel, code: CompiledProgram, arithmetic: Arithmetic, found: Sequence[Any]
) -> Any:
    """Return the program for the C extension; None if it cannot run these arrays."""
    if not channel.is_native:
        return None
    wire = arithmetic.wire
    for array in found:
        if isinstance(array, np.ndarray) and (
            array.dtype != wire or not (array.flags.aligned and array.flags.c_contiguous)
        ):
            return None
    return native_of(code, arithmetic)


def _views(channel: GroupChannel, code: CompiledProgram, found: Sequence[Any]) -> list[Any]:
    return [
        channel.resident(one.offset, count, one.dtype)
        if isinstance(one, ShmRef)
        else _EMPTY
        if one is None
        else one
        for one, count in zip(found, code.sizes.values(), strict=True)
    ]


def _offsets(found: Sequence[Any]) -> tuple[int, ...]:
    return tuple(
        [
            one.offset if type(one) is ShmRef else one.place if type(one) is RemoteRef else -1
            for one in found
        ]
    )
