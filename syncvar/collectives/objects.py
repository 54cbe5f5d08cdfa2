"""Collectives of plain Python objects, sent as data and never pickled.

Objects are None, bool, int, float, complex, str, bytes, date, time, datetime, timedelta, and lists, tuples, sets and dicts (plain,
OrderedDict, Counter) of these, of NumPy arrays, and of tensors of PyTorch and JAX, which come out as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.collectives._arguments import checked_root
from syncvar.collectives._moving import UNMOVED, call_prepared, detail_of, moved, moves
from syncvar.collectives.all_gather import gathered_blocks
from syncvar.collectives.broadcast import broadcast_blocks
from syncvar.collectives.flat import AT_ONCE, HEAD, broadcast_bytes, gather_bytes, scatter_flat
from syncvar.collectives.groups import by_rank, communicator_of
from syncvar.engine.group import Request, fingerprint
from syncvar.engine.timeouts import is_seconds
from syncvar.errors import ConfigError
from syncvar.execution.moves import Blocks, Layout
from syncvar.wire import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.engine.group import Communicator
    from syncvar.engine.operation import Stage

__all__ = ["all_gather_object", "broadcast_object", "gather_object", "scatter_object"]

_HEAD_BYTES = HEAD.size
_BYTE = np.dtype(np.uint8)
_EMPTY = np.frombuffer(HEAD.pack(0, b""), np.uint8)
_NOTHING = np.empty(0, np.uint8)


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

    Cost: small objects (248 bytes packed) travel at once: where the ranks share memory by one phase, else with a header round; larger ones
        take n-1 rounds after that.

    Example:
        >>> import syncvar as sv
        >>> sv.all_gather_object({"rank": sv.rank()})
        [{'rank': 0}]
    """
    communicator = communicator_of(group)
    head = _head_of(o) if not async_op and (timeout is None or is_seconds(timeout)) else None
    if head is not None:
        made = call_prepared(communicator, ("all_gather_object",), head, None, timeout, _prepare_gather, None)
        if made is not None:
            return [unpack_object(data) for data in _in_heads(made)]
    return communicator.perform(
        "all_gather_object", lambda: _gather_request(communicator, pack_object(o), None), timeout, async_op=async_op
    )


def _prepare_gather(communicator: Communicator, _head: NDArray[Any], root: int | None) -> Any:
    request = _gather_request(communicator, b"", None if root is None else checked_root(root, communicator))
    layout, blocks = _gathered_heads(communicator, root)
    return request, layout, lambda x, _: blocks(x), lambda x, _: gather_bytes(communicator, _in_heads(x)[0], root)


def _gather_request(communicator: Communicator, mine: bytes, root: int | None) -> Request:
    """Return the request of a gathering of objects: on the root, or on every rank (None)."""
    name = "all_gather_object" if root is None else "gather_object"

    def body() -> Generator[Stage, None, list[Any] | None]:
        everything = None
        if moves(communicator, name, None):
            everything = yield from _moved(_heads([mine]), *_gathered_heads(communicator, root))
        if everything is None:
            everything = yield from gather_bytes(communicator, mine, root)
        return by_rank(communicator, list(map(unpack_object, everything)), None) if root in (None, communicator.member_rank) else None

    what = name if root is None else f"{name}(root {root})"
    return Request(what, fingerprint(name) if root is None else fingerprint(name, root), body())


