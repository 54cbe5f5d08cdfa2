"""Recursive doubling and halving: in round k partners are 2**k apart.

Doubling takes the fewest rounds and sends the whole vector in each; halving (Rabenseifner) also
sends few bytes. All sums are those of aligned blocks of 1, 2, 4, ... ranks, the subtrees of
`syncvar.algorithms.reproducible_tree.tree_order`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.schedule import (
    Buffer,
    Chunk,
    Copy,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    consecutive_chunks,
    even_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.algorithms.schedule import Round, ScheduleArgs, Step


class _Folding(NamedTuple):
    """The folding of a group onto a power of two of ranks.

    With n = P + f, P the largest power of two up to n, ranks 2i and 2i+1 fold for i < f. The odd
    rank sends its vector to the even one, waits, and receives the result. The other P ranks keep
    their order, so neighbours stay neighbours.

    Example:
        >>> folding = _Folding.of(5)
        >>> folding.levels, [folding.number(rank) for rank in range(5)]
        (2, [0, None, 1, 2, 3])
        >>> [folding.rank(number) for number in range(4)]
        [0, 2, 3, 4]
    """

    levels: int  # log2 of P
    folded: int  # pairs that fold

    @classmethod
    def of(cls, world_size: int) -> _Folding:
        """Return the folding of `world_size` ranks."""
        levels = world_size.bit_length() - 1
        return cls(levels, world_size - (1 << levels))

    def number(self, rank: int) -> int | None:
        """Return the number of an active rank, or None if it waits."""
        if rank >= 2 * self.folded:
            return rank - self.folded
        return None if rank % 2 else rank // 2

    def rank(self, number: int) -> int:
        """Return the rank with a number."""
        return 2 * number if number < self.folded else number + self.folded

    def partner(self, rank: int) -> int | None:
        """Return the rank that waits for an active rank, or None."""
        return rank + 1 if rank < 2 * self.folded else None


def doubling_all_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a recursive-doubling all-reduce for one rank.

    Partners exchange their sums and reduce both. By the borrow rule each round reduces in a place
    of its own. Ranks beyond a power of two fold.

    Cost: floor(log2 n) rounds, 2 more if n is no power of two; each active rank sends `count`
        elements in each round, and makes as many reductions; scratch floor(log2 n) count.
    Order: the tree T over the active ranks, with folded pairs as one: T(0, n) if n is a power of
        two. Bytes are equal on every rank.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.5 (recursive doubling); figure:
        tests/golden/doubling_5.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    if world_size == 1:
        return
    folding = _Folding.of(world_size)
    work = Chunk(0, count)
    number, partner = folding.number(rank), folding.partner(rank)
    if number is None:
        yield (Send(rank - 1, work),)
        yield from [()] * folding.levels
        yield (Recv(rank - 1, work),)
        return
    sums = consecutive_chunks([count] * folding.levels, Buffer.SCRATCH)[::-1]
    fold = () if partner is None else (RecvReduce(partner, work, incoming_left=False),)
    yield (*fold, Copy(work, sums[0]))
    for level, held in enumerate(sums):
        peer = folding.rank(number ^ (1 << level))
        if level == folding.levels - 1:
            yield (Send(peer, held), RecvReduce(peer, work, incoming_left=peer < rank))
            continue
        wider = sums[level + 1]
        steps: list[Step] = [
            Send(peer, held),
            Recv(peer, wider),
            Reduce(held, wider, source_left=rank < peer),
        ]
        if level == folding.levels - 2:
            steps.append(Copy(wider, work))
        yield tuple(steps)
    if folding.folded:
        yield () if partner is None else (Send(partner, work),)


def halving_all_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of Rabenseifner's all-reduce for one rank.

    Reduce-scatter: partners are 1, 2, 4, ... apart; each sends the half that the other keeps and
    reduces its own half. All-gather: the same partners in reverse order return the complete halves.
    Ranks beyond a power of two fold.

    Cost: 2 floor(log2 n) rounds, 2 more if n is no power of two. With P the largest power of two <=
        n each active rank sends 2(P-1)/P of the buffer, and reduces (P-1)/P of it; folding sends it
        whole; no scratch.
    Order: the tree T over the active ranks, with folded pairs as one: T(0, n) if n is a power of
        two. Bytes are equal on every rank.
    Source: Rabenseifner 2004, "Optimization of collective reduction operations", section 3; Thakur,
        Rabenseifner and Gropp 2005, section 4.5; figure: tests/golden/halving_5.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    if world_size == 1:
        return
    folding = _Folding.of(world_size)
    work = Chunk(0, count)
    number, partner = folding.number(rank), folding.partner(rank)
    if number is None:
        yield (Send(rank - 1, work),)
        yield from [()] * (2 * folding.levels)
        yield (Recv(rank - 1, work),)
        return
    if folding.folded:
        yield () if partner is None else (RecvReduce(partner, work, incoming_left=False),)
    chunks = even_chunks(count, 1 << folding.levels)
    halvings: list[tuple[int, Chunk, Chunk]] = []
    low, high = 0, len(chunks)
    for level in range(folding.levels):
        peer = folding.rank(number ^ (1 << level))
        middle = (low + high) // 2
        lower = Chunk(chunks[low].start, chunks[middle - 1].stop)
        upper = Chunk(chunks[middle].start, chunks[high - 1].stop)
        own_half, sent_half = (lower, upper) if rank < peer else (upper, lower)
        low, high = (low, middle) if rank < peer else (middle, high)
        halvings.append((peer, own_half, sent_half))
        yield (Send(peer, sent_half), RecvReduce(peer, own_half, incoming_left=peer < rank))
    for peer, own_half, sent_half in reversed(halvings):
        yield (Send(peer, own_half), Recv(peer, sent_half))
    if folding.folded:
        yield () if partner is None else (Send(partner, work),)


def doubling_all_gather(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a recursive-doubling all-gather for one rank.

    Cost: log2 n rounds and as many messages per rank; (n-1) blocks sent per rank; no scratch and no
        copies.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.1; figure:
        tests/golden/doubling_all_gather_4.txt.
    """
    rank, world_size, counts = args.rank, args.world_size, args.counts
    blocks = consecutive_chunks(counts)
    for level in range(world_size.bit_length() - 1):
        span = 1 << level
        peer = rank ^ span
        own, other = (
            Chunk(blocks[low].start, blocks[low + span - 1].stop)
            for low in (rank & -span, peer & -span)
        )
        yield (Send(peer, own), Recv(peer, other))


