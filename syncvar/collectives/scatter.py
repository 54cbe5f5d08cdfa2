"""Scatter and all-to-all: the root, or every rank, sends each rank its part of a value."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from syncvar.algorithms.schedule import even_chunks
from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.dispatch import make_call, native_dispatch
from syncvar.collectives.gather import other_ranks
from syncvar.collectives.groups import by_rank, checked_root
from syncvar.collectives.stage_builders import (
    all_to_all_flat,
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
    place_of,
)
from syncvar.core.array_arguments import as_array, deliver, result_buffer
from syncvar.core.array_types import DTYPE_NAMES, UnsupportedLibrary, dtype_from_index, dtype_index
from syncvar.core.errors import ConfigError, MismatchError
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.block_transfer import Blocks, TransferLayout
from syncvar.runtime.collective_spec import CollectiveSpec

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.runtime.communicator import Communicator, Persistent
    from syncvar.runtime.request import Stage

_DIMENSIONS_MAX = 64  # NumPy's limit


@native_dispatch(second="root", usual=0, positions=2)
def scatter(
    x: Any = None,
    root: int = 0,
    *,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Give each rank its part of the root's input.

    Args:
        x: On the root, a list of one array for each rank, of one dtype and any shapes. Or one
            array, which is cut along axis 0; the first parts are longer. Arguments of other ranks
            are ignored.
        root: Rank of the group whose input is sent.
        out: Array of the part's shape and dtype to write to.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        A new array: this rank's part.

    Raises:
        ConfigError, MismatchError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory, with parts of one shape, one direct copy of each part. The other ranks
        must know the shape: from `out`, or from the last call. Else a broadcast of the shapes, then
        each part once.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.scatter([np.arange(3)])
        array([0, 1, 2])
    """
    options = (root, algorithm)
    return make_call(scatter, _ScatterCall, x, out, group, async_op, timeout, _foreign, options)


class _ScatterCall(TransferCall):
    """A scatter; `keep` copies the root's arrays."""

    @staticmethod
    def persistent_input(
        communicator: Communicator, x: Any, out: Any, options: Any
    ) -> NDArray[Any] | None:
        # Ranks that are not the root expect a part like `out`, or like the last one. If it differs,
        # the slow path sends its shape.
        root, algorithm = options
        if type(root) is not int or algorithm is not None:
            return None
        if communicator.rank == root:
            is_plain = type(x) is np.ndarray and x.ndim and x.shape[0] % communicator.size == 0
            return x if is_plain else None
        if x is not None and type(x) is not np.ndarray:  # perhaps the result is a tensor like it
            return None
        return out if type(out) is np.ndarray else communicator.last_parts.get(root)

    def __init__(
        self, communicator: Communicator, x: Any, out: Any, *options: Any, keep: bool
    ) -> None:
        root, algorithm = options
        size, rank = communicator.size, communicator.member_rank
        root = checked_root(root, communicator)
        parts: list[NDArray[Any]] = []
        if rank == root:
            if x is None:
                raise ConfigError(
                    f"the root (rank {root}) must pass a list of arrays, or one array, not None"
                )
            parts = [part.copy() if keep else part for part in cut(x, communicator, "scatter")]
        like = out if type(out) is np.ndarray else communicator.last_parts.get(root)
        like, layout = parts[0] if parts else like, None
        if moves(communicator, "scatter", algorithm):
            is_alike = like is not None and all(part.shape == like.shape for part in parts)
            layout = UNMOVED
            if like is not None and is_alike and like.dtype.isnative:
                takes = () if rank == root else ((root, place_of(root, rank)),)
                detail = detail_of(like.dtype, like.shape)
                layout = TransferLayout(detail, like.dtype, like.shape, size - 1, takes)
        spec = CollectiveSpec("scatter", root=root, algorithm=algorithm, shown=(f"root {root}",))
        super().__init__(communicator, spec, layout, parts, out)
        self._root, self._is_root, self._algorithm = root, rank == root, algorithm

    def parts_of(self, x: NDArray[Any]) -> list[NDArray[Any]]:
        return even_parts(x, self.size) if self._is_root else []

    def blocks_of(self, parts: list[NDArray[Any]], out: Any) -> Blocks:
        layout, rank = self.layout, self.rank
        assert layout is not None
        output = result_buffer(out, layout.shape, layout.dtype, *parts)
        if parts:
            return Blocks(output, (*parts[:rank], *parts[rank + 1 :]), (), parts[rank], output)
        return Blocks(output, targets=(output,))

    def slow_path(self) -> Generator[Stage, None, Any]:
        # A broadcast of the shapes, then the scatter of the parts.
        communicator, root, parts, skeleton = self.communicator, self._root, self.inputs, b""
        if parts:
            shapes = [list(part.shape) for part in parts]
            skeleton = pack_object([dtype_index(parts[0].dtype), shapes])
        skeleton = yield from broadcast_bytes(communicator, skeleton, root)
        index, shapes = unpack_object(skeleton)
        dtype = dtype_from_index(index)
        counts = tuple(prod(shape) for shape in shapes)
        shape = tuple(shapes[self.rank])
        if not self._is_root:
            communicator.last_parts[root] = np.empty(shape, dtype)
        flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else None
        mine = yield from scatter_flat(communicator, flat, dtype, counts, root, self._algorithm)
        mine = mine.reshape(shape)
        # The part is a view of a buffer for all parts, which must not outlive the call.
        return mine.copy() if self.out is None else deliver(mine, self.out)


