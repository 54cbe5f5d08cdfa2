"""Chunks: cut a flat buffer into consecutive ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.schedule import Buffer, Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PIECES = 8
"""Pieces of a pipeline. Fixed, so that sizes never change which ranks exchange messages."""


def consecutive_chunks(
    counts: Iterable[int], buffer: Buffer = Buffer.WORK, start: int = 0
) -> list[Chunk]:
    """Return chunks of the given counts; each starts where the one before stops.

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
    """Cut `count` elements into consecutive chunks whose sizes differ by at most one.

    The longer chunks come first; trailing ones may be empty.

    Example:
        >>> [c.count for c in even_chunks(7, 3)], [c.count for c in even_chunks(1, 3)]
        ([3, 2, 2], [1, 0, 0])
    """
    base, longer = divmod(count, parts)
    return consecutive_chunks([base + 1] * longer + [base] * (parts - longer), buffer)


def exchange_blocks(matrix: Sequence[Sequence[int]], rank: int) -> tuple[list[Chunk], list[Chunk]]:
    """Return the WORK buffer of an all-to-all: blocks by destination, then blocks by source.

    Example:
        >>> outgoing, incoming = exchange_blocks([[1, 2], [0, 3]], 0)
        >>> [(c.start, c.stop) for c in (*outgoing, *incoming)]
        [(0, 1), (1, 3), (3, 4), (4, 4)]
    """
    world_size = len(matrix)
    blocks = consecutive_chunks([*matrix[rank], *(row[rank] for row in matrix)])
    return blocks[:world_size], blocks[world_size:]
