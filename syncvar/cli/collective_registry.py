"""The registry of collectives: inputs, outputs, call, expected result and rating of each, as data.

`syncvar bench`, `syncvar test` and `syncvar collectives` read it and know no collective themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import syncvar as sv
from syncvar.cli.selftest_inputs import Case, combined, cut, part
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError
from syncvar.core.reduce_ops import OPS, identity, reduction
from syncvar.core.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective.

    Args:
        name: Name of the function; send and recv share one row.
        functions: Functions of `syncvar`.
        gives: Input of a rank, in words.
        gets: Output of a rank, in words.
        plans: Keys of `ALGORITHMS` whose schedules it runs.
        bus: Key of `BUS_FACTORS`; "" if no bytes move, or an unknown number.
        layout: Relation of a rank's array to the rated size S. "vector": S; "cut": S, cut into n
            pieces; "blocks": S / n, one of n blocks; "none": no array.
        has_op: Whether it has an op.
        ops: Its ops, as far as a dtype supports them.
        has_root: Whether it has a root.
        from_root: Whether only the root passes an array.
        wanted: Expected result of a case.
        run: Call, if it is not `function(x, op, root=…)`.
        in_place: Whether `out=` may be the input.
        tests: File of its tests with real processes.
    """

    name: str
    functions: tuple[str, ...]
    gives: str
    gets: str
    plans: tuple[str, ...]
    bus: str = ""
    layout: str = "none"
    has_op: bool = False
    ops: tuple[str, ...] = OPS
    has_root: bool = False
    from_root: bool = False
    wanted: Callable[[Case], Any] = lambda _: None
    run: Callable[..., Any] | None = None
    in_place: bool = False
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
        bus="2(n-1)/n", layout="vector", has_op=True, wanted=_everybody, in_place=True,
    ),
    Collective(
        name="all_reduce_shards", functions=("all_reduce_shards",),
        plans=("all_to_all", "all_gather"),
        gives="arrays by id, any of the ids 0 to m-1", gets="the combination of the m arrays",
        bus="2(n-1)/n", layout="vector", has_op=True, ops=("sum", "mean"), wanted=_everybody,
        run=lambda case, x, **options: sv.all_reduce_shards(
            {case.size - 1 - case.rank: x}, case.op, **options
        ),
    ),
    Collective(
        name="reduce", functions=("reduce",), plans=("reduce",),
        gives="an array", gets="root: the combination of all ranks' arrays; others: None",
        bus="1", layout="vector", has_op=True, has_root=True, wanted=_at_root, in_place=True,
    ),
    Collective(
        name="reduce_scatter", functions=("reduce_scatter",), plans=("reduce_scatter",),
        gives="an array", gets="rank r: piece r of the combination, cut along axis 0",
        bus="(n-1)/n", layout="cut", has_op=True,
        wanted=lambda case: cut(_everybody(case), case.size)[case.rank],
    ),
    Collective(
        name="scan", functions=("scan",), plans=("scan",),
        gives="an array", gets="rank r: the combination of ranks 0 to r",
        bus="1", layout="vector", has_op=True,
        wanted=lambda case: combined(case, range(case.rank + 1)), in_place=True,
    ),
    Collective(
        name="exscan", functions=("exscan",), plans=("exscan",),
        gives="an array",
        gets="rank r: the combination of ranks 0 to r-1; rank 0: the op's identity",
        bus="1", layout="vector", has_op=True, wanted=_exclusive, in_place=True,
    ),
    Collective(
        name="broadcast", functions=("broadcast",), plans=("broadcast",),
        gives="root: an array; others: None, or one of that shape", gets="the root's array",
        bus="1", layout="vector", has_root=True, from_root=True,
        wanted=lambda case: part(case, case.root),
        in_place=True,
    ),
    Collective(
        name="all_gather", functions=("all_gather",), plans=("all_gather",),
        gives="an array; lengths may differ", gets="all ranks' arrays, joined in rank order",
        bus="(n-1)/n", layout="blocks", wanted=_joined,
    ),
    Collective(
        name="gather", functions=("gather",), plans=("gather",),
        gives="an array; lengths may differ",
        gets="root: all ranks' arrays, joined in rank order; others: None",
        bus="(n-1)/n", layout="blocks", has_root=True,
        wanted=lambda case: _joined(case) if case.rank == case.root else None,
    ),
    Collective(
        name="scatter", functions=("scatter",), plans=("scatter",),
        gives="root: n arrays, or one to be cut along axis 0; others: None", gets="rank r: array r",
        bus="(n-1)/n", layout="cut", has_root=True, from_root=True,
        wanted=lambda case: cut(part(case, case.root), case.size)[case.rank],
    ),
    Collective(
        name="all_to_all", functions=("all_to_all",), plans=("all_to_all",),
        gives="n arrays, or one to be cut along axis 0",
        gets="rank r: array r of each rank, a list",
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
        bus="1", layout="vector",
        wanted=lambda case: part(case, (case.rank - 1) % case.size), run=_ring,
    ),
    Collective(
        name="barrier", functions=("barrier",), plans=("barrier",),
        gives="nothing", gets="None, after all ranks have entered",
        run=lambda _case, _x, **options: sv.barrier(**options),
    ),
    Collective(
        name="all_gather_object", functions=("all_gather_object",), plans=("all_gather",),
        gives="plain data", gets="all ranks' objects, a list",
    ),
    Collective(
        name="broadcast_object", functions=("broadcast_object",), plans=("broadcast",),
        gives="root: plain data", gets="the root's object", has_root=True, from_root=True,
    ),
    Collective(
        name="gather_object", functions=("gather_object",), plans=("gather",),
        gives="plain data", gets="root: all ranks' objects, a list; others: None", has_root=True,
    ),
    Collective(
        name="scatter_object", functions=("scatter_object",), plans=("scatter",),
        gives="root: a list of n objects", gets="rank r: object r", has_root=True, from_root=True,
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
