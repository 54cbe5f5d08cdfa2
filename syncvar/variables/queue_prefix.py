"""How far the replicas' queues of writes agree: pure arithmetic on what each of them tells.

Writes are numbered from 1 in the order in which a replica makes them. Each replica tells how many it has made, the
number of its first refused write, and a **chain**: a digest of all its writes up to the last one, in order. What all
have made is the common prefix; where the chains at its end are equal, so are the writes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "QueuePrefix",
    "chained",
    "common_prefix",
    "first_difference",
    "pack_told",
    "unpack_told",
]

_TOLD = struct.Struct("<QQQQ")
_MASK = (1 << 64) - 1
_FACTOR = 0x100000001B3  # of the FNV hash


class QueuePrefix(NamedTuple):
    """What a replica tells of its queue.

    Args:
        made: Number of its last write.
        refused: Number of its first write that was refused and not told yet; 0 if there is none.
        chain: Digest of its writes up to the last.
        block: How often it has begun to count anew; writes of unequal blocks have nothing in common.
    """

    made: int
    refused: int
    chain: int
    block: int = 0


def pack_told(told: QueuePrefix) -> bytes:
    """Return the bytes of a record, always as many."""
    return _TOLD.pack(*told)


def unpack_told(data: bytes) -> QueuePrefix:
    """Return the record in some bytes.

    Example:
        >>> unpack_told(pack_told(QueuePrefix(3, 0, 7)))
        QueuePrefix(made=3, refused=0, chain=7, block=0)
    """
    return QueuePrefix(*_TOLD.unpack(data))


def chained(chain: int, digest: int) -> int:
    """Return the chain after one more write; it depends on the order.

    Example:
        >>> chained(chained(0, 1), 2) == chained(chained(0, 2), 1)
        False
    """
    return ((chain ^ digest) * _FACTOR + 1) & _MASK


def common_prefix(sent: int, told: Sequence[QueuePrefix]) -> tuple[int, bool]:
    """Return (number of the last write that can be sent now, whether that one is to be dropped by all).

    Args:
        sent: Number of the last write that was sent; the same on all replicas.
        told: By replica.

    A refused write is told to all on its own, after those before it.

    Example:
        >>> common_prefix(2, [QueuePrefix(5, 0, 0), QueuePrefix(4, 0, 0)])
        (4, False)
        >>> common_prefix(2, [QueuePrefix(5, 0, 0), QueuePrefix(5, 4, 0)]), common_prefix(3, [QueuePrefix(5, 0, 0), QueuePrefix(5, 4, 0)])
        ((3, False), (4, True))
    """
    last = min(one.made for one in told)
    refused = min((one.refused for one in told if one.refused), default=0)
    if not refused or refused > last:
        return last, False
    return (refused, True) if refused == sent + 1 else (refused - 1, False)


def first_difference(sent: int, chains: Sequence[Sequence[int]]) -> int:
    """Return the number of the first write in which replicas differ, or 0.

    Args:
        sent: Number of the write before the first of the chains.
        chains: By replica, the chain after each write.

    Example:
        >>> first_difference(4, [[1, 2, 3], [1, 9, 8]])
        6
    """
    for place, row in enumerate(zip(*chains, strict=True)):
        if any(chain != row[0] for chain in row):
            return sent + place + 1
    return 0
