"""Random programs: from hypothesis, which shrinks what fails, or from a seed, which costs less.

Numbers are exact in any order of summation: integers are small, floats are integers times 324, so that means over two,
three and four replicas stay integers for a few generations. The first choice of every draw is the simplest.
"""

import random

import numpy as np
from hypothesis import strategies as st

from tests.verification.programs.program_language import (
    CROSS,
    MERGE,
    OUTSIDE,
    PLACES,
    REPLICA,
    Block,
    Made,
    Operand,
    Program,
    Step,
)
from tests.verification.programs.reference_model import (
    FOREIGN,
    Model,
    context_of,
    read_communicates,
    route,
)

SYNCHRONIZATIONS = ("ON_WRITE", "ON_READ", "NONE", "AUTO")
AGGREGATIONS = ("SUM", "MEAN", "NONE", "ONLY_FIRST_REPLICA")
DTYPES = ("float32", "float64", "int64", "float32", "int32", "int8", "uint8", "bool")
SHAPES = ((2,), (), (3, 2), (3,), (0,))
ASSIGNS = ("assign", "assign_add", "assign_sub")
SCATTERS = (
    "scatter_add",
    "scatter_sub",
    "scatter_min",
    "scatter_max",
    "scatter_mul",
    "scatter_div",
    "scatter_update",
)
READS = ("read_value", "numpy", "value", "operator", "asarray", "index")
BAD = ("none", "shape", "text", "dtype", "per_replica", "python")
BLOCKS_MAX, STEPS_MAX, VARIABLES_MAX = 3, 5, 3
FLOAT_UNIT = 324


