"""Pairwise exchange, dissemination and Bruck's algorithms: one peer per round.

Pairwise: in round d every rank sends to the rank d to the right, each block once. Dissemination and
Bruck: in round k the peer is 2**k away, and blocks that a rank knows travel on together. This takes
the fewest rounds for any number of ranks, and no rank is special.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.reproducible_tree import tree_steps
from syncvar.algorithms.schedule import (
    Buffer,
    Chunk,
    Copy,
    Recv,
    Send,
    consecutive_chunks,
    exchange_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        local = own if distance == 1 else ()
        yield (Send(target, outgoing[target]), Recv(source, incoming[source]), *local)


def bruck_all_to_all(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of Bruck's all-to-all for one rank, for equal blocks.

    Block i travels i ranks to the right. In round k all blocks whose bit k is set go 2**k ranks to
    the right in one message; the rank packs them unless they are adjacent. By the borrow rule each
    round packs and receives in a place of its own.

    Cost: ceil(log2 n) rounds and as many messages per rank; each round sends and copies the blocks
        whose bit is set, n/2 if n is a power of two; scratch 2 blocks for each of them, at most n
        log2 n blocks.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby 1997, "Efficient algorithms for all-to-all
        communications in multiport message-passing systems", section 3; figure:
        tests/golden/bruck_3.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.matrix[0][0]
    outgoing, incoming = exchange_blocks([[count] * world_size] * world_size, rank)
    held = [outgoing[(rank + distance) % world_size] for distance in range(world_size)]
    free = 0
    transfers: tuple[Step, ...] = ()
    for level in range((world_size - 1).bit_length()):
        span = 1 << level
        moved = [distance for distance in range(world_size) if distance & span]
        parts = consecutive_chunks([count] * len(moved), Buffer.SCRATCH, free)
        packing = _copies(
            (held[distance], part) for distance, part in zip(moved, parts, strict=True)
        )
        packed = Chunk(parts[0].start, parts[-1].stop, Buffer.SCRATCH)
        if len(packing) == 1:  # the blocks lie side by side already
            packed, packing = packing[0].source, []
        else:
            free = packed.stop
        if level or world_size > 3:  # two or three ranks have nothing to pack at first
            yield (*transfers, *packing)
        parts = consecutive_chunks([count] * len(moved), Buffer.SCRATCH, free)
        room = Chunk(free, parts[-1].stop, Buffer.SCRATCH)
        free = room.stop
        for distance, part in zip(moved, parts, strict=True):
            held[distance] = part
        transfers = (
            Send((rank + span) % world_size, packed),
            Recv((rank - span) % world_size, room),
        )
    sources = [incoming[(rank - distance) % world_size] for distance in range(world_size)]
    yield (*transfers, *_copies(zip(held, sources, strict=True)))


def _copies(pairs: Iterable[tuple[Chunk, Chunk]]) -> list[Copy]:
    """Return copies from source to target, adjacent ones merged."""
    copies: list[Copy] = []
    for source, target in pairs:
        last = copies[-1] if copies else None
        if (
            last is not None
            and (last.source.buffer, last.source.stop) == (source.buffer, source.start)
            and (last.target.buffer, last.target.stop) == (target.buffer, target.start)
        ):
            copies[-1] = Copy(
                Chunk(last.source.start, source.stop, source.buffer),
                Chunk(last.target.start, target.stop, target.buffer),
            )
        else:
            copies.append(Copy(source, target))
    return copies


def dissemination_barrier(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a dissemination barrier for one rank.

    Cost: ceil(log2 n) rounds and as many messages per rank, no elements; no scratch.
    Order: nothing is combined; every rank ends after every rank has begun.
    Source: Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization", section
        3; figure: tests/golden/dissemination_barrier_5.txt.
    """
    rank, world_size = args.rank, args.world_size
    nothing = Chunk(0, 0)
    for level in range((world_size - 1).bit_length()):
        span = 1 << level
        yield (Send((rank + span) % world_size, nothing), Recv((rank - span) % world_size, nothing))


def dissemination_all_gather(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of Bruck's all-gather for one rank, for equal blocks.

    SCRATCH holds the blocks rotated: block j is that of rank + j. So the known blocks are always
    one chunk, and one message per round is enough. Copies at the end undo the rotation.

    Cost: ceil(log2 n) rounds and as many messages per rank; n-1 blocks sent per rank; scratch n
        blocks.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby 1997, "Efficient algorithms for all-to-all
        communications in multiport message-passing systems", section 4; figure:
        tests/golden/dissemination_5.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.counts[0]
    own = Chunk(rank * count, (rank + 1) * count)
    levels = (world_size - 1).bit_length()
    for level in range(levels):
        span = 1 << level
        blocks = min(span, world_size - span)
        # A single block is the own one, which is in WORK already.
        known = own if blocks == 1 else Chunk(0, blocks * count, Buffer.SCRATCH)
        room = Chunk(span * count, (span + blocks) * count, Buffer.SCRATCH)
        target, source = (rank - span) % world_size, (rank + span) % world_size
        steps: list[Step] = [Send(target, known), Recv(source, room)]
        if level == 0 and world_size > 3:
            # Some later round sends several blocks, and the first of them is the own one.
            steps.append(Copy(own, Chunk(0, count, Buffer.SCRATCH)))
        if level == levels - 1:
            wrap = world_size - rank
            if wrap > 1:
                upper = Chunk((rank + 1) * count, world_size * count)
                steps.append(Copy(Chunk(count, wrap * count, Buffer.SCRATCH), upper))
            if rank > 0:
                rest = Chunk(wrap * count, world_size * count, Buffer.SCRATCH)
                steps.append(Copy(rest, Chunk(0, rank * count)))
        yield tuple(steps)
