"""Random calls of what programs write in every step, each repeated until it is prepared and beyond, against plain NumPy.

Values: numbers, NumPy's scalars, short lists, structures of a few leaves; each rank brings the same in a form of its own
(a number here, an array without dimensions there), with a timeout or without, started or waited for. Writes: variables of
every mode and aggregation, written outside every scope, in a scope and in `run`, in turns; operands of any form; writes
that one rank refuses, and writes of which one rank makes another.

As a script, this is a rank of a job: `repeated_calls.py SEED CASES`.

All ranks draw the same numbers from one seed, so that each knows what all of them bring, and what must come out needs no
communication. Values are small whole numbers, multiples of the number of ranks where they are averaged: all is exact.
"""

import sys
from contextlib import nullcontext
from functools import reduce as fold

import numpy as np

import syncvar as sv
from tests.support.rank_scripts.random_collectives import FOLD, Wrong

TURNS = 6
WRITES = 8
STYLES = [*[""] * 7, "timeout", "timeout", "seconds", "odd", "async", "async", "later", "later"]
OPTIONS = {
    "": {},
    "timeout": {"timeout": 30.0},
    "seconds": {"timeout": 30},
    "odd": {"timeout": np.float32(30)},
    "async": {"async_op": True},
    "later": {"async_op": True},
}
KINDS = {
    "f8": float,
    "i8": int,
    "?": bool,
    "c16": complex,
    "f4": np.float32,
    "i4": np.int32,
    "f2": np.float16,
}
SYNC, AGGREGATION = sv.VariableSynchronization, sv.VariableAggregation


def pick(rng, choices):
    return choices[int(rng.integers(0, len(choices)))]


def same(got, wanted, what):
    wanted = np.asarray(wanted)
    if (
        not isinstance(got, np.ndarray)
        or (got.shape, got.dtype) != (wanted.shape, wanted.dtype)
        or got.tobytes() != wanted.tobytes()
    ):
        raise Wrong(f"{what}: {got!r} instead of {wanted!r}")


def number(rank, seed, kind, op, place=0):
    """What a rank brings."""
    value = (rank * 5 + seed * 3 + place * 7) % 4
    return kind(value % 2 if kind is bool else value + 1 if op == "prod" else value)


def combined(parts, op):
    """Combine arrays of one dtype and shape, exactly."""
    dtype = parts[0].dtype
    wide = {"b": "?", "i": "i8", "f": "f8", "c": "c16"}[dtype.kind]
    total = fold(FOLD[op], [part.astype(wide) for part in parts])
    if op == "mean":
        kind = (
            np.dtype("f8")
            if dtype.kind == "i"
            else np.dtype("f4")
            if dtype.itemsize == 2
            else dtype
        )
        return (total.astype(kind) / kind.type(len(parts))).astype(
            "f8" if dtype.kind == "i" else dtype
        )
    return np.asarray(total, dtype)


def in_form(array, form):
    """Return an array as it is, or as the number or list that it is made from."""
    if form == "array" or not array.size:
        return array
    if array.ndim == 0:
        return (
            array[()]
            if form == "scalar"
            else array.item()
            if array.dtype.char in "dl?D"
            else array[()]
        )
    return (
        (tuple if form == "tuple" else list)(array.tolist())
        if array.dtype.char in "dl?D"
        else array
    )