class Seeded:
    """Draws from a seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def number(self, low, high):
        return self.random.randint(low, high)

    def one_of(self, choices):
        return choices[int(self.random.random() * len(choices))]

    def chance(self, percent):
        return self.random.random() * 100 < percent


class Drawn:
    """Draws from hypothesis."""

    def __init__(self, draw):
        self.draw = draw

    def number(self, low, high):
        return self.draw(st.integers(low, high))

    def one_of(self, choices):
        return choices[self.draw(st.integers(0, len(choices) - 1))]

    def chance(self, percent):
        return self.draw(st.integers(0, 99)) >= 100 - percent


@st.composite
def programs(draw, sizes=(2, 3, 4, 1)):
    """Programs that hypothesis can shrink."""
    return Writer(Drawn(draw), sizes).program()


def seeded_program(seed, sizes=(2, 3, 4, 1)):
    """Return the program of a seed."""
    return Writer(Seeded(seed), sizes).program()


class Writer:
    """Writes one program. It runs the model beside it, to know which variables there are."""

    def __init__(self, source, sizes):
        self.source = source
        self.size = source.one_of(sizes)
        self.model = Model(Program(self.size, (), ()))

    def program(self):
        source = self.source
        variables, blocks = [], []
        for _ in range(source.number(1, VARIABLES_MAX)):
            owner, made = source.one_of((1, 0, 2)), self.made()
            variables.append((owner, made))
            self.model.create(owner, made)
        for _ in range(source.number(1, BLOCKS_MAX)):
            blocks.append(self.block())
        return Program(self.size, tuple(variables), tuple(blocks))

    def block(self):
        source = self.source
        owners = [one.owner for one in self.model.variables if one is not None]
        strategy = source.one_of(owners if owners and not source.chance(20) else (1, 0, 2))
        place = source.one_of((REPLICA, CROSS, OUTSIDE, MERGE))
        count = source.number(1, STEPS_MAX)
        leaves_at = source.number(0, count - 1) if place == REPLICA and source.chance(12) else None
        frame = Block(strategy, place, ())
        steps, gone = [], None
        for number in range(count):
            if number == leaves_at:
                gone = source.number(0, self.size - 1)
                steps.append(Step("raise", odd=gone))
                continue
            made = self.step(frame, leaves=leaves_at is not None)
            for step in made if isinstance(made, list) else [made] if made else []:
                self.model.step(frame, step, gone)
                steps.append(step)
        return Block(strategy, place, tuple(steps))

    # -- numbers -----------------------------------------------------------------------------------

    @staticmethod
    def exact(dtype, number):
        if dtype == "bool":
            return bool(number % 2)
        if dtype == "uint8":
            return abs(number)
        return float(number * FLOAT_UNIT) if dtype.startswith("float") else number

    def filled(self, shape, dtype, base):
        """Return a nested list of exact numbers, each different."""
        count = int(np.prod(shape, dtype=int))
        numbers = [self.exact(dtype, base + index) for index in range(count)]
        return np.array(numbers, dtype=object).reshape(shape).tolist()

    def operands(self, shape, dtype, *, differ, kinds=("array", "python", "mirrored")):
        """Return one good operand for each replica."""
        source = self.source
        base, stride = source.number(-3, 3), source.number(-2, 2) if differ else 0
        kind = source.one_of(kinds)
        made = []
        for rank in range(self.size):
            data = self.filled(shape, dtype, base + rank * stride)
            made.append(Operand(kind, data, "" if kind == "python" else dtype))
        return made

    def bad(self, shape, dtype):
        """Return an operand that cannot go in."""
        kind = self.source.one_of(BAD)
        if kind in ("none", "text"):
            return Operand(kind)
        if kind == "shape":
            return Operand("array", self.filled((*shape, 2), dtype, 1), dtype)
        if kind == "dtype":
            return Operand(
                "array",
                np.zeros(shape).tolist(),
                "complex128" if dtype.startswith("float") else "float64",
            )
        if kind == "python" and dtype.startswith("float"):
            return Operand("python", [1.0, [2.0]])
        if kind == "python":
            return Operand("python", np.full(shape, 0.5).tolist() if shape else 0.5)
        return Operand("per_replica", self.filled(shape, dtype, 1), dtype)

    def spoiled(self, operands, shape, dtype, percent=12):
        """Return the operands, now and then with bad ones on one replica or on all."""
        source = self.source
        if not source.chance(percent):
            return tuple(operands)
        bad = self.bad(shape, dtype)
        if source.chance(25):
            return (bad,) * self.size
        operands[source.number(0, self.size - 1)] = bad
        return tuple(operands)

    # -- variables ---------------------------------------------------------------------------------

    def made(self):
        source = self.source
        synchronization, aggregation = source.one_of(SYNCHRONIZATIONS), source.one_of(AGGREGATIONS)
        dtype, shape = source.one_of(DTYPES), source.one_of(SHAPES)
        if aggregation == "MEAN" and not dtype.startswith("float") and not source.chance(20):
            dtype = "float32"
        apart = synchronization == "NONE"
        ranks = None
        if apart and source.chance(25):
            ranks = tuple(rank for rank in range(self.size) if source.chance(50)) or (
                self.size - 1,
            )
        operands = self.operands(shape, dtype, differ=apart or source.chance(10))
        if source.chance(3):
            synchronization, ranks = "TYPO", None
        elif source.chance(5):
            bad = source.one_of(
                (Operand("none"), Operand("text"), Operand("array", [[1]], "int64"))
            )
            if apart or bad.kind == "array":  # values of another shape cannot be wrong on all alone
                bad = Operand("none")
            if apart:
                operands = [bad] * self.size
            else:
                operands[source.number(0, self.size - 1)] = bad
        return Made(synchronization, aggregation, dtype, tuple(operands), ranks)

    def variables(self, wanted):
        """Return the numbers of the variables that are wanted."""
        return [
            number
            for number, one in enumerate(self.model.variables)
            if one is not None and wanted(one)
        ]

    @staticmethod
    def is_whole(variable):
        return all(copy is not None for copy in variable.copies)

    # -- steps -------------------------------------------------------------------------------------

    def step(self, block, *, leaves):
        kinds = ["write"] * 9 + ["read"] * 4 + ["scatter"] * 4 + ["sync", "local", "crossed"]
        kinds += (
            ["all_reduce", "all_gather"]
            if block.place == REPLICA
            else ["reduce", "reduce", "gather"]
        )
        kinds += (
            []
            if leaves
            else ["deepcopy", "create", "scope", "run", "read_from", "reduce", "all_gather"]
        )
        kind = self.source.one_of(kinds)
        if kind in ("reduce", "gather", "all_reduce", "all_gather"):
            return self.combining(block, kind)
        if kind == "create":
            return Step("create", made=self.made())
        if kind == "scope":
            return Step("scope", variable=self.source.number(0, 2))
        if kind == "run":
            return Step("run")
        whole = kind in ("deepcopy", "read_from", "crossed")
        foreign = self.source.chance(6)
        numbers = self.variables(
            lambda one: (
                (self.is_whole(one) or not whole)
                and (context_of(one.owner, block.strategy, block.place) == FOREIGN) == foreign
            )
        )
        if not numbers:
            return None
        number = self.source.one_of(numbers)
        variable = self.model.variables[number]
        context = context_of(variable.owner, block.strategy, block.place)
        return getattr(self, kind)(block, number, variable, context, leaves)

    def some_ranks(self, free):
        """Return which replicas make a call that needs no other."""
        if not free or not self.source.chance(20):
            return None
        return tuple(rank for rank in range(self.size) if self.source.chance(50))

    def read(self, block, number, variable, context, leaves):
        free = not read_communicates(variable.synchronization, variable.aggregation, context)
        return Step("read", number, self.source.one_of(READS), ranks=self.some_ranks(free))

    def local(self, block, number, variable, context, leaves):
        return Step("local", number, ranks=self.some_ranks(True))

    def sync(self, block, number, variable, context, leaves):
        return Step("sync", number)

    def deepcopy(self, block, number, variable, context, leaves):
        return Step("deepcopy", number) if len(self.model.variables) < 6 else None

    def read_from(self, block, number, variable, context, leaves):
        return Step("read_from", number, odd=self.source.number(0, self.size - 1))

    def write(self, block, number, variable, context, leaves):
        source = self.source
        way = (
            "own"
            if context == FOREIGN
            else route(variable.synchronization, variable.aggregation, context)
        )
        operation = source.one_of(ASSIGNS)
        others = self.variables(
            lambda one: self.is_whole(one) and one is not variable and self.is_near(block, one)
        )
        shared = (
            variable.synchronization == "ON_READ"
            and variable.aggregation == "SUM"
            and way == "same"
        )
        if shared and not leaves and variable.dtype.kind == "f" and source.chance(40):
            return self.split(number, variable)
        if others and self.is_whole(variable) and source.chance(12):
            other = Operand("variable", source.one_of(others))
            return Step("write", number, operation, (other,) * self.size)
        dtype = self.narrower(variable.dtype.name)
        operands = self.operands(variable.shape, dtype, differ=way != "same" or source.chance(12))
        operands = self.spoiled(operands, variable.shape, variable.dtype.name)
        return Step("write", number, operation, operands, ranks=self.some_ranks(way == "own"))

    def split(self, number, variable):
        """Return an assignment of numbers that do not divide, a look at the copies, and numbers that do."""
        rough = self.source.one_of((0.1, 1 / 3, -2.7, 1e-3, 16777217.0, 1e-45, -7e30))
        steps = []
        for value in (rough, float(FLOAT_UNIT)):
            data = np.full(variable.shape, value).tolist()
            steps.append(Step("write", number, "assign", (Operand("python", data),) * self.size))
            steps.append(Step("read", number, "read_value"))
        return steps

    def is_near(self, block, one):
        """Return whether a variable may be used here; now and then one that may not."""
        return context_of(one.owner, block.strategy, block.place) != FOREIGN or self.source.chance(
            5
        )

    def narrower(self, dtype):
        """Return a dtype whose values go in."""
        if dtype == "bool" or not self.source.chance(15):
            return dtype
        return {"float64": "float32", "int64": "int32", "float32": "float64", "int32": "int64"}.get(
            dtype, dtype
        )

    def scatter(self, block, number, variable, context, leaves):
        source = self.source
        way = (
            "own"
            if context == FOREIGN
            else route(variable.synchronization, variable.aggregation, context)
        )
        operation = source.one_of(SCATTERS)
        differ = way != "same" or source.chance(12)
        rows = variable.shape[0] if variable.shape else 0
        dtype = variable.dtype.name
        base, count = source.number(0, 2), source.number(0, 3) if rows else 0
        start, stride = source.number(-3, 3), source.number(-2, 2) if differ else 0
        indices, operands = [], []
        for rank in range(self.size):
            length = count + rank % 2 if differ and rows else count
            picked = tuple((base + index * (1 + rank * differ)) % rows for index in range(length))
            shape = (length, *variable.shape[1:])
            if operation in ("scatter_mul", "scatter_div"):
                factor = (1, 2, 4)[(start + rank * stride) % 3]
                data = np.full(shape, factor).tolist()
            else:
                data = self.filled(shape, dtype, start + rank * stride)
            indices.append(picked)
            operands.append(Operand("array", data, dtype))
        if source.chance(12):
            odd = source.number(0, self.size - 1)
            if rows and source.chance(60):
                indices[odd] = (source.one_of((rows, -1)),)
                operands[odd] = Operand(
                    "array", self.filled((1, *variable.shape[1:]), dtype, 1), dtype
                )
            else:
                operands[odd] = self.bad((len(indices[odd]), *variable.shape[1:]), dtype)
        ranks = self.some_ranks(way == "own")
        return Step("scatter", number, operation, tuple(operands), tuple(indices), ranks=ranks)

    def crossed(self, block, number, variable, context, leaves):
        """Return a step in which one replica writes another variable, or by another operation."""

        def fits(one):
            way = route(one.synchronization, one.aggregation, context)
            return (
                one.owner == variable.owner
                and way in ("same", "combined")
                and one.dtype.kind != "b"
                and self.is_whole(one)
            )

        if self.size == 1 or context == FOREIGN or not fits(variable):
            return None
        other = self.source.one_of(self.variables(fits))
        odd = self.source.number(0, self.size - 1)
        operands = self.operands(variable.shape, variable.dtype.name, differ=False)
        stranger = self.model.variables[other]
        operands[odd] = self.operands(stranger.shape, stranger.dtype.name, differ=False)[odd]
        operation = self.source.one_of(ASSIGNS[1:])
        return Step("crossed", number, operation, tuple(operands), other=other, odd=odd)

    def combining(self, block, kind):
        source = self.source
        operation = source.one_of(("SUM", "MEAN", "MIN", "MAX", "PROD")) if "reduce" in kind else ""
        numbers = self.variables(
            lambda one: (
                self.is_whole(one)
                and (operation != "PROD" or one.dtype.kind != "f")
                and self.is_near(block, one)
            )
        )
        structured = source.number(0, 1) if block.place != MERGE else 0
        if numbers and source.chance(30):
            number = source.one_of(numbers)
            ndim = len(self.model.variables[number].shape)
            axis = (
                0
                if "gather" in kind
                else source.one_of((None, 0))
                if kind == "reduce" and ndim
                else None
            )
            if axis == 0 and ndim and self.model.variables[number].shape[0] == 0:
                axis = None if "reduce" in kind else 0
            return Step(
                kind,
                op=operation,
                operands=(Operand("variable", number),) * self.size,
                axis=axis,
                other=structured,
            )
        dtype = source.one_of(DTYPES)
        axis = (
            source.one_of((0, -1, 1))
            if "gather" in kind
            else source.one_of((None, 0))
            if kind == "reduce"
            else None
        )
        uneven = axis is not None and source.chance(50)
        shape = source.one_of(
            ((2, 2), (1, 2), (3,)) if axis is not None else ((), (2,), (2, 2), (0,))
        )
        base, stride = source.number(-3, 3), source.number(-2, 2)
        form = source.one_of(("array", "per_replica", "mirrored"))
        operands = []
        for rank in range(self.size):
            mine = list(shape)
            if uneven and "gather" in kind and -len(shape) <= axis < len(shape):
                mine[axis] = (mine[axis] + rank) % 4
            elif uneven and kind == "reduce":
                mine[0] += rank % 3 - (1 if rank else 0)
            data = self.filled(mine, dtype, base + rank * stride)
            if operation == "PROD" and dtype.startswith("float"):
                data = np.sign(np.array(data, dtype=float)).tolist()
            operands.append(Operand(form, data, dtype))
        if source.chance(8):
            odd = source.number(0, self.size - 1)
            operands[odd] = source.one_of(
                (Operand("none"), Operand("text"), Operand("array", [[[1, 2], [3, 4]]], dtype))
            )
        if source.chance(3) and "reduce" in kind:
            operation = "TYPO"
        return Step(kind, op=operation, operands=tuple(operands), axis=axis, other=structured)


__all__ = ["PLACES", "Seeded", "Writer", "programs", "seeded_program"]
