"""What every replica must see: the contract of variables as plain Python and NumPy, with all copies in one place.

Written from the contract alone; nothing here calls the product. `predict` returns, for each step and replica, what the
call gives: ("value", dtype, shape, numbers), ("error", names of the classes that are right) or None where it made no call.
"""

from fractions import Fraction

import numpy as np

from tests.verification.programs.program_language import CROSS, MERGE, OUTSIDE, REPLICA

SPMD, FOREIGN = "spmd", "foreign"
DEFAULT = 0
STRICT = 2


class Refused(Exception):
    """A call that one replica's product must refuse."""

    def __init__(self, *classes):
        super().__init__(classes)
        self.classes = frozenset(classes)


class Variable:
    """All copies of one variable; a copy is None where the variable does not exist."""

    def __init__(self, owner, synchronization, aggregation, copies):
        self.owner = owner
        self.synchronization = "ON_WRITE" if synchronization == "AUTO" else synchronization
        self.aggregation = aggregation
        self.copies = copies
        some = next(copy for copy in copies if copy is not None)
        self.shape, self.dtype = some.shape, some.dtype


# -- where and what --------------------------------------------------------------------------------


def context_of(owner, strategy, place):
    """Return in which context a variable of `owner` is used, in a place of `strategy`."""
    if place == OUTSIDE:
        return SPMD if owner == DEFAULT else CROSS
    if owner == strategy:
        return place
    return CROSS if owner == DEFAULT else FOREIGN


def read_communicates(synchronization, aggregation, context):
    return (
        synchronization == "ON_READ" and context in (CROSS, MERGE, SPMD) and aggregation != "NONE"
    )


def route(synchronization, aggregation, context):
    """Return how a write goes: "own" copy, "combined", the "same" on all, or "refused"."""
    if synchronization == "NONE":
        return "own"
    if context in (CROSS, MERGE):
        return "same"
    if synchronization == "ON_READ":
        return "own"
    if aggregation == "NONE":
        return "refused" if context == REPLICA else "same"
    return "combined"


# -- numbers ---------------------------------------------------------------------------------------


def value_of(array):
    """Return an array as an outcome; zeros have no sign here, and NaN equals itself."""
    array = np.asarray(array)
    plain = (
        (array + 0).reshape(-1).tolist() if array.dtype.kind != "b" else array.reshape(-1).tolist()
    )
    return ("value", array.dtype.name, array.shape, repr(plain))


def error_of(*classes):
    return ("error", frozenset(classes))


def shares(value, count):
    """Return the exact split: value / count truncated everywhere, and the rest on replica 0."""
    value = np.asarray(value)
    parts = [np.empty_like(value) for _ in range(count)]
    for at in np.ndindex(value.shape):
        for replica, part in enumerate(_split(value[at], count)):
            parts[replica][at] = part
    return parts


def _split(x, count):
    if x.dtype.kind == "b":
        return [x] + [False] * (count - 1)
    if x.dtype.kind in "iu":
        unit, whole = 1, int(x)
    elif x == 0 or not np.isfinite(x):
        return [x] * count
    else:
        unit = Fraction(float(np.spacing(np.abs(x))))
        whole = int(Fraction(float(x)) / unit)
    part = abs(whole) // count * (1 if whole > 0 else -1)
    made = [whole - part * (count - 1)] + [part] * (count - 1)
    return [type(x)(float(one * unit)) if x.dtype.kind == "f" else one for one in made]


def summed(copies):
    total = copies[0].copy()
    for copy in copies[1:]:
        total = np.asarray(total + copy, total.dtype)
    return total


def mean(copies):
    if copies[0].dtype.kind in "iu":
        copies = [copy.astype(np.float64) for copy in copies]
    total = summed(copies)
    return np.asarray(total / total.dtype.type(len(copies)), total.dtype)