def cut(value: Any, communicator: Communicator, name: str) -> list[NDArray[Any]]:
    """Return the parts of the ranks that take part, from a list of them or an array to be cut."""
    size = len(communicator.whole)
    if isinstance(value, list | tuple):
        if len(value) != size:
            raise ConfigError(
                f"{name} needs one array for each of {size} ranks, not {len(value)}; "
                f"or pass one array to be cut"
            )
        parts = [as_array(value[rank], f"part {rank}") for rank in communicator.present]
    else:
        array = as_array(value)
        if array.ndim == 0:
            raise ConfigError(
                f"{name} cuts along axis 0, and a scalar has none; pass a list of {size} values"
            )
        chunks = even_chunks(array.shape[0], communicator.size)
        parts = [array[chunk.start : chunk.stop] for chunk in chunks]
    if any(part.dtype != parts[0].dtype for part in parts):
        names = sorted({part.dtype.name for part in parts})
        raise ConfigError(
            f"the parts of {name} must have one dtype, not {', '.join(names)}: write x.astype(…)"
        )
    return [np.ascontiguousarray(part).reshape(part.shape) for part in parts]


@native_dispatch(takes_numbers=False)
def all_to_all(
    parts: Any,
    *,
    out: Any = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    algorithm: str | None = None,
    **_foreign: Never,
) -> Any:
    """Send part d to rank d, and receive from each rank its part for this one.

    Args:
        parts: A list of one array for each rank. Shapes may differ; the dtype must be the same on
            every rank. Or one array, which is cut along axis 0; the first parts are longer.
        out: A list of arrays to write to, one for each rank, of the results' shapes and dtype. Or
            one array to be cut along axis 0. They must not overlap `parts`.
        group, async_op, timeout, algorithm: See `syncvar.collectives`.

    Returns:
        A list of arrays in rank order, in the shapes of their senders; the arrays of `out` if you
        pass it.

    Raises:
        MismatchError: The dtypes differ.
        ConfigError, PeerLost, DeadlineExceeded: See `syncvar.collectives`.

    Cost: in shared memory, with one shape for all parts, one direct copy of each part. Else an
        exchange of the shapes, then n-1 rounds over links, or one in shared memory.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.all_to_all([np.arange(3)])
        [array([0, 1, 2])]
    """
    options = (algorithm,)
    return make_call(
        all_to_all, _AllToAllCall, parts, out, group, async_op, timeout, _foreign, options
    )


