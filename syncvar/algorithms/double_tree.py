"""Two binary trees at once: a rank with children in one is a leaf in the other.

Each tree carries half of the vector in pieces, so all ranks send about as much. The edges have two
colours, such that no rank has two outgoing or two incoming edges of one colour. Edges of a colour
are active in every second round. So a rank sends at most one message and receives at most one in a
round.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from syncvar.algorithms.chunks import PIECES, even_chunks
from syncvar.algorithms.schedule import Recv, RecvReduce, Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.algorithms.schedule import Chunk, Round, ScheduleArgs, Step


class _Arc(NamedTuple):
    """One edge of one of the two trees.

    The root is position 0, the others are numbered in rank order from 1.

    Args:
        tree: 0 or 1.
        parent: Position.
        child: Position.
        first: Round in which a broadcast sends the first piece; the others follow two rounds apart.
    """

    tree: int
    parent: int
    child: int
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
