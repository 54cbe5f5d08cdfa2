"""Programs are run: what their memories are is looked up, and one of the two runners does what they say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.errors import InternalError
from syncvar.execution.program import Kind
from syncvar.kernel import UNREAD, run
from syncvar.kernel import program as native_program
from syncvar.runtime.crowd import crowd
from syncvar.runtime.interpreter import interpret, opened
from syncvar.runtime.whereabouts import ADDRESS, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.execution.program import Code, Memory
    from syncvar.runtime.interpreter import Copier
    from syncvar.runtime.kernels import Combiner

    Found: TypeAlias = "NDArray[Any] | Lying | Reached | None"

__all__ = ["Arithmetic", "Lying", "Reached", "in_channel", "native_of", "open_code", "run_code", "suits_native"]


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
        half = 0 if self.wire == self.accumulate else _HALVES.get(self.wire.name, -1)
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
_HALVES = {"float16": 1, "bfloat16": 2}  # as in native.h


class Lying(NamedTuple):
    """Where a memory of a program begins in the arena.

    Args:
        offset: In bytes.
        dtype: Of its elements.
    """

    offset: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a memory of a program begins in the process of another rank, which may be read.

    Args:
        rank: Whose, in the group.
        address: There.
        dtype: Of its elements.
    """

    rank: int
    address: int
    dtype: np.dtype[Any]

    def __getitem__(self, part: slice) -> Reached:
        """Return the elements of a slice."""
        return Reached(self.rank, self.address + part.start * self.dtype.itemsize, self.dtype)


def in_channel(channel: Channel, memory: Memory, sides: Mapping[int, int], dtype: np.dtype[Any]) -> Lying | None:
    """Return where ranks write for each other; None where it is not known yet.

    Args:
        channel: This rank's.
        memory: Slots, cells, or what a rank has made for the others.
        sides: Of the first cells of the ranks that are known.
        dtype: Of the elements.
    """
    kind, rank, place = memory
    if rank not in sides:
        return None
    if kind == Kind.SLOT:
        return Lying(channel.small_offset(rank, sides[rank]), dtype)
    if kind == Kind.CELLS:
        return Lying(channel.segment_offset(rank, sides[rank] ^ place), dtype)
    if kind == Kind.MADE:
        return Lying(channel.segment_offset(rank, 2 + place), dtype)
    raise InternalError(f"{memory} is no memory of a channel")


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


def open_code(channel: Channel, code: Code, found: Sequence[Found], copy: Copier) -> None:
    """Make the copies that come before phase 0."""
    if code.opening:
        opened(code.opening, _views(channel, code, found), copy)


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
    reached = [one for one in found if type(one) is Reached]
    if native is None:
        if reached:
            store = _reading(channel, store)
        yield from interpret(channel, code.steps, _views(channel, code, found), copy, store, fold)
        return
    offsets = tuple([
        one.offset if type(one) is Lying else one.address | ADDRESS if type(one) is Reached else -1 for one in found
    ])  # fmt: skip
    for need in run(native, channel, tuple(found), offsets, keeps_lock=crowd.holds()):
        if need == UNREAD:
            for one in reached:
                read(channel, one.rank, one.address | ADDRESS, np.empty(1, np.uint8), hold=True)
            raise InternalError("the memory of another rank could not be read, and can be")
        yield need
