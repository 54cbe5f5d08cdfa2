"""All-to-all: each rank gives every rank a part of its own, and gets one from each."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives._headers import BYTES, Record, exchange
from syncvar.collectives.all_gather import gather_flat
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.scatter import cut
from syncvar.errors import MismatchError
from syncvar.runtime.group import Request, fingerprint
from syncvar.runtime.operation import Stage
from syncvar.wire import DTYPE_NAMES, dtype_index, pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.group import Communicator

__all__ = ["all_to_all"]


def all_to_all(
    parts: Any,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
) -> Any:
    """Give part d to rank d, and get from each rank the part it has for this one.

    Args:
        parts: A list of one array for each rank, of one dtype (the same on every rank) and any shapes; or one array, which
            is cut along axis 0, first parts longer.
        group: Ranks that take part; None means the world.
        async_op: Return a `Work` at once. The parts are taken when the call is made.
        timeout: Seconds; None means the job's default.
        algorithm: Force one of `syncvar plan all_to_all`; the same on every rank.

    Returns:
        A list of new arrays, one from each rank, in rank order, in the shapes in which they were given.

    Raises:
        ConfigError: A wrong argument; the other ranks raise MismatchError and the group stays usable.
        MismatchError: The dtypes differ, or the ranks do not make the same call.
        PeerLost: A rank is gone.
        DeadlineExceeded: The call did not finish in time.

    Cost: an exchange of the shapes, then n-1 rounds over links, one in shared memory.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.all_to_all([np.arange(3)])
        [array([0, 1, 2])]
    """
    communicator = communicator_of(group)

    def check() -> Request:
        mine = cut(parts, communicator.size, "all_to_all")
        if async_op:
            mine = [part.copy() for part in mine]
        packed = pack_object([dtype_index(mine[0].dtype), [list(part.shape) for part in mine]])

        def body() -> Generator[Stage, None, list[NDArray[Any]]]:
            records = yield from exchange(communicator, Record(BYTES, nbytes=len(packed)))
            lengths = tuple(record.nbytes for record in records)
            flat = (yield from gather_flat(communicator, np.frombuffer(packed, np.uint8), lengths)).tobytes()
            ends = list(accumulate(lengths))
            told = [unpack_object(flat[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
            if any(index != told[0][0] for index, _ in told):
                table = {communicator.members[rank]: f"brings {DTYPE_NAMES[index]}" for rank, (index, _) in enumerate(told)}
                raise MismatchError("all_to_all: the parts must have one dtype on all ranks", table)
            return (yield from _exchanged(communicator, mine, [shapes for _, shapes in told], algorithm))

        what = f"all_to_all({mine[0].dtype.name}, {sum(part.nbytes for part in mine)} bytes)"
        return Request(what, fingerprint("all_to_all", algorithm), body())

    return communicator.perform("all_to_all", check, timeout, async_op=async_op)


def _exchanged(
    communicator: Communicator, mine: list[NDArray[Any]], shapes: list[list[list[int]]], algorithm: str | None
) -> Generator[Stage, None, list[NDArray[Any]]]:
    size, rank = communicator.size, communicator.member_rank
    matrix = tuple(tuple(prod(shape) for shape in row) for row in shapes)
    sent, received = matrix[rank], tuple(row[rank] for row in matrix)
    work = np.empty(sum(sent) + sum(received), mine[0].dtype)
    start = 0
    for part in mine:
        work[start : start + part.size] = part.reshape(-1)
        start += part.size
    yield Stage(communicator.plan("all_to_all", matrix, work.itemsize, algorithm=algorithm), work)
    results = []
    for source in range(size):
        stop = start + received[source]
        results.append(work[start:stop].reshape(shapes[source][rank]).copy())
        start = stop
    return results
