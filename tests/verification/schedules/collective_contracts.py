"""Each collective as a contract: who holds what before, who must hold what after, who must have heard of whom.

A contribution is named by the rank it comes from and its element in the WORK of that rank. Only an all-to-all moves a
value to another element of WORK; elsewhere the element is not written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from syncvar.algorithms.schedule import Chunk, consecutive_chunks, exchange_blocks
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Expression: TypeAlias = "int | tuple[Expression, Expression]"
"""A rank's contribution, or (left operand, right operand)."""


@dataclass(frozen=True, slots=True)
class ExpectedRange:
    """What a range of WORK must hold in the end.

    Args:
        chunk: The range.
        contributors: The ranks whose contributions must be in each element, each exactly once.
        expression: The exact combination, where the contract demands one.
        origin: The element in the WORK of the contributors that the first element of the range comes from, where it
            is another one.
    """

    chunk: Chunk
    contributors: tuple[int, ...]
    expression: Expression | None = None
    origin: int | None = None


@dataclass(frozen=True, slots=True)
class Contract:
    """What a collective promises.

    Args:
        collective: Its name, for messages.
        world_size: Ranks of the group.
        work_counts: Elements of the WORK buffer of each rank.
        before: For each rank the range of WORK that holds its contribution at the start; the rest is undefined.
        after: For each rank what must be in WORK at the end. Ranks that want the same element of the same contributors
            must hold it as the same expression, which is what makes their bytes equal.
        heard_of: For each rank the ranks whose start must causally precede its end.
    """

    collective: str
    world_size: int
    work_counts: tuple[int, ...]
    before: tuple[Chunk, ...]
    after: tuple[tuple[ExpectedRange, ...], ...]
    heard_of: tuple[tuple[int, ...], ...]


def tree_expression(lo: int, hi: int) -> Expression:
    """Return the tree T(lo, hi) = T(lo, mid) + T(mid, hi), mid = lo + the largest power of two < hi - lo.

    Written down from the definition, and so a check of `syncvar.algorithms.reproducible_tree.tree_order`.

    Args:
        lo: First rank.
        hi: One past the last rank; hi > lo.

    Returns:
        Nested pairs.

    Example:
        >>> tree_expression(0, 5)
        (((0, 1), (2, 3)), 4)
    """
    if hi - lo == 1:
        return lo
    mid = lo + (1 << ((hi - lo - 1).bit_length() - 1))
    return tree_expression(lo, mid), tree_expression(mid, hi)


def all_reduce_contract(world_size: int, count: int, *, tree: bool = False) -> Contract:
    """Return the contract of an all-reduce: every rank ends with every contribution exactly once.

    Args:
        world_size: Ranks of the group.
        count: Elements of WORK.
        tree: Whether every element must be the tree T(0, world_size).

    Returns:
        The contract.
    """
    work = Chunk(0, count)
    everyone = tuple(range(world_size))
    wanted = ExpectedRange(work, everyone, tree_expression(0, world_size) if tree else None)
    return Contract(
        "all_reduce",
        world_size,
        (count,) * world_size,
        (work,) * world_size,
        ((wanted,),) * world_size,
        (everyone,) * world_size,
    )


def all_gather_contract(counts: Sequence[int]) -> Contract:
    """Return the contract of an all-gather: every rank ends with the block of every rank, in rank order.

    Args:
        counts: Elements of each rank's block; their number is the world size.

    Returns:
        The contract.
    """
    blocks = tuple(consecutive_chunks(counts))
    wanted = tuple(ExpectedRange(block, (rank,)) for rank, block in enumerate(blocks))
    world_size = len(blocks)
    return Contract(
        "all_gather",
        world_size,
        (sum(counts),) * world_size,
        blocks,
        (wanted,) * world_size,
        (tuple(range(world_size)),) * world_size,
    )


