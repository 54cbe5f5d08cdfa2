"""All-reduce of logical shards: the bits do not depend on which rank has which shard; `tree_sum`.

A fixed binary tree over shard ids defines the sum. Each rank sums the nodes of the tree whose
shards it has all, and sends those sums. We chose this over exact integer summation (a common
exponent for each element, 64-bit sums, one rounding). It is faster unless shards are dealt out in
turn, treats all dtypes, infinities and NaN alike, and gives the bits of `tree_sum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.algorithms.reproducible_tree import runs_of, split, whole_nodes
from syncvar.algorithms.schedule import Chunk, even_chunks
from syncvar.collectives.collective_registry import Collective, CollectiveKind, register
from syncvar.collectives.groups import communicator_of
from syncvar.collectives.reduce_args import check_finite
from syncvar.collectives.stage_builders import all_to_all_flat, gather_bytes, gather_flat
from syncvar.collectives.tensors import convert_back
from syncvar.core.array_arguments import as_array, matching_word
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index, dtype_index
from syncvar.core.errors import ConfigError, MismatchError
from syncvar.core.pytree import (
    TreeDef,
    arrays_of,
    describe,
    flatten,
    holds_dataclass,
    structure_from_plain,
    structure_to_plain,
    unflatten,
)
from syncvar.core.reduce_ops import finish, quiet, reduction
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.arithmetic import widen
from syncvar.runtime.collective_spec import CollectiveSpec, spec_of
from syncvar.runtime.communicator import CheckedCall

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from syncvar.collectives.groups import Group
    from syncvar.core.reduce_ops import Reduction
    from syncvar.runtime.communicator import Communicator
    from syncvar.runtime.request import Stage

    Node = tuple[int, int]

_BLOCK = 1 << 14  # elements summed at a time, so that intermediate sums stay in the cache


def tree_sum(parts: Sequence[Any]) -> Any:
    """Sum parts in the order of the reproducible tree, on this rank alone.

    The bits are those of `all_reduce_shards` of the same parts, wherever they are.

    Args:
        parts: At least one array or pytree of arrays; all of one shape and dtype.

    Returns:
        T(0, len(parts)), a new array or pytree.

    Raises:
        ConfigError: There are no parts, or they do not fit together.

    Order: T(lo, hi) = T(lo, mid) + T(mid, hi), mid = lo + the largest power of two below hi - lo.

    Example:
        >>> import syncvar as sv
        >>> sv.tree_sum([1.0, 2.0, 4.0])
        array(7.)
    """
    parts = list(parts)
    if not parts:
        raise ConfigError("tree_sum needs at least one part")
    flat = [flatten(part) for part in parts]
    if any(structure != flat[0][0] for structure, _ in flat):
        raise ConfigError("the parts of tree_sum must have the same structure")
    sums = []
    for leaves in zip(*(leaves for _, leaves in flat), strict=True):
        arrays = [as_array(leaf, "a part") for leaf in leaves]
        first = arrays[0]
        if any(array.shape != first.shape or array.dtype != first.dtype for array in arrays):
            raise ConfigError("the parts of tree_sum must have the same shape and dtype")
        sums.append(tree_combined(arrays, "sum"))
    return convert_back(parts[0], unflatten(flat[0][0], sums, parts[0]))


def tree_combined(arrays: Sequence[NDArray[Any]], op: str) -> NDArray[Any]:
    """Return the "sum" or "mean" of arrays of one shape and dtype, by the reproducible tree."""
    first = arrays[0]
    reducer = reduction(op, first.dtype)
    total = np.empty(first.size, reducer.accumulate)
    items = {
        (number, number + 1): np.ascontiguousarray(array).reshape(-1)
        for number, array in enumerate(arrays)
    }
    summed(items, 0, len(arrays), total, 0)
    with quiet():
        return finish(reducer, total, len(arrays)).reshape(first.shape)


def summed(
    held: Mapping[Node, NDArray[Any]], lo: int, hi: int, out: NDArray[Any], start: int
) -> None:
    """Sum the tree T(lo, hi) into `out`, in the dtype of `out`, from element `start` of the nodes.

    `held` has the flat arrays of known nodes (lo, hi), which cover the tree.
    """
    rooms: list[NDArray[Any]] = []
    with quiet():
        for first in range(0, out.size, _BLOCK):
            block = out[first : first + _BLOCK]
            _sum(held, lo, hi, block, start + first, rooms, 0)


def _sum(
    held: Mapping[Node, NDArray[Any]],
    lo: int,
    hi: int,
    out: NDArray[Any],
    start: int,
    rooms: list[NDArray[Any]],
    depth: int,
) -> None:
    node = held.get((lo, hi))
    if node is not None:
        part = node[start : start + out.size]
        if part.dtype == np.float16 and out.dtype == np.float32:
            widen(part, out)
        else:
            out[...] = part
        return
    mid = split(lo, hi)
    left, right = held.get((lo, mid)), held.get((mid, hi))
    if left is None or left.dtype != out.dtype:
        _sum(held, lo, mid, out, start, rooms, depth)
        first = out
    else:
        first = left[start : start + out.size]
    if right is None or right.dtype != out.dtype:
        if len(rooms) == depth:
            rooms.append(np.empty(_BLOCK, out.dtype))
        second = rooms[depth][: out.size]
        _sum(held, mid, hi, second, start, rooms, depth + 1)
    else:
        second = right[start : start + out.size]
    np.add(first, second, out=out)


# -- shards on several ranks -----------------------------------------------------------------------

_SMALL_BYTES = 1 << 16  # of all nodes: up to here each rank gets all of them, in one round
_OPS = ("sum", "mean")
_SHOWN_MAX = 8  # ids, or ranges of ids, that a message lists


def all_reduce_shards(
    shards: Mapping[int, Any],
    op: str = "sum",
    *,
    group: Group | None = None,
    timeout: float | None = None,
) -> Any:
    """Combine numbered shards, each held by one rank, and give every rank the result.

    The bits of the result depend on the shards alone: not on the number of ranks, the distribution
    of shards, hosts or transports. They are those of `sv.tree_sum` of all shards in the order of
    their ids.

    Args:
        shards: Mapping of id to an array of any shape, a number, or a nested
            dict/list/tuple/dataclass of them. Trees, shapes and dtypes must be the same for all
            shards. Over all ranks the ids are 0 to n-1, each once. A rank without shards passes {};
            if shards hold dataclasses, every rank needs one, because classes are not sent.
        op: "sum", or "mean": the sum divided by n, the number of shards.
        group: Ranks that take part; None means the world.
        timeout: Seconds; None means the job's default.

    Returns:
        A new array of the shape and dtype of a shard (the mean of integers is float64), or the same
        pytree of arrays. If this rank's shards hold tensors, so does the result. A rank that passes
        {} gets NumPy arrays, and plain tuples in place of named ones.

    Raises:
        ConfigError: An argument of this rank is wrong; the other ranks raise MismatchError.
        MismatchError: On all ranks: an id occurs twice or never, or shards do not fit together. A
            table lists the shards of each rank. The group stays usable.
        PeerLost: A rank has failed.
        DeadlineExceeded: The call did not finish in time.

    Cost: an exchange of ids and shapes, then two rounds. In the first, each rank sums the subtrees
        of which it has all shards, cuts each of these sums into one piece for each rank, and sends
        the pieces. In the second, it sends its piece of the result. A few small arrays travel
        whole, in one round. Give each rank consecutive ids: it then has at most 2 log2(n) subtrees,
        and only one if its number of shards is a power of two. With every N-th id each shard is a
        subtree.
    Order: T(0, n) over ids, T(lo, hi) = T(lo, mid) + T(mid, hi), mid = lo + the largest power of
        two below hi - lo. Half types are combined in float32 and rounded once. The bytes are equal
        on every rank. The error is at most log2(n) roundings of the sum of the absolute values.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> sv.all_reduce_shards({0: np.array([1.0, 2.0]), 1: np.array([3.0, 4.0])}, "mean")
        array([2., 3.])
    """
    communicator = communicator_of(group)
    make_checked = partial(ShardsCall, communicator, shards, op)
    return communicator.perform("all_reduce_shards", make_checked, timeout)


class _Kind(NamedTuple):
    """Tree of a shard, and (dtype index, shape) of each of its arrays."""

    structure: TreeDef
    arrays: tuple[tuple[int, tuple[int, ...]], ...]

    def describe(self) -> str:
        shown = ", ".join(f"{DTYPE_NAMES[index]}{list(shape)}" for index, shape in self.arrays[:3])
        more = ", …" if len(self.arrays) > 3 else ""
        if self.structure.kind == "leaf":
            return shown
        return f"{describe(self.structure)} of {shown}{more}"


class _Announcement(NamedTuple):
    """Announcement of a rank: its ids as ranges, and the kind of its shards (None: no shards)."""

    runs: tuple[tuple[int, int], ...]
    kind: _Kind | None

    def describe(self) -> str:
        if self.kind is None:
            return "brings nothing"
        return f"brings {_shown(self.runs)}: {self.kind.describe()}"


class ShardsCall(CheckedCall):
    """An all-reduce of shards, which may be a part of the call `name`."""

    def __init__(
        self,
        communicator: Communicator,
        shards: Any,
        op: Any,
        *,
        name: str | CollectiveSpec = "all_reduce_shards",
    ) -> None:
        ids, self._leaves, kind = _checked(shards)
        self._like = shards[ids[0]] if ids else None
        self._op = op = _checked_op(op)
        for index, _ in () if kind is None else kind.arrays:
            reduction(op, dtype_from_index(index))  # raises for a dtype that has no sum
        self._mine = _Announcement(tuple(runs_of(ids)), kind)
        self._communicator, self._name = communicator, name
        if communicator.size == 1:
            wrong = _first_wrong([self._mine])
            if wrong:
                raise ConfigError(f"{name}: {wrong}")
        shown = (name, _shown(self._mine.runs))
        super().__init__(spec_of(name)._replace(op=op, text=_label, shown=shown))

    def stages(self) -> Generator[Stage, None, Any]:
        """Yield the exchange of ids, then the stages of each dtype."""
        everyone = yield from self._announcements()
        agreed = next(one.kind for one in everyone if one.kind is not None)
        results: list[Any] = [None] * len(agreed.arrays)
        runs = tuple(one.runs for one in everyone)
        reducers = [reduction(self._op, dtype_from_index(index)) for index, _ in agreed.arrays]
        for reducer, places in groupby(
            sorted(range(len(reducers)), key=lambda place: reducers[place].source),
            key=reducers.__getitem__,
        ):
            chosen = list(places)
            shapes = [agreed.arrays[place][1] for place in chosen]
            flat = {
                number: _joined([arrays[place] for place in chosen])
                for number, arrays in self._leaves.items()
            }
            count = sum(map(_size, shapes))
            total = yield from _total(self._communicator, flat, runs, reducer, count)
            ends = list(accumulate(map(_size, shapes)))
            for place, shape, end in zip(chosen, shapes, ends, strict=True):
                results[place] = total[end - _size(shape) : end].reshape(shape)
        return convert_back(self._like, unflatten(agreed.structure, results, self._like))

    def _announcements(self) -> Generator[Stage, None, list[_Announcement]]:
        """Return the announcements of all ranks; raise MismatchError if they do not fit."""
        communicator = self._communicator
        if communicator.size == 1:
            return [self._mine]
        packed = yield from gather_bytes(communicator, _packed(self._mine))
        everyone = list(map(_unpacked, packed))
        wrong = _first_wrong(everyone)
        if wrong:
            members = communicator.members
            table = {members[rank]: one.describe() for rank, one in enumerate(everyone)}
            raise MismatchError(f"{self._name}: {wrong}", table)
        return everyone


def _label(spec: CollectiveSpec) -> str:
    return f"{spec.shown[0]}({spec.op}, {spec.shown[1]})"


def _checked_op(op: Any) -> str:
    known = matching_word(op, _OPS)
    if known:
        return known
    from syncvar.core.migration_hints import op_hint, op_of

    known = op_of(str(op).lower())
    if known not in _OPS:
        wrong = f"{op!r}{op_hint(op, _OPS)}"
        raise ConfigError(f"op of all_reduce_shards must be one of {', '.join(_OPS)}, not {wrong}")
    return known


def _checked(shards: Any) -> tuple[list[int], dict[int, list[NDArray[Any]]], _Kind | None]:
    """Return the ids (ascending), the arrays of each shard, and the kind of the shards."""
    if not isinstance(shards, Mapping):
        raise ConfigError(
            f"shards must be a dict of id -> array, {{}} for none, not {type(shards).__name__}"
        )
    leaves: dict[int, list[NDArray[Any]]] = {}
    kinds: dict[int, _Kind] = {}
    for key, value in shards.items():
        if isinstance(key, bool) or not isinstance(key, int | np.integer) or key < 0:
            raise ConfigError(f"the id of a shard must be an integer, 0 or more, not {key!r}")
        number = int(key)
        structure, parts = flatten(value)
        arrays = arrays_of(value, parts, f"shard {number}")
        for array in arrays:
            check_finite(array, f"shard {number} of all_reduce_shards")
        leaves[number] = arrays
        shapes = tuple((dtype_index(array.dtype), array.shape) for array in arrays)
        kinds[number] = _Kind(structure, shapes)
    ids = sorted(leaves)
    for number in ids:
        if kinds[number] != kinds[ids[0]]:
            raise ConfigError(
                f"all shards must have the same structure, shapes and dtypes: shard {ids[0]} is "
                f"{kinds[ids[0]].describe()}, shard {number} is {kinds[number].describe()}"
            )
    return ids, leaves, kinds[ids[0]] if ids else None


def _packed(announcement: _Announcement) -> bytes:
    kind = announcement.kind
    shown = None if kind is None else [structure_to_plain(kind.structure), kind.arrays]
    return pack_object([announcement.runs, shown])


def _unpacked(data: bytes) -> _Announcement:
    runs, kind = unpack_object(data)
    kind = None if kind is None else _Kind(structure_from_plain(kind[0]), kind[1])
    return _Announcement(runs, kind)


def _first_wrong(everyone: Sequence[_Announcement]) -> str:
    """Return why the shards of the ranks cannot be combined, or an empty text."""
    found = {
        one.kind: rank for rank, one in reversed(list(enumerate(everyone))) if one.kind is not None
    }
    if not found:
        return "no rank has a shard: there is nothing to combine"
    if len(found) > 1:
        return "all shards must have the same structure, shapes and dtypes"
    if any(one.kind is None for one in everyone) and holds_dataclass(next(iter(found)).structure):
        return (
            "classes of dataclasses are not sent, so every rank must have a shard; "
            "or pass dicts: dataclasses.asdict(x)"
        )
    twice, missing = [], []
    reached, last = 0, 0  # all ids below `reached` are known; `last` has the one just below
    for start, stop, rank in sorted(
        (start, stop, rank) for rank, one in enumerate(everyone) for start, stop in one.runs
    ):
        if start < reached:
            twice.append(((start, min(stop, reached)), (last, rank)))
        elif start > reached:
            missing.append((reached, start))
        if stop > reached:
            reached, last = stop, rank
    words = [f"ranks {a} and {b} both have {_shown([run])}" for run, (a, b) in twice[:3]]
    if missing:
        words.append(f"no rank has {_shown(missing)}")
    rule = ". The ids of all ranks must be 0 to n-1, each once"
    return "; ".join(words) + (rule if words else "")


def _shown(runs: Sequence[tuple[int, int]]) -> str:
    """Return the text of ids.

    Example:
        >>> _shown([(0, 3), (5, 6)])
        'shards 0-2, 5'
    """
    if not runs:
        return "no shard"
    shown = [
        str(start) if stop == start + 1 else f"{start}-{stop - 1}"
        for start, stop in runs[:_SHOWN_MAX]
    ]
    noun = "shard" if len(runs) == 1 and runs[0][1] == runs[0][0] + 1 else "shards"
    return f"{noun} {', '.join(shown)}{', …' if len(runs) > _SHOWN_MAX else ''}"


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0]).reshape(-1)
    return np.concatenate([one.reshape(-1) for one in arrays])


@lru_cache(maxsize=64)
def _nodes(
    runs: tuple[tuple[tuple[int, int], ...], ...],
) -> tuple[list[list[tuple[int, int]]], int]:
    """Return the tree nodes that each rank can sum alone, and the number of shards."""
    count = max(stop for one in runs for _, stop in one)
    return [whole_nodes(one, count) for one in runs], count


def _total(
    communicator: Communicator,
    shards: dict[int, NDArray[Any]],
    runs: tuple[tuple[tuple[int, int], ...], ...],
    reducer: Reduction,
    count: int,
) -> Generator[Stage, None, NDArray[Any]]:
    """Return the combination of all ranks' flat shards of `count` elements."""
    size, rank = communicator.size, communicator.member_rank
    nodes, shard_count = _nodes(runs)
    items = {(number, number + 1): array for number, array in shards.items()}
    is_small = sum(map(len, nodes)) * count * reducer.accumulate.itemsize <= _SMALL_BYTES
    chunks = [Chunk(0, count)] * size if is_small else even_chunks(count, size)
    own = chunks[rank]
    # Every rank sends the nodes that it can sum alone, cut by elements. Each rank then continues
    # with its elements; if all nodes together are small, every rank continues with all elements.
    matrix = tuple(
        [
            tuple([len(mine) * one.count * (peer != source) for peer, one in enumerate(chunks)])
            for source, mine in enumerate(nodes)
        ]
    )
    sent = np.empty(sum(matrix[rank]), reducer.accumulate)
    place = 0
    for peer, chunk in enumerate(chunks):
        for node in nodes[rank] if peer != rank else ():
            summed(items, *node, sent[place : place + chunk.count], chunk.start)
            place += chunk.count
    received, place = sent[:0], 0
    if count and size > 1:
        received = yield from all_to_all_flat(communicator, sent, matrix)
    held = {item: array[own.start : own.stop] for item, array in items.items()}
    for source in range(size):
        for node in nodes[source] if source != rank else ():
            held[node] = received[place : place + own.count]
            place += own.count
    piece = np.empty(own.count, reducer.accumulate)
    summed(held, 0, shard_count, piece, 0)
    with quiet():
        piece = finish(reducer, piece, shard_count)
    if is_small or size == 1:
        return piece
    return (yield from gather_flat(communicator, piece, tuple(chunk.count for chunk in chunks)))


register(
    Collective(
        (all_reduce_shards,), CollectiveKind.REDUCE, gives="arrays by id, any of the ids 0 to m-1",
        gets="the combination of the m arrays",
        cost="an exchange of ids, then two rounds: partial sums, results",
        wanted=lambda case: case.combined(), schedules=("all_to_all", "all_gather"),
        own_bus="2(n-1)/n", ops=_OPS, arguments=lambda case, x: ({case.size - 1 - case.rank: x},),
    )
)  # fmt: skip
