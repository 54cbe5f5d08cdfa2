"""Run programs: compare phase 0, look up the memories, and run the steps in C or in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar._native import open_program, run
from syncvar._native import program as native_program
from syncvar._native.constants import PEER_ENDED, UNREAD, MemoryKind
from syncvar.core.errors import InternalError
from syncvar.runtime.gil_contention import copier, gil_monitor
from syncvar.runtime.programs.arithmetic import folder, storer
from syncvar.runtime.programs.buffer_location import RemoteRef, ShmRef, UnknownRef, read
from syncvar.runtime.programs.interpreter import interpret, opened
from syncvar.shm.segment_file import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from syncvar.runtime.gil_contention import Copier
    from syncvar.runtime.programs.arithmetic import Arithmetic
    from syncvar.runtime.programs.instructions import CompiledProgram
    from syncvar.shm.group_channel import GroupChannel

    # Flat input and output arrays of a rank.
    Arrays: TypeAlias = "tuple[Sequence[NDArray[Any]], Sequence[NDArray[Any]]]"

DISAGREE = 0
"""Yielded when the ranks do not make the same call: only the launcher can end the wait."""


def settled(channel: GroupChannel, *, to_its_end: bool = True) -> Iterator[int]:
    """After an abandoned call, wait until the others are past what this rank has published.

    Args:
        channel: This rank's channel.
        to_its_end: The ranks agreed on the call, so all of them come to its last phase. False for a
            call that also needs other hosts: then all must have entered the call, so that no rank
                is two
            ahead.
    """
    if not channel.is_settled:
        if channel.last:  # it has published something
            yield -channel.phase if channel.phase and to_its_end else channel.last
        channel.is_settled = True


def agreed(channel: GroupChannel, check: int, reached: int) -> Iterator[int]:
    """Wait for phase 0 of all ranks, and compare the checks."""
    yield reached
    if channel.disagreeing(check):
        yield DISAGREE


def native_of(code: CompiledProgram, how: Arithmetic) -> Any:
    """Return a program for the C extension, or None if it has no loop for the arithmetic."""
    found = code.natives.get(how, _MISSING)
    if found is _MISSING:
        # A registered op may be any callable.
        is_known = how.ufunc is None or isinstance(how.ufunc, np.ufunc)
        found = code.natives[how] = (
            native_program(*code.numbers(), how.native) if is_known else None
        )
    return found


_MISSING = object()


def open_code(
    channel: GroupChannel,
    code: CompiledProgram,
    how: Arithmetic,
    arrays: Arrays,
    side: int,
    slots: tuple[int, ...] | None = None,
) -> None:
    """Make the copies of phase 0 into cells or the slot of this side; see `run_code`."""
    found = _found(channel, code, how, arrays, channel.own_side(side), slots)
    native = _native(channel, code, how, found)
    if native is not None:
        open_program(native, channel, tuple(found), _offsets(found), keeps_lock=gil_monitor.holds())
    elif code.opening:
        opened(code, _views(channel, code, found), copier())


def run_code(
    channel: GroupChannel,
    code: CompiledProgram,
    how: Arithmetic,
    arrays: Arrays,
    sides: tuple[int, ...],
    slots: tuple[int, ...] | None = None,
    location_of: Callable[[int, int, int], ShmRef | RemoteRef] | None = None,
) -> Iterator[int]:
    """Run the steps of a program; yield the publications to wait for.

    Args:
        channel: This rank's channel.
        code: The program.
        how: Its arithmetic.
        arrays: (SOURCEs, TARGETs).
        sides: Side of the first cells of each rank; from bit 1 on the page at which they begin.
        slots: Offsets of the slots of all ranks in shared memory; None for the slots of these
            sides.
        location_of: Function of (kind, rank, place): location of an array of another rank.
    """
    found = _found(channel, code, how, arrays, sides, slots, location_of)
    native = _native(channel, code, how, found)
    if native is not None:
        steps = run(native, channel, tuple(found), _offsets(found), keeps_lock=gil_monitor.holds())
        yield from reading(
            channel, steps, [(one.rank, one.place) for one in found if type(one) is RemoteRef]
        )
        return
    copy = copier()
    store = storer(how, copy)
    if RemoteRef in map(type, found):
        store = _reading(channel, store)
    try:
        yield from interpret(
            channel, code.steps, _views(channel, code, found), copy, store, folder(how)
        )
    except UnknownRef:
        yield PEER_ENDED


def reading(
    channel: GroupChannel, steps: Iterable[int], places: Iterable[tuple[int, int]]
) -> Iterator[int]:
    """Continue a run of the C extension; raise the error if reading another process failed."""
    for need in steps:
        if need != UNREAD:
            yield need
            continue
        try:
            for rank, place in places:
                read(channel, rank, place, np.empty(1, np.uint8), hold=True)
        except UnknownRef:
            yield PEER_ENDED
        raise InternalError("reading the memory of another rank failed once, but works now")


def _reading(channel: GroupChannel, store: Copier) -> Copier:
    """Return a store that also reads from other processes; it may raise `UnknownRef`."""
    hold = gil_monitor.holds()

    def stored(target: NDArray[Any], value: Any) -> None:
        if type(value) is RemoteRef:
            read(channel, value.rank, value.place, target, hold=hold)
        else:
            store(target, value)

    return stored


def _found(
    channel: GroupChannel,
    code: CompiledProgram,
    how: Arithmetic,
    arrays: Arrays,
    sides: tuple[int, ...],
    slots: tuple[int, ...] | None = None,
    location_of: Callable[[int, int, int], ShmRef | RemoteRef] | None = None,
) -> list[Any]:
    """Return the memories of a program: arrays, `ShmRef`, `RemoteRef`, or None if not known yet."""
    (sources, targets), wire = arrays, how.wire
    key = code, sides, wire, slots
    shared = channel.found.get(key)
    if shared is None:
        if len(channel.found) >= _FOUND_MAX:
            channel.found.clear()
        shared = channel.found[key] = _found_shared(channel, code, sides, wire, slots)
    found = shared.copy()
    for number, kind, rank, place, count in code.own:
        if kind == _SOURCE:
            found[number] = sources[place]
        elif kind == _TARGET:
            found[number] = targets[place]
        elif kind == _SCRATCH:
            found[number] = np.empty(count, wire)
        elif location_of is not None:
            found[number] = location_of(kind, rank, place)
    return found


_SOURCE, _TARGET, _SCRATCH = map(int, (MemoryKind.SOURCE, MemoryKind.TARGET, MemoryKind.SCRATCH))
_FOUND_MAX = 1024


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
        if kind == MemoryKind.SLOT and slots is not None:
            offset = slots[rank]
        elif kind == MemoryKind.SLOT:
            offset = channel.small_offset(rank, side)
        elif kind == MemoryKind.CELLS:
            offset = channel.segment_offset(rank, (side & 1) ^ place) + (side >> 1) * PAGE_BYTES
        else:
            offset = channel.segment_offset(rank, 2 + place)
        found[number] = ShmRef(offset, dtype)
    return found


def _native(
    channel: GroupChannel, code: CompiledProgram, how: Arithmetic, found: Sequence[Any]
) -> Any:
    """Return the program for the C extension; None if it cannot run these arrays."""
    if not channel.is_native:
        return None
    wire = how.wire
    for array in found:
        if isinstance(array, np.ndarray) and (
            array.dtype != wire or not (array.flags.aligned and array.flags.c_contiguous)
        ):
            return None
    return native_of(code, how)


def _views(channel: GroupChannel, code: CompiledProgram, found: Sequence[Any]) -> list[Any]:
    return [
        channel.resident(one.offset, count, one.dtype)
        if isinstance(one, ShmRef)
        else _NONE
        if one is None
        else one
        for one, count in zip(found, code.sizes.values(), strict=True)
    ]


_NONE: NDArray[Any] = np.empty(0, np.uint8)  # for a memory that is not used yet


def _offsets(found: Sequence[Any]) -> tuple[int, ...]:
    return tuple(
        [
            one.offset if type(one) is ShmRef else one.place if type(one) is RemoteRef else -1
            for one in found
        ]
    )