def broadcast_contract(world_size: int, count: int, root: int) -> Contract:
    """Return the contract of a broadcast: every rank ends with what the root holds, and has heard of the root.

    Args:
        world_size: Ranks of the group.
        count: Elements of WORK.
        root: The rank that holds the vector.

    Returns:
        The contract.
    """
    work = Chunk(0, count)
    before = tuple(work if rank == root else Chunk(0, 0) for rank in range(world_size))
    return Contract(
        "broadcast",
        world_size,
        (count,) * world_size,
        before,
        ((ExpectedRange(work, (root,)),),) * world_size,
        ((root,),) * world_size,
    )


def barrier_contract(world_size: int) -> Contract:
    """Return the contract of a barrier: every rank ends after every rank has begun.

    Args:
        world_size: Ranks of the group.

    Returns:
        The contract.
    """
    return Contract(
        "barrier",
        world_size,
        (0,) * world_size,
        (Chunk(0, 0),) * world_size,
        ((),) * world_size,
        (tuple(range(world_size)),) * world_size,
    )


def reduce_contract(world_size: int, count: int, root: int, *, tree: bool = False) -> Contract:
    """Return the contract of a reduction: the root ends with every contribution exactly once.

    Args:
        world_size: Ranks of the group.
        count: Elements of WORK.
        root: The rank that gets the result.
        tree: Whether every element must be the tree T(0, world_size).

    Returns:
        The contract.
    """
    work = Chunk(0, count)
    everyone = tuple(range(world_size))
    wanted = ExpectedRange(work, everyone, tree_expression(0, world_size) if tree else None)
    return Contract(
        "reduce",
        world_size,
        (count,) * world_size,
        (work,) * world_size,
        tuple((wanted,) if rank == root else () for rank in everyone),
        tuple(everyone if rank == root else () for rank in everyone),
    )


def gather_contract(counts: Sequence[int], root: int) -> Contract:
    """Return the contract of a gather: the root ends with the block of every rank, in rank order.

    Args:
        counts: Elements of each rank's block; their number is the world size.
        root: The rank that gets the blocks. The others keep their own.

    Returns:
        The contract.
    """
    blocks = tuple(consecutive_chunks(counts))
    world_size = len(blocks)
    everyone = tuple(range(world_size))
    wanted = tuple(ExpectedRange(block, (rank,)) for rank, block in enumerate(blocks))
    return Contract(
        "gather",
        world_size,
        (sum(counts),) * world_size,
        blocks,
        tuple(wanted if rank == root else (wanted[rank],) for rank in everyone),
        tuple(everyone if rank == root else () for rank in everyone),
    )


def scatter_contract(counts: Sequence[int], root: int) -> Contract:
    """Return the contract of a scatter: every rank ends with its block of what the root holds, in its place.

    Args:
        counts: Elements of each rank's block; their number is the world size.
        root: The rank that holds the concatenation.

    Returns:
        The contract.
    """
    blocks = tuple(consecutive_chunks(counts))
    world_size, total = len(blocks), sum(counts)
    return Contract(
        "scatter",
        world_size,
        (total,) * world_size,
        tuple(Chunk(0, total if rank == root else 0) for rank in range(world_size)),
        tuple((ExpectedRange(block, (root,)),) for block in blocks),
        ((root,),) * world_size,
    )


def reduce_scatter_contract(counts: Sequence[int], *, tree: bool = False) -> Contract:
    """Return the contract of a reduce-scatter: rank r ends with every contribution to block r exactly once.

    Args:
        counts: Elements of each rank's block; their number is the world size.
        tree: Whether every element must be the tree T(0, world_size).

    Returns:
        The contract.
    """
    blocks = tuple(consecutive_chunks(counts))
    world_size, total = len(blocks), sum(counts)
    everyone = tuple(range(world_size))
    expression = tree_expression(0, world_size) if tree else None
    return Contract(
        "reduce_scatter",
        world_size,
        (total,) * world_size,
        (Chunk(0, total),) * world_size,
        tuple((ExpectedRange(block, everyone, expression),) for block in blocks),
        (everyone,) * world_size,
    )


