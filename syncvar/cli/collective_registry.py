"""The registry of collectives: inputs, outputs, call, expected result and rating of each, as data.

`syncvar bench`, `syncvar test` and `syncvar collectives` read it and know no collective themselves.

An input is a short pattern, repeated. Its length is a prime, so a chunk in the wrong position
shows; patterns of two ranks differ. The expected results use NumPy only, in float64 or in integers:
they are exact, so == compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv
from syncvar.algorithms.schedule import even_chunks
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError
from syncvar.core.reduce_ops import OPS, identity, reduction
from syncvar.core.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

PERIOD = 1021

_FOLDS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_LOCATING = {"minloc": np.argmin, "maxloc": np.argmax}
FOLDED_OPS = (*_FOLDS, *_LOCATING)  # ops with an expected result


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a collective; equal on all ranks except for `rank`."""

    rank: int  # this rank
    size: int  # number of ranks
    shape: tuple[int, ...]  # shape of a rank's input
    dtype: str = "float32"  # its name
    op: str = "sum"  # op, if the collective has one
    root: int = 0  # root, if it has one


def part(case: Case, rank: int) -> NDArray[Any]:
    """Return a rank's input as a new array."""
    return np.resize(_pattern(case.dtype, case.op, rank, case.size), case.shape)


def combined(case: Case, ranks: Sequence[int]) -> Any:
    """Return the reduction of some ranks' inputs; (values, ranks) for minloc and maxloc."""
    found = _combined(case.dtype, case.op, tuple(ranks), case.size)
    if isinstance(found, tuple):
        return tuple(np.resize(one, case.shape) for one in found)
    return np.resize(found, case.shape)


def cut(value: Any, size: int) -> list[Any]:
    """Return `size` pieces of axis 0, the first ones longer; of a tuple, tuples of pieces."""
    if isinstance(value, tuple):
        return list(zip(*(cut(one, size) for one in value), strict=True))
    return [value[chunk.start : chunk.stop] for chunk in even_chunks(value.shape[0], size)]


def different_array(wanted: NDArray[Any]) -> NDArray[Any]:
    """Return an array that differs in every element, to detect elements that nobody writes."""
    return np.asarray((wanted == 0).astype(wanted.dtype))