def reduced(op, copies):
    if op in ("SUM", "MEAN", "PROD") and copies[0].dtype.kind == "b":
        raise Refused("ConfigError")
    if op == "SUM":
        return summed(copies)
    if op == "MEAN":
        return mean(copies)
    made = copies[0].copy()
    for copy in copies[1:]:
        how = {"MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}[op]
        made = np.asarray(how(made, copy))
    return made


def array_of(operand):
    """Return an operand that is no variable as an array, without looking at a variable."""
    if operand.kind in ("none", "text"):
        raise Refused("ConfigError")
    if operand.kind == "python":
        try:
            return np.asarray(operand.data)
        except ValueError:  # a ragged list
            raise Refused("ConfigError") from None
    return np.asarray(operand.data, dtype=operand.dtype)


def cast(array, dtype, *, weak):
    """Return an array as `dtype`: same_kind for arrays, weak Python numbers."""
    if array.dtype == dtype:
        return array
    if weak and not array.size:
        return array.astype(dtype)
    if weak:
        order = {"b": 0, "u": 1, "i": 1, "f": 2}
        if order[array.dtype.kind] > order[dtype.kind]:
            raise Refused("ConfigError")
        if dtype.kind in "iu" and array.size:
            limits = np.iinfo(dtype)
            if int(array.max()) > limits.max or int(array.min()) < limits.min:
                raise Refused("ConfigError")
    elif not np.can_cast(array.dtype, dtype, "same_kind"):
        raise Refused("ConfigError")
    return array.astype(dtype)


# -- the world -------------------------------------------------------------------------------------


class Model:
    """The copies of all variables of one program."""

    def __init__(self, program):
        self.program = program
        self.size = program.size
        self.variables = []
        self.outcomes = []

    def predict(self):
        """Return the outcomes of all steps, then of the copies after each block."""
        for owner, made in self.program.variables:
            self.outcomes.append(self.create(owner, made))
        for block in self.program.blocks:
            gone = None  # the replica that has left this run by an exception
            for step in block.steps:
                if step.kind == "raise":
                    gone = step.odd
                    self.outcomes.append([None] * self.size)
                    continue
                self.outcomes.append(self.step(block, step, gone))
            for variable in self.variables:
                copies = variable.copies if variable else [None] * self.size
                self.outcomes.append([None if copy is None else value_of(copy) for copy in copies])
            self.outcomes.append(
                [value_of(np.float64(self.size))] * self.size
            )  # the groups are still aligned
        return self.outcomes

    # -- making ------------------------------------------------------------------------------------

    def create(self, owner, made):
        wrong, values = {}, {}
        apart = made.synchronization == "NONE"
        ranks = range(self.size) if made.ranks is None else made.ranks
        for rank in ranks:
            try:
                values[rank] = self.initial(made, made.values[rank])
            except Refused as refused:
                wrong[rank] = refused.classes
        if apart:
            copies = [values.get(rank) for rank in range(self.size)]
            self.variables.append(
                Variable(owner, "NONE", made.aggregation, copies) if values else None
            )
            return [
                ("error", wrong[rank])
                if rank in wrong
                else value_of(copies[rank])
                if rank in values
                else None
                for rank in range(self.size)
            ]
        differs = len({(value.shape, value.dtype) for value in values.values()}) > 1
        if owner == STRICT and not differs:
            differs = len({value.tobytes() for value in values.values()}) > 1
        if wrong or differs:
            self.variables.append(None)
            return [
                ("error", wrong[rank]) if rank in wrong else error_of("MismatchError")
                for rank in range(self.size)
            ]
        chief = values[0]
        if made.synchronization == "ON_READ" and made.aggregation == "SUM":
            copies = shares(chief, self.size)
        else:
            copies = [chief.copy() for _ in range(self.size)]
        self.variables.append(Variable(owner, made.synchronization, made.aggregation, copies))
        return [value_of(copy) for copy in copies]

    def initial(self, made, operand):
        array = array_of(operand)
        weak = operand.kind == "python"
        dtype = (
            np.dtype(made.dtype)
            if made.dtype
            else np.dtype(np.float32)
            if weak and array.dtype.kind == "f"
            else array.dtype
        )
        if made.synchronization == "TYPO" or made.aggregation == "TYPO":
            raise Refused("ConfigError")
        array = cast(array, dtype, weak=weak)
        if made.aggregation == "MEAN" and dtype.kind != "f":
            raise Refused("ConfigError")
        return array

    def copied(self, variable):
        copies = [None if copy is None else copy.copy() for copy in variable.copies]
        self.variables.append(
            Variable(variable.owner, variable.synchronization, variable.aggregation, copies)
        )
        return [None if copy is None else value_of(copy) for copy in copies]

    # -- steps -------------------------------------------------------------------------------------

    def step(self, block, step, gone):
        """Return the outcome of a step on each replica; those that left or take no part have None."""
        made = self.everywhere(block, step, gone)
        for rank in range(self.size):
            if rank == gone or (step.ranks is not None and rank not in step.ranks):
                made[rank] = None
        return made

    def everywhere(self, block, step, gone):
        kind = step.kind
        if kind == "create":
            return self.create(block.strategy if block.place != OUTSIDE else DEFAULT, step.made)
        if kind == "run":
            wrong = block.place in (REPLICA, MERGE)
            return [error_of("UsageError") if wrong else value_of(np.int64(7))] * self.size
        if kind == "scope":
            wrong = block.place in (REPLICA, MERGE) or (
                block.place == CROSS and step.variable != block.strategy
            )
            return [error_of("UsageError") if wrong else value_of(np.int64(7))] * self.size
        if kind in ("reduce", "gather", "all_reduce", "all_gather"):
            return self.values(block, step, gone)
        variable = self.variables[step.variable]
        if variable is None:
            if kind == "deepcopy":
                self.variables.append(None)
            return [None] * self.size
        context = context_of(variable.owner, block.strategy, block.place)
        if context == FOREIGN:
            if kind == "deepcopy":
                self.variables.append(None)
            return self.where_it_is(variable, [error_of("UsageError")] * self.size)
        if kind == "deepcopy":
            return self.copied(variable)
        if kind == "local":
            return [None if copy is None else value_of(copy) for copy in variable.copies]
        if kind == "read_from":
            copies = variable.copies
            return self.where_it_is(variable, [value_of(copies[step.odd])] * self.size)
        if kind in ("read", "sync"):
            return self.where_it_is(
                variable, self.read(variable, context, gone, sync=kind == "sync")
            )
        if kind == "crossed":
            return [error_of("MismatchError")] * self.size
        return self.where_it_is(variable, self.write(block, step, variable, context, gone))

    @staticmethod
    def where_it_is(variable, outcomes):
        return [
            None if copy is None else one
            for copy, one in zip(variable.copies, outcomes, strict=True)
        ]

    def read(self, variable, context, gone, *, sync=False):
        """Return the outcome of a read on each replica."""
        try:
            values, communicates = self.value(
                variable, REPLICA if not sync and context == REPLICA else CROSS
            )
        except Refused as refused:
            return [("error", refused.classes)] * self.size
        if sync and variable.synchronization == "ON_WRITE":
            communicates = True
        if communicates and gone is not None:
            return [error_of("MismatchError")] * self.size
        return [None if value is None else value_of(value) for value in values]

    def value(self, variable, context):
        """Return what each replica reads, and whether that is a call of the group."""
        copies = variable.copies
        if variable.synchronization != "ON_READ" or context == REPLICA:
            return copies, False
        if variable.aggregation == "NONE":
            raise Refused("NoAggregation")
        if variable.dtype.kind == "b" and variable.aggregation in ("SUM", "MEAN"):
            raise Refused("ConfigError")
        first = {"SUM": summed, "MEAN": mean, "ONLY_FIRST_REPLICA": lambda all_of: all_of[0]}[
            variable.aggregation
        ]
        return [first(copies)] * self.size, True

    # -- writing -----------------------------------------------------------------------------------

    def write(self, block, step, variable, context, gone):
        way = route(variable.synchronization, variable.aggregation, context)
        if way == "refused":
            return [error_of("NoAggregation")] * self.size
        scatter = step.kind == "scatter"
        factor = step.op in ("scatter_mul", "scatter_div", "scatter_update")
        if scatter and way == "combined" and variable.aggregation in ("SUM", "MEAN") and factor:
            return [error_of("UsageError")] * self.size
        brought, wrong = {}, {}
        left = (
            False  # a read of an operand that is a call of the group fails when a replica has left
        )
        for rank in range(self.size):
            if variable.copies[rank] is None:
                continue
            try:
                operand = step.operands[rank]
                if operand.kind == "variable":
                    array, weak, left = self.operand_variable(block, operand.data, rank, gone)
                elif (
                    operand.kind == "per_replica"
                ):  # which of two reasons is told first is nobody's promise
                    two = variable.dtype.kind == "b" or (scatter and not variable.shape)
                    raise Refused("UsageError", *(["ConfigError"] if two else []))
                else:
                    array, weak = array_of(operand), operand.kind == "python"
                brought[rank] = self.checked(step, variable, way, array, weak, rank)
            except Refused as refused:
                wrong[rank] = refused.classes
        if left:
            return [error_of("MismatchError")] * self.size
        if way != "own" and gone is not None:
            return [
                ("error", wrong[rank]) if rank in wrong else error_of("MismatchError")
                for rank in range(self.size)
            ]
        if way != "own" and (wrong or (way == "same" and self.differ(brought))):
            return [
                ("error", wrong[rank]) if rank in wrong else error_of("MismatchError")
                for rank in range(self.size)
            ]
        absent = () if step.ranks is None else set(range(self.size)) - set(step.ranks)
        brought = {
            rank: one for rank, one in brought.items() if rank != gone and rank not in absent
        }
        change = self.scattered if scatter else self.assigned
        change(step, variable, way, brought)
        return [
            ("error", wrong[rank]) if rank in wrong else None if copy is None else value_of(copy)
            for rank, copy in enumerate(variable.copies)
        ]

    def operand_variable(self, block, number, rank, gone):
        """Return (array, False, whether a replica that left makes it fail)."""
        operand = self.variables[number]
        context = context_of(operand.owner, block.strategy, block.place)
        if context == FOREIGN:
            raise Refused("UsageError")
        values, communicates = self.value(operand, context)
        if communicates and gone is not None:
            return None, False, True
        return values[rank], False, False

    def checked(self, step, variable, way, array, weak, rank):
        dtype, shape = variable.dtype, variable.shape
        is_bool = dtype.kind == "b"
        shared = (
            way == "same"
            and variable.synchronization == "ON_READ"
            and variable.aggregation == "SUM"
        )
        if array is None:
            return None
        if step.kind == "scatter":
            rows = step.indices[rank]
            if is_bool and (
                shared or step.op not in ("scatter_min", "scatter_max", "scatter_update")
            ):
                raise Refused("ConfigError")
            if not shape or array.shape != (len(rows), *shape[1:]):
                raise Refused("ConfigError")
            array = cast(array, dtype, weak=weak)
            if any(not 0 <= row < shape[0] for row in rows):
                raise Refused("RowOutOfRange")
            return rows, array
        if is_bool and (
            step.op != "assign"
            or shared
            or (way == "combined" and variable.aggregation in ("SUM", "MEAN"))
        ):
            raise Refused("ConfigError")
        if array.shape != shape:
            raise Refused("ConfigError")
        return cast(array, dtype, weak=weak)

    @staticmethod
    def differ(brought):
        def bytes_of(one):
            return (one[0], one[1].tobytes()) if isinstance(one, tuple) else one.tobytes()

        return len({bytes_of(one) for one in brought.values()}) > 1

    def assigned(self, step, variable, way, brought):
        if way == "combined":
            everyone = [brought[rank] for rank in range(self.size)]
            how = {"SUM": summed, "MEAN": mean, "ONLY_FIRST_REPLICA": lambda all_of: all_of[0]}
            together = how[variable.aggregation](everyone)
            brought = dict.fromkeys(range(self.size), together)
        elif (
            way == "same"
            and variable.synchronization == "ON_READ"
            and variable.aggregation == "SUM"
        ):
            brought = dict(enumerate(shares(brought[0], self.size)))
        for rank, x in brought.items():
            copy = variable.copies[rank]
            made = {
                "assign": lambda: x,  # noqa: B023
                "assign_add": lambda: copy + x,  # noqa: B023
                "assign_sub": lambda: copy - x,  # noqa: B023
            }[step.op]()  # noqa: B023
            variable.copies[rank] = np.array(made, variable.dtype)

    def scattered(self, step, variable, way, brought):
        if way == "combined":
            if variable.aggregation == "ONLY_FIRST_REPLICA":
                lists = [brought[0]]
            elif variable.aggregation == "MEAN" and step.op in ("scatter_add", "scatter_sub"):
                count = variable.dtype.type(self.size)
                lists = [
                    (rows, np.asarray(values / count, variable.dtype))
                    for rows, values in brought.values()
                ]
            else:
                lists = list(brought.values())
            everyone = dict.fromkeys(range(self.size), lists)
        else:
            everyone = {rank: [one] for rank, one in brought.items()}
        if (
            way == "same"
            and variable.synchronization == "ON_READ"
            and variable.aggregation == "SUM"
        ):
            value = rows_applied(step.op, summed(variable.copies), everyone[0])
            variable.copies[:] = shares(value, self.size)
            return
        for rank, lists in everyone.items():
            variable.copies[rank] = rows_applied(step.op, variable.copies[rank], lists)

    # -- reduce and gather -------------------------------------------------------------------------

    def values(self, block, step, gone):
        """Return the outcome of strategy.reduce, gather, and of the replica context's all_reduce and all_gather."""
        inside = step.kind in ("all_reduce", "all_gather")
        if (block.place == REPLICA) != inside and not (inside and block.place == OUTSIDE):
            return [error_of("UsageError")] * self.size
        wrong, parts = {}, {}
        for rank, operand in enumerate(step.operands):
            try:
                if operand.kind == "variable":
                    variable = self.variables[operand.data]
                    if variable is None:
                        return [None] * self.size
                    if context_of(variable.owner, block.strategy, block.place) == FOREIGN:
                        raise Refused("UsageError")
                    array = variable.copies[rank]
                else:
                    array = array_of(operand)
                parts[rank] = self.checked_part(step, array)
            except Refused as refused:
                wrong[rank] = refused.classes
        fits = {
            (
                part.shape
                if step.kind in ("all_reduce", "reduce")
                else self.apart(part, step.axis),
                part.dtype,
            )
            for part, _ in parts.values()
        }
        if wrong or len(fits) > 1 or gone is not None:
            return [
                ("error", wrong[rank]) if rank in wrong else error_of("MismatchError")
                for rank in range(self.size)
            ]
        arrays = [parts[rank][0] for rank in range(self.size)]
        if step.kind in ("gather", "all_gather"):
            return [value_of(np.concatenate(arrays, axis=step.axis))] * self.size
        if step.axis is not None and step.op == "MEAN":
            total = summed(arrays)
            count = sum(count for _, count in parts.values())
            with np.errstate(all="ignore"):
                made = np.asarray(
                    total / count, np.float64 if total.dtype.kind in "iu" else total.dtype
                )
            return [value_of(made)] * self.size
        return [value_of(reduced(step.op, arrays))] * self.size

    @staticmethod
    def apart(part, axis):
        """Return the shape without the axis along which lengths may differ."""
        shape = list(part.shape)
        del shape[axis]
        return tuple(shape)

    @staticmethod
    def checked_part(step, array):
        """Return (array reduced along the axis, how many were reduced)."""
        if step.kind in ("gather", "all_gather"):
            if array.ndim == 0 or not -array.ndim <= step.axis < array.ndim:
                raise Refused("ConfigError")
            return array, 0
        if step.op in ("SUM", "MEAN", "PROD") and array.dtype.kind == "b":
            raise Refused("ConfigError")
        if step.op == "TYPO":
            raise Refused("ConfigError")
        if step.axis is None:
            return array, 0
        if not -array.ndim <= step.axis < array.ndim:
            raise Refused("ConfigError")
        count = array.shape[step.axis]
        how = {"SUM": np.sum, "MEAN": np.sum, "PROD": np.prod, "MIN": np.min, "MAX": np.max}[
            step.op
        ]
        if step.op in ("SUM", "MEAN", "PROD"):
            return np.asarray(how(array, axis=step.axis, dtype=array.dtype)), count
        if count == 0:
            least = {"MIN": 1, "MAX": -1}[step.op]
            if array.dtype.kind == "b":
                fill = step.op == "MIN"
            elif array.dtype.kind == "f":
                fill = np.inf * least
            else:
                fill = np.iinfo(array.dtype).max if least > 0 else np.iinfo(array.dtype).min
            shape = [
                length
                for place, length in enumerate(array.shape)
                if place != step.axis % array.ndim
            ]
            return np.full(shape, fill, array.dtype), 0
        return np.asarray(how(array, axis=step.axis)), count


def rows_applied(op, copy, lists):
    """Return a copy with rows applied in the order of (replica, position)."""
    made = copy.copy()
    pairs = [pair for rows, values in lists for pair in zip(rows, values, strict=True)]
    with np.errstate(over="ignore"):
        for row, value in pairs:
            old = made[row]
            if op == "scatter_add":
                new = old + value
            elif op == "scatter_sub":
                new = old - value
            elif op == "scatter_mul":
                new = old * value
            elif op == "scatter_div":
                new = np.trunc(old / value) if made.dtype.kind in "iu" else old / value
            elif op == "scatter_min":
                new = np.minimum(old, value)
            elif op == "scatter_max":
                new = np.maximum(old, value)
            else:
                new = value
            made[row] = new
    return made


def predict(program):
    """Return the outcomes of a program: a list of lists, by call and by replica."""
    return Model(program).predict()
