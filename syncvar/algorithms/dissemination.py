"""Dissemination: in round k each rank exchanges with the rank 2**k away, and known blocks double.

The fewest rounds with one message per rank and round, for any number of ranks; no rank is special.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.schedule import Buffer, Chunk, Copy, Recv, Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.algorithms.schedule import Round, ScheduleArgs, Step


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
    rank, world_size, count_per_rank = args.rank, args.world_size, args.counts[0]
    count = count_per_rank
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