def count_wrong(got: Any, wanted: Any) -> int:
    """Return the number of wrong elements; all, at least one, if shape or dtype is wrong."""
    if wanted is None:
        return 0 if got is None else 1
    if isinstance(wanted, list | tuple):
        if not isinstance(got, list | tuple) or len(got) != len(wanted):
            return max(1, sum(int(one.size) for one in wanted))
        return sum(count_wrong(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    if not isinstance(got, np.ndarray) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return max(1, int(wanted.size))
    return int(np.count_nonzero(got != wanted))


def first_wrong(got: Any, wanted: Any) -> str:
    """Describe the first difference of two results; "" if there is none."""
    if wanted is None:
        return "" if got is None else f"a {type(got).__name__} instead of None"
    if isinstance(wanted, list | tuple):
        return _first_wrong_array(got, wanted)
    if not isinstance(got, np.ndarray):
        return f"a {type(got).__name__} instead of an array"
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    indexes = np.argwhere(got != wanted)
    if not len(indexes):
        return ""
    where = tuple(int(one) for one in indexes[0])
    shown = where[0] if len(where) == 1 else where
    more = f" ({len(indexes)} of {wanted.size} are wrong)" if len(indexes) > 1 else ""
    return f"index {shown} is {got[where]} instead of {wanted[where]}{more}"


def _first_wrong_array(got: Any, wanted: Sequence[Any]) -> str:
    if not isinstance(got, list | tuple):
        return f"a {type(got).__name__} instead of {len(wanted)} arrays"
    if len(got) != len(wanted):
        return f"{len(got)} arrays instead of {len(wanted)}"
    found = (first_wrong(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    return next((f"array {index}: {one}" for index, one in enumerate(found) if one), "")


@lru_cache(maxsize=4096)
def _pattern(dtype: str, op: str, rank: int, size: int) -> NDArray[Any]:
    kind = _dtype(dtype)
    index = np.arange(PERIOD)
    mixed = (7 * index + 5 * rank + index // 13 * (rank + 1) + rank * rank) % 11
    if kind.kind == "b":
        return (mixed % 2).astype(kind)
    if op in ("and", "or", "xor"):
        return ((mixed * 37 + 11) % 128).astype(kind)
    if op == "prod":  # one rank has a 2 in each element: products stay small on many ranks
        signs = np.ones(PERIOD) if kind.kind == "u" else 1.0 - 2.0 * (mixed % 2)
        factors = np.where(index % size == rank, 2.0, 1.0) * signs
        if kind.kind == "c":
            factors = factors * np.where(mixed % 3 == 0, 1j, 1)
        return factors.astype(kind)
    values = mixed % 6 if kind.kind == "u" else mixed % 8 - 5
    if op == "mean" and size * 5 <= np.iinfo(np.int8).max:
        values = values * size  # so that the mean is a whole number
    if kind.kind == "c":
        return (values + 1j * values[::-1]).astype(kind)
    return values.astype(kind)


@lru_cache(maxsize=4096)
def _combined(dtype: str, op: str, ranks: tuple[int, ...], size: int) -> Any:
    kind = _dtype(dtype)
    parts = [_pattern(dtype, op, rank, size) for rank in ranks]
    if op in _LOCATING:
        if kind.kind == "V":
            parts = [one.astype(np.float64) for one in parts]
        wide = np.stack(parts)
        at = _LOCATING[op](wide, axis=0)  # the lowest rank of equal values
        return np.take_along_axis(wide, at[None], axis=0)[0].astype(kind), np.asarray(ranks)[at]
    if not parts:
        is_float = op == "mean" and kind.kind in "iu"
        return np.full(PERIOD, _identity(op, kind), np.float64 if is_float else kind)
    if kind.kind in "fV":
        parts = [one.astype(np.float64) for one in parts]
    elif kind.kind == "c":
        parts = [one.astype(np.complex128) for one in parts]
    elif op == "mean":
        parts, kind = [one.astype(np.float64) for one in parts], np.dtype(np.float64)
    with np.errstate(over="ignore"):
        total = reduce(_FOLDS[op], parts)
    if op == "mean" and kind.kind == "c":
        # Complex division rounds more than once: divide in the dtype itself.
        total = total.astype(kind) / kind.type(len(ranks))
    elif op == "mean":
        total = total / len(ranks)
    return np.asarray(total).astype(kind)


def _identity(op: str, kind: np.dtype[Any]) -> Any:
    if op in ("min", "max"):
        if kind.kind == "b":
            return op == "min"
        if kind.kind in "iu":
            limits = np.iinfo(kind)
            return limits.max if op == "min" else limits.min
        return np.inf if op == "min" else -np.inf
    if op == "and":
        return np.True_ if kind.kind == "b" else ~kind.type(0)
    return 1 if op == "prod" else 0


def _dtype(name: str) -> np.dtype[Any]:
    from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index

    return dtype_from_index(DTYPE_NAMES.index(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective."""

    name: str  # name of the function; send and recv share one row
    functions: tuple[str, ...]  # functions of `syncvar`
    gives: str  # input of a rank, in words
    gets: str  # output of a rank, in words
    cost: str  # what it costs, in words; the docstring has the details
    plans: tuple[str, ...]  # keys of `ALGORITHMS` whose schedules it runs
    bus: str = ""  # key of `BUS_FACTORS`; "" if no bytes move, or an unknown number
    # Relation of a rank's array to the rated size S. "vector": S; "cut": S, cut into n pieces;
    # "blocks": S / n, one of n blocks; "none": no array.
    layout: str = "none"
    has_op: bool = False  # whether it has an op
    ops: tuple[str, ...] = OPS  # its ops, as far as a dtype supports them
    has_root: bool = False  # whether it has a root
    from_root: bool = False  # whether only the root passes an array
    wanted: Callable[[Case], Any] = lambda _: None  # expected result of a case
    run: Callable[..., Any] | None = None  # call, if it is not `function(x, op, root=…)`
    in_place: bool = False  # whether `out=` may be the input
    # File of its tests with real processes
    tests: str = "tests/support/rank_scripts/every_collective.py"

    def shape(self, count: int, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's input for `count` elements, rounded up to pieces."""
        if self.layout in ("cut", "blocks"):
            block = -(-count // size)
            return (block * size,) if self.layout == "cut" else (block,)
        return (count,) if self.layout == "vector" else (0,)

    def total(self, case: Case) -> int:
        """Return the elements by which a call is rated."""
        count = int(np.prod(case.shape, dtype=np.int64))
        return count * case.size if self.layout == "blocks" else count

    def contribution(self, case: Case) -> Any:
        """Return this rank's input: a new array, or None if only the root passes one."""
        if self.layout == "none" or (self.from_root and case.rank != case.root):
            return None
        return part(case, case.rank)

    def call(self, case: Case, x: Any, **options: Any) -> Any:
        """Make the call."""
        if self.run is not None:
            return self.run(case, x, **options)
        if self.has_root:
            options["root"] = case.root
        function = getattr(sv, self.functions[0])
        return function(x, case.op, **options) if self.has_op else function(x, **options)


def _everybody(case: Case) -> Any:
    return combined(case, range(case.size))


def _at_root(case: Case) -> Any:
    return _everybody(case) if case.rank == case.root else None


def _joined(case: Case) -> Any:
    return np.concatenate([part(case, rank) for rank in range(case.size)])


def _exclusive(case: Case) -> Any:
    return combined(case, range(case.rank))


def _ring(case: Case, x: Any, **options: Any) -> Any:
    """Send to the next rank, receive from the previous one; odd ranks receive first."""
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    if case.rank % 2:
        result = sv.recv(before, **options)
        sv.send(x, after)
        return result
    sv.send(x, after)
    return sv.recv(before, **options)


_ALL = (
    Collective(
        name="all_reduce", functions=("all_reduce",), plans=("all_reduce",),
        gives="an array", gets="the combination of all ranks' arrays",
        cost="one or two rounds; over links 2(n-1) rounds, 2(n-1)/n of the array sent",
        bus="2(n-1)/n", layout="vector", has_op=True, wanted=_everybody, in_place=True,
    ),
    Collective(
        name="all_reduce_shards", functions=("all_reduce_shards",),
        plans=("all_to_all", "all_gather"),
        gives="arrays by id, any of the ids 0 to m-1", gets="the combination of the m arrays",
        cost="an exchange of ids, then two rounds: partial sums, results",
        bus="2(n-1)/n", layout="vector", has_op=True, ops=("sum", "mean"), wanted=_everybody,
        run=lambda case, x, **options: sv.all_reduce_shards(
            {case.size - 1 - case.rank: x}, case.op, **options
        ),
    ),
    Collective(
        name="reduce", functions=("reduce",), plans=("reduce",),
        gives="an array", gets="root: the combination of all ranks' arrays; others: None",
        cost="one round; over links ceil(log2 n) rounds of the array",
        bus="1", layout="vector", has_op=True, has_root=True, wanted=_at_root, in_place=True,
    ),
    Collective(
        name="reduce_scatter", functions=("reduce_scatter",), plans=("reduce_scatter",),
        gives="an array", gets="rank r: piece r of the combination, cut along axis 0",
        cost="one round; over links n-1 rounds, (n-1)/n of the array sent",
        bus="(n-1)/n", layout="cut", has_op=True,
        wanted=lambda case: cut(_everybody(case), case.size)[case.rank],
    ),
    Collective(
        name="scan", functions=("scan",), plans=("scan",),
        gives="an array", gets="rank r: the combination of ranks 0 to r",
        cost="one round; over links ceil(log2 n) rounds of the array",
        bus="1", layout="vector", has_op=True,
        wanted=lambda case: combined(case, range(case.rank + 1)), in_place=True,
    ),
    Collective(
        name="exscan", functions=("exscan",), plans=("exscan",),
        gives="an array",
        gets="rank r: the combination of ranks 0 to r-1; rank 0: the op's identity",
        cost="as `scan`",
        bus="1", layout="vector", has_op=True, wanted=_exclusive, in_place=True,
    ),
    Collective(
        name="broadcast", functions=("broadcast",), plans=("broadcast",),
        gives="root: an array; others: None, or one of that shape", gets="the root's array",
        cost="one direct copy; over links ceil(log2 n) rounds of the array",
        bus="1", layout="vector", has_root=True, from_root=True,
        wanted=lambda case: part(case, case.root),
        in_place=True,
    ),
    Collective(
        name="all_gather", functions=("all_gather",), plans=("all_gather",),
        gives="an array; lengths may differ", gets="all ranks' arrays, joined in rank order",
        cost="one direct copy of each block; over links n-1 rounds, (n-1)/n of the result sent",
        bus="(n-1)/n", layout="blocks", wanted=_joined,
    ),
    Collective(
        name="gather", functions=("gather",), plans=("gather",),
        gives="an array; lengths may differ",
        gets="root: all ranks' arrays, joined in rank order; others: None",
        cost="one direct copy of each block; over links each block once to the root",
        bus="(n-1)/n", layout="blocks", has_root=True,
        wanted=lambda case: _joined(case) if case.rank == case.root else None,
    ),
    Collective(
        name="scatter", functions=("scatter",), plans=("scatter",),
        gives="root: n arrays, or one to be cut along axis 0; others: None", gets="rank r: array r",
        cost="one direct copy of each part; over links each part once from the root",
        bus="(n-1)/n", layout="cut", has_root=True, from_root=True,
        wanted=lambda case: cut(part(case, case.root), case.size)[case.rank],
    ),
    Collective(
        name="all_to_all", functions=("all_to_all",), plans=("all_to_all",),
        gives="n arrays, or one to be cut along axis 0",
        gets="rank r: array r of each rank, a list",
        cost="one direct copy of each part; over links n-1 rounds, each part once",
        bus="(n-1)/n", layout="cut",
        wanted=lambda case: [
            cut(part(case, rank), case.size)[case.rank] for rank in range(case.size)
        ],
    ),
    Collective(
        name="send_recv", functions=("send", "recv", "sendrecv", "send_object", "recv_object"),
        plans=(),
        gives="send: an array for one rank; send_object: plain data",
        gets="recv: the array of one rank; recv_object: its object",
        cost="one copy into shared memory and one out; over links two frames",
        bus="1", layout="vector",
        wanted=lambda case: part(case, (case.rank - 1) % case.size), run=_ring,
    ),
    Collective(
        name="barrier", functions=("barrier",), plans=("barrier",),
        gives="nothing", gets="None, after all ranks have entered",
        cost="a look at each rank's word; over links ceil(log2 n) rounds of empty frames",
        run=lambda _case, _x, **options: sv.barrier(**options),
    ),
    Collective(
        name="all_gather_object", functions=("all_gather_object",), plans=("all_gather",),
        gives="plain data", gets="all ranks' objects, a list",
        cost="one round for small objects, otherwise n-1 more",
    ),
    Collective(
        name="broadcast_object", functions=("broadcast_object",), plans=("broadcast",),
        gives="root: plain data", gets="the root's object", has_root=True, from_root=True,
        cost="one round for small objects, otherwise ceil(log2 n) more",
    ),
    Collective(
        name="gather_object", functions=("gather_object",), plans=("gather",),
        gives="plain data", gets="root: all ranks' objects, a list; others: None", has_root=True,
        cost="one round for small objects, otherwise each object once to the root",
    ),
    Collective(
        name="scatter_object", functions=("scatter_object",), plans=("scatter",),
        gives="root: a list of n objects", gets="rank r: object r", has_root=True, from_root=True,
        cost="one round for small objects, otherwise each object once from the root",
    ),
)  # fmt: skip

COLLECTIVES: Mapping[str, Collective] = {one.name: one for one in _ALL}
"""The collectives by name, in the order of the table."""


def available() -> list[Collective]:
    """Return the collectives of this version."""
    return [one for one in _ALL if all(hasattr(sv, name) for name in one.functions)]


def find(name: str) -> Collective:
    """Return a collective that can be timed; raise ConfigError for other names."""
    known = [one.name for one in available() if one.layout != "none" or one.run is not None]
    name = name.removesuffix("_perf")  # as nccl-tests names its programs
    name = "send_recv" if name in ("send", "recv", "sendrecv") else name
    if name not in known:
        raise ConfigError(
            f"unknown collective {name!r}{nearest(name, known)}: it is one of {', '.join(known)}"
        )
    return COLLECTIVES[name]


def has_result_like_input(case: Case) -> bool:
    """Return whether result and input have one dtype; not so for minloc, integer mean."""
    found = combined(case, (0,))
    return not isinstance(found, tuple) and found.dtype.name == case.dtype


def dtypes() -> tuple[str, ...]:
    """Return the dtypes that collectives support."""
    return DTYPE_NAMES


def ops_of(collective: Collective, dtype: str) -> tuple[str, ...]:
    """Return the ops that a collective supports for a dtype."""
    kind = dtype_from_index(DTYPE_NAMES.index(dtype))
    supported = []
    for op in collective.ops if collective.has_op else ():
        try:
            found = reduction(op, kind)
            if collective.name == "exscan":
                identity(found)
        except ConfigError:
            continue
        supported.append(op)
    return tuple(supported)
