"""The reproducible all-reduce: one fixed tree over the ranks reduces every element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.chunks import consecutive_chunks, even_chunks
from syncvar.algorithms.ring import ring_all_gather
from syncvar.algorithms.schedule import Buffer, Recv, Reduce, Send

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar.algorithms.schedule import Chunk, Round, ScheduleArgs, Step


def tree_order(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Yield the combinations of the tree T(lo, hi), innermost first.

    T(lo, hi) = T(lo, mid) + T(mid, hi) with mid = lo + the largest power of two < hi - lo; T(lo,
    lo+1) is item lo. The subtrees that this makes are the aligned blocks of 1, 2, 4, ... items, so
    the tree is read off level by level.

    Cost: hi - lo - 1 pairs.

    Example:
        >>> list(tree_order(0, 5))
        [(0, 1), (2, 3), (0, 2), (0, 4)]
        >>> items = ["a", "b", "c", "d", "e"]
        >>> for target, source in tree_order(0, 5):
        ...     items[target] = f"({items[target]}+{items[source]})"
        >>> items[0]
        '(((a+b)+(c+d))+e)'
    """
    span = 1
    while span < hi - lo:
        for target in range(lo, hi - span, 2 * span):
            yield target, target + span
        span *= 2


def tree_steps(places: Sequence[Chunk], own: Chunk) -> Iterator[Step]:
    """Yield the local steps that sum by the tree T(0, len(places)), into the place that is `own`.

    Cost: len(places) - 1 reductions.

    Example:
        >>> from syncvar.algorithms.chunks import consecutive_chunks
        >>> from syncvar.algorithms.render import step_text
        >>> places = consecutive_chunks([1, 1, 1])
        >>> [step_text(step) for step in tree_steps(places, places[1])]
        ['w[1:2] = w[0:1] + w[1:2]', 'w[1:2] = w[1:2] + w[2:3]']
    """
    held = list(places)
    for left, right in tree_order(0, len(held)):
        if held[right] is own:
            yield Reduce(held[left], own, source_left=True)
            held[left] = own
        else:
            yield Reduce(held[right], held[left], source_left=False)


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
