"""Direct algorithms: every rank exchanges with every other in one round.

Fewest rounds possible, but the elements sent grow with the ranks: for small vectors on few ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.plans.chunks import consecutive_chunks
from syncvar.plans.model import Buffer, Chunk, Copy, Recv, Reduce, Send

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar.plans.model import Round, Step

__all__ = ["direct_all_gather", "direct_all_reduce"]


def direct_all_reduce(rank: int, world_size: int, count: int) -> Iterator[Round]:
    """Yield the rounds of a direct all-reduce for one rank.

    Every rank publishes a copy of its vector, receives the copy of every other rank into a slot of its own, and
    reduces the slots in rank order. The copy is what makes one exchange enough: WORK is overwritten by the result in
    the round of the sends, when no rank can know yet that its own vector has arrived, so WORK must not be sent.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the WORK buffer; may be 0.

    Yields:
        A local round with one Copy, then a round with everything else; none for a group of one.

    Cost: 1 round with transfers, n-1 messages and (n-1) count elements sent per rank, n-1 reductions and one copy of
        the whole vector; scratch n count.

    Order: ((x0 + x1) + x2) + ..., for every element. Bytes are equal on every rank.

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
    # Ranks below this one are folded into slot 0, which then goes to the left of the own value in WORK.
    steps += [Reduce(slots[lower], slots[0], source_left=False) for lower in range(1, rank)]
    if rank > 0:
        steps.append(Reduce(slots[0], work, source_left=True))
    steps += [Reduce(slots[higher], work, source_left=False) for higher in range(rank + 1, world_size)]
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
