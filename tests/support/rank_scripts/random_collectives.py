"""Random calls of every collective, each repeated until it is prepared and beyond, against plain NumPy.

The array of each rank lies wherever that rank's draw says, and moves from repetition to repetition: in shared memory, in
private memory, in the middle of something larger, unaligned, with gaps, read-only, or private because shared memory is full.
Lengths lie around every limit at which another way is taken; the limits are read from the code.

All ranks draw the same numbers from one seed, so that each knows what all of them bring, and what must come out needs no
communication. Values are small whole numbers: results are exact in every order, and compared by their bytes. What lies
around an array has to stay as it is, and so does what is only read.

As a script, this is a rank of a job: `random_collectives.py SEED CASES [COLLECTIVE ...]`.
"""

import contextlib
import sys
from bisect import bisect_left
from functools import lru_cache
from functools import reduce as fold
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.errors import SharedMemoryFull

TURNS = 6
DTYPES = ["f4", "f8", "f2", "bf16", "i4", "i8", "u1", "c8", "?"]
FOLD = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "or": np.bitwise_or,
}
MIB = 1 << 20


class Wrong(AssertionError):
    """A call did not do what it must."""


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bf16" else name)


def limits(size):
    """Return the lengths in bytes at which a call goes another way, as the code has them."""
    from syncvar.runtime import arithmetic
    from syncvar.runtime import arithmetic as crowd
    from syncvar.runtime import block_transfer as shared_moves
    from syncvar.runtime import shm_reduce as shared_reduce
    from syncvar.shm import channel_table

    segment, small = shared_reduce.SEGMENT_BYTES, channel_table.SMALL_BYTES
    direct = (
        bisect_left(
            range(small + 1), True, key=lambda nbytes: not shared_reduce.is_direct(nbytes, size)
        )
        - 1
    )
    found = {
        direct,
        small,
        segment,
        2 * segment,
        segment // 2 // shared_moves._LAG,
        shared_moves._NATIVE_SLOT_BYTES,
        shared_reduce._BLOCK_BYTES,
        shared_reduce._SEPARATE_BYTES,
        2 * arithmetic._WIDENED,
        4 * crowd.PIECE,
    }
    return sorted(one for one in found if one > 0)


def fill_the_shm(least=128 << 10):
    """Take the memory that this rank has left for arrays, but for pieces smaller than this."""
    held, step = [], 4 * MIB
    while step >= least:
        try:
            held.append(sv.empty(step, np.uint8))
        except SharedMemoryFull:
            step //= 2
    return held


def register_ops():
    """Register an op that does not commute."""
    sv.register_op("rightmost", lambda left, right: right, replace=True)  # noqa: ARG005


# -- where arrays lie ------------------------------------------------------------------------------


class Made:
    """An array, and the bytes that it is a part of."""

    def __init__(self, array, ground, view):
        self.array = array
        self.ground = ground
        self.view = view
        self.before = b""

    def fill(self, value):
        if not self.array.flags.writeable:
            self.view(self.ground)[...] = value
        else:
            self.array[...] = value

    def remember(self):
        self.before = self.ground.tobytes()

    def differs(self, wanted=None):
        """Return whether the bytes are others than those remembered, with what is wanted in the array's place."""
        if wanted is None:
            return self.ground.tobytes() != self.before
        shadow = np.frombuffer(bytearray(self.before), np.uint8)
        self.view(shadow)[...] = wanted
        return self.ground.tobytes() != shadow.tobytes()


def _bytes(nbytes, resident):
    if resident:
        try:
            return sv.empty(nbytes, np.uint8)
        except SharedMemoryFull:
            pass
    return np.empty(nbytes, np.uint8)


