"""Collectives of plain Python objects, sent as data and never pickled.

Objects are None, bool, int, float, complex, str, bytes, date, time, datetime, timedelta, and lists, tuples, sets and dicts (plain,
OrderedDict, Counter) of these, of NumPy arrays, and of tensors of PyTorch and JAX, which come out as such.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives._arguments import checked_root
from syncvar.collectives._headers import exchange_bytes
from syncvar.collectives.all_gather import gather_flat
from syncvar.collectives.broadcast import broadcast_bytes
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.scatter import scatter_flat
from syncvar.errors import ConfigError
from syncvar.runtime.group import Request, fingerprint
from syncvar.wire import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from syncvar.collectives.groups import Group
    from syncvar.runtime.group import Communicator
    from syncvar.runtime.operation import Stage

__all__ = ["all_gather_object", "broadcast_object", "gather_bytes", "gather_object", "scatter_object"]

_LENGTH = struct.Struct("<Q")
_AT_ONCE = 248  # bytes of an object that travel with its length; with it four cache lines


def all_gather_object(o: Any, *, group: Group | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Give every rank the objects of all ranks, in rank order.

    Args:
        o: Any object of the kinds named in this module.
        group: Ranks that take part; None means the world.
        timeout: Seconds; None means the job's default.
        async_op: Return a `Work` at once.

    Raises:
        ConfigError: The object cannot travel; the others raise MismatchError.

    Cost: a header round, which holds small objects; for larger ones n-1 rounds of the packed objects.

    Example:
        >>> import syncvar as sv
        >>> sv.all_gather_object({"rank": sv.rank()})
        [{'rank': 0}]
    """
    communicator = communicator_of(group)

    def check() -> Request:
        mine = pack_object(o)

        def body() -> Generator[Stage, None, list[Any]]:
            return _placed(communicator, (yield from gather_bytes(communicator, mine)))

        return Request("all_gather_object", fingerprint("all_gather_object"), body())

    return communicator.perform("all_gather_object", check, timeout, async_op=async_op)


def _placed(communicator: Communicator, data: list[bytes]) -> list[Any]:
    """Return the objects of all ranks; None for ranks that have left a block of sv.uneven."""
    found = [unpack_object(one) for one in data]
    if len(found) == len(communicator.whole):
        return found
    known = dict(zip(communicator.present, found, strict=True))
    return [known.get(rank) for rank in range(len(communicator.whole))]


def gather_objects(
    communicator: Communicator, name: str, make: Callable[[], Any], timeout: float | None, *, async_op: bool = False
) -> Any:
    """Gather what `make` returns; what it raises is the caller's error, of which the group is told."""

    def check() -> Request:
        mine = pack_object(make())

        def body() -> Generator[Stage, None, list[Any]]:
            return [unpack_object(data) for data in (yield from gather_bytes(communicator, mine))]

        return Request(name, fingerprint(name), body())

    return communicator.perform(name, check, timeout, async_op=async_op)


