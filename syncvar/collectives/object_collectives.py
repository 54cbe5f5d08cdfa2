"""Collectives of plain Python objects, sent as data and never pickled.

Objects are None, bool, int, float, complex, str, bytes, date, time, datetime and timedelta. Lists,
tuples, sets and dicts (plain, OrderedDict, Counter) may hold them, NumPy arrays, and tensors of
PyTorch and JAX, which arrive as such.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

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
from syncvar.collectives.transfer_args import (
    UNMOVED,
    TransferCall,
    detail_of,
    even_parts,
    moves,
)
from syncvar.core.array_arguments import result_buffer
from syncvar.core.errors import ConfigError
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.block_transfer import Blocks, TransferLayout
from syncvar.runtime.collective_spec import CollectiveSpec

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
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
    return _call(_AllGatherObjectCall, o, None, group, timeout, async_op=async_op)


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
    return _call(_BroadcastObjectCall, o, root, group, timeout, async_op=async_op)


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
    return _call(_GatherObjectCall, o, root, group, timeout, async_op=async_op)


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
    return _call(_ScatterObjectCall, objects, root, group, timeout, async_op=async_op)


def _call(
    kind: type[_ObjectCall], value: Any, root: Any, group: Any, timeout: Any, *, async_op: bool
) -> Any:
    """Make a call by its persistent call, which moves small objects, or by the slow path."""
    communicator, name = communicator_of(group), kind.name
    make_checked = partial(kind.of_value, communicator, root, value)
    if not async_op and (root is None or type(root) is int):
        try:
            heads = _heads(kind.pack(communicator, value, root))
        except Exception:  # of another library's tensor: the slow path raises it, informs the group
            heads = None
        if heads is not None:
            output = call_persistent(communicator, (name, root), heads, None, timeout, make_checked)
            if output is not None:
                return kind.unpack(communicator, _in_heads(output), root)
    return communicator.perform(name, make_checked, timeout, async_op=async_op)


class _ObjectCall(TransferCall):
    """A call with this rank's packed objects; a subclass is one of the four collectives.

    Small objects in shared memory take one phase. One long object sends all ranks to the slow path,
    whose result is a list of packed objects.
    """

    name: str
    is_cut = False  # whether the root has an object for each rank

    @classmethod
    def pack(cls, _communicator: Communicator, value: Any, _root: int | None) -> list[bytes]:
        """Return this rank's packed objects."""
        return [pack_object(value)]

    @classmethod
    def unpack(cls, _communicator: Communicator, packed: list[bytes], _root: int | None) -> Any:
        """Return the result of the call."""
        return unpack_object(packed[0])

    @classmethod
    def of_value(cls, communicator: Communicator, root: Any, value: Any) -> Self:
        """Check the arguments and return the call."""
        root = None if root is None else checked_root(root, communicator)
        return cls(communicator, cls.pack(communicator, value, root), root)

    def __init__(self, communicator: Communicator, packed: list[bytes], root: int | None) -> None:
        spec = CollectiveSpec(self.name)
        if root is not None:
            spec = CollectiveSpec(self.name, root=root, shown=(f"root {root}",))
        super().__init__(communicator, spec, None, [])
        self._packed, self._root = packed, root
        heads = _heads(packed)
        detail = detail_of(_BYTE, (_HEAD_BYTES,), "objects")
        small = TransferLayout(
            detail, _BYTE, (_HEAD_BYTES,), self.size if self.is_cut else 1, self._takes()
        )
        if small.is_small and moves(communicator, self.name):
            self.layout = UNMOVED if heads is None else small
            self.inputs = [] if heads is None else [heads]

    def _takes(self) -> tuple[tuple[int, int], ...]:
        """Return (rank, number) of the objects that this rank gets from others."""
        if self.rank == self._root:
            return ()
        return ((self._root or 0, self.rank if self.is_cut else 0),)

    def finish(self, output: NDArray[Any] | list[bytes]) -> list[bytes]:
        return _in_heads(output)

    def slow_path_of(self, x: NDArray[Any], _out: None) -> Generator[Stage, None, Any]:
        return type(self)(self.communicator, _in_heads(x), self._root).slow_path()

    def stages(self) -> Generator[Stage, None, Any]:
        packed = yield from super().stages()
        return self.unpack(self.communicator, packed, self._root)


class _AllGatherObjectCall(_ObjectCall):
    """A gather of objects on every rank."""

    name = "all_gather_object"

    @classmethod
    def unpack(cls, communicator: Communicator, packed: list[bytes], root: int | None) -> Any:
        if root is not None and communicator.rank != root:
            return None
        output = [unpack_object(data) for data in packed]
        return output if communicator.uneven is None else by_rank(communicator, output, None)

    def _takes(self) -> tuple[tuple[int, int], ...]:
        return other_ranks(self.size, self.rank) if self._root in (None, self.rank) else ()

    def blocks_of(self, parts: list[NDArray[Any]], out: Any) -> Blocks:
        return gathered_blocks(parts[0], out, self.size, self.rank, self._root)

    def slow_path(self) -> Generator[Stage, None, list[bytes]]:
        return gather_bytes(self.communicator, self._packed[0], self._root)


class _GatherObjectCall(_AllGatherObjectCall):
    """A gather of objects on the root."""

    name = "gather_object"


class _BroadcastObjectCall(_ObjectCall):
    """A broadcast of the root's object."""

    name = "broadcast_object"

    @classmethod
    def pack(cls, communicator: Communicator, value: Any, root: int | None) -> list[bytes]:
        return [pack_object(value) if communicator.rank == root else b""]

    def blocks_of(self, parts: list[NDArray[Any]], out: Any) -> Blocks:
        return broadcast_blocks(parts[0], out, is_root=self.rank == self._root)

    def slow_path(self) -> Generator[Stage, None, list[bytes]]:
        assert self._root is not None
        return [(yield from broadcast_bytes(self.communicator, self._packed[0], self._root))]


class _ScatterObjectCall(_ObjectCall):
    """A scatter of the root's objects."""

    name = "scatter_object"
    is_cut = True

    @classmethod
    def pack(cls, communicator: Communicator, value: Any, root: int | None) -> list[bytes]:
        if communicator.rank != root:
            return [b""]
        count, is_list = len(communicator.whole), isinstance(value, list | tuple)
        if not is_list or len(value) != count:
            found = f"{len(value)} objects" if is_list else type(value).__name__
            raise ConfigError(
                f"scatter_object needs a list of {count} objects on the root, not {found}"
            )
        if communicator.uneven is not None:
            value = [value[rank] for rank in communicator.present]
        return [pack_object(o) for o in value]

    def blocks_of(self, parts: list[NDArray[Any]], out: Any) -> Blocks:
        output = result_buffer(out, (_HEAD_BYTES,), _BYTE, *parts)
        if self.rank != self._root:
            return Blocks(output, targets=(output,))
        parts = even_parts(parts[0], self.size)
        return Blocks(output, parts, own=parts[self.rank], own_target=output)

    def slow_path(self) -> Generator[Stage, None, list[bytes]]:
        communicator, packed, root = self.communicator, self._packed, self._root
        assert root is not None
        lengths = pack_object([len(data) for data in packed])
        counts = tuple(unpack_object((yield from broadcast_bytes(communicator, lengths, root))))
        is_root = self.rank == root
        whole = np.frombuffer(b"".join(packed), np.uint8).copy() if is_root else None
        return [(yield from scatter_flat(communicator, whole, _BYTE, counts, root)).tobytes()]


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