class _AllToAllCall(TransferCall):
    """An all-to-all; `keep` copies the parts."""

    @staticmethod
    def persistent_input(
        communicator: Communicator, parts: Any, _out: Any, options: Any
    ) -> NDArray[Any] | None:
        (algorithm,) = options
        is_plain = (
            type(parts) is np.ndarray
            and algorithm is None
            and parts.ndim
            and parts.shape[0] % communicator.size == 0
        )
        return parts if is_plain else None

    def __init__(
        self, communicator: Communicator, parts: Any, out: Any, algorithm: str | None, *, keep: bool
    ) -> None:
        mine = cut(parts, communicator, "all_to_all")
        if out is not None:
            _checked_outs(out, communicator, mine)
        # The array that has been cut, if it can be sent as it is
        is_whole = (
            type(parts) is np.ndarray
            and parts.flags.c_contiguous
            and parts.dtype == mine[0].dtype
            and not keep
        )
        self._whole = parts.reshape(-1) if is_whole else None
        if keep:
            mine = [part.copy() for part in mine]
        shape, dtype, layout = mine[0].shape, mine[0].dtype, None
        self._algorithm = algorithm
        if moves(communicator, "all_to_all", algorithm):
            layout = UNMOVED
            if all(part.shape == shape for part in mine):
                rank, most = communicator.member_rank, communicator.size - 1
                takes = tuple(
                    (peer, place_of(peer, rank)) for peer, _ in other_ranks(most + 1, rank)
                )
                detail = detail_of(dtype, shape)
                layout = TransferLayout(detail, dtype, shape, most, takes, most_takes=most)
        nbytes = sum(part.nbytes for part in mine)
        spec = CollectiveSpec(
            "all_to_all",
            algorithm=algorithm,
            dtype=dtype.name,
            size=nbytes,
            is_uniform=False,
            shown=(dtype.name, f"{nbytes} bytes"),
        )
        super().__init__(communicator, spec, layout, mine, out)

    def arrange(self) -> Blocks | None:
        return self._blocks(self.inputs, self._outs(self.inputs, self.out))

    def parts_of(self, x: NDArray[Any]) -> list[NDArray[Any]]:
        return even_parts(x, self.size)

    def persistent(self, like: NDArray[Any]) -> Persistent | None:
        self._whole = None  # repetitions have other parts
        return super().persistent(like)

    def _outs(self, mine: list[NDArray[Any]], out: Any) -> list[NDArray[Any]] | None:
        return None if out is None else _checked_outs(out, self.communicator, mine)

    def bind(self, x: NDArray[Any], out: Any) -> Blocks | None:
        mine = self.parts_of(x)
        output = np.empty(x.shape, x.dtype) if out is None else out
        is_like_x = (
            type(output) is np.ndarray
            and output.shape == x.shape
            and output.dtype == x.dtype
            and output.flags.carray
        )
        if is_like_x and not np.may_share_memory(output, x):
            blocks = _sides(mine, even_parts(output, self.size), self.rank)
            return blocks._replace(output=output, parts=self.size)
        return self._blocks(mine, self._outs(mine, out))

    def _blocks(self, mine: list[NDArray[Any]], outs: list[NDArray[Any]] | None) -> Blocks | None:
        """Return the arrays of a call with parts of one shape; None if `outs` does not serve."""
        shape, dtype = mine[0].shape, mine[0].dtype
        if outs is None and 0 < len(shape) < _DIMENSIONS_MAX:
            output = list(np.empty((len(mine), *shape), dtype))
        elif outs is None:
            output = [np.empty(shape, dtype) for _ in mine]
        else:
            output = outs
            if any(
                one.shape != shape or one.dtype != dtype or not one.flags.carray for one in output
            ):
                return None
        return _sides(mine, output, self.rank)

    def finish(self, output: list[NDArray[Any]]) -> list[NDArray[Any]]:
        # One array for each rank; empty ones for ranks that left a block of `sv.uneven`.
        empty = np.empty((0, *output[0].shape[1:]), output[0].dtype)
        return by_rank(self.communicator, list(output), empty)

    def slow_path(self) -> Generator[Stage, None, list[NDArray[Any]]]:
        communicator, mine = self.communicator, self.inputs
        header = [dtype_index(mine[0].dtype), [list(part.shape) for part in mine]]
        packed = yield from gather_bytes(communicator, pack_object(header))
        headers = list(map(unpack_object, packed))
        if any(index != headers[0][0] for index, _ in headers):
            table = {
                communicator.members[rank]: f"brings {DTYPE_NAMES[index]}"
                for rank, (index, _) in enumerate(headers)
            }
            raise MismatchError("all_to_all: the parts must have one dtype on all ranks", table)
        output = yield from self._exchanged([shapes for _, shapes in headers])
        outs = self._outs(mine, self.out)
        if outs is not None:
            output = [deliver(one, target) for one, target in zip(output, outs, strict=True)]
        return self.finish(output)

    def _exchanged(
        self, shapes: list[list[list[int]]]
    ) -> Generator[Stage, None, list[NDArray[Any]]]:
        """Yield the stage of the parts; return those for this rank, in `out` if they fit there."""
        rank, sent = self.rank, self._whole
        if sent is None:
            sent = np.concatenate([part.reshape(-1) for part in self.inputs])
        matrix = tuple(tuple(prod(shape) for shape in row) for row in shapes)
        counts = tuple(row[rank] for row in matrix)
        received = self._memory(counts, sent.dtype)
        yield from all_to_all_flat(self.communicator, sent, matrix, received, self._algorithm)
        ends = accumulate(counts)
        blocks = zip(ends, counts, shapes, strict=True)
        return [received[end - count : end].reshape(row[rank]) for end, count, row in blocks]

    def _memory(self, counts: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return flat memory for blocks of so many elements: `out`, if they lie there like this."""
        out = self.out
        outs = self._outs(self.inputs, out) if type(out) is np.ndarray else None
        if outs is not None and tuple(one.size for one in outs) == counts:
            return result_buffer(out, out.shape, dtype).reshape(-1)
        return np.empty(sum(counts), dtype)


def _checked_outs(
    out: Any, communicator: Communicator, mine: list[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Return one output for each rank that takes part; raise ConfigError if they do not fit."""
    if type(out) is UnsupportedLibrary:
        raise ConfigError(f"out {out.reason}")
    size = len(communicator.whole)
    if isinstance(out, np.ndarray) and out.ndim:
        outs = [out[chunk.start : chunk.stop] for chunk in even_chunks(out.shape[0], len(mine))]
    elif (
        isinstance(out, list | tuple)
        and len(out) == size
        and all(isinstance(one, np.ndarray) for one in out)
    ):
        outs = [out[rank] for rank in communicator.present]
    else:
        raise ConfigError(
            f"out must be a list of {size} arrays, or one array to be cut along axis 0"
        )
    for one in outs:
        if any(np.may_share_memory(one, part) for part in mine):
            raise ConfigError("out overlaps the parts: pass another array, or leave it out")
    return outs


def _sides(mine: list[NDArray[Any]], output: list[NDArray[Any]], rank: int) -> Blocks:
    targets = (*output[rank + 1 :], *output[:rank])
    return Blocks(output, (*mine[:rank], *mine[rank + 1 :]), targets, mine[rank], output[rank])


register(
    Collective(
        (scatter,), CollectiveKind.MOVE,
        gives="root: n arrays, or one to be cut along axis 0; others: None", gets="rank r: array r",
        cost="one direct copy of each part; over links each part once from the root",
        wanted=lambda case: case.piece(case.part(case.root)), layout="cut", from_root=True,
    ),
    Collective(
        (all_to_all,), CollectiveKind.MOVE, gives="n arrays, or one to be cut along axis 0",
        gets="rank r: array r of each rank, a list",
        cost="one direct copy of each part; over links n-1 rounds, each part once",
        wanted=lambda case: [case.piece(part) for part in case.parts()], layout="cut",
    ),
)  # fmt: skip
