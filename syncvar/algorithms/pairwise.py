"""Pairwise exchange: in round d every rank sends to the rank d to the right.

One peer at a time, each message once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.chunks import consecutive_chunks, exchange_blocks
from syncvar.algorithms.reproducible import tree_steps
from syncvar.algorithms.schedule import Buffer, Copy, Recv, Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.algorithms.schedule import Round, ScheduleArgs, Step


def pairwise_reduce_scatter(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a pairwise reduce-scatter for one rank.

    Cost: n-1 rounds and as many messages per rank; each rank sends every block but its own; n-1
        reductions of the own block; scratch n-1 blocks.

    Order: T(0, n) for every element.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.3 (pairwise exchange), with the tree
        applied to raw contributions; figure: tests/golden/pairwise_reduce_scatter_3.txt.
    """
    rank, world_size, counts = args.rank, args.world_size, args.counts
    blocks = consecutive_chunks(counts)
    own = blocks[rank]
    # The own contribution stays in WORK, and is never sent.
    places = consecutive_chunks([own.count] * (world_size - 1), Buffer.SCRATCH)
    places.insert(rank, own)
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        local = tree_steps(places, own) if distance == world_size - 1 else ()
        yield (Send(target, blocks[target]), Recv(source, places[source]), *local)


def pairwise_all_to_all(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a pairwise all-to-all for one rank.

    Cost: n-1 rounds and as many messages per rank, every block but the own sent once; no scratch.

    Order: nothing is combined.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.4 of "all-to-all" for long messages;
        figure: tests/golden/pairwise_all_to_all_3.txt.
    """
    rank, world_size, matrix = args.rank, args.world_size, args.matrix
    outgoing, incoming = exchange_blocks(matrix, rank)
    own: tuple[Step, ...] = (Copy(outgoing[rank], incoming[rank]),)
    if world_size == 1:
        yield own
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        yield (
            Send(target, outgoing[target]),
            Recv(source, incoming[source]),
            *(own if distance == 1 else ()),
        )