def doubling_scan(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a recursive-doubling inclusive scan for one rank.

    In round k a rank whose bit k is set receives the sum of the aligned block of 2**k ranks to its
    left. It combines this sum with its prefix. A rank computes sums of wider blocks only if a
    higher rank needs them.

    Cost: ceil(log2 n) rounds; each rank sends the vector once per round at most, and makes two
        reductions; scratch ceil(log2 n) count at most.
    Order: T(0, r+1) at rank r.
    Source: Kruskal, Rudolph and Snir 1985, "The power of parallel prefix"; the recursive doubling
        of MPICH's scan, without unused block sums; figure: tests/golden/doubling_scan_5.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    return _prefix(rank, world_size, Chunk(0, count), inclusive=True)


def doubling_exscan(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a recursive-doubling exclusive scan for one rank.

    Cost: as `doubling_scan`, with one reduction less.
    Order: T(0, r) at rank r; the WORK of rank 0 stays unchanged.
    Source: as `doubling_scan`; figure: tests/golden/doubling_exscan_5.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    return _prefix(rank, world_size, Chunk(0, count), inclusive=False)


def _prefix(rank: int, world_size: int, work: Chunk, *, inclusive: bool) -> Iterator[Round]:
    levels = (world_size - 1).bit_length()
    room = consecutive_chunks([work.count] * (levels + 1), Buffer.SCRATCH)
    # The sum of the aligned block of 2**level ranks around this one, in a place that is not written
    # after it was sent. WORK is such a place when the prefix is complete, at rank 0 from the start.
    block = work
    if world_size > 2:
        if rank and _is_needed(rank, 0, world_size):
            later = [
                level for level in range(1, levels) if not (inclusive and rank + 1 == 1 << level)
            ]
            block = room.pop(any(_is_needed(rank, level, world_size) for level in later))
            yield (Copy(work, block),)
        else:
            yield ()
    is_empty = not inclusive
    for level in range(levels):
        span = 1 << level
        peer = rank ^ span
        widens = _is_needed(rank, level + 1, world_size)
        steps: list[Step] = []
        if rank < peer < world_size:
            steps.append(Send(peer, block))
            if widens:
                wider = room.pop(0)
                steps += [Recv(peer, wider), Reduce(block, wider, source_left=True)]
                block = wider
        elif peer < rank:
            if _is_needed(peer, level + 1, world_size):
                steps.append(Send(peer, block))
            if widens and inclusive and rank + 1 == 2 * span:
                steps.append(RecvReduce(peer, work, incoming_left=True))
                block = work
            elif widens:
                wider = room.pop(0)
                prefix = Copy(wider, work) if is_empty else Reduce(wider, work, source_left=True)
                steps += [Recv(peer, wider), prefix, Reduce(block, wider, source_left=False)]
                block = wider
            else:
                receive = Recv(peer, work)
                steps.append(receive if is_empty else RecvReduce(peer, work, incoming_left=True))
            is_empty = False
        yield tuple(steps)


@lru_cache(maxsize=4096)
def _is_needed(rank: int, level: int, world_size: int) -> bool:
    """Return whether a rank needs the sum of the aligned block of 2**level ranks around it.

    It does if it sends the sum to a higher rank, or if it or its lower partner widens it.
    """
    span = 1 << level
    if span >= world_size:
        return False
    if rank & span:
        lower = rank - span
        return _is_needed(lower, level + 1, world_size) or _is_needed(rank, level + 1, world_size)
    return rank + span < world_size or _is_needed(rank, level + 1, world_size)
