"""The all-reduce by owners: every rank sums one chunk for all, by the tree.

In the memory that ranks of one host share this is the shortest way for long vectors: what a rank sends is put where
the others see it, and each owner reads what it needs. Over links it takes the fewest rounds that move as few bytes as a ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.plans.chunks import consecutive_chunks, even_chunks
from syncvar.plans.model import Buffer, Recv, Send
from syncvar.plans.reproducible import tree_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.plans.model import Round, Step

__all__ = ["owners_all_reduce"]


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
    own = chunks[rank]
    # The own contribution stays in WORK, which this rank never sends before the sum is there.
    places = consecutive_chunks([own.count] * (world_size - 1), Buffer.SCRATCH)
    places.insert(rank, own)
    steps: list[Step] = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        steps += [Send(target, chunks[target]), Recv(source, places[source])]
    steps += tree_steps(places, own)
    yield tuple(steps)
    steps = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        steps += [Send(target, own), Recv(source, chunks[source])]
    yield tuple(steps)
