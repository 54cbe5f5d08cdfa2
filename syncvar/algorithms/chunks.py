"""Cut a flat buffer into consecutive chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.schedule import Buffer, Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["PIECES", "consecutive_chunks", "even_chunks", "exchange_blocks"]

PIECES = 8
"""Pieces that follow each other through a pipeline. The same for every count: sizes never change who talks to whom."""


def consecutive_chunks(
    counts: Iterable[int], buffer: Buffer = Buffer.WORK, start: int = 0
) -> list[Chunk]:
    """Lay chunks of given sizes one after the other.

    Args:
        counts: Elements of each chunk, each >= 0.
        buffer: Where the chunks lie.
        start: First element of the first chunk.

    Returns:
        One chunk per count, in order; each starts where the one before stops.

    Cost: linear in the number of chunks.

    Example:
        >>> [(c.start, c.stop) for c in consecutive_chunks([2, 0, 3])]
        [(0, 2), (2, 2), (2, 5)]
    """
    chunks = []
    for count in counts:
        chunks.append(Chunk(start, start + count, buffer))
        start += count
    return chunks


def even_chunks(count: int, parts: int, buffer: Buffer = Buffer.WORK) -> list[Chunk]:
    """Cut `count` elements into `parts` consecutive chunks whose sizes differ by one at most.

    Args:
        count: Elements to cut, >= 0; may be smaller than `parts`.
        parts: Number of chunks, >= 1.
        buffer: Where the chunks lie.

    Returns:
        The chunks in order; the longer ones come first, and trailing ones may be empty.

    Cost: linear in `parts`.

    Example:
        >>> [c.count for c in even_chunks(7, 3)], [c.count for c in even_chunks(1, 3)]
        ([3, 2, 2], [1, 0, 0])
    """
    base, longer = divmod(count, parts)
    return consecutive_chunks([base + 1] * longer + [base] * (parts - longer), buffer)


def exchange_blocks(matrix: Sequence[Sequence[int]], rank: int) -> tuple[list[Chunk], list[Chunk]]:
    """Lay out the WORK buffer of an all-to-all: first what the rank sends, by destination, then what comes, by source.

    Args:
        matrix: matrix[s][d] elements go from rank s to rank d.
        rank: The rank whose WORK it is.

    Returns:
        The blocks for destinations 0 ... n-1, and the blocks from sources 0 ... n-1.

    Cost: linear in the number of ranks.

    Example:
        >>> outgoing, incoming = exchange_blocks([[1, 2], [0, 3]], 0)
        >>> [(c.start, c.stop) for c in (*outgoing, *incoming)]
        [(0, 1), (1, 3), (3, 4), (4, 4)]
    """
    world_size = len(matrix)
    blocks = consecutive_chunks([*matrix[rank], *(row[rank] for row in matrix)])
    return blocks[:world_size], blocks[world_size:]
