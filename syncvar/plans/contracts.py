"""Each collective as a contract: who holds what before, who must hold what after, who must have heard of whom.

A contribution is named by the rank it comes from and the element of WORK it belongs to. No collective here moves a
value to another element of WORK, so the element is never written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from syncvar.errors import ConfigError
from syncvar.plans.chunks import consecutive_chunks
from syncvar.plans.model import Chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Contract",
    "Expression",
    "Wanted",
    "all_gather_contract",
    "all_reduce_contract",
    "barrier_contract",
    "broadcast_contract",
    "contract_of",
    "tree_expression",
]

Expression: TypeAlias = "int | tuple[Expression, Expression]"
"""A rank's contribution, or (left operand, right operand)."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a range of WORK must hold in the end.

    Args:
        chunk: The range.
        contributors: The ranks whose contributions must be in each element, each exactly once.
        expression: The exact combination, where the contract demands one.
    """

    chunk: Chunk
    contributors: tuple[int, ...]
    expression: Expression | None = None


@dataclass(frozen=True, slots=True)
class Contract:
    """What a collective promises.

    Args:
        collective: Its name, for messages.
        world_size: Ranks of the group.
        work_count: Elements of the WORK buffer, equal on every rank.
        before: For each rank the range of WORK that holds its contribution at the start; the rest is undefined.
        after: For each rank what must be in WORK at the end. Ranks that want the same element must hold it as the
            same expression, which is what makes their bytes equal.
        heard_of: The ranks whose start must causally precede the end of every rank.
    """

    collective: str
    world_size: int
    work_count: int
    before: tuple[Chunk, ...]
    after: tuple[tuple[Wanted, ...], ...]
    heard_of: tuple[int, ...]


def tree_expression(lo: int, hi: int) -> Expression:
    """Return the tree T(lo, hi) = T(lo, mid) + T(mid, hi), mid = lo + the largest power of two < hi - lo.

    Written down from the definition, and so a check of `syncvar.plans.reproducible.tree_order`.

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
    wanted = Wanted(work, everyone, tree_expression(0, world_size) if tree else None)
    return Contract(
        "all_reduce", world_size, count, (work,) * world_size, ((wanted,),) * world_size, everyone
    )


def all_gather_contract(counts: Sequence[int]) -> Contract:
    """Return the contract of an all-gather: every rank ends with the block of every rank, in rank order.

    Args:
        counts: Elements of each rank's block; their number is the world size.

    Returns:
        The contract.
    """
    blocks = tuple(consecutive_chunks(counts))
    wanted = tuple(Wanted(block, (rank,)) for rank, block in enumerate(blocks))
    world_size = len(blocks)
    return Contract(
        "all_gather", world_size, sum(counts), blocks, (wanted,) * world_size, tuple(range(world_size))
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
    return Contract("broadcast", world_size, count, before, ((Wanted(work, (root,)),),) * world_size, (root,))


def barrier_contract(world_size: int) -> Contract:
    """Return the contract of a barrier: every rank ends after every rank has begun.

    Args:
        world_size: Ranks of the group.

    Returns:
        The contract.
    """
    return Contract(
        "barrier", world_size, 0, (Chunk(0, 0),) * world_size, ((),) * world_size, tuple(range(world_size))
    )


def contract_of(
    collective: str,
    world_size: int,
    *,
    count: int = 0,
    counts: Sequence[int] | None = None,
    root: int = 0,
    tree: bool = False,
) -> Contract:
    """Return the contract of a collective by name, with the arguments of `syncvar.plans.select.build`.

    Args:
        collective: "all_reduce", "all_gather", "broadcast", "barrier" or "header_exchange".
        world_size: Ranks of the group.
        count: Elements of WORK; of each rank's block for an all-gather without `counts`.
        counts: Elements of each rank's block, for an all-gather of uneven blocks.
        root: Root of a broadcast.
        tree: Whether an all-reduce must be the tree T(0, world_size).

    Returns:
        The contract.

    Raises:
        ConfigError: There is no such collective.
    """
    if collective == "all_reduce":
        return all_reduce_contract(world_size, count, tree=tree)
    if collective in {"all_gather", "header_exchange"}:
        return all_gather_contract([count] * world_size if counts is None else counts)
    if collective == "broadcast":
        return broadcast_contract(world_size, count, root)
    if collective == "barrier":
        return barrier_contract(world_size)
    raise ConfigError(f"there is no contract for a collective named {collective!r}")