class Everyday:
    """One rank's side.

    Args:
        seed: From which all is drawn.
    """

    def __init__(self, seed):
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.rank, self.size = sv.rank(), sv.world_size()
        self.strategies = [
            sv.get_strategy(),
            sv.MultiWorkerMirroredStrategy(),
            sv.MultiWorkerMirroredStrategy(timeout=30.0),
        ]
        self.strategies.append(sv.MultiWorkerMirroredStrategy(reproducible=True))
        self.number = 0
        self.said = ""

    def run(self, cases):
        for _ in range(cases):
            check_every = pick(self.rng, [0, 1, 3, 100])
            for strategy in self.strategies:
                strategy.check_every = check_every
            case = pick(
                self.rng, [self._values, self._structure, self._along, self._writes, self._writes]
            )
            try:
                case()
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
                    f"seed {self.seed}, {self.size} ranks, case {self.number} ({case.__name__}), rank {self.rank}: {error!r}"
                ) from error
            self.number += 1

    def _mine(self, choices):
        """Draw for every rank; return what this one has drawn."""
        return [pick(self.rng, choices) for _ in range(self.size)][self.rank]

    def _op(self, kind):
        return pick(
            self.rng,
            ["or", "max"]
            if kind is bool
            else ["sum", "mean", "prod"]
            if kind is complex
            else ["sum", "sum", "mean", "prod", "min", "max"],
        )

    # -- values ------------------------------------------------------------------------------------

    def _values(self):
        """One number, or a short list, by one of the collectives."""
        name = pick(self.rng, sorted(KINDS))
        kind, shape = KINDS[name], pick(self.rng, [(), (), (1,), (3,), (40,)])
        op = self._op(kind)
        strategy = pick(self.rng, self.strategies)
        call = pick(
            self.rng,
            ["all_reduce", "all_reduce", "all_reduce", "reduce", "broadcast", "all_gather"],
        )
        if call == "reduce" and kind is bool:
            call = "all_reduce"
        later = []
        for _ in range(TURNS):
            seed = int(self.rng.integers(0, 8))
            count = int(np.prod(shape))
            parts = [
                np.array(
                    [number(rank, seed, kind, op, place) for place in range(count)], name
                ).reshape(shape)
                for rank in range(self.size)
            ]
            x = in_form(
                parts[self.rank], self._mine(["array", "number", "number", "scalar", "tuple"])
            )
            style = self._mine(STYLES)
            options = OPTIONS[style]
            if call == "reduce":
                said = self._mine([op, op.upper(), sv.ReduceOp(op)])
                if pick(self.rng, [False, False, True]):
                    got = strategy.run(
                        lambda x=x, said=said: sv.get_replica_context().all_reduce(said, x)
                    )
                else:
                    got = strategy.reduce(said, x, axis=None)
                same(got, combined(parts, op), f"strategy.reduce({x!r}, {op})")
                continue
            if call == "all_reduce":
                got, wanted = sv.all_reduce(x, op, **options), combined(parts, op)
            elif call == "broadcast":
                got, wanted = sv.broadcast(x, root=self.size - 1, **options), parts[-1]
            else:
                got, wanted = (
                    sv.all_gather(x, **options),
                    np.concatenate([part.reshape(1) if part.ndim == 0 else part for part in parts]),
                )
            what = f"{call}({x!r}, {op}, {options})"
            if style == "later":
                later.insert(len(later) // 2, (got, np.copy(wanted), what))
                if isinstance(x, np.ndarray) and x.size:
                    x[...] = 0  # it was taken
            else:
                same(got.wait() if style == "async" else got, wanted, what)
        for work, wanted, what in later:
            same(work.wait(), wanted, f"{what}, waited for later")

    def _structure(self):
        """A dict, list or tuple of numbers and arrays; nested, or of several dtypes, at times."""
        names = ["loss", "acc", "n", "grad"][: int(self.rng.integers(1, 5))]
        several = self.rng.random() < 0.3
        first = pick(self.rng, ["f8", "f8", "i8", "f4", "f2"])
        kinds = {name: pick(self.rng, ["f8", "i8", "f4"]) if several else first for name in names}
        shapes = {name: pick(self.rng, [(), (), (3,), (2, 2), (0,), (9000,)]) for name in names}
        outer = pick(self.rng, ["dict", "dict", "list", "tuple", "nested"])
        op = pick(self.rng, ["sum", "mean", "max"])
        by_strategy = pick(self.rng, [None, None, *self.strategies])
        for _ in range(TURNS):
            seed = int(self.rng.integers(0, 8))
            wanted, mine = {}, {}
            for place, name in enumerate(names):
                count = int(np.prod(shapes[name]))
                parts = [
                    np.array(
                        [
                            number(rank, seed, KINDS[kinds[name]], op, place + step)
                            for step in range(count)
                        ],
                        kinds[name],
                    ).reshape(shapes[name])
                    for rank in range(self.size)
                ]
                wanted[name] = combined(parts, op)
                mine[name] = in_form(
                    parts[self.rank],
                    self._mine(["array", "number", "scalar", "list"])
                    if outer == "dict"
                    else "array",
                )
            if self._mine([False, True]):
                mine = dict(reversed(mine.items()))  # of dicts the order does not count
            ordered = [mine[name] for name in names]
            value = {"dict": mine, "list": ordered, "tuple": tuple(ordered), "nested": {"a": mine}}[
                outer
            ]
            options = OPTIONS[self._mine(STYLES)]
            if by_strategy is not None:
                got = by_strategy.reduce(op, value, axis=None)
            else:
                got = sv.all_reduce(value, op, **options)
                got = got.wait() if "async_op" in options else got
            if type(got) is not type(value):
                raise Wrong(f"a {type(got).__name__} instead of a {type(value).__name__}")
            leaves = (
                got
                if outer == "dict"
                else got["a"]
                if outer == "nested"
                else dict(zip(names, got, strict=True))
            )
            if list(leaves) != (sorted(names) if outer in ("dict", "nested") else names):
                raise Wrong(f"the leaves are {list(leaves)}")
            for name in names:
                same(leaves[name], wanted[name], f"{name} of {value!r}, {op}")
            for name in names:  # each is an array of its own
                leaves[name][...] = 1
                if any(
                    leaves[other].tobytes() != wanted[other].tobytes()
                    for other in names[names.index(name) + 1 :]
                ):
                    raise Wrong(f"writing to {name} has changed another leaf")

    def _along(self):
        """Rows that are reduced on each replica first, alone or in a dict; not all bring as many."""
        name, op = (
            pick(self.rng, ["f8", "i8", "f4", "f2"]),
            pick(self.rng, ["sum", "mean", "mean", "min", "max"]),
        )
        strategy, shape, is_dict = (
            pick(self.rng, self.strategies),
            pick(self.rng, [(), (1,), (3,), (2, 3), (9000,)]),
            pick(self.rng, [False, False, True]),
        )
        for _ in range(TURNS):
            seed, counts = (
                int(self.rng.integers(0, 8)),
                [int(count) for count in self.rng.integers(0, 4, self.size)],
            )
            counts[-1] = max(counts[-1], 1)
            parts = [
                np.array(
                    [
                        number(rank, seed, KINDS[name], op, place)
                        for place in range(count * int(np.prod(shape)))
                    ],
                    name,
                ).reshape(count, *shape)
                for rank, count in enumerate(counts)
            ]
            mine, wanted = parts[self.rank], combined(list(np.concatenate(parts)), op)
            axis, is_list = self._mine([0, 0, (0,)]), self._mine([False, False, True])
            mine = mine.tolist() if is_list and name in ("f8", "i8") and mine.size else mine
            got = strategy.reduce(
                op, {"rows": mine, "one": np.ones(1)} if is_dict else mine, axis=axis
            )
            same(
                got["rows"] if is_dict else got,
                wanted,
                f"strategy.reduce({op}, {mine!r}, axis={axis})",
            )

    # -- writes ------------------------------------------------------------------------------------

    def _writes(self):
        """One variable, written again and again."""
        strategy = pick(self.rng, self.strategies)
        sync = pick(self.rng, [SYNC.ON_WRITE, SYNC.ON_WRITE, SYNC.AUTO, SYNC.ON_READ, SYNC.NONE])
        aggregation = pick(
            self.rng,
            [
                AGGREGATION.SUM,
                AGGREGATION.SUM,
                AGGREGATION.MEAN,
                AGGREGATION.ONLY_FIRST_REPLICA,
                AGGREGATION.NONE,
            ],
        )
        dtype = np.dtype(
            pick(
                self.rng,
                ["f4", "f4", "f8", "f2"]
                + (["i8", "c8"] if aggregation is not AGGREGATION.MEAN else []),
            )
        )
        shape = pick(self.rng, [(), (), (1,), (3,), (2, 3), (30_000,)])
        with nullcontext() if strategy is self.strategies[0] else strategy.scope():
            v = sv.Variable(np.zeros(shape, dtype), synchronization=sync, aggregation=aggregation)
        model = [np.zeros(shape, dtype) for _ in range(self.size)]
        held = []
        for _ in range(WRITES):
            self._write(strategy, v, model, held)

    def _write(self, strategy, v, model, held):
        rng, sync, aggregation = self.rng, v.synchronization, v.aggregation
        place = pick(rng, ["plain", "plain", "plain", "run", "run", "scope"])
        is_default = strategy is self.strategies[0]
        is_cross = place == "scope" or (place == "plain" and not is_default)
        operation = pick(rng, ["assign", "assign_add", "assign_add", "assign_sub"])
        fault = (
            pick(rng, ["", "", "", "", "shape", "None", "other"])
            if v.requested_synchronization is not SYNC.AUTO
            else ""
        )
        culprit = int(rng.integers(0, self.size))
        seed = int(rng.integers(0, 8))
        is_mirrored = sync is SYNC.ON_WRITE
        if is_cross and sync is SYNC.ON_READ and aggregation is AGGREGATION.SUM:
            place, is_cross = "run", False  # what is split is another test's
        is_same = is_mirrored and aggregation is AGGREGATION.NONE
        if is_same and place == "run":
            place, is_cross = "plain", not is_default
        brings_same = is_cross or is_same
        travels = is_mirrored or (is_cross and sync is SYNC.ON_READ)
        parts = [
            np.full(v.shape, self.size * ((0 if brings_same else rank * 5) + seed * 3) % 7, v.dtype)
            * self.size
            for rank in range(self.size)
        ]
        x = self._operand(
            parts[self.rank], self._mine(["array", "array", "array", "number", "wide", "variable"])
        )
        mine = operation
        if fault and self.rank == culprit:
            x = (
                np.zeros((*v.shape, 2), v.dtype)
                if fault == "shape"
                else None
                if fault == "None"
                else x
            )
            mine = (
                {"assign": "assign_add", "assign_add": "assign_sub", "assign_sub": "assign"}[
                    operation
                ]
                if fault == "other"
                else operation
            )
        raised = []

        def write():
            try:
                if getattr(v, mine)(x) is not v:
                    raise Wrong("a write returns the variable")
            except (sv.ConfigError, sv.MismatchError) as error:
                raised.append(type(error))
                self.said = str(error)
            return v.local_value()

        if place == "run":
            got = strategy.run(write)
        else:
            with strategy.scope() if place == "scope" else nullcontext():
                got = write()
        refuses = self.rank == culprit and fault in ("shape", "None")
        wanted = sv.ConfigError if refuses else sv.MismatchError if fault and travels else None
        if raised != ([] if wanted is None else [wanted]):
            raise Wrong(
                f"{mine} of {v!r} in {place}, {fault} by rank {culprit}: {raised} instead of {wanted}: {self.said}"
            )
        for rank in range(self.size):
            if travels and fault:
                break
            if rank == culprit and fault in ("shape", "None"):
                continue
            done = (
                {"assign": "assign_add", "assign_add": "assign_sub", "assign_sub": "assign"}[
                    operation
                ]
                if rank == culprit and fault
                else operation
            )
            value = parts[rank]
            if is_mirrored and not brings_same:
                value = (
                    combined(parts, "mean" if aggregation is AGGREGATION.MEAN else "sum")
                    if aggregation is not AGGREGATION.ONLY_FIRST_REPLICA
                    else parts[0]
                )
            model[rank] = (
                value.astype(v.dtype)
                if done == "assign"
                else model[rank] + value
                if done == "assign_add"
                else model[rank] - value
            )
            model[rank] = np.asarray(model[rank], v.dtype)
        same(
            got,
            model[self.rank],
            f"{mine} of {v!r} in {place}, {fault}, {[str(part.flat[0]) if part.size else '' for part in parts]}",
        )
        keeps = self._mine(["a view", "nothing", "as it is"])
        if keeps == "a view":
            held[:] = [got]  # the next write has to go elsewhere on this rank
        elif keeps == "nothing":
            held.clear()

    def _operand(self, array, form):
        if form == "wide" and array.dtype.kind == "f":
            return array.astype("f8")
        if form == "number" and array.dtype.kind != "c":
            return array.tolist()
        if form == "variable":
            return sv.Variable(array, synchronization=SYNC.NONE)
        return array


if __name__ == "__main__":
    everyday = Everyday(int(sys.argv[1]))
    everyday.run(int(sys.argv[2]))
    print(f"made {everyday.number} cases", flush=True)