def _gathered_heads(communicator: Communicator, root: int | None) -> tuple[Layout, Callable[[NDArray[Any]], Blocks]]:
    size, rank = communicator.size, communicator.member_rank
    if root not in (None, rank):
        return _layout(), lambda head: Blocks(_NOTHING, (head,))
    takes = (((rank + distance) % size, 0) for distance in range(1, size))
    return _layout(*takes), lambda head: gathered_blocks(head, None, size, rank)


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

    Cost: where the ranks share memory one phase for a small object (248 bytes packed); else a header round, then ceil(log2 n) rounds of
        the packed object.

    Example:
        >>> import syncvar as sv
        >>> sv.broadcast_object([1, "two"])
        [1, 'two']
    """
    communicator = communicator_of(group)
    if type(root) is int and not async_op and (timeout is None or is_seconds(timeout)):
        head = _head_of(o) if communicator.rank == root else _EMPTY
        if head is not None:
            made = call_prepared(communicator, ("broadcast_object", root), head, None, timeout, _prepare_broadcast, root)
            if made is not None:
                return unpack_object(_in_heads(made)[0])

    def check() -> Request:
        source = checked_root(root, communicator)
        return _broadcast_request(communicator, pack_object(o) if communicator.member_rank == source else b"", source)

    return communicator.perform("broadcast_object", check, timeout, async_op=async_op)


def _prepare_broadcast(communicator: Communicator, _head: NDArray[Any], root: int) -> Any:
    def general(x: NDArray[Any], _out: None) -> Generator[Stage, None, list[bytes]]:
        return [(yield from broadcast_bytes(communicator, _in_heads(x)[0], root))]

    request = _broadcast_request(communicator, b"", checked_root(root, communicator))
    layout, blocks = _broadcast_heads(communicator, root)
    return request, layout, lambda x, _: blocks(x), general


def _broadcast_request(communicator: Communicator, mine: bytes, root: int) -> Request:
    def body() -> Generator[Stage, None, Any]:
        made = None
        if moves(communicator, "broadcast_object", None):
            made = yield from _moved(_heads([mine]), *_broadcast_heads(communicator, root))
        return unpack_object((yield from broadcast_bytes(communicator, mine, root)) if made is None else made[0])

    return Request(f"broadcast_object(root {root})", fingerprint("broadcast_object", root), body())


def _broadcast_heads(communicator: Communicator, root: int) -> tuple[Layout, Callable[[NDArray[Any]], Blocks]]:
    is_root = communicator.member_rank == root
    return _layout(*(() if is_root else ((root, 0),))), lambda head: broadcast_blocks(head, None, is_root=is_root)


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

    Cost: small objects (248 bytes packed) travel at once: where the ranks share memory by one phase, else with a header round; larger ones
        go once to the root after that.

    Example:
        >>> import syncvar as sv
        >>> sv.gather_object("me")
        ['me']
    """
    communicator = communicator_of(group)
    head = _head_of(o) if type(root) is int and not async_op and (timeout is None or is_seconds(timeout)) else None
    if head is not None:
        made = call_prepared(communicator, ("gather_object", root), head, None, timeout, _prepare_gather, root)
        if made is not None:
            return [unpack_object(data) for data in _in_heads(made)] if communicator.rank == root else None

    def check() -> Request:
        target = checked_root(root, communicator)
        return _gather_request(communicator, pack_object(o), target)

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

    Cost: where the ranks share memory one phase for small objects (248 bytes packed); else a broadcast of the lengths, then each packed
        object once.

    Example:
        >>> import syncvar as sv
        >>> sv.scatter_object(["for rank 0"])
        'for rank 0'
    """
    communicator = communicator_of(group)
    if type(root) is int and not async_op and (timeout is None or is_seconds(timeout)):
        is_fit = type(objects) in (list, tuple) and len(objects) == communicator.size  # type: ignore[arg-type]
        heads = _EMPTY if communicator.rank != root else _head_of(*objects) if is_fit else None  # type: ignore[misc]
        if heads is not None:
            made = call_prepared(communicator, ("scatter_object", root), heads, None, timeout, _prepare_scatter, root)
            if made is not None:
                return unpack_object(_in_heads(made)[0])

    def check() -> Request:
        source = checked_root(root, communicator)
        packed: list[bytes] = []
        if communicator.member_rank == source:
            count = len(communicator.whole)
            if not isinstance(objects, list | tuple) or len(objects) != count:
                given = f"{len(objects)} objects" if isinstance(objects, list | tuple) else type(objects).__name__
                raise ConfigError(f"scatter_object needs a list of {count} objects on the root, not {given}")
            packed = [pack_object(objects[rank]) for rank in communicator.present]
        return _scatter_request(communicator, packed, source)

    return communicator.perform("scatter_object", check, timeout, async_op=async_op)


def _prepare_scatter(communicator: Communicator, _heads: NDArray[Any], root: int) -> Any:
    def general(x: NDArray[Any], _out: None) -> Generator[Stage, None, list[bytes]]:
        return [(yield from _scattered(communicator, _in_heads(x) if communicator.member_rank == root else [], root))]

    layout, blocks = _scattered_heads(communicator, checked_root(root, communicator))
    return (_scatter_request(communicator, [], root), layout, lambda x, _: blocks(x), general) if layout.is_small else None


def _scatter_request(communicator: Communicator, packed: list[bytes], root: int) -> Request:
    def body() -> Generator[Stage, None, Any]:
        layout, blocks_of = _scattered_heads(communicator, root)
        made = None
        if layout.is_small and moves(communicator, "scatter_object", None):
            made = yield from _moved(_heads(packed) if packed else _EMPTY, layout, blocks_of)
        return unpack_object((yield from _scattered(communicator, packed, root)) if made is None else made[0])

    return Request(f"scatter_object(root {root})", fingerprint("scatter_object", root), body())


def _scattered(communicator: Communicator, packed: list[bytes], root: int) -> Generator[Stage, None, bytes]:
    """Scatter bytes of any lengths, which the root knows."""
    lengths = pack_object([len(data) for data in packed])
    counts = tuple(unpack_object((yield from broadcast_bytes(communicator, lengths, root))))
    whole = np.frombuffer(b"".join(packed), np.uint8).copy() if packed else None
    mine = yield from scatter_flat(communicator, whole, _BYTE, counts, root)
    return mine.tobytes()


def _scattered_heads(communicator: Communicator, root: int) -> tuple[Layout, Callable[[NDArray[Any]], Blocks]]:
    size, rank = communicator.size, communicator.member_rank
    is_root = rank == root

    def blocks(heads: NDArray[Any]) -> Blocks:
        made = np.empty(_HEAD_BYTES, np.uint8)
        if not is_root:
            return Blocks(made, targets=(made,))
        parts = [heads[start : start + _HEAD_BYTES] for start in range(0, heads.size, _HEAD_BYTES)]
        return Blocks(made, parts, own=parts[rank], own_target=made)

    return _layout(*(() if is_root else ((root, rank),)), blocks=size), blocks


# -- small objects in shared memory: one phase ------------------------------------------------------------------------


def _head_of(*objects: Any) -> NDArray[Any] | None:
    """Return what carries small objects; None where the general way has to look at them, and tells what is wrong."""
    try:
        return _heads([pack_object(o) for o in objects])
    except Exception:  # whatever another library's tensor raises
        return None


def _heads(packed: list[bytes]) -> NDArray[Any] | None:
    """Return what carries packed objects; None where one of them is too long."""
    if max(map(len, packed)) > AT_ONCE:
        return None
    return np.frombuffer(b"".join([HEAD.pack(len(data), data) for data in packed]), np.uint8)


def _in_heads(made: NDArray[Any] | list[bytes]) -> list[bytes]:
    """Return the objects in heads; what has gone the general way is there already."""
    return made if isinstance(made, list) else [data[:count] for count, data in HEAD.iter_unpack(made.tobytes())]


def _layout(*takes: tuple[int, int], blocks: int = 1) -> Layout:
    """Return how heads are moved; a rank whose object is longer moves nothing, and so does nobody."""
    return Layout(detail_of(_BYTE, (_HEAD_BYTES,), "objects"), _BYTE, (_HEAD_BYTES,), blocks, takes)


def _moved(
    heads: NDArray[Any] | None, layout: Layout, blocks_of: Callable[[NDArray[Any]], Blocks]
) -> Generator[Stage, None, list[bytes] | None]:
    """Move heads, as the first stage of a call; None where some object is longer."""
    if heads is None:
        yield from moved(*UNMOVED)
        return None
    blocks = blocks_of(heads)
    return _in_heads(blocks.made) if (yield from moved(layout, blocks)) else None
