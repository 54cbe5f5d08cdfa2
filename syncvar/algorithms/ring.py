"""Ring algorithms, and the reproducible all-reduce, whose sums go around a ring.

In a ring every rank sends to the right and receives from the left: bandwidth-optimal for long
vectors, and only two links per rank. The number of rounds grows with the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.reproducible_tree import tree_steps
from syncvar.algorithms.schedule import (
    Buffer,
    Recv,
    RecvReduce,
    Send,
    consecutive_chunks,
    even_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar.algorithms.schedule import Chunk, Round, ScheduleArgs, Step


def ring_all_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a bandwidth-optimal ring all-reduce for one rank.

    First a reduce-scatter: chunk c starts at rank c and collects one contribution at each stop, so
    that it is complete at rank c - 1. Then the complete chunks go around once more, replacing what
    is there.

    Cost: 2(n-1) rounds and as many messages per rank; each rank sends 2(n-1)/n of the buffer,
        exactly 2 count - chunk(rank+1) - chunk(rank+2) elements where chunk(c) is the size of chunk
        c modulo n; no scratch.
    Order: chunk c is summed along ranks c, c+1, ..., n-1, then 0, ..., c-1; rank 0 puts its own
        value to the left of what has come so far. Bytes are equal on every rank.
    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", section 4; figure: tests/golden/ring_5.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    if world_size == 1:
        return
    chunks = even_chunks(count, world_size)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    # What comes to rank r holds ranks c ... r-1, around the end of the ring if need be. Its lowest
    # rank is c or 0, below r in either case, except at rank 0, which is lower than anything that
    # can come to it.
    incoming_left = rank != 0
    for step in range(world_size - 1):
        out, come = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        yield (Send(right, out), RecvReduce(left, come, incoming_left))
    yield from _circulate(rank, world_size, chunks, (rank + 1) % world_size)


def ring_all_gather(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a ring all-gather for one rank: the blocks travel once around.

    Cost: n-1 rounds and as many messages per rank; rank r sends every block but that of rank r+1;
        no scratch.
    Source: Chan, Heimlich, Purkayastha and van de Geijn 2007, "Collective communication: theory,
        practice, and experience", section 4 ("bucket" all-gather).
    """
    rank, world_size, counts = args.rank, args.world_size, args.counts
    if world_size == 1:
        return
    yield from _circulate(rank, world_size, consecutive_chunks(counts), rank)


def reproducible_all_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of an all-reduce whose result is the tree T(0, n) for every element.

    Every rank sends its raw contribution to chunk c to rank c, one peer per round; rank c sums by
    the tree; the sums go around a ring.

    Cost: 2(n-1) rounds and as many messages per rank; each rank sends 2(n-1)/n of the buffer like a
        ring, exactly 2 count - chunk(rank) - chunk(rank+1) elements; n-1 reductions of one chunk;
        scratch n-1 chunks.
    Order: T(0, n) for every element, whatever the count. Bytes are equal on every rank.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.3 (pairwise-exchange reduce-scatter),
        with the tree applied to raw contributions; figure: tests/golden/reproducible_5.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    if world_size == 1:
        return
    chunks = even_chunks(count, world_size)
    own = chunks[rank]
    # Where each rank's contribution to the own chunk lies: the own one in WORK, which this rank
    # never sends before the sum is there, the others in SCRATCH.
    places = consecutive_chunks([own.count] * (world_size - 1), Buffer.SCRATCH)
    places.insert(rank, own)
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        steps: list[Step] = [Send(target, chunks[target]), Recv(source, places[source])]
        if distance == world_size - 1:
            steps += tree_steps(places, own)
        yield tuple(steps)
    yield from ring_all_gather(args._replace(counts=tuple(chunk.count for chunk in chunks)))


def _circulate(rank: int, world_size: int, chunks: Sequence[Chunk], first: int) -> Iterator[Round]:
    """Yield n-1 rounds in which a rank forwards chunks first, first-1, ..., as it receives them."""
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    for step in range(world_size - 1):
        out, come = chunks[(first - step) % world_size], chunks[(first - step - 1) % world_size]
        yield (Send(right, out), Recv(left, come))