def all_to_all_contract(matrix: Sequence[Sequence[int]]) -> Contract:
    """Return the contract of an all-to-all: rank d ends with block d of every rank, in rank order.

    Args:
        matrix: matrix[s][d] elements go from rank s to rank d. WORK holds the blocks for destinations 0 ... n-1, then
            those from sources 0 ... n-1.

    Returns:
        The contract.
    """
    world_size = len(matrix)
    everyone = tuple(range(world_size))
    layouts = [exchange_blocks(matrix, rank) for rank in everyone]
    return Contract(
        "all_to_all",
        world_size,
        tuple(incoming[-1].stop for _, incoming in layouts),
        tuple(Chunk(0, outgoing[-1].stop) for outgoing, _ in layouts),
        tuple(
            tuple(
                ExpectedRange(block, (source,), origin=layouts[source][0][rank].start)
                for source, block in enumerate(layouts[rank][1])
            )
            for rank in everyone
        ),
        (everyone,) * world_size,
    )


def scan_contract(world_size: int, count: int, *, exclusive: bool = False) -> Contract:
    """Return the contract of a scan: rank r ends with the tree T(0, r+1), or T(0, r) if it is exclusive.

    The order is demanded of every algorithm: a scan has the same bytes whichever way it went. It is a tree, so the
    operands stand in rank order, and ranks that see the same prefix see the same bytes.

    Args:
        world_size: Ranks of the group.
        count: Elements of WORK.
        exclusive: Without the own contribution; rank 0 may end with anything.

    Returns:
        The contract.
    """
    work = Chunk(0, count)
    ends = [rank if exclusive else rank + 1 for rank in range(world_size)]
    return Contract(
        "exscan" if exclusive else "scan",
        world_size,
        (count,) * world_size,
        (work,) * world_size,
        tuple(
            (ExpectedRange(work, tuple(range(end)), tree_expression(0, end)),) if end else ()
            for end in ends
        ),
        tuple(tuple(range(end)) for end in ends),
    )


def contract_of(
    collective: str,
    world_size: int,
    *,
    count: int = 0,
    counts: Sequence[int] | None = None,
    root: int = 0,
    matrix: Sequence[Sequence[int]] | None = None,
    tree: bool = False,
) -> Contract:
    """Return the contract of a collective by name, with the arguments of `syncvar.algorithms.builders.build`.

    Args:
        collective: A key of `syncvar.algorithms.builders.ALGORITHMS`.
        world_size: Ranks of the group.
        count: Elements of WORK; of each rank's block for a collective of blocks without `counts`; of every block for
            an all-to-all without `matrix`.
        counts: Elements of each rank's block, where they are uneven.
        root: Root of a broadcast, reduction, gather or scatter.
        matrix: Elements that each rank sends to each, for an all-to-all of uneven blocks.
        tree: Whether a reduction must be the tree T(0, world_size); a scan always is a tree.

    Returns:
        The contract.

    Raises:
        ConfigError: There is no such collective.
    """
    blocks = [count] * world_size if counts is None else counts
    contracts: dict[str, Callable[[], Contract]] = {
        "all_reduce": lambda: all_reduce_contract(world_size, count, tree=tree),
        "all_gather": lambda: all_gather_contract(blocks),
        "header_exchange": lambda: all_gather_contract(blocks),
        "broadcast": lambda: broadcast_contract(world_size, count, root),
        "reduce": lambda: reduce_contract(world_size, count, root, tree=tree),
        "gather": lambda: gather_contract(blocks, root),
        "scatter": lambda: scatter_contract(blocks, root),
        "reduce_scatter": lambda: reduce_scatter_contract(blocks, tree=tree),
        "all_to_all": lambda: all_to_all_contract(
            [blocks] * world_size if matrix is None else matrix
        ),
        "scan": lambda: scan_contract(world_size, count),
        "exscan": lambda: scan_contract(world_size, count, exclusive=True),
        "barrier": lambda: barrier_contract(world_size),
    }
    if collective not in contracts:
        raise ConfigError(f"there is no contract for a collective named {collective!r}")
    return contracts[collective]()
