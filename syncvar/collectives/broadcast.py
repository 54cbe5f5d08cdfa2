"""Broadcast: every rank ends with the root's value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.dispatch import make_call, native_dispatch
from syncvar.collectives.groups import checked_root
from syncvar.collectives.stage_builders import (
    broadcast_bytes,
    broadcast_flat,
    exchange,
    require_same,
)
from syncvar.collectives.transfer_args import UNMOVED, TransferCall, detail_of, moves
from syncvar.core.array_arguments import deliver, result_buffer
from syncvar.core.array_types import dtype_from_index, dtype_index
from syncvar.core.errors import ConfigError, MismatchError
from syncvar.core.pytree import (
    TreeDef,
    arrays_in,
    describe,
    holds_dataclass,
    private_copy,
    structure_from_plain,
    structure_to_plain,
    unflatten,
)
from syncvar.protocol.fixed_records import ARRAY, BYTES, NOTHING, InputRecord, array_record
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.block_transfer import Blocks, TransferLayout
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage


@native_dispatch(second="root", usual=0, positions=2)
def broadcast(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Give every rank the root's value.

    Args:
        x: On the root, an array, a number, or a nested dict/list/tuple/dataclass of them. Other
            ranks pass the same shapes and dtypes (syncvar compares them), or None. If the root's
            value holds a dataclass, they cannot pass None, because classes are not sent.
        root: Rank of the group whose value is sent.
        out: Array of the result's shape and dtype to write to. Not for pytrees.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        A new array (or pytree of arrays) with the root's value. A rank that passes None gets NumPy
        arrays, and plain tuples in place of named ones.

    Raises:
        MismatchError: A rank passes another shape or dtype than the root, or another `root`.
        ConfigError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory, if all ranks pass the shape and dtype, one direct copy. Else a header
        round of ceil(log2 n) small frames, then ceil(log2 n) rounds of the whole value.
    Order: nothing is combined; the bytes are equal on every rank.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.broadcast(np.arange(3))
        array([0, 1, 2])
    """
    options = (root, algorithm)
    return make_call(broadcast, BroadcastCall, x, out, group, async_op, timeout, _foreign, options)


class BroadcastCall(TransferCall):
    """A broadcast; `keep` copies the root's input."""

    def __init__(
        self,
        communicator: Communicator,
        x: Any,
        out: Any = None,
        root: int = 0,
        algorithm: str | None = None,
        *,
        keep: bool = False,
        name: str = "broadcast",
    ) -> None:
        self._name, self._algorithm = name, algorithm
        self._root = root = checked_root(root, communicator)
        self._is_root = is_root = communicator.member_rank == root
        if x is None and is_root:
            raise ConfigError(f"the root (rank {root}) must pass a value, not None")
        structure, arrays = (None, []) if x is None else arrays_in(x, out)
        self._record, self._skeleton = _described(structure, arrays)
        self._like = None  # the pytree of this rank
        if structure is not None:
            self._like = private_copy(structure, x) if keep else x
        if keep and is_root:
            arrays = [array.copy() for array in arrays]
        layout = None
        if moves(communicator, "broadcast", algorithm):
            is_array = self._record.kind == ARRAY
            layout = _layout(arrays[0], root, is_root=is_root) if is_array else UNMOVED
        shown = "None" if x is None else "structure"
        spec = _spec(
            name, root, algorithm, shown if x is None or structure is not None else arrays[0]
        )
        super().__init__(communicator, spec, layout, arrays, out)

    def blocks_of(self, parts: list[NDArray[Any]], out: Any) -> Blocks:
        """Return the arrays of a call with such inputs."""
        return broadcast_blocks(parts[0], out, is_root=self._is_root)

    def slow_path(self) -> Generator[Stage, None, Any]:
        """Yield a header round, then the stages of the value."""
        communicator, name, root = self.communicator, self._name, self._root
        records = yield from exchange(communicator, self._record)
        values = [one for one in records if one.kind != NOTHING]
        if any(one != records[root] for one in values):
            require_same(communicator, f"{name} from rank {root}", records, records)
        theirs = records[root]
        if theirs.kind == BYTES:
            members = communicator.members
            absent = [members[rank] for rank, one in enumerate(records) if one.kind == NOTHING]
            return (yield from self._tree_stages(absent))
        if theirs.kind != ARRAY:
            raise MismatchError(f"{name}: the root (rank {root}) passes no value")
        mine, dtype = self.inputs[0] if self._is_root else None, dtype_from_index(theirs.dtype)
        result = yield from broadcast_flat(
            communicator, mine, theirs.shape, dtype, root, self._algorithm, self.out
        )
        # `out` is checked only now: other ranks may be waiting for data that this rank forwards.
        return deliver(result, self.out)

    def _tree_stages(self, absent: list[int]) -> Generator[Stage, None, Any]:
        """Yield the stages of a pytree; the ranks `absent` pass None."""
        communicator, root = self.communicator, self._root
        skeleton = yield from broadcast_bytes(communicator, self._skeleton, root)
        plain, kinds = unpack_object(skeleton)
        structure = structure_from_plain(plain)
        if absent and holds_dataclass(structure):  # all ranks see it, so all raise
            member, tree = communicator.members[root], describe(structure)
            shown = f"{self._name}: the root (rank {member}) passes {tree}"
            verb = "passes" if len(absent) == 1 else "pass"
            ranks = f"rank {', '.join(map(str, absent))}, which {verb}"
            raise MismatchError(
                f"{shown}, and classes of dataclasses are not sent: pass one with arrays of the "
                f"same shapes on {ranks} None; or a dict: dataclasses.asdict(x)"
            )
        results = []
        for place, (index, shape) in enumerate(kinds):
            mine, dtype = self.inputs[place] if self._is_root else None, dtype_from_index(index)
            whole = yield from broadcast_flat(communicator, mine, tuple(shape), dtype, root)
            results.append(whole)
        return unflatten(structure, results, self._like)


