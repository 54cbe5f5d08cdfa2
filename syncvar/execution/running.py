"""Programs are run: what their memories are is looked up, and one of the two runners does what they say."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.arena.layout import PAGE_BYTES
from syncvar.errors import InternalError
from syncvar.execution.addresses import ADDRESS, read
from syncvar.execution.gil import crowd
from syncvar.execution.interpreter import interpret, opened
from syncvar.execution.program import Kind
from syncvar.kernel import UNREAD, open_program, run
from syncvar.kernel import program as native_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from syncvar.arena.channel import Channel
    from syncvar.execution.interpreter import Copier
    from syncvar.execution.kernels import Combiner
    from syncvar.execution.program import Code

    Found: TypeAlias = "NDArray[Any] | Lying | Reached | None"

__all__ = ["HALVES", "Arithmetic", "Lying", "Reached", "found_in", "native_of", "open_code", "run_code", "suits_native"]


class Arithmetic(NamedTuple):
    """What becomes of the terms of ranks.

    Args:
        ufunc: Combines two operands; None where nothing is combined.
        wire: dtype of the terms.
        accumulate: dtype in which they are combined.
        divisor: What the combination is divided by; 0 for nothing.
        apply: A target becomes apply(target, combination); None sets it to the combination.
    """

    ufunc: Combiner | None
    wire: np.dtype[Any]
    accumulate: np.dtype[Any]
    divisor: int = 0
    apply: np.ufunc | None = None

    @property
    def native(self) -> tuple[Any, ...]:
        """The same for `kernel.program`."""
        half = 0 if self.wire == self.accumulate else HALVES.get(self.wire.name, -1)
        divide = np.divide if self.divisor else None
        divisor = np.asarray(self.divisor, self.accumulate).tobytes() if self.divisor else b""
        return self.wire.itemsize, self.accumulate, half, self.ufunc, divide, divisor, self.apply


def native_of(code: Code, how: Arithmetic) -> Any:
    """Return a program for the C runner, or None where it has no loop for what becomes of terms."""
    found = code.natives.get(how, _NOT_MADE)
    if found is _NOT_MADE:
        is_known = how.ufunc is None or isinstance(how.ufunc, np.ufunc)  # a registered op is any callable
        found = code.natives[how] = native_program(*code.numbers(), code.names, code.sizes, *how.native) if is_known else None
    return found


@lru_cache(maxsize=256)
def suits_native(how: Arithmetic) -> bool:
    """Return whether the C runner can do what becomes of terms."""
    return isinstance(how.ufunc, np.ufunc) and native_program(b"", 0, (), (), *how.native) is not None


_NOT_MADE = object()
HALVES = {"float16": 1, "bfloat16": 2}  # as in native.h


class Lying(NamedTuple):
    """Where a memory of a program begins in the arena.

    Args:
        offset: In bytes.
        dtype: Of its elements.
    """

    offset: int
    dtype: np.dtype[Any]


class Reached:
    """Where a memory of a program begins in the process of another rank, which may be read.

    Args:
        rank: Whose, in the group.
        address: There.
        dtype: Of its elements.
    """

    __slots__ = ("address", "dtype", "rank")

    def __init__(self, rank: int, address: int, dtype: np.dtype[Any]) -> None:
        self.rank = rank
        self.address = address
        self.dtype = dtype

    def __getitem__(self, part: slice) -> Reached:
        """Return the elements of a slice."""
        return Reached(self.rank, self.address + part.start * self.dtype.itemsize, self.dtype)


def found_in(
    channel: Channel, code: Code, sides: tuple[int, ...], dtype: np.dtype[Any], slots: tuple[int, ...] | None = None
) -> list[Any]:
    """Return the memories of a program, of which only those are known in which ranks write for each other.

    Args:
        channel: This rank's.
        code: The program.
        sides: Of the first cells of each rank, above bit 0 where they begin on it, as a number of pages; -1 where it is not known yet.
        dtype: Of the elements.
        slots: Where the slots of all ranks begin in the arena, when it has been published; until then they lie on these sides.
    """
    key = code, sides, dtype, slots
    found = channel.found.get(key)
    if found is None:
        found = [None] * len(code.memories)
        for number, (kind, rank, place) in code.shared:
            side = sides[rank]
            if kind == Kind.SLOT and slots is not None:
                offset = slots[rank]
            elif side < 0:
                continue
            elif kind == Kind.SLOT:
                offset = channel.small_offset(rank, side)
            else:
                offset = channel.segment_offset(rank, (side & 1) ^ place if kind == Kind.CELLS else 2 + place) + (side >> 1) * PAGE_BYTES
            found[number] = Lying(offset, dtype)
        if len(channel.found) >= _FOUND_MAX:
            channel.found.clear()
        channel.found[key] = found
    return found.copy()


_FOUND_MAX = 1024


def _reading(channel: Channel, copy: Copier) -> Copier:
    """Return what copies from the memory of other processes too.

    It raises `Gone` where such a process is no more.
    """
    hold = crowd.holds()

    def copied(target: NDArray[Any], value: Any) -> None:
        if type(value) is Reached:
            read(channel, value.rank, value.address | ADDRESS, target, hold=hold)
        else:
            copy(target, value)

    return copied


def _views(channel: Channel, code: Code, found: Sequence[Found]) -> list[Any]:
    return [
        channel.resident(one.offset, count, one.dtype) if isinstance(one, Lying) else _NONE if one is None else one
        for one, count in zip(found, code.sizes, strict=True)
    ]


_NONE: NDArray[Any] = np.empty(0, np.uint8)  # of a memory that is not used yet


def open_code(channel: Channel, code: Code, found: Sequence[Found], native: Any, copy: Copier) -> None:
    """Make the copies that come before phase 0; arguments as of `run_code`."""
    if native is not None:
        open_program(native, channel, tuple(found), _offsets(found), keeps_lock=crowd.holds())
    elif code.opening:
        opened(code, _views(channel, code, found), copy)


def _offsets(found: Sequence[Found]) -> tuple[int, ...]:
    return tuple([
        one.offset if type(one) is Lying else one.address | ADDRESS if type(one) is Reached else -1 for one in found
    ])  # fmt: skip


def run_code(
    channel: Channel,
    code: Code,
    found: Sequence[Found],
    native: Any,
    copy: Copier,
    store: Copier,
    fold: Callable[[list[NDArray[Any]], NDArray[Any]], Any],
) -> Iterator[int]:
    """Run the steps of a program.

    Args:
        channel: This rank's.
        code: The program.
        found: Its memories, by their numbers.
        native: The same for the C runner; None where Python has to run it.
        copy: As `interpret` takes it; so are the others.
        store: Of (target, value).
        fold: Of (terms, target).

    Yields:
        What the others have to reach.

    Raises:
        Gone: A process whose memory is read is no more.
    """
    if native is None:
        if Reached in map(type, found):
            store = _reading(channel, store)
        yield from interpret(channel, code.steps, _views(channel, code, found), copy, store, fold)
        return
    for need in run(native, channel, tuple(found), _offsets(found), keeps_lock=crowd.holds()):
        if need == UNREAD:
            for one in [one for one in found if type(one) is Reached]:
                read(channel, one.rank, one.address | ADDRESS, np.empty(1, np.uint8), hold=True)
            raise InternalError("the memory of another rank could not be read, and can be")
        yield need