def broadcast_object(o: Any, root: int = 0, *, group: Group | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Give every rank the root's object; what other ranks pass is not looked at.

    Args:
        o: On the root, any object of the kinds named in this module.
        root: Rank of the group whose object is sent.
        group: Ranks that take part; None means the world.
        timeout: Seconds; None means the job's default.
        async_op: Return a `Work` at once.

    Raises:
        ConfigError: The object cannot travel; the others raise MismatchError.

    Cost: a header round, then ceil(log2 n) rounds of the packed object.

    Example:
        >>> import syncvar as sv
        >>> sv.broadcast_object([1, "two"])
        [1, 'two']
    """
    communicator = communicator_of(group)

    def check() -> Request:
        source = checked_root(root, communicator)
        mine = pack_object(o) if communicator.member_rank == source else b""

        def body() -> Generator[Stage, None, Any]:
            return unpack_object((yield from broadcast_bytes(communicator, mine, source)))

        return Request(f"broadcast_object(root {source})", fingerprint("broadcast_object", source), body())

    return communicator.perform("broadcast_object", check, timeout, async_op=async_op)


def gather_object(
    o: Any, root: int = 0, *, group: Group | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Give the root the objects of all ranks, in rank order; other ranks get None.

    Args:
        o: Any object of the kinds named in this module.
        root: Rank of the group that gets the list.
        group: Ranks that take part; None means the world.
        timeout: Seconds; None means the job's default.
        async_op: Return a `Work` at once.

    Raises:
        ConfigError: The object cannot travel; the others raise MismatchError.

    Cost: a header round, which holds small objects; larger ones go once to the root.

    Example:
        >>> import syncvar as sv
        >>> sv.gather_object("me")
        ['me']
    """
    communicator = communicator_of(group)

    def check() -> Request:
        target = checked_root(root, communicator)
        mine = pack_object(o)

        def body() -> Generator[Stage, None, list[Any] | None]:
            everything = yield from gather_bytes(communicator, mine, target)
            return _placed(communicator, everything) if communicator.member_rank == target else None

        return Request(f"gather_object(root {target})", fingerprint("gather_object", target), body())

    return communicator.perform("gather_object", check, timeout, async_op=async_op)


def scatter_object(
    objects: list[Any] | None, root: int = 0, *, group: Group | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Give rank r the r-th object of the root's list; what other ranks pass is not looked at.

    Args:
        objects: On the root, a list of as many objects as the group has ranks.
        root: Rank of the group that has the list.
        group: Ranks that take part; None means the world.
        timeout: Seconds; None means the job's default.
        async_op: Return a `Work` at once.

    Raises:
        ConfigError: The list is too long or too short, or an object cannot travel; the others raise MismatchError.

    Cost: a broadcast of the lengths, then each packed object once.

    Example:
        >>> import syncvar as sv
        >>> sv.scatter_object(["for rank 0"])
        'for rank 0'
    """
    communicator = communicator_of(group)

    def check() -> Request:
        source = checked_root(root, communicator)
        packed: list[bytes] = []
        if communicator.member_rank == source:
            count = len(communicator.whole)
            if not isinstance(objects, list | tuple) or len(objects) != count:
                given = f"{len(objects)} objects" if isinstance(objects, list | tuple) else type(objects).__name__
                raise ConfigError(f"scatter_object needs a list of {count} objects on the root, not {given}")
            packed = [pack_object(objects[rank]) for rank in communicator.present]

        def body() -> Generator[Stage, None, Any]:
            lengths = pack_object([len(data) for data in packed])
            counts = tuple(unpack_object((yield from broadcast_bytes(communicator, lengths, source))))
            whole = np.frombuffer(b"".join(packed), np.uint8).copy() if packed else None
            mine = yield from scatter_flat(communicator, whole, np.dtype(np.uint8), counts, source)
            return unpack_object(mine.tobytes())

        return Request(f"scatter_object(root {source})", fingerprint("scatter_object", source), body())

    return communicator.perform("scatter_object", check, timeout, async_op=async_op)


def gather_bytes(
    communicator: Communicator, mine: bytes, root: int | None = None
) -> Generator[Stage, None, list[bytes]]:
    """Gather bytes, of any length from each rank: on the root, or on every rank (None).

    Cost: one exchange of small frames; where somebody has more than these hold, another round for all.
    """
    heads = yield from exchange_bytes(communicator, _LENGTH.pack(len(mine)) + mine[:_AT_ONCE].ljust(_AT_ONCE, b"\0"))
    counts = tuple(_LENGTH.unpack_from(head)[0] for head in heads)
    if max(counts) <= _AT_ONCE:
        return [head[_LENGTH.size : _LENGTH.size + count] for head, count in zip(heads, counts, strict=True)]
    flat = yield from gather_flat(communicator, np.frombuffer(mine, np.uint8), counts, root)
    if root is not None and communicator.member_rank != root:
        return []
    data = flat.tobytes()
    ends = list(accumulate(counts))
    return [data[end - count : end] for end, count in zip(ends, counts, strict=True)]