def _described(structure: TreeDef | None, arrays: list[NDArray[Any]]) -> tuple[InputRecord, bytes]:
    """Return the record of an input, and of a pytree the structure and the shapes as bytes."""
    if structure is None:
        return array_record(arrays[0]) if arrays else InputRecord(), b""
    kinds = [(dtype_index(array.dtype), array.shape) for array in arrays]
    record = InputRecord(BYTES, nbytes=fingerprint(structure, tuple(kinds)))
    shapes = [[index, list(shape)] for index, shape in kinds]
    return record, pack_object([structure_to_plain(structure), shapes])


def _spec(name: str, root: int, algorithm: str | None, value: NDArray[Any] | str) -> CollectiveSpec:
    """Return the description of a call with an array, or with another value named by a word."""
    spec = CollectiveSpec(name, root=root, algorithm=algorithm, is_uniform=False)
    if isinstance(value, str):
        return spec._replace(shown=(f"root {root}", value))
    return spec._replace(text=_label).with_array(value)


def _label(spec: CollectiveSpec) -> str:
    return f"{spec.collective}(root {spec.root}, {spec.array})"


def _layout(array: NDArray[Any], root: int, *, is_root: bool) -> TransferLayout:
    detail, takes = detail_of(array.dtype, array.shape), () if is_root else ((root, 0),)
    return TransferLayout(detail, array.dtype, array.shape, 1, takes)


def broadcast_blocks(array: NDArray[Any], out: Any, *, is_root: bool) -> Blocks:
    """Return the arrays of a call in which the inputs of all ranks have this shape and dtype."""
    if not is_root:
        output = result_buffer(out, array.shape, array.dtype)
        return Blocks(output, targets=(output,))
    if array is out:
        return Blocks(array, (array,))
    output = result_buffer(out, array.shape, array.dtype, array)
    return Blocks(output, (array,), own=array, own_target=output)


register(
    Collective(
        (broadcast,), CollectiveKind.MOVE,
        gives="root: an array; others: None, or one of that shape", gets="the root's array",
        cost="one direct copy; over links ceil(log2 n) rounds of the array",
        wanted=lambda case: case.part(case.root), from_root=True, in_place=True,
    )
)  # fmt: skip
