"""Reductions by owners: every rank sums one chunk for all, by the tree.

In the memory that ranks of one host share this is the shortest way for long vectors: what a rank sends is put where
the others see it, and each owner reads what it needs. Over links it takes the fewest rounds that move as few bytes as a ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.chunks import even_chunks
from syncvar.algorithms.direct import direct_gather, direct_reduce_scatter
from syncvar.algorithms.schedule import Recv, Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.algorithms.schedule import Round, Step

__all__ = ["owners_all_reduce", "owners_reduce"]


def owners_all_reduce(rank: int, world_size: int, count: int) -> Iterator[Round]:
    """Yield the two rounds of an all-reduce by owners for one rank.

    Rank c owns chunk c: it receives the raw contribution of every other rank to it, sums by the tree T(0, n), and
    sends the sum to every other rank.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the WORK buffer; may be 0 or smaller than `world_size`.

    Yields:
        Two rounds of n-1 Sends and n-1 Recvs; none for a group of one.

    Cost: 2 rounds, 2(n-1) messages per rank; each rank sends the other chunks once and its own n-1 times, about
        2(n-1)/n of the buffer; n-1 reductions of one chunk; scratch n-1 chunks.

    Order: T(0, n) for every element, whatever the count. Bytes are equal on every rank.

    Source: direct reduce-scatter and all-gather, as in Rabenseifner 2004 for few ranks; figure:
        tests/golden/owners_3.txt.
    """
    if world_size == 1:
        return
    chunks = even_chunks(count, world_size)
    yield from direct_reduce_scatter(rank, world_size, [chunk.count for chunk in chunks])
    steps: list[Step] = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        steps += [Send(target, chunks[rank]), Recv(source, chunks[source])]
    yield tuple(steps)


def owners_reduce(rank: int, world_size: int, count: int, root: int) -> Iterator[Round]:
    """Yield the two rounds of a reduction by owners for one rank.

    Rank c owns chunk c and sums it by the tree T(0, n), as in the all-reduce; then it sends the sum to the root.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the WORK buffer; may be 0 or smaller than `world_size`.
        root: The rank that gets the result; the others keep the sum of their own chunk.

    Yields:
        A round of n-1 Sends and n-1 Recvs, and one in which the root receives; none for a group of one.

    Cost: 2 rounds, n messages per rank; each rank but the root sends the whole vector; n-1 reductions of one chunk;
        scratch n-1 chunks.

    Order: T(0, n) for every element.

    Source: Rabenseifner 2004, reduce-scatter and gather; figure: tests/golden/owners_reduce_3.txt.
    """
    counts = [chunk.count for chunk in even_chunks(count, world_size)]
    yield from direct_reduce_scatter(rank, world_size, counts)
    yield from direct_gather(rank, world_size, counts, root)
