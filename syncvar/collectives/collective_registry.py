"""The registry of collectives: one record of each, which its own file registers.

A record has the functions, what goes in and comes out, the documentation of the table, and the
schedules that run. `syncvar bench`, `syncvar test`, `syncvar collectives` and `sv.persistent` read
the records and know no collective themselves. What is pure stands in `algorithms.builders`.

An input is a short pattern, repeated. Its length is a prime, so a chunk in the wrong position
shows; patterns of two ranks differ. The expected results use NumPy only, in float64 or in integers:
they are exact, so == compares them.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache, partial, reduce
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.algorithms.builders import SCHEDULES
from syncvar.algorithms.schedule import even_chunks
from syncvar.collectives.barrier import barrier
from syncvar.collectives.send_recv import (
    probe,
    recv,
    recv_any,
    recv_object,
    send,
    send_object,
    sendrecv,
)
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError
from syncvar.core.reduce_ops import OPS, identity, reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


class Case(NamedTuple):
    """One call of a collective; equal on all ranks except for `rank`."""

    rank: int  # this rank
    size: int  # number of ranks
    shape: tuple[int, ...]  # shape of a rank's input
    dtype: str = "float32"  # its name
    op: str = "sum"  # op, if the collective has one
    root: int = 0  # root, if it has one
    objects: tuple[Any, ...] = ()  # input of each rank, of a collective of objects

    def part(self, rank: int) -> Any:
        """Return a rank's input, counting in a ring: a new array, or its object."""
        if self.objects:
            return self.objects[rank]
        return np.resize(_pattern(self.dtype, self.op, rank % self.size, self.size), self.shape)

    def parts(self) -> list[Any]:
        """Return the inputs of all ranks."""
        return [self.part(rank) for rank in range(self.size)]

    def combined(self, stop: int | None = None) -> Any:
        """Return the reduction of the inputs of all ranks, or of those below `stop`.

        The result is (values, ranks) for minloc and maxloc.
        """
        found = _combined(self.dtype, self.op, self.size if stop is None else stop, self.size)
        if isinstance(found, tuple):
            return tuple(np.resize(one, self.shape) for one in found)
        return np.resize(found, self.shape)

    def at_root(self, value: Any) -> Any:
        """Return a value on the root, and None on the other ranks."""
        return value if self.rank == self.root else None

    def piece(self, value: Any) -> Any:
        """Return this rank's piece of axis 0; of a tuple, a tuple. The first pieces are longer."""
        if isinstance(value, tuple):
            return tuple(map(self.piece, value))
        chunk = even_chunks(len(value), self.size)[self.rank]
        return value[chunk.start : chunk.stop]

    def has_result_like_input(self) -> bool:
        """Return whether result and input have one dtype; not so for minloc, integer mean."""
        found = self.combined(1)
        return not isinstance(found, tuple) and found.dtype.name == self.dtype


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
def _combined(dtype: str, op: str, stop: int, size: int) -> Any:
    kind = _dtype(dtype)
    parts = [_pattern(dtype, op, rank, size) for rank in range(stop)]
    if op in _LOCATING:
        if kind.kind == "V":
            parts = [one.astype(np.float64) for one in parts]
        wide = np.stack(parts)
        at = _LOCATING[op](wide, axis=0)  # the lowest rank of equal values
        return np.take_along_axis(wide, at[None], axis=0)[0].astype(kind), at
    if not parts:
        is_float = op == "mean" and kind.kind in "iu"
        return np.full(PERIOD, _identity(op, kind)).astype(np.float64 if is_float else kind)
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
        total = total.astype(kind) / kind.type(stop)
    elif op == "mean":
        total = total / stop
    return np.asarray(total).astype(kind)


def _identity(op: str, kind: np.dtype[Any]) -> Any:
    if op in ("min", "max"):
        if kind.kind == "b":
            return op == "min"
        if kind.kind in "iu":
            limits = np.iinfo(kind)
            return limits.max if op == "min" else limits.min
        return np.inf if op == "min" else -np.inf
    return _FOLDS[op].identity


def _dtype(name: str) -> np.dtype[Any]:
    return dtype_from_index(DTYPE_NAMES.index(name))


class CollectiveKind(Enum):
    """The purpose of a collective; tables have this order."""

    REDUCE = "combine"
    MOVE = "distribute and collect"
    MESSAGE = "send to one rank"
    WAIT = "wait for each other"
    OBJECT = "move Python objects"


