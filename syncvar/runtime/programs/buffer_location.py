"""Where an array of one rank can be had by the others: in shared memory, in the rank's own memory, or nowhere.

A **place** is a number that ranks tell each other: an offset in shared memory; an address in the rank's memory with the bit
`ADDRESS`; None where the others cannot get at the array, and it has to be brought. What is had by its place must neither
change nor go away until all have published that they are done with it; whoever leaves such a call early keeps the array
for good (`Channel.keep`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native.constants import ADDRESS
from syncvar.core.errors import InternalError, SyncvarError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.shm.group_channel import Channel

__all__ = ["ADDRESS", "RemoteRef", "ShmRef", "UnknownRef", "place_of", "read"]


class ShmRef(NamedTuple):
    """Where an array begins in shared memory.

    Args:
        offset: In bytes.
        dtype: Of its elements.
    """

    offset: int
    dtype: np.dtype[Any]


class RemoteRef:
    """Where an array begins in the process of another rank, which may be read.

    Args:
        rank: Whose, in the group.
        place: As that rank has told it.
        dtype: Of its elements.
    """

    __slots__ = ("dtype", "place", "rank")

    def __init__(self, rank: int, place: int, dtype: np.dtype[Any]) -> None:
        self.rank, self.place, self.dtype = rank, place, dtype

    def __getitem__(self, part: slice) -> RemoteRef:
        """Return the elements of a slice."""
        return RemoteRef(self.rank, self.place + part.start * self.dtype.itemsize, self.dtype)


class UnknownRef(Exception):  # noqa: N818  (no error: the launcher will say what has happened)
    """The process whose memory is read is no more."""


def place_of(channel: Channel, array: NDArray[Any]) -> int | None:
    """Return where the others find an array in one piece, which this rank keeps alive; None where they cannot read it."""
    offset = channel.shm.locate(array)
    if offset is not None:
        return offset
    reach = channel.reach
    if reach is None or not array.flags.c_contiguous:
        return None
    address: int = array.__array_interface__["data"][0]
    ground = array
    while not ground.flags.owndata:
        if not isinstance(
            ground.base, np.ndarray
        ):  # memory of another library, or of a device that others cannot read
            return (
                ADDRESS | address if reach.can_read(channel.rank, address, array.nbytes) else None
            )
        ground = ground.base
    return ADDRESS | address


def read(channel: Channel, rank: int, place: int, target: NDArray[Any], *, hold: bool) -> None:
    """Copy what lies at an address of another rank's memory into an array in one piece.

    Args:
        channel: This rank's.
        rank: Whose memory, in the group.
        place: As it told; an address.
        target: As many bytes are read as it has.
        hold: Keep the interpreter's lock.

    Raises:
        Gone: The other process is no more.
    """
    if channel.reach is None:
        raise InternalError("the memory of other ranks was told to be read, and cannot be")
    try:
        is_there = channel.reach.read(rank, place ^ ADDRESS, target, hold=hold)
    except SyncvarError:
        if not channel.shm.is_aborted:
            raise
        is_there = False
    if not is_there:
        raise UnknownRef
