"""Binomial trees and the double tree: the number of rounds grows with the logarithm of the ranks.

Every rank yields every round, empty where it has nothing to do, so that both ends of a transfer
count it as the same round. With rank 0 as root, the parent of a rank is that rank with its lowest
set bit cleared.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.schedule import (
    Chunk,
    Recv,
    RecvReduce,
    Send,
    consecutive_chunks,
    even_chunks,
)

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
    Order: the tree T(0, n) of `syncvar.algorithms.reproducible_tree.tree_order`, for any root.
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
    Order: the tree T(0, n) of `syncvar.algorithms.reproducible_tree.tree_order`. Bytes are equal on
        every rank.
    Source: Thakur, Rabenseifner and Gropp 2005, sections 4.2 and 4.4; figure:
        tests/golden/tree_5.txt.
    """
    args = args._replace(root=0)
    yield from binomial_reduce(args)
    yield from binomial_broadcast(args)


# -- two binary trees at once: a rank with children in one is a leaf in the other ------------------
#
# Each tree carries half of the vector in pieces, so all ranks send about as much. The edges have
# two colours, such that no rank has two outgoing or two incoming edges of one colour. Edges of a
# colour are active in every second round. So a rank sends at most one message and receives at most
# one in a round.

PIECES = 8
"""Pieces of a pipeline. Fixed, so that sizes never change which ranks exchange messages."""


class _Arc(NamedTuple):
    """One edge of one of the two trees.

    The root is position 0, the others are numbered in rank order from 1.
    """

    tree: int  # 0 or 1
    parent: int  # position
    child: int  # position
    # Round in which a broadcast sends the first piece; the others follow two rounds apart.
    first: int


def double_tree_broadcast(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a broadcast by two trees for one rank.

    Cost: 2s + 2 log2 n rounds at most; no rank sends more than the vector once; no scratch.
    Source: Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast,
        reduction and scan", sections 3 and 4; figure: tests/golden/double_tree_broadcast_4.txt.
    """
    rank, world_size, count, root = args.rank, args.world_size, args.count, args.root
    arcs = _arcs(world_size)
    pieces = even_chunks(count, 2 * PIECES)
    rounds: list[list[Step]] = [[] for _ in range(_length(arcs))]
    for arc in arcs:
        parent, child = _rank(arc.parent, root), _rank(arc.child, root)
        if rank in (parent, child):
            for number, piece in enumerate(_pieces_of(arc, pieces)):
                steps = rounds[arc.first + 2 * number]
                steps.append(Send(child, piece) if rank == parent else Recv(parent, piece))
    yield from map(tuple, rounds)


def double_tree_reduce(args: ScheduleArgs) -> Iterator[Round]:
    """Yield the rounds of a reduction by two trees for one rank: the broadcast backwards.

    The other ranks keep partial results.

    Cost: as `double_tree_broadcast`; every rank but the root sends the vector once; no scratch.
    Order: each half by its tree. A rank combines its own value with those of its children in the
        order of the rounds, the lower contributor on the left. Fixed for given n and root.
    Source: Sanders, Speck and Träff 2009, section 4; figure: tests/golden/double_tree_reduce_4.txt.
    """
    rank, world_size, count, root = args.rank, args.world_size, args.count, args.root
    arcs = _arcs(world_size)
    pieces = even_chunks(count, 2 * PIECES)
    length = _length(arcs)
    rounds: list[list[Step]] = [[] for _ in range(length)]
    # Backwards, an arc whose child is reached later comes earlier: the order in which a parent
    # hears of its children.
    places = range(world_size)
    lowest = {(tree, place): _rank(place, root) for tree in range(2) for place in places}
    for arc in sorted(arcs, key=lambda arc: arc.first, reverse=True):
        below, above = lowest[arc.tree, arc.child], lowest[arc.tree, arc.parent]
        lowest[arc.tree, arc.parent] = min(below, above)
        parent, child = _rank(arc.parent, root), _rank(arc.child, root)
        if rank in (parent, child):
            for number, piece in enumerate(_pieces_of(arc, pieces)):
                steps = rounds[length - 1 - arc.first - 2 * number]
                if rank == parent:
                    steps.append(RecvReduce(child, piece, below < above))
                else:
                    steps.append(Send(parent, piece))
    yield from map(tuple, rounds)


def _rank(position: int, root: int) -> int:
    """Return the rank at a position: the root at 0, then the others in rank order."""
    if position == 0:
        return root
    return position - 1 if position <= root else position


def _pieces_of(arc: _Arc, pieces: list[Chunk]) -> list[Chunk]:
    return pieces[arc.tree * PIECES : (arc.tree + 1) * PIECES]


def _length(arcs: tuple[_Arc, ...]) -> int:
    return max((arc.first + 2 * PIECES - 1 for arc in arcs), default=0)


@lru_cache(maxsize=64)
def _arcs(world_size: int) -> tuple[_Arc, ...]:
    """Return the edges of both trees, with their rounds.

    The first tree has the other ranks, numbered 1 ... m, in order; its leaves are the odd numbers.
    The second one is its mirror image for even m, and shifted by one for odd m. Either way its
    leaves are the even numbers, with one exception.
    """
    others = world_size - 1
    if others == 0:
        return ()
    links = []
    for tree in range(2):
        name = {0: 0}  # number in the first tree -> position
        for number in range(1, others + 1):
            shifted = number - 1 or others
            name[number] = (
                number if tree == 0 else others + 1 - number if others % 2 == 0 else shifted
            )
        # Parents come before their children, the root's own child first.
        numbers = [(0, 1 << (others.bit_length() - 1))]
        for parent, number in numbers:
            links.append((tree, name[parent], name[number]))
            numbers += [(number, child) for child in _children(number, others)]
    colours = _colours(links)
    reached = {(tree, 0): -1 for tree in range(2)}
    arcs = []
    for (tree, parent, child), colour in zip(links, colours, strict=True):
        first = reached[tree, parent] + 1
        first += (first + colour) % 2
        reached[tree, child] = first
        arcs.append(_Arc(tree, parent, child, first))
    return tuple(arcs)


def _children(number: int, others: int) -> Iterator[int]:
    """Yield the children of a number in the in-order binary tree of 1 ... others."""
    half = (number & -number) >> 1
    if half:
        yield number - half
    while half and number + half > others:
        half >>= 1
    if half:
        yield number + half


def _colours(links: list[tuple[int, int, int]]) -> list[int]:
    """Give each link 0 or 1, such that links with the same sender, or the same receiver, differ.

    No rank sends or receives over more than two links, so links that touch form paths and even
    cycles.
    """
    touching: dict[tuple[str, int], list[int]] = {}
    for index, (_, parent, child) in enumerate(links):
        touching.setdefault(("from", parent), []).append(index)
        touching.setdefault(("to", child), []).append(index)
    colours: dict[int, int] = {}
    for start in range(len(links)):
        colours.setdefault(start, 0)
        found = [start]
        for index in found:
            _, parent, child = links[index]
            for other in (*touching["from", parent], *touching["to", child]):
                if other not in colours:
                    colours[other] = 1 - colours[index]
                    found.append(other)
    return [colours[index] for index in range(len(links))]
