"""Recursive halving, then doubling: the all-reduce with few rounds and few bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.chunks import even_chunks
from syncvar.algorithms.power_of_two_folding import Folding
from syncvar.algorithms.schedule import Chunk, Recv, RecvReduce, Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.algorithms.schedule import Round, ScheduleArgs


def halving_all_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of Rabenseifner's all-reduce for one rank.

    Reduce-scatter: partners are 1, 2, 4, ... apart; each sends the half that the other keeps and
    sums its own half. All-gather: the same partners in reverse order give the halves back, now
    complete. Ranks beyond a power of two fold (`syncvar.algorithms.power_of_two_folding`).

    Cost: 2 floor(log2 n) rounds, 2 more if n is no power of two; with P the largest power of two <=
        n each rank that goes on sends 2(P-1)/P of the buffer, and reduces (P-1)/P of it; folding
        sends it whole; no scratch.

    Order: the tree T over the ranks that go on, with folded pairs as one: T(0, n) if n is a power
        of two. Bytes are equal on every rank.

    Source: Rabenseifner 2004, "Optimization of collective reduction operations", section 3; Thakur,
        Rabenseifner and Gropp 2005, section 4.5; figure: tests/golden/halving_5.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    if world_size == 1:
        return
    folding = Folding.of(world_size)
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
        lower, upper = (
            Chunk(chunks[a].start, chunks[b - 1].stop) for a, b in ((low, middle), (middle, high))
        )
        kept, given = (lower, upper) if rank < peer else (upper, lower)
        low, high = (low, middle) if rank < peer else (middle, high)
        halvings.append((peer, kept, given))
        yield (Send(peer, given), RecvReduce(peer, kept, incoming_left=peer < rank))
    for peer, kept, given in reversed(halvings):
        yield (Send(peer, kept), Recv(peer, given))
    if folding.folded:
        yield () if partner is None else (Send(partner, work),)
