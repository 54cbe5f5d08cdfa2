"""Collectives of plain Python objects, sent as data and never pickled.

Objects are None, bool, int, float, complex, str, bytes, date, time, datetime and timedelta. Lists,
tuples, sets and dicts (plain, OrderedDict, Counter) may hold them, NumPy arrays, and tensors of
PyTorch and JAX, which arrive as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives.broadcast import broadcast_blocks
from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.dispatch import call_persistent
from syncvar.collectives.gather import gathered_blocks, other_ranks
from syncvar.collectives.groups import by_rank, checked_root, communicator_of
from syncvar.collectives.stage_builders import (
    AT_ONCE,
    HEAD,
    broadcast_bytes,
    gather_bytes,
    scatter_flat,
)
from syncvar.collectives.transfer_args import UNMOVED, TransferArgs, detail_of, moves
from syncvar.core.errors import ConfigError
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.block_transfer import Blocks, TransferLayout
from syncvar.runtime.collective_spec import CollectiveSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import CheckedCall, Communicator
    from syncvar.runtime.request import Stage

_HEAD_BYTES = HEAD.size
_BYTE = np.dtype(np.uint8)


def all_gather_object(
    o: Any, *, group: Group | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Give every rank the objects of all ranks, in rank order.

    Args:
        o: Any object: plain Python data, see `syncvar.collectives.object_collectives`.
        group, async_op, timeout: See `syncvar.collectives`.

    Returns:
        A list of objects in rank order.

    Raises:
        ConfigError: The object cannot be sent; the other ranks raise MismatchError.
        MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: objects of at most 248 packed bytes take one phase in shared memory, or one header round.
        If any object is larger, n-1 rounds follow.

    Example:
        >>> import syncvar as sv
        >>> sv.all_gather_object({"rank": sv.rank()})
        [{'rank': 0}]
    """
    return _call(_ALL_GATHER, o, None, group, timeout, async_op=async_op)


