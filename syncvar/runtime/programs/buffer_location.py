"""Locations of arrays that other ranks can read: in shared memory, or in the memory of their rank.

A **location** is a number that ranks publish: an offset in shared memory, or an address in the
    rank's
process with the bit `ADDRESS`. None: others cannot read the array, so its rank has to copy it.

Invariant: a published array must neither change nor be freed before all ranks have published that
they are done with it. A rank that leaves such a call early keeps the array forever
(`GroupChannel.keep`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar._native.constants import ADDRESS
from syncvar.core.errors import InternalError, SyncvarError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from syncvar.shm.group_channel import GroupChannel


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


class UnknownRef(Exception):  # noqa: N818  (no error: the launcher will report the failure)
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
        if not isinstance(
            ground.base, np.ndarray
        ):  # memory of another library, or of a device that others cannot read
            return (
                ADDRESS | address if reach.can_read(channel.rank, address, array.nbytes) else None
            )
        ground = ground.base
    return ADDRESS | address


def read(channel: GroupChannel, rank: int, place: int, target: NDArray[Any], *, hold: bool) -> None:
    """Copy from the memory of another rank into a contiguous array, keeping the GIL if `hold`.

    Raises:
        UnknownRef: The other process has ended.
    """
    if channel.reach is None:
        raise InternalError("this process cannot read the memory of other ranks")
    try:
        is_there = channel.reach.read(rank, place ^ ADDRESS, target, hold=hold)
    except SyncvarError:
        if not channel.shm.is_aborted:
            raise
        is_there = False
    if not is_there:
        raise UnknownRef