class Collective(NamedTuple):
    """One collective."""

    functions: tuple[Callable[..., Any], ...]  # public functions; send and recv share one record
    kind: CollectiveKind
    gives: str  # input of a rank, in words
    gets: str  # output of a rank, in words
    cost: str  # what it costs, in words; the docstring has the details
    wanted: Callable[[Case], Any] = lambda _: None  # expected result of a case
    # Relation of a rank's array to the rated size S. "vector": S; "cut": S, cut into n pieces;
    # "blocks": S / n, one of n blocks.
    layout: str = "vector"
    schedules: tuple[str, ...] = ()  # keys of `SCHEDULES` that it runs, if not its own name
    own_bus: str = ""  # key of `BUS_FACTORS`, if it has no schedules of its own
    ops: tuple[str, ...] = OPS  # its ops, as far as a dtype supports them
    from_root: bool = False  # whether only the root passes an input
    in_place: bool = False  # whether `out=` may be the input
    inputs: Callable[[Case, int], Any] = Case.part  # input of a rank
    # Arguments before the op, for an input
    arguments: Callable[[Case, Any], tuple[Any, ...]] = lambda _, x: (x,)
    run: Callable[..., Any] | None = None  # function to call, if it is not the first one

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions."""
        return tuple(one.__name__ for one in self.functions)

    @property
    def name(self) -> str:
        """Name of the collective: of its function, or "send_recv"."""
        return self.names[0] if len(self.functions) == 1 else "_".join(self.names[:2])

    @property
    def bus(self) -> str:
        """Key of `BUS_FACTORS`; "" if no bytes move, or an unknown number."""
        return SCHEDULES[self.name].bus if self.name in SCHEDULES else self.own_bus

    @property
    def has_arrays(self) -> bool:
        """Whether it moves arrays."""
        return self.kind not in (CollectiveKind.OBJECT, CollectiveKind.WAIT)

    def takes(self, parameter: str) -> bool:
        """Return whether the function has a parameter."""
        return parameter in signature(self.functions[-1]).parameters

    def shape(self, count: int, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's input for `count` elements, rounded up to pieces."""
        if self.layout == "vector":
            return (count if self.has_arrays else 0,)
        block = -(-count // size)
        return (block * size if self.layout == "cut" else block,)

    def total(self, case: Case) -> int:
        """Return the elements by which a call is rated."""
        count = int(np.prod(case.shape, dtype=np.int64))
        return count * case.size if self.layout == "blocks" else count

    def contribution(self, case: Case) -> Any:
        """Return this rank's input; None if there is none, or only the root passes one."""
        if self.kind is CollectiveKind.WAIT or (self.from_root and case.rank != case.root):
            return None
        return self.inputs(case, case.rank)

    def bound(self, case: Case, x: Any, **options: Any) -> partial[Any]:
        """Return the call as a function without arguments."""
        root = {"root": case.root} if self.takes("root") else {}
        op = (case.op,) if self.takes("op") else ()
        function = self.run or self.functions[0]
        return partial(function, *self.arguments(case, x), *op, **root, **options)


COLLECTIVES: dict[str, Collective] = {}
"""The collectives by name."""


def register(*collectives: Collective) -> None:
    """Add collectives; the file of their functions calls this."""
    COLLECTIVES.update((one.name, one) for one in collectives)


def available() -> list[Collective]:
    """Return all collectives in the order of tables."""
    kinds = list(CollectiveKind)
    return sorted(COLLECTIVES.values(), key=lambda one: kinds.index(one.kind))


def find(name: str, known: Iterable[Collective]) -> Collective:
    """Return one of some collectives by its name; raise ConfigError for other names."""
    names = [one.name for one in known]
    name = name.removesuffix("_perf")  # as nccl-tests names its programs
    name = "send_recv" if name in ("send", "recv", "sendrecv") else name
    if name not in names:
        from syncvar.core.settings import nearest  # needed for wrong names only

        raise ConfigError(
            f"unknown collective {name!r}{nearest(name, names)}: it is one of {', '.join(names)}"
        )
    return COLLECTIVES[name]


def ops_of(collective: Collective, dtype: str) -> tuple[str, ...]:
    """Return the ops that a collective supports for a dtype."""
    kind = _dtype(dtype)
    supported = []
    for op in collective.ops if collective.takes("op") else ():
        try:
            found = reduction(op, kind)
            if collective.name == "exscan":
                identity(found)
        except ConfigError:
            continue
        supported.append(op)
    return tuple(supported)


def _ring(case: Case, x: Any, **options: Any) -> Any:
    """Send to the next rank, receive from the previous one; odd ranks receive first."""
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    if case.rank % 2:
        result = recv(before, **options)
        send(x, after)
        return result
    send(x, after)
    return recv(before, **options)


register(
    Collective(
        (send, recv, sendrecv, send_object, recv_object, recv_any, probe),
        CollectiveKind.MESSAGE,
        gives="send: an array for one rank; send_object: plain data",
        gets="recv: the array of one rank; recv_object: its object; recv_any: either, of any rank",
        cost="one copy into shared memory and one out; over links two frames",
        wanted=lambda case: case.part(case.rank - 1),
        own_bus="1",
        arguments=lambda case, x: (case, x),
        run=_ring,
    ),
    Collective(
        (barrier,),
        CollectiveKind.WAIT,
        gives="nothing",
        gets="None, after all ranks have entered",
        cost="a look at each rank's word; over links ceil(log2 n) rounds of empty frames",
        arguments=lambda *_: (),
    ),
)