def broadcast_object(
    o: Any,
    root: int = 0,
    *,
    group: Group | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Give every rank the root's object; arguments of other ranks are ignored.

    Args:
        o: On the root, any object: plain Python data, see `syncvar.collectives.object_collectives`.
        root: Rank of the group whose object is sent.
        group, async_op, timeout: See `syncvar.collectives`.

    Returns:
        The root's object.

    Raises:
        ConfigError: The object cannot be sent; the other ranks raise MismatchError.
        MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory one phase for at most 248 packed bytes. Else a header round, then
        ceil(log2 n) rounds of the packed object.

    Example:
        >>> import syncvar as sv
        >>> sv.broadcast_object([1, "two"])
        [1, 'two']
    """
    return _call(_BROADCAST, o, root, group, timeout, async_op=async_op)


def gather_object(
    o: Any,
    root: int = 0,
    *,
    group: Group | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Give the root the objects of all ranks, in rank order; other ranks get None.

    Args:
        o: Any object: plain Python data, see `syncvar.collectives.object_collectives`.
        root: Rank of the group that gets the list.
        group, async_op, timeout: See `syncvar.collectives`.

    Returns:
        On the root a list of objects in rank order, None on the other ranks.

    Raises:
        ConfigError: The object cannot be sent; the other ranks raise MismatchError.
        MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: objects of at most 248 packed bytes take one phase in shared memory, or one header round.
        If any object is larger, each then goes once to the root.

    Example:
        >>> import syncvar as sv
        >>> sv.gather_object("me")
        ['me']
    """
    return _call(_GATHER, o, root, group, timeout, async_op=async_op)


def scatter_object(
    objects: list[Any] | None,
    root: int = 0,
    *,
    group: Group | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Give rank r the r-th object of the root's list; arguments of other ranks are ignored.

    Args:
        objects: On the root, a list of one object for each rank of the group.
        root: Rank of the group that has the list.
        group, async_op, timeout: See `syncvar.collectives`.

    Returns:
        This rank's object.

    Raises:
        ConfigError: The list has the wrong length, or an object cannot be sent; the other ranks
            raise MismatchError.
        MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory one phase if all objects have at most 248 packed bytes. Else a broadcast
        of the lengths, then each packed object once.

    Example:
        >>> import syncvar as sv
        >>> sv.scatter_object(["for rank 0"])
        'for rank 0'
    """
    return _call(_SCATTER, objects, root, group, timeout, async_op=async_op)


class _ObjectCollective(NamedTuple):
    """One of the four calls."""

    name: str  # the public call
    # Function of (communicator, object, root) that returns this rank's packed objects.
    pack: Callable[[Communicator, Any, int | None], list[bytes]]
    # Function of (name, communicator, packed, root) that returns the checked call.
    make: Callable[[str, Communicator, list[bytes], Any], TransferArgs]
    # Function of (communicator, packed, root) that returns the result of the call.
    finish: Callable[[Communicator, list[bytes], int | None], Any]


def _call(
    collective: _ObjectCollective,
    value: Any,
    root: int | None,
    group: Any,
    timeout: float | None,
    *,
    async_op: bool,
) -> Any:
    """Make a call by its persistent call, which moves small objects, or by the slow path."""
    name, pack, make, finish = collective
    communicator = communicator_of(group)
    if not async_op and (root is None or type(root) is int):
        try:
            heads = _heads(pack(communicator, value, root))
        except Exception:  # of another library's tensor: the slow path raises it, informs the group
            heads = None
        if heads is not None:
            output = call_persistent(
                communicator,
                (name, root),
                heads,
                None,
                timeout,
                lambda x, _: make(name, communicator, _in_heads(x), _checked(root, communicator)),
            )
            if output is not None:
                return finish(communicator, _in_heads(output), root)

    def check() -> CheckedCall:
        source = _checked(root, communicator)
        checked = make(name, communicator, pack(communicator, value, source), source)
        return checked.then(lambda packed: finish(communicator, packed, source))

    return communicator.perform(name, check, timeout, async_op=async_op)


def _checked(root: Any, communicator: Communicator) -> int | None:
    return None if root is None else checked_root(root, communicator)


# -- input and result of a rank --------------------------------------------------------------------


def _own(_communicator: Communicator, o: Any, _root: int | None) -> list[bytes]:
    return [pack_object(o)]


def _of_root(communicator: Communicator, o: Any, root: int | None) -> list[bytes]:
    return [pack_object(o) if communicator.rank == root else b""]


def _parts(communicator: Communicator, objects: Any, root: int | None) -> list[bytes]:
    if communicator.rank != root:
        return [b""]
    count = len(communicator.whole)
    if not isinstance(objects, list | tuple) or len(objects) != count:
        is_list = isinstance(objects, list | tuple)
        found = f"{len(objects)} objects" if is_list else type(objects).__name__
        raise ConfigError(
            f"scatter_object needs a list of {count} objects on the root, not {found}"
        )
    if communicator.uneven is not None:
        objects = [objects[rank] for rank in communicator.present]
    return [pack_object(o) for o in objects]


def _each(communicator: Communicator, packed: list[bytes], root: int | None) -> list[Any] | None:
    if root is not None and communicator.rank != root:
        return None
    output = [unpack_object(data) for data in packed]
    return output if communicator.uneven is None else by_rank(communicator, output, None)


def _first(_communicator: Communicator, packed: list[bytes], _root: int | None) -> Any:
    return unpack_object(packed[0])


# -- checked calls: small objects in shared memory take one phase ----------------------------------


def _checked_gather(
    name: str, communicator: Communicator, packed: list[bytes], root: int | None
) -> TransferArgs:
    size, rank = communicator.size, communicator.member_rank
    takes = other_ranks(size, rank) if root in (None, rank) else ()
    return _transfer(
        name,
        communicator,
        packed,
        root,
        _layout(takes),
        lambda head: gathered_blocks(head, None, size, rank, root),
        lambda: gather_bytes(communicator, packed[0], root),
    )


def _checked_broadcast(
    name: str, communicator: Communicator, packed: list[bytes], root: int
) -> TransferArgs:
    is_root = communicator.member_rank == root

    def general() -> Generator[Stage, None, list[bytes]]:
        return [(yield from broadcast_bytes(communicator, packed[0], root))]

    return _transfer(
        name,
        communicator,
        packed,
        root,
        _layout(() if is_root else ((root, 0),)),
        lambda head: broadcast_blocks(head, None, is_root=is_root),
        general,
    )


def _checked_scatter(
    name: str, communicator: Communicator, packed: list[bytes], root: int
) -> TransferArgs:
    size, rank = communicator.size, communicator.member_rank
    is_root = rank == root

    def blocks_of(heads: NDArray[Any]) -> Blocks:
        output = np.empty(_HEAD_BYTES, np.uint8)
        if not is_root:
            return Blocks(output, targets=(output,))
        parts = [heads[start : start + _HEAD_BYTES] for start in range(0, heads.size, _HEAD_BYTES)]
        return Blocks(output, parts, own=parts[rank], own_target=output)

    def general() -> Generator[Stage, None, list[bytes]]:
        lengths = pack_object([len(data) for data in packed])
        counts = tuple(unpack_object((yield from broadcast_bytes(communicator, lengths, root))))
        whole = np.frombuffer(b"".join(packed), np.uint8).copy() if is_root else None
        return [(yield from scatter_flat(communicator, whole, _BYTE, counts, root)).tobytes()]

    layout = _layout(() if is_root else ((root, rank),), blocks=size)
    return _transfer(name, communicator, packed, root, layout, blocks_of, general)


def _layout(takes: tuple[tuple[int, int], ...], blocks: int = 1) -> TransferLayout:
    detail = detail_of(_BYTE, (_HEAD_BYTES,), "objects")
    return TransferLayout(detail, _BYTE, (_HEAD_BYTES,), blocks, takes)


def _transfer(
    name: str,
    communicator: Communicator,
    packed: list[bytes],
    root: int | None,
    small: TransferLayout,
    blocks_of: Callable[[NDArray[Any]], Blocks],
    general: Callable[[], Generator[Stage, None, list[bytes]]],
) -> TransferArgs:
    """Return a call that moves objects; one long object sends all ranks to the slow path."""
    heads = _heads(packed)
    layout = None
    if small.is_small and moves(communicator, name):
        layout = UNMOVED if heads is None else small
    spec = CollectiveSpec(name)
    if root is not None:
        spec = CollectiveSpec(name, root=root, shown=(f"root {root}",))
    return TransferArgs(
        spec,
        layout,
        arrange=lambda: None if heads is None else blocks_of(heads),
        finish=_in_heads,
        general=general,
        front=lambda x, _: blocks_of(x),
    )


def _heads(packed: list[bytes]) -> NDArray[Any] | None:
    """Pack objects with their lengths; None if one of them is too long."""
    heads = []
    for data in packed:
        if len(data) > AT_ONCE:
            return None
        heads.append(HEAD.pack(len(data), data))
    return np.frombuffer(b"".join(heads), np.uint8)


def _in_heads(output: NDArray[Any] | list[bytes]) -> list[bytes]:
    """Unpack such objects; the slow path returns them unpacked already."""
    if isinstance(output, list):
        return output
    return [data[:count] for count, data in HEAD.iter_unpack(output.data)]


_ALL_GATHER = _ObjectCollective("all_gather_object", _own, _checked_gather, _each)
_BROADCAST = _ObjectCollective("broadcast_object", _of_root, _checked_broadcast, _first)
_GATHER = _ObjectCollective("gather_object", _own, _checked_gather, _each)
_SCATTER = _ObjectCollective("scatter_object", _parts, _checked_scatter, _first)


register(
    Collective(
        (all_gather_object,), CollectiveKind.OBJECT, gives="plain data",
        gets="all ranks' objects, a list", cost="one round for small objects, otherwise n-1 more",
        wanted=lambda case: case.parts(), schedules=("all_gather",),
    ),
    Collective(
        (broadcast_object,), CollectiveKind.OBJECT, gives="root: plain data",
        gets="the root's object", cost="one round for small objects, otherwise ceil(log2 n) more",
        wanted=lambda case: case.part(case.root), schedules=("broadcast",), from_root=True,
    ),
    Collective(
        (gather_object,), CollectiveKind.OBJECT, gives="plain data",
        gets="root: all ranks' objects, a list; others: None",
        cost="one round for small objects, otherwise each object once to the root",
        wanted=lambda case: case.at_root(case.parts()), schedules=("gather",),
    ),
    Collective(
        (scatter_object,), CollectiveKind.OBJECT, gives="root: a list of n objects",
        gets="rank r: object r",
        cost="one round for small objects, otherwise each object once from the root",
        wanted=lambda case: case.part(case.rank), schedules=("scatter",), from_root=True,
        inputs=lambda case, _rank: case.parts(),
    ),
)  # fmt: skip
