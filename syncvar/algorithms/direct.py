"""Direct algorithms: every rank exchanges with every other in one round.

Fewest rounds possible, but the elements sent grow with the ranks: for small vectors on few ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.reproducible_tree import tree_order, tree_steps
from syncvar.algorithms.schedule import (
    Buffer,
    Chunk,
    Copy,
    Recv,
    Reduce,
    Send,
    consecutive_chunks,
    even_chunks,
    exchange_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar.algorithms.schedule import Round, ScheduleArgs, Step


def direct_all_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a direct all-reduce for one rank.

    Each rank sends a copy of its vector to all others and reduces all vectors by the tree T(0, n).
    The copy makes one exchange enough: the result overwrites WORK in the round of the sends, before
    the rank can know that its vector has arrived.

    Cost: 1 round with transfers; n-1 messages and (n-1) count elements sent per rank; n-1
        reductions and one copy of the vector (two on ranks above 0); scratch n count.
    Order: T(0, n) for every element, as the reproducible algorithm. Bytes are equal on every rank.
    Source: the "linear" all-to-all exchange; figure: tests/golden/direct_3.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
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
    held = [work if other == rank else slots[other] for other in range(world_size)]
    order = tree_order(0, world_size)
    steps += [Reduce(held[right], held[left], source_left=False) for left, right in order]
    if rank > 0:
        steps.append(Copy(held[0], work))
    yield tuple(steps)


def direct_all_gather(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the one round of a direct all-gather for one rank.

    Cost: 1 round, n-1 messages and (n-1) counts[rank] elements sent per rank; no scratch.
    Source: the "linear" all-to-all exchange; figure: tests/golden/direct_all_gather_3.txt.
    """
    rank, world_size, counts = args.rank, args.world_size, args.counts
    if world_size == 1:
        return
    blocks = consecutive_chunks(counts)
    steps: list[Step] = []
    for distance in range(1, world_size):
        source = (rank - distance) % world_size
        steps.append(Send((rank + distance) % world_size, blocks[rank]))
        steps.append(Recv(source, blocks[source]))
    yield tuple(steps)


