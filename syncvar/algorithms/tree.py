"""Binomial trees: the number of rounds grows with the logarithm of the ranks.

Every rank yields every round, empty where it has nothing to do, so that both ends of a transfer
count it as the same round. With rank 0 as root, the parent of a rank is that rank with its lowest
set bit cleared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.chunks import consecutive_chunks, even_chunks
from syncvar.algorithms.schedule import Chunk, Recv, RecvReduce, Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.algorithms.schedule import Round, ScheduleArgs, Step


def binomial_broadcast(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a binomial-tree broadcast for one rank.

    Cost: ceil(log2 n) rounds; n-1 messages of the whole vector in all, of which the root sends
        ceil(log2 n); no scratch.
    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
        operations in MPICH", section 4.2; figure: tests/golden/tree_broadcast_5.txt.
    """
    rank, world_size, count, root = args.rank, args.world_size, args.count, args.root
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


def binomial_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a binomial-tree reduction for one rank; others keep partial results.

    It combines the aligned blocks of 1, 2, 4, ... ranks. The sum of a block is at its first rank,
    or at the root if the block contains it.

    Cost: ceil(log2 n) rounds; every rank but the root sends the whole vector once; no scratch.
    Order: the tree T(0, n) of `syncvar.algorithms.reproducible.tree_order`, for any root.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.4; figure:
        tests/golden/tree_reduce_5.txt.
    """
    rank, world_size, count, root = args.rank, args.world_size, args.count, args.root
    work = Chunk(0, count)
    for merge in _merges(rank, world_size, root):
        if merge is None:
            yield ()
        elif rank == merge.giver:
            yield (Send(merge.taker, work),)
        else:
            yield (RecvReduce(merge.giver, work, incoming_left=merge.low < merge.other_low),)


def binomial_gather(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a binomial-tree gather for one rank: the reduction, with adjacent ranges.

    Cost: ceil(log2 n) rounds; every rank but the root sends once; a block is sent once per level at
        most, half of all blocks in the last round if n is a power of two; no scratch.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4; Chan et al. 2007, section 4
        (minimum-spanning-tree gather); figure: tests/golden/tree_gather_5.txt.
    """
    rank, world_size, counts, root = args.rank, args.world_size, args.counts, args.root
    blocks = consecutive_chunks(counts)
    for merge in _merges(rank, world_size, root):
        if merge is None:
            yield ()
            continue
        part = Chunk(blocks[merge.low].start, blocks[merge.high - 1].stop)
        yield (Send(merge.taker, part) if rank == merge.giver else Recv(merge.giver, part),)


def binomial_scatter(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a binomial-tree scatter for one rank: the gather backwards.

    Cost: as `binomial_gather`.
    Source: as `binomial_gather`; figure: tests/golden/tree_scatter_5.txt.
    """
    rank, world_size, counts, root = args.rank, args.world_size, args.counts, args.root
    blocks = consecutive_chunks(counts)
    for merge in reversed(list(_merges(rank, world_size, root))):
        if merge is None:
            yield ()
            continue
        part = Chunk(blocks[merge.low].start, blocks[merge.high - 1].stop)
        yield (Send(merge.giver, part) if rank == merge.taker else Recv(merge.taker, part),)


def scattered_broadcast(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of van de Geijn's broadcast: tree scatter, then ring all-gather.

    If the tree gave a rank more than its own chunk, the ring does not send these chunks again.

    Cost: ceil(log2 n) + n-1 rounds; the root sends 2(n-1)/n of the vector, other ranks at most 3/2
        of it; no scratch.
    Source: Barnett, Gupta, Payne, Shuler, van de Geijn and Watts 1994, "Interprocessor collective
        communication library"; Thakur, Rabenseifner and Gropp 2005, section 4.2; figure:
        tests/golden/scattered_4.txt.
    """
    rank, world_size, count, root = args.rank, args.world_size, args.count, args.root
    chunks = even_chunks(count, world_size)
    yield from binomial_scatter(args._replace(counts=tuple(chunk.count for chunk in chunks)))
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    mine, theirs = _part_of(rank, world_size, root), _part_of(right, world_size, root)
    for step in range(world_size - 1):
        out, come = (rank - step) % world_size, (left - step) % world_size
        steps: list[Step] = []
        if out not in theirs:
            steps.append(Send(right, chunks[out]))
        if come not in mine:
            steps.append(Recv(left, chunks[come]))
        yield tuple(steps)


class _BlockMerge(NamedTuple):
    """Two blocks of ranks become one; `giver` has the data of its block low ... high-1."""

    giver: int
    taker: int
    low: int
    high: int
    other_low: int


def _merges(rank: int, world_size: int, root: int) -> Iterator[_BlockMerge | None]:
    """Yield for each level the merge that a rank takes part in, or None."""
    for level in range((world_size - 1).bit_length()):
        span = 1 << level
        low = rank & -(2 * span)
        middle, high = low + span, min(low + 2 * span, world_size)
        if middle >= world_size:
            yield None
            continue
        left = root if low <= root < middle else low
        right = root if middle <= root < high else middle
        if rank not in (left, right):
            yield None
        elif right == root:
            yield _BlockMerge(left, right, low, middle, middle)
        else:
            yield _BlockMerge(right, left, middle, high, low)


def _part_of(rank: int, world_size: int, root: int) -> range:
    """Return the chunks that a rank holds after a binomial scatter."""
    for merge in _merges(rank, world_size, root):
        if merge is not None and merge.giver == rank:
            return range(merge.low, merge.high)
    return range(world_size)


def binomial_all_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a tree all-reduce for one rank: reduce to rank 0, then broadcast.

    Cost: 2 ceil(log2 n) rounds; 2(n-1) messages of the whole vector in all; no scratch.
    Order: the tree T(0, n) of `syncvar.algorithms.reproducible.tree_order`. Bytes are equal on
        every rank.
    Source: Thakur, Rabenseifner and Gropp 2005, sections 4.2 and 4.4; figure:
        tests/golden/tree_5.txt.
    """
    args = args._replace(root=0)
    yield from binomial_reduce(args)
    yield from binomial_broadcast(args)
