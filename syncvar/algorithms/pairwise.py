"""Pairwise exchange: in round d every rank sends to the rank d to the right. One peer at a time, each message once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.chunks import consecutive_chunks, exchange_blocks
from syncvar.algorithms.reproducible import tree_steps
from syncvar.algorithms.schedule import Buffer, Copy, Recv, Send

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar.algorithms.schedule import Round, Step

__all__ = ["pairwise_all_to_all", "pairwise_reduce_scatter"]


def pairwise_reduce_scatter(rank: int, world_size: int, counts: Sequence[int]) -> Iterator[Round]:
    """Yield the rounds of a pairwise reduce-scatter for one rank.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        counts: Elements of each rank's block; uneven and 0 are allowed. WORK holds the whole vector, and the result
            in the own block; what is outside of it stays as it was.

    Yields:
        n-1 rounds of one Send and one Recv, the sum in the last; none for a group of one.

    Cost: n-1 rounds and as many messages per rank; each rank sends every block but its own; n-1 reductions of the own
        block; scratch n-1 blocks.

    Order: T(0, n) for every element.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.3 (pairwise exchange), with the tree applied to raw
        contributions; figure: tests/golden/pairwise_reduce_scatter_3.txt.
    """
    blocks = consecutive_chunks(counts)
    own = blocks[rank]
    # The own contribution stays in WORK, and is never sent.
    places = consecutive_chunks([own.count] * (world_size - 1), Buffer.SCRATCH)
    places.insert(rank, own)
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        local = tree_steps(places, own) if distance == world_size - 1 else ()
        yield (Send(target, blocks[target]), Recv(source, places[source]), *local)


def pairwise_all_to_all(
    rank: int, world_size: int, matrix: Sequence[Sequence[int]]
) -> Iterator[Round]:
    """Yield the rounds of a pairwise all-to-all for one rank.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        matrix: matrix[s][d] elements go from rank s to rank d; uneven and 0 are allowed. WORK holds the blocks for
            destinations 0 ... n-1, then those from sources 0 ... n-1.

    Yields:
        n-1 rounds of one Send and one Recv, the first of them with the copy of the own block; a local round with that
        copy for a group of one.

    Cost: n-1 rounds and as many messages per rank, every block but the own sent once; no scratch.

    Order: nothing is combined.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.4 of "all-to-all" for long messages; figure:
        tests/golden/pairwise_all_to_all_3.txt.
    """
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