def direct_broadcast(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the one round of a direct broadcast for one rank.

    Cost: 1 round; the root sends n-1 messages of `count` elements, which shared memory publishes
        once; no scratch.
    Source: the "linear" broadcast; figure: tests/golden/direct_broadcast_3.txt.
    """
    rank, world_size, count, root = args.rank, args.world_size, args.count, args.root
    if world_size == 1:
        return
    work = Chunk(0, count)
    if rank != root:
        yield (Recv(root, work),)
        return
    yield tuple(Send((root + distance) % world_size, work) for distance in range(1, world_size))


def direct_barrier(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the one round of a direct barrier for one rank.

    Cost: 1 round, n-1 messages per rank, no elements; no scratch.
    Order: nothing is combined; every rank ends after every rank has begun.
    Source: the "linear" barrier; figure: tests/golden/direct_barrier_3.txt.
    """
    rank, world_size = args.rank, args.world_size
    nothing = Chunk(0, 0)
    steps: list[Step] = []
    for distance in range(1, world_size):
        target, source = (rank + distance) % world_size, (rank - distance) % world_size
        steps += [Send(target, nothing), Recv(source, nothing)]
    if steps:
        yield tuple(steps)


def direct_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the one round of a direct reduction for one rank.

    Cost: 1 round; every other rank sends its vector once; n-1 reductions of the whole vector at the
        root; scratch (n-1) count there.
    Order: T(0, n) for every element.
    Source: the "linear" reduction; figure: tests/golden/direct_reduce_3.txt.
    """
    rank, world_size, count, root = args.rank, args.world_size, args.count, args.root
    if world_size == 1:
        return
    work = Chunk(0, count)
    if rank != root:
        yield (Send(root, work),)
        return
    places = consecutive_chunks([count] * (world_size - 1), Buffer.SCRATCH)
    places.insert(root, work)
    steps: list[Step] = []
    for distance in range(1, world_size):
        source = (root - distance) % world_size
        steps.append(Recv(source, places[source]))
    yield (*steps, *tree_steps(places, work))


def direct_gather(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the one round of a direct gather for one rank.

    Cost: 1 round; every other rank sends its block once; no scratch.
    Source: the "linear" gather; figure: tests/golden/direct_gather_3.txt.
    """
    rank, world_size, counts, root = args.rank, args.world_size, args.counts, args.root
    if world_size == 1:
        return
    blocks = consecutive_chunks(counts)
    if rank != root:
        yield (Send(root, blocks[rank]),)
        return
    others = [(root - distance) % world_size for distance in range(1, world_size)]
    yield tuple(Recv(source, blocks[source]) for source in others)


def direct_scatter(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the one round of a direct scatter for one rank.

    Cost: 1 round; the root sends n-1 messages, every block but its own once; no scratch.
    Source: the "linear" scatter; figure: tests/golden/direct_scatter_3.txt.
    """
    rank, world_size, counts, root = args.rank, args.world_size, args.counts, args.root
    if world_size == 1:
        return
    blocks = consecutive_chunks(counts)
    if rank != root:
        yield (Recv(root, blocks[rank]),)
        return
    others = [(root + distance) % world_size for distance in range(1, world_size)]
    yield tuple(Send(target, blocks[target]) for target in others)


def direct_reduce_scatter(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the one round of a direct reduce-scatter for one rank.

    Rank c reduces block c by the tree. WORK holds the whole vector, and outside the own block it
    stays unchanged.

    Cost: 1 round, n-1 messages per rank; each rank sends every block but its own; n-1 reductions of
        the own block; scratch n-1 blocks.
    Order: T(0, n) for every element.
    Source: the first half of `owners_all_reduce`; figure:
        tests/golden/direct_reduce_scatter_3.txt.
    """
    rank, world_size, counts = args.rank, args.world_size, args.counts
    if world_size == 1:
        return
    blocks = consecutive_chunks(counts)
    own = blocks[rank]
    # The own contribution stays in WORK, and is never sent.
    places = consecutive_chunks([own.count] * (world_size - 1), Buffer.SCRATCH)
    places.insert(rank, own)
    steps: list[Step] = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        steps += [Send(target, blocks[target]), Recv(source, places[source])]
    yield (*steps, *tree_steps(places, own))


def direct_all_to_all(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the one round of a direct all-to-all for one rank.

    Cost: 1 round, n-1 messages per rank, every block but the own sent once; no scratch.
    Source: the "linear" all-to-all exchange; figure: tests/golden/direct_all_to_all_3.txt.
    """
    rank, world_size, matrix = args.rank, args.world_size, args.matrix
    outgoing, incoming = exchange_blocks(matrix, rank)
    steps: list[Step] = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        steps += [Send(target, outgoing[target]), Recv(source, incoming[source])]
    yield (*steps, Copy(outgoing[rank], incoming[rank]))


def direct_scan(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a direct inclusive scan: each rank reduces all lower ranks' vectors.

    Cost: 1 round with transfers; rank r sends its vector n-1-r times and makes r reductions of it;
        scratch (r+1) count at most.
    Order: T(0, r+1) at rank r.
    Source: the "linear" all-to-all exchange; figure: tests/golden/direct_scan_3.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    if world_size == 1:
        return
    work = Chunk(0, count)
    places = [*consecutive_chunks([count] * rank, Buffer.SCRATCH), work]
    yield from _send_up(rank, world_size, work, places[:rank], tuple(tree_steps(places, work)))


def direct_exscan(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a direct exclusive scan: each rank reduces all lower ranks' vectors.

    Cost: 1 round with transfers; rank r sends its vector n-1-r times and makes r-1 reductions of
        it; scratch r count at most.
    Order: T(0, r) at rank r; the WORK of rank 0 stays unchanged.
    Source: the "linear" all-to-all exchange; figure: tests/golden/direct_exscan_3.txt.
    """
    rank, world_size, count = args.rank, args.world_size, args.count
    if world_size == 1:
        return
    work = Chunk(0, count)
    # What comes from rank 0 is the leftmost operand of every sum: it lands where the sum is wanted.
    places = [work, *consecutive_chunks([count] * (rank - 1), Buffer.SCRATCH)][:rank]
    yield from _send_up(rank, world_size, work, places, tuple(tree_steps(places, work)))


def _send_up(
    rank: int, world_size: int, work: Chunk, places: Sequence[Chunk], local: tuple[Step, ...]
) -> Iterator[Round]:
    """Yield the rounds: send to all higher ranks, receive from all lower ones, then `local`."""
    mine = work
    if 0 < rank < world_size - 1:
        end = max((place.stop for place in places if place.buffer == Buffer.SCRATCH), default=0)
        mine = Chunk(end, end + work.count, Buffer.SCRATCH)
    if world_size > 2:
        yield () if mine is work else (Copy(work, mine),)
    sends = [Send(target, mine) for target in range(rank + 1, world_size)]
    receives = [Recv(source, places[source]) for source in reversed(range(rank))]
    yield (*sends, *receives, *local)


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
