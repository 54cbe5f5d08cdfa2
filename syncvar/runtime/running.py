"""Programs are run: what their memories are is looked up, and one of the two runners does what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.errors import InternalError
from syncvar.execution.program import Kind
from syncvar.kernel import run
from syncvar.runtime.crowd import crowd
from syncvar.runtime.interpreter import interpret, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel
    from syncvar.execution.program import Code, Memory
    from syncvar.runtime.interpreter import Copier

    Found: TypeAlias = "NDArray[Any] | Lying | None"

__all__ = ["Lying", "in_channel", "open_code", "run_code"]


class Lying(NamedTuple):
    """Where a memory of a program begins in the arena.

    Args:
        offset: In bytes.
        dtype: Of its elements.
    """

    offset: int
    dtype: np.dtype[Any]


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


def _views(channel: Channel, code: Code, found: Sequence[Found]) -> list[NDArray[Any]]:
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
    """
    if native is None:
        yield from interpret(channel, code.steps, _views(channel, code, found), copy, store, fold)
        return
    arrays = tuple([None if isinstance(one, Lying) else one for one in found])
    offsets = tuple([one.offset if isinstance(one, Lying) else -1 for one in found])
    yield from run(native, channel, arrays, offsets, keeps_lock=crowd.holds())
