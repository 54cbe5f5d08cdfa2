"""Reductions in two stages: each rank owns a chunk and reduces it by the tree, then sends it on.

In shared memory this is the fastest way for long vectors: each owner reads what it needs. Over
links it has the fewest rounds among the algorithms that send as few bytes as a ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.chunks import even_chunks
from syncvar.algorithms.direct import direct_gather, direct_reduce_scatter
from syncvar.algorithms.schedule import Recv, Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.algorithms.schedule import Round, ScheduleArgs, Step


def owners_all_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the two rounds of an all-reduce by owners for one rank.

    Rank c owns chunk c. It receives the raw contributions of all other ranks, sums by the
    tree T(0, n), and sends the sum to every other rank.

    Cost: 2 rounds, 2(n-1) messages per rank; each rank sends the other chunks once and its own n-1
        times, about 2(n-1)/n of the buffer; n-1 reductions of one chunk; scratch n-1 chunks.
    Order: T(0, n) for every element, whatever the count. Bytes are equal on every rank.
    Source: direct reduce-scatter and all-gather, as in Rabenseifner 2004 for few ranks; figure:
        tests/golden/owners_3.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    if world_size == 1:
        return
    chunks = even_chunks(count, world_size)
    counts = tuple(chunk.count for chunk in chunks)
    yield from direct_reduce_scatter(args._replace(counts=counts))
    steps: list[Step] = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        steps += [Send(target, chunks[rank]), Recv(source, chunks[source])]
    yield tuple(steps)


def owners_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the two rounds of a reduction by owners for one rank.

    Rank c owns chunk c and sums it by the tree T(0, n), as in the all-reduce; then it sends the sum
    to the root.

    Cost: 2 rounds, n messages per rank; each rank but the root sends the whole vector; n-1
        reductions of one chunk; scratch n-1 chunks.
    Order: T(0, n) for every element.
    Source: Rabenseifner 2004, reduce-scatter and gather; figure: tests/golden/owners_reduce_3.txt.
    """
    counts = tuple(chunk.count for chunk in even_chunks(args.count, args.world_size))
    yield from direct_reduce_scatter(args._replace(counts=counts))
    yield from direct_gather(args._replace(counts=counts))
