"""Where an array of one rank can be had by the others: in the arena, in the rank's own memory, or nowhere.

A **place** is a number that ranks tell each other: an offset in the arena; an address in the rank's memory with the bit
`ADDRESS`; 0 where the others cannot get at the array, and it has to be brought. What is had by its place must neither
change nor go away until all have published that they are done with it; whoever leaves such a call early keeps the array
for good (`Channel.keep`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.errors import InternalError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from syncvar.arena.channels import Channel

__all__ = ["ADDRESS", "Gone", "get", "place_of"]

ADDRESS = 1 << 60  # above every offset, and every address of a program


class Gone(Exception):  # noqa: N818  (no error: the launcher will say what has happened)
    """The process whose memory is read is no more."""


def place_of(channel: Channel, array: NDArray[Any]) -> int:
    """Return where the others find a flat array, which this rank keeps alive."""
    offset = channel.arena.locate(array)
    if offset > 0:
        return offset
    return 0 if channel.reach is None else ADDRESS | array.__array_interface__["data"][0]


def get(
    channel: Channel,
    rank: int,
    place: int,
    shape: tuple[int, int, int],
    dtype: np.dtype[Any],
    room: NDArray[Any],
    *,
    hold: bool,
) -> NDArray[Any]:
    """Return elements of an array of another rank: a view of the arena, or `room`, into which they are read.

    Args:
        channel: This rank's.
        rank: Whose array, in the group.
        place: As it told.
        shape: (elements of the array, first of those asked for, one past the last).
        dtype: Of the array.
        room: As many elements in one piece.
        hold: Keep the interpreter's lock.

    Raises:
        Gone: The other process is no more.
    """
    count, start, stop = shape
    if not place & ADDRESS:
        return channel.resident(place, count, dtype)[start:stop]
    if channel.reach is None:
        raise InternalError("the memory of other ranks was told to be read, and cannot be")
    if not channel.reach.read(rank, (place ^ ADDRESS) + start * dtype.itemsize, room, hold=hold):
        raise Gone
    return room
