"""Direct algorithms: every rank exchanges with every other in one round.

Fewest rounds possible, but the elements sent grow with the ranks: for small vectors on few ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.plans.chunks import consecutive_chunks
from syncvar.plans.model import Buffer, Chunk, Copy, Recv, Reduce, Send
from syncvar.plans.reproducible import tree_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar.plans.model import Round, Step

__all__ = ["direct_all_gather", "direct_all_reduce", "direct_barrier", "direct_broadcast"]


def direct_all_reduce(rank: int, world_size: int, count: int) -> Iterator[Round]:
    """Yield the rounds of a direct all-reduce for one rank.

    Every rank publishes a copy of its vector, receives the copy of every other rank into a slot of its own, and
    reduces by the tree T(0, n), the own vector taken from WORK. The copy is what makes one exchange enough: WORK is
    overwritten by the result in the round of the sends, when no rank can know yet that its own vector has arrived, so
    WORK must not be sent.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the WORK buffer; may be 0.

    Yields:
        A local round with one Copy, then a round with everything else; none for a group of one.

    Cost: 1 round with transfers, n-1 messages and (n-1) count elements sent per rank, n-1 reductions and one copy of
        the whole vector (two on ranks above 0); scratch n count.

    Order: T(0, n) for every element, as the reproducible algorithm. Bytes are equal on every rank.

    Source: the "linear" all-to-all exchange; figure: tests/golden/direct_3.txt.
    """
    if world_size == 1:
        return
    work = Chunk(0, count)
    slots = consecutive_chunks([count] * world_size, Buffer.SCRATCH)
    yield (Copy(work, slots[rank]),)

    steps: list[Step] = []
    for distance in range(1, world_size):
        # Each rank starts with its neighbour, so that not everyone begins with rank 0.
        steps.append(Send((rank + distance) % world_size, slots[rank]))
        steps.append(Recv((rank - distance) % world_size, slots[(rank - distance) % world_size]))
    held = [work if other == rank else slots[other] for other in range(world_size)]
    steps += [Reduce(held[source], held[target], source_left=False) for target, source in tree_order(0, world_size)]
    if rank > 0:
        steps.append(Copy(held[0], work))
    yield tuple(steps)


def direct_all_gather(rank: int, world_size: int, counts: Sequence[int]) -> Iterator[Round]:
    """Yield the one round of a direct all-gather for one rank.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        counts: Elements of each rank's block; uneven and 0 are allowed. WORK holds the concatenation in rank order,
            with the own block in place at the start.

    Yields:
        One round; none for a group of one.

    Cost: 1 round, n-1 messages and (n-1) counts[rank] elements sent per rank; no scratch.

    Order: nothing is combined.

    Source: the "linear" all-to-all exchange; figure: tests/golden/direct_all_gather_3.txt.
    """
    if world_size == 1:
        return
    blocks = consecutive_chunks(counts)
    steps: list[Step] = []
    for distance in range(1, world_size):
        source = (rank - distance) % world_size
        steps.append(Send((rank + distance) % world_size, blocks[rank]))
        steps.append(Recv(source, blocks[source]))
    yield tuple(steps)


def direct_broadcast(rank: int, world_size: int, count: int, root: int) -> Iterator[Round]:
    """Yield the one round of a direct broadcast for one rank.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the WORK buffer; may be 0.
        root: The rank whose vector is sent.

    Yields:
        One round, in which the root sends and the others receive; none for a group of one.

    Cost: 1 round; the root sends n-1 messages of `count` elements, which shared memory publishes once; no scratch.

    Order: nothing is combined.

    Source: the "linear" broadcast; figure: tests/golden/direct_broadcast_3.txt.
    """
    if world_size == 1:
        return
    work = Chunk(0, count)
    if rank != root:
        yield (Recv(root, work),)
        return
    yield tuple(Send((root + distance) % world_size, work) for distance in range(1, world_size))


def direct_barrier(rank: int, world_size: int) -> Iterator[Round]:
    """Yield the one round of a direct barrier for one rank.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.

    Yields:
        One round of n-1 Sends and n-1 Recvs of empty chunks; none for a group of one.

    Cost: 1 round, n-1 messages per rank, no elements; no scratch.

    Order: nothing is combined; every rank ends after every rank has begun.

    Source: the "linear" barrier; figure: tests/golden/direct_barrier_3.txt.
    """
    nothing = Chunk(0, 0)
    steps: list[Step] = []
    for distance in range(1, world_size):
        steps += [Send((rank + distance) % world_size, nothing), Recv((rank - distance) % world_size, nothing)]
    if steps:
        yield tuple(steps)