def make(shape, dtype, place):
    """Return an array that lies as `place` says."""
    kind, _, extra = place.partition(" ")
    resident = kind == "resident"
    count = int(np.prod(shape))
    nbytes = count * dtype.itemsize
    start, whole = 0, nbytes
    if extra in ("inside", "unaligned"):
        start, whole = 64 + (extra == "unaligned"), nbytes + 192
    if extra == "gaps":
        whole = 2 * nbytes

    def view(ground):
        cut = ground[start : start + (2 * nbytes if extra == "gaps" else nbytes)].view(dtype)
        if extra == "gaps":
            return (cut.reshape(*shape[:-1], 2 * shape[-1]) if shape else cut)[..., ::2].reshape(
                shape
            )
        if extra == "backwards":
            return cut[::-1].reshape(shape) if len(shape) == 1 else cut.reshape(shape)[::-1]
        if extra == "fortran":
            return cut.reshape(shape[::-1]).T
        return cut.reshape(shape)

    if extra == "":  # an array that is no view of anything, as far as that goes
        array = None
        if resident:
            with contextlib.suppress(SharedMemoryFull):
                array = sv.empty(shape, dtype)
        array = np.empty(shape, dtype) if array is None else array
        ground = array.reshape(-1).view(np.uint8)
        return Made(array, ground, view)
    ground = (
        np.frombuffer(bytearray(whole), np.uint8) if extra == "buffer" else _bytes(whole, resident)
    )
    ground[...] = 0xA5
    array = view(ground)
    if extra == "frozen":
        array.flags.writeable = False
    return Made(array, ground, view)


def places_for(shape, *, writes):
    kinds = ["private", "resident"] * 4 + [
        "resident inside",
        "private inside",
        "resident unaligned",
        "private unaligned",
    ]
    if shape and shape[-1]:
        kinds += ["private gaps", "resident gaps"]
    if len(shape) > 1:
        kinds += ["private fortran", "resident fortran"]
    if shape:
        kinds += ["resident backwards", "private backwards"]
    kinds += ["private buffer"]
    return kinds if writes else [*kinds, "private frozen", "resident frozen"]


# -- what must come out ----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def values(rank, seed, shape, dtype, op=""):
    """What a rank brings: whole numbers from 0 to 3, 1 and 2 for products."""
    base = (
        np.arange(int(np.prod(shape))) * 7
        + rank * 5
        + seed * 3
        + np.arange(int(np.prod(shape))) // 251
    )
    base = base % 2 + (op == "prod") if dtype.kind == "b" or op == "prod" else base % 4
    made = (
        (base + 1j * (base[::-1] % 2) if dtype.kind == "c" else base).astype(dtype).reshape(shape)
    )
    made.flags.writeable = False  # others get it too
    return made


@lru_cache(maxsize=256)
def reduced(ranks, seed, shape, dtype, op):
    """Combine what some ranks bring, exactly; half types are divided in float32 and rounded once."""
    parts = [values(rank, seed, shape, dtype, op) for rank in range(ranks)]
    if op == "rightmost":
        return parts[-1]
    wide = (
        dtype
        if dtype.kind == "b"
        else np.dtype("c16")
        if dtype.kind == "c"
        else np.dtype("i8")
        if dtype.kind in "iu"
        else np.dtype("f8")
    )
    total = fold(FOLD[op], [one.astype(wide) for one in parts])
    if op != "mean":
        return total.astype(dtype)
    kind = (
        np.dtype(np.float64)
        if dtype.kind in "iu"
        else np.dtype(np.float32)
        if dtype.itemsize == 2
        else dtype
    )
    return (total.astype(kind) / kind.type(len(parts))).astype(
        np.float64 if dtype.kind in "iu" else dtype
    )


def result_dtype(dtype, op):
    return np.dtype(np.float64) if op == "mean" and dtype.kind in "iu" else dtype


def neutral(shape, dtype, op):
    """What an exclusive scan gives rank 0."""
    value = {"sum": 0, "mean": 0, "prod": 1, "or": 0}.get(op)
    if value is None:
        if dtype.kind in "iu":
            value = np.iinfo(dtype).max if op == "min" else np.iinfo(dtype).min
        else:
            value = (op == "min") if dtype.kind == "b" else np.inf if op == "min" else -np.inf
    return np.full(shape, value, result_dtype(dtype, op))


def bounds(count, size):
    base, longer = divmod(count, size)
    return np.cumsum([0, *(base + (rank < longer) for rank in range(size))])


# -- the calls -------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """One repetition; lists are by rank."""

    seed: int
    inputs: list[str]
    outs: list[str]  # "" for none, "x" for the input itself, "shifted" for memory that overlaps it
    styles: list[str]
    rows: list[int]  # of what each rank brings, where that may differ


class Case(NamedTuple):
    """A call that is repeated."""

    collective: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    root: int
    more: dict[str, Any]
    turns: list[Turn]


