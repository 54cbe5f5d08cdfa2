"""A chain of ranks through which a vector is passed piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.algorithms.chunks import PIECES, even_chunks
from syncvar.algorithms.schedule import Recv, Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncvar.algorithms.schedule import Round, Step

__all__ = ["chain_broadcast"]


def chain_broadcast(rank: int, world_size: int, count: int, root: int) -> Iterator[Round]:
    """Yield the rounds of a pipelined chain broadcast for one rank: while a piece comes in, the one before goes out.

    Args:
        rank: The rank whose rounds are wanted, 0 <= rank < world_size.
        world_size: Ranks of the group, n >= 1.
        count: Elements of the WORK buffer; may be 0 or smaller than the number of pieces, s = `PIECES`.
        root: The rank that holds the vector, and begins the chain.

    Yields:
        n-2+s rounds of one Send and one Recv at most; none for a group of one.

    Cost: n-2+s rounds; every rank but the last sends the vector once, in s messages; no scratch.

    Order: nothing is combined.

    Source: the pipelined linear array, Chan, Heimlich, Purkayastha and van de Geijn 2007, section 5; figure:
        tests/golden/chain_3.txt.
    """
    if world_size == 1:
        return
    pieces = even_chunks(count, PIECES)
    position = (rank - root) % world_size
    for number in range(world_size - 2 + PIECES):
        out, come = number - position, number - position + 1
        steps: list[Step] = []
        if position < world_size - 1 and 0 <= out < PIECES:
            steps.append(Send((rank + 1) % world_size, pieces[out]))
        if position and 0 <= come < PIECES:
            steps.append(Recv((rank - 1) % world_size, pieces[come]))
        yield tuple(steps)
