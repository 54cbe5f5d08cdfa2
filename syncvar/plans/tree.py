"""Binomial trees: the number of rounds grows with the logarithm of the ranks.

Every rank yields every round, empty where it has nothing to do, so that both ends of a transfer count it as the same
round. The parent of a rank is that rank with its lowest set bit cleared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.plans.model import Chunk, Recv, RecvReduce, Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.plans.model import Round

__all__ = ["binomial_all_reduce", "binomial_broadcast", "binomial_reduce"]


def binomial_broadcast(rank: int, world_size: int, count: int, root: int) -> Iterator[Round]:
    """Yield the rounds of a binomial-tree broadcast for one rank.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the WORK buffer; may be 0.
        root: The rank that holds the vector.

    Yields:
        ceil(log2 n) rounds of one transfer at most, some of them empty.

    Cost: ceil(log2 n) rounds; n-1 messages of the whole vector in all, of which the root sends ceil(log2 n); no
        scratch.

    Order: nothing is combined.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH",
        section 4.2; figure: tests/golden/tree_broadcast_5.txt.
    """
    work = Chunk(0, count)
    distance_to_root = (rank - root) % world_size
    for level in reversed(range((world_size - 1).bit_length())):
        span = 1 << level
        if distance_to_root % (2 * span) == span:
            yield (Recv((rank - span) % world_size, work),)
        elif distance_to_root % (2 * span) == 0 and distance_to_root + span < world_size:
            yield (Send((rank + span) % world_size, work),)
        else:
            yield ()


def binomial_reduce(rank: int, world_size: int, count: int) -> Iterator[Round]:
    """Yield the rounds of a binomial-tree reduction to rank 0, for one rank. The other ranks keep partial results.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the WORK buffer; may be 0.

    Yields:
        ceil(log2 n) rounds of one transfer at most, some of them empty.

    Cost: ceil(log2 n) rounds; every rank but 0 sends the whole vector once; no scratch.

    Order: the tree T(0, n) of `syncvar.plans.reproducible.tree_order`.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.4.
    """
    work = Chunk(0, count)
    for level in range((world_size - 1).bit_length()):
        span = 1 << level
        if rank % (2 * span) == span:
            yield (Send(rank - span, work),)
        elif rank % (2 * span) == 0 and rank + span < world_size:
            # This rank holds rank ... rank+span-1, the incoming value rank+span and up: the own side is the lower.
            yield (RecvReduce(rank + span, work, incoming_left=False),)
        else:
            yield ()


def binomial_all_reduce(rank: int, world_size: int, count: int) -> Iterator[Round]:
    """Yield the rounds of a tree all-reduce for one rank: reduce to rank 0, then broadcast from there.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the WORK buffer; may be 0.

    Yields:
        2 ceil(log2 n) rounds of one transfer at most, some of them empty.

    Cost: 2 ceil(log2 n) rounds; 2(n-1) messages of the whole vector in all; no scratch.

    Order: the tree T(0, n) of `syncvar.plans.reproducible.tree_order`. Bytes are equal on every rank.

    Source: Thakur, Rabenseifner and Gropp 2005, sections 4.2 and 4.4; figure: tests/golden/tree_5.txt.
    """
    yield from binomial_reduce(rank, world_size, count)
    yield from binomial_broadcast(rank, world_size, count, 0)