COMBINING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
PREPARED = (
    "all_reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "all_to_all",
    "gather",
    "scatter",
    "reduce",
    "scan",
    "exscan",
)
ALIASING = ("all_reduce", "all_reduce tree", "reduce", "scan", "exscan", "broadcast", "variable")
COLLECTIVES = (
    "all_reduce",
    "all_reduce",
    "all_reduce",
    "all_reduce",
    "all_reduce tree",
    "reduce",
    "reduce_scatter",
    "scan",
    "exscan",
    "broadcast",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "variable",
    "optimizer",
)


def draw(rng, size, ends):
    """Draw a case."""
    collective = str(rng.choice(COLLECTIVES))
    dtype = str(rng.choice(DTYPES)) if rng.random() < 0.6 else "f4"
    if collective == "variable" and dtype == "?":
        dtype = "f8"
    if collective == "optimizer":
        dtype = "f4"
    kind = dtype_of(dtype)
    op = "sum"
    if collective.split()[0] in COMBINING:
        ops = ["or", "max"] if kind.kind == "b" else ["sum", "sum", "mean", "prod"]
        ops += (
            ["rightmost"]
            if collective in ("all_reduce", "reduce", "reduce_scatter", "scan")
            else []
        )
        op = str(rng.choice(ops + (["min", "max"] if kind.kind in "iufV" else [])))
    nbytes = (
        int(rng.choice(ends)) + int(rng.integers(0, 2)) * int(rng.integers(0, 30_000))
        if rng.random() < 0.85
        else int(rng.integers(0, 4096))
    )
    share = int(rng.choice([1, 1, size, max(1, size - 1)]))
    width = max(4, kind.itemsize) if kind.itemsize == 2 and rng.random() < 0.5 else kind.itemsize
    count = max(0, nbytes // width // share + int(rng.choice([-1, 0, 0, 1])))
    if collective in ("reduce_scatter", "all_to_all", "scatter") and rng.random() < 0.8:
        count = max(size, count // size * size * (1 if rng.random() < 0.5 else size))
        count = min(count, max(ends) // kind.itemsize // size * size)
    shape: tuple[int, ...] = (count,)
    if rng.random() < 0.25 and count >= 2 * size:
        shape = (count // 3, 3) if rng.random() < 0.7 else (2 * size, count // (2 * size))
    if collective in ("all_reduce", "reduce", "scan", "broadcast") and rng.random() < 0.03:
        shape = ()
    turns: list[Turn] = []
    can_alias = collective in ALIASING and result_dtype(kind, op) == kind
    in_place, given = rng.choice([(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.25, 0.4)])
    for turn in range(TURNS):
        if turn and rng.random() < 0.35:  # the same arrays with other values
            turns.append(turns[-1]._replace(seed=int(rng.integers(0, 8))))
            continue
        outs = []
        inputs = []
        for _rank in range(size):
            where = rng.random()
            out = (
                "x"
                if where < in_place and can_alias
                else str(rng.choice(places_for(shape, writes=True)))
                if where < in_place + given
                else ""
            )
            if collective == "all_reduce" and can_alias and len(shape) == 1 and rng.random() < 0.02:
                out = "shifted"
            inputs.append(str(rng.choice(places_for(shape, writes=out in ("x", "shifted")))))
            outs.append(out)
        styles = [str(rng.choice([*[""] * 14, "timeout", "async"])) for _ in range(size)]
        rows = [shape[0] if shape else 0] * size
        if collective in ("all_gather", "gather") and rng.random() < 0.2:
            rows = [int(rng.integers(0, row + 1)) for row in rows]
        turns.append(Turn(int(rng.integers(0, 8)), inputs, outs, styles, rows))
    more: dict[str, Any] = {}
    if collective == "all_reduce" and rng.random() < 0.15:
        more["reproducible"] = True
    if collective in ("scatter", "all_to_all") and rng.random() < 0.25:
        more["list"] = True
    if collective == "broadcast" and rng.random() < 0.15:
        more["none"] = int(rng.integers(0, size))
    return Case(collective, op, dtype, shape, int(rng.integers(0, size)), more, turns)


MANNERS = [
    ("private", ""),
    ("private", "private"),
    ("private", "x"),
    ("private", "resident"),
    ("private gaps", ""),
    ("resident", ""),
    ("resident", "private"),
    ("resident", "x"),
    ("resident", "resident"),
    ("resident inside", "x"),
    ("resident unaligned", "x"),
    ("private unaligned", ""),
]


def every_pair(rng, size, collective, dtype, count):
    """Return a case in which the first two ranks call in every pair of manners, and the others in some; else all is alike."""
    can_alias = collective in ALIASING
    manners = [one for one in MANNERS if can_alias or one[1] != "x"]
    pairs = [(one, other) for one in manners for other in manners]
    rng.shuffle(pairs)
    rows = [count] * size
    turns = []
    for number, pair in enumerate(pairs):
        chosen = [*pair, *(manners[int(rng.integers(0, len(manners)))] for _ in range(size - 2))]
        turns.append(
            Turn(
                number % 8,
                [str(one[0]) for one in chosen],
                [str(one[1]) for one in chosen],
                [""] * size,
                rows,
            )
        )
    return Case(collective, "sum", dtype, (count,), int(rng.integers(0, size)), {}, turns)


class Rank:
    """One rank's side of the cases.

    Args:
        seed: From which all is drawn.
        group: Whose calls they are; None for the world.
    """

    def __init__(self, seed, group=None):
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.group = group
        self.rank = sv.rank() if group is None else group.rank
        self.size = sv.world_size() if group is None else group.size
        self.ends = limits(self.size)
        self.number = 0

    def run(self, cases):
        """Draw and make cases; raises `Wrong`, naming seed and case."""
        for _ in range(cases):
            self._make(draw(self.rng, self.size, self.ends), meets=self.rng.random() < 0.3)

    def run_pairs(self, collectives=PREPARED, dtype="f4"):
        """Make calls of collectives that have a prepared way in every pair of manners."""
        itemsize = dtype_of(dtype).itemsize
        for collective in collectives:
            blocks = self.size if collective in ("reduce_scatter", "all_to_all", "scatter") else 1
            for nbytes in [
                *self.ends,
                max(self.ends) + itemsize * blocks,
            ]:  # one length between all limits, and one above
                count = nbytes // itemsize // blocks * blocks
                self._make(every_pair(self.rng, self.size, collective, dtype, count))

    def _make(self, case, *, meets=False):
        made: dict[Any, Made] = {}
        for number, turn in enumerate(case.turns):
            try:
                self._turn(case, turn, made)
            except (
                Wrong,
                AssertionError,
                ValueError,
                TypeError,
                IndexError,
                sv.SyncvarError,
            ) as error:
                if isinstance(error, sv.TransportError):
                    raise
                raise Wrong(
                    f"seed {self.seed}, {self.size} ranks, case {self.number}, turn {number}, rank {self.rank}: "
                    f"{type(error).__name__}: {error}\n{case._replace(turns=[])}\n{turn}"
                ) from error
            if meets and number % 2:
                sv.barrier(group=self.group)
        self.number += 1

    def _turn(self, case, turn, made):
        name = case.collective.replace(" ", "_")
        getattr(self, f"_{name}")(case, turn, made)

    # -- pieces ------------------------------------------------------------------------------------

    def _input(self, case, turn, made, shape=None, key="in", dtype=None):
        shape = case.shape if shape is None else shape
        dtype = dtype or dtype_of(case.dtype)
        place = turn.inputs[self.rank]
        key = key, place, shape, dtype
        if key not in made:
            made[key] = make(shape, dtype, place)
        return made[key]

    def _out(self, case, turn, made, shape, dtype, key="out"):
        place = turn.outs[self.rank]
        key = key, place, shape, dtype
        if key not in made:
            made[key] = make(shape, dtype, place)
        out = made[key]
        out.fill(np.zeros((), dtype) if turn.seed % 2 else np.ones((), dtype))
        return out

    def _call(self, function, *arguments, turn, **options):
        style = turn.styles[self.rank]
        if style == "timeout":
            options["timeout"] = 30.0
        if style != "async":
            return function(*arguments, group=self.group, **options)
        return function(*arguments, group=self.group, async_op=True, **options).wait()

    def _same(self, got, wanted, what):
        if wanted is None:
            if got is not None:
                raise Wrong(f"{what}: a {type(got).__name__} instead of None")
            return
        if not isinstance(got, np.ndarray) or (got.shape, got.dtype) != (
            wanted.shape,
            wanted.dtype,
        ):
            raise Wrong(
                f"{what}: {getattr(got, 'dtype', type(got))}{getattr(got, 'shape', '')} instead of {wanted.dtype}{wanted.shape}"
            )
        if got.tobytes() != wanted.tobytes():
            places = np.flatnonzero(
                np.ascontiguousarray(got).reshape(-1) != np.ascontiguousarray(wanted).reshape(-1)
            )
            at = np.unravel_index(places[0], wanted.shape)
            raise Wrong(
                f"{what}: {places.size} of {wanted.size} are wrong, at {at} {got[at]} instead of {wanted[at]}"
            )

    def _one_array(self, case, turn, made, wanted, call, gets=True):
        """Make a call that takes one array and gives one; `wanted` is None where this rank gets nothing."""
        x = self._input(case, turn, made)
        x.fill(values(self.rank, turn.seed, case.shape, x.array.dtype, case.op))
        where = turn.outs[self.rank]
        out = None
        if where == "x" and gets:
            out = x
        elif where == "shifted":
            self._shifted(case, turn, wanted, call)
            return
        elif where and where != "x" and gets:
            out = self._out(case, turn, made, wanted.shape, wanted.dtype)
        x.remember()
        if out is not None and out is not x:
            out.remember()
        got = call(x.array, **({} if out is None else {"out": out.array}))
        self._judge(x, out, got, wanted)

    def _judge(self, x, out, got, wanted):
        if out is not None and got is not out.array:
            raise Wrong("the result is not `out`")
        self._same(got, wanted, "result")
        if out is not x and x.differs():
            raise Wrong("the call has changed its input")
        if out is not None and out.differs(wanted):
            raise Wrong("the call has written beside its result")

    def _shifted(self, case, turn, wanted, call):
        buffer = make((case.shape[0] + 1,), wanted.dtype, turn.inputs[self.rank]).array
        x, out = (buffer[1:], buffer[:-1]) if turn.seed % 2 else (buffer[:-1], buffer[1:])
        x[...] = values(self.rank, turn.seed, case.shape, x.dtype, case.op)
        self._same(call(x, out=out), wanted, "result where out overlaps x")

    def _parts(self, case, turn):
        dtype = dtype_of(case.dtype)
        return [values(rank, turn.seed, case.shape, dtype, case.op) for rank in range(self.size)]

    def _reduced(self, case, turn, ranks=None):
        return reduced(
            self.size if ranks is None else ranks,
            turn.seed,
            case.shape,
            dtype_of(case.dtype),
            case.op,
        )

    # -- collectives -------------------------------------------------------------------------------

    def _all_reduce(self, case, turn, made):
        wanted = self._reduced(case, turn)
        self._one_array(
            case,
            turn,
            made,
            wanted,
            lambda x, **more: self._call(sv.all_reduce, x, case.op, turn=turn, **case.more, **more),
        )

    def _all_reduce_tree(self, case, turn, made):
        """A structure of leaves of several lengths, with an out for all of them or none."""
        dtype = dtype_of(case.dtype)
        shapes = {
            "a": case.shape,
            "b": (5,),
            "c": (case.shape[0] // 3 if case.shape else 7,),
            "d": case.shape,
        }
        seeds = {name: turn.seed + place for place, name in enumerate(shapes)}
        wanted = {
            name: reduced(self.size, seeds[name], shape, dtype, case.op)
            for name, shape in shapes.items()
        }
        inputs, outs = {}, {}
        where = turn.outs[self.rank]
        for name, shape in shapes.items():
            inputs[name] = one = self._input(case, turn, made, shape, key=name)
            if not one.array.flags.writeable and where == "x":
                where = ""
            one.fill(values(self.rank, seeds[name], shape, dtype, case.op))
            one.remember()
        in_place = where == "x" and wanted["a"].dtype == dtype
        if where in ("", "x") and not in_place:
            outs = dict.fromkeys(shapes)
        else:
            for name in shapes:
                outs[name] = (
                    inputs[name]
                    if in_place
                    else self._out(
                        case, turn, made, wanted[name].shape, wanted[name].dtype, key=f"out {name}"
                    )
                )
                outs[name].remember()
        more = {} if outs["a"] is None else {"out": {name: one.array for name, one in outs.items()}}
        got = self._call(
            sv.all_reduce,
            {name: one.array for name, one in inputs.items()},
            case.op,
            turn=turn,
            **more,
        )
        for name in shapes:
            self._judge(inputs[name], outs[name], got[name], wanted[name])

    def _reduce(self, case, turn, made):
        is_root = self.rank == case.root
        wanted = self._reduced(case, turn) if is_root else None
        self._one_array(
            case,
            turn,
            made,
            wanted,
            lambda x, **more: self._call(sv.reduce, x, case.op, root=case.root, turn=turn, **more),
            gets=is_root,
        )

    def _scan(self, case, turn, made):
        wanted = self._reduced(case, turn, self.rank + 1)
        self._one_array(
            case,
            turn,
            made,
            wanted,
            lambda x, **more: self._call(sv.scan, x, case.op, turn=turn, **more),
        )

    def _exscan(self, case, turn, made):
        wanted = (
            self._reduced(case, turn, self.rank)
            if self.rank
            else neutral(case.shape, dtype_of(case.dtype), case.op)
        )
        self._one_array(
            case,
            turn,
            made,
            wanted,
            lambda x, **more: self._call(sv.exscan, x, case.op, turn=turn, **more),
        )

    def _reduce_scatter(self, case, turn, made):
        total = self._reduced(case, turn)
        edges = bounds(case.shape[0], self.size)
        wanted = total[edges[self.rank] : edges[self.rank + 1]]
        self._one_array(
            case,
            turn,
            made,
            wanted,
            lambda x, **more: self._call(sv.reduce_scatter, x, case.op, turn=turn, **more),
        )

    def _broadcast(self, case, turn, made):
        wanted = self._parts(case, turn)[case.root]
        if case.more.get("none") == self.rank != case.root:
            out = (
                self._out(case, turn, made, wanted.shape, wanted.dtype)
                if turn.outs[self.rank] not in ("", "x")
                else None
            )
            if out is not None:
                out.remember()
            got = self._call(
                sv.broadcast,
                None,
                root=case.root,
                turn=turn,
                **({} if out is None else {"out": out.array}),
            )
            self._same(got, wanted, "result")
            if out is not None and out.differs(wanted):
                raise Wrong("the call has written beside its result")
            return
        self._one_array(
            case,
            turn,
            made,
            wanted,
            lambda x, **more: self._call(sv.broadcast, x, root=case.root, turn=turn, **more),
        )

    def _joined(self, case, turn, made, function, gets, **options):
        dtype = dtype_of(case.dtype)
        shapes = [(row, *case.shape[1:]) for row in turn.rows]
        parts = [values(rank, turn.seed, shape, dtype) for rank, shape in enumerate(shapes)]
        wanted = np.concatenate(parts) if gets else None
        x = self._input(case, turn, made, shapes[self.rank])
        x.fill(parts[self.rank])
        out = None
        if gets and turn.outs[self.rank] not in ("", "x"):
            out = self._out(case, turn, made, wanted.shape, dtype)
            out.remember()
        x.remember()
        got = self._call(
            function, x.array, turn=turn, **options, **({} if out is None else {"out": out.array})
        )
        self._judge(x, out, got, wanted)

    def _all_gather(self, case, turn, made):
        self._joined(case, turn, made, sv.all_gather, True)

    def _gather(self, case, turn, made):
        self._joined(case, turn, made, sv.gather, self.rank == case.root, root=case.root)

    def _scatter(self, case, turn, made):
        edges = bounds(case.shape[0], self.size)
        whole = values(case.root, turn.seed, case.shape, dtype_of(case.dtype))
        wanted = whole[edges[self.rank] : edges[self.rank + 1]]
        out = None
        if turn.outs[self.rank] not in ("", "x"):
            out = self._out(case, turn, made, wanted.shape, wanted.dtype)
            out.remember()
        x, given = None, None
        if self.rank == case.root:
            x = self._input(case, turn, made)
            x.fill(whole)
            x.remember()
            given = x.array
            if case.more:
                given = [x.array[edges[rank] : edges[rank + 1]] for rank in range(self.size)]
        got = self._call(
            sv.scatter,
            given,
            root=case.root,
            turn=turn,
            **({} if out is None else {"out": out.array}),
        )
        self._same(got, wanted, "result")
        if x is not None and x.differs():
            raise Wrong("the call has changed its input")
        if out is not None and (got is not out.array or out.differs(wanted)):
            raise Wrong("the result is not only in `out`")

    def _all_to_all(self, case, turn, made):
        edges = bounds(case.shape[0], self.size)
        cut = slice(edges[self.rank], edges[self.rank + 1])
        wanted = [part[cut] for part in self._parts(case, turn)]
        x = self._input(case, turn, made)
        x.fill(values(self.rank, turn.seed, case.shape, x.array.dtype, case.op))
        x.remember()
        out, outs = None, None
        if turn.outs[self.rank] not in ("", "x"):
            whole = (len(wanted[0]) * self.size, *case.shape[1:])
            out = self._out(case, turn, made, whole, x.array.dtype)
            out.remember()
            outs = out.array
            if case.more:
                outs = (
                    [
                        outs[start : start + len(wanted[0])]
                        for start in range(0, whole[0], len(wanted[0]))
                    ]
                    if len(wanted[0])
                    else [outs] * self.size
                )
        given = (
            [x.array[edges[rank] : edges[rank + 1]] for rank in range(self.size)]
            if case.more
            else x.array
        )
        got = self._call(sv.all_to_all, given, turn=turn, **({} if outs is None else {"out": outs}))
        for source in range(self.size):
            self._same(np.asarray(got[source]), wanted[source], f"result of rank {source}")
        if x.differs():
            raise Wrong("the call has changed its input")
        if out is not None and out.differs(np.concatenate(wanted)):
            raise Wrong("the call has written beside its result")

    def _variable(self, case, turn, made):
        """Writes of a variable, whose copies move when views of them are alive, and lie elsewhere where shared memory is full."""
        dtype = dtype_of(case.dtype)
        key = "variable"
        if key not in made:
            made[key] = (
                sv.Variable(np.zeros(case.shape, dtype), aggregation=sv.VariableAggregation.SUM),
                [],
                [np.zeros(case.shape, dtype)],
            )
        variable, held, state = made[key]
        parts = self._parts(case, turn)
        x = self._input(case, turn, made)
        x.fill(parts[self.rank])
        x.remember()
        total = self._reduced(case, turn)
        if turn.seed % 3:
            variable.assign_add(x.array)
            state[0] = state[0] + total
        else:
            variable.assign(x.array)
            state[0] = total
        got = variable.read_value()
        self._same(np.asarray(got), np.asarray(state[0]).astype(dtype), "the variable")
        if turn.outs[self.rank] == "x":
            held[:] = [got]  # the next write has to go elsewhere on this rank
        elif turn.outs[self.rank] == "":
            held.clear()
        if x.differs():
            raise Wrong("the write has changed its operand")

    def _optimizer(self, case, turn, made):
        """Steps of two weights, whose gradients travel together, and grouped writes between them."""
        dtype = dtype_of(case.dtype)
        if "weights" not in made:
            made["weights"] = [
                sv.Variable(np.zeros(shape, dtype), aggregation=sv.VariableAggregation.SUM)
                for shape in (case.shape, (3,))
            ]
            made["optimizer"] = sv.optimizers.SGD(1.0)
            made["state"] = [np.zeros(case.shape, dtype), np.zeros(3, dtype)]
        weights, state = made["weights"], made["state"]
        x = self._input(case, turn, made)
        x.fill(values(self.rank, turn.seed, case.shape, dtype))
        x.remember()
        total = self._reduced(case, turn)
        short = np.full(3, self.rank, dtype)
        if turn.seed % 4:
            made["optimizer"].apply_gradients([(x.array, weights[0]), (short, weights[1])])
            state[0] = state[0] - total / dtype.type(self.size)
            state[1] = state[1] - dtype.type((self.size - 1) / 2)
        else:
            sv.assign_add_all([(weights[0], x.array), (weights[1], short)])
            state[0] = state[0] + total
            state[1] = state[1] + dtype.type(self.size * (self.size - 1) / 2)
        for weight, wanted in zip(weights, state, strict=True):
            got = np.asarray(weight.read_value())
            if not np.allclose(got, wanted, rtol=0, atol=1e-3):
                raise Wrong(
                    f"a weight: {got[got != wanted][:3]} instead of {wanted[got != wanted][:3]}"
                )
        if x.differs():
            raise Wrong("the step has changed its gradient")


def main(seed, cases, *pairs):
    register_ops()
    rank = Rank(seed)
    rank.run(cases)
    rank.run_pairs(pairs)
    sv.barrier()
    if sv.rank() == 0:
        print(f"made {rank.number} cases over {current().transport}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
