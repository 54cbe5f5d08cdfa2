"""One replica executes a program, and writes down what it saw in the words of the model."""

import copy
import itertools

import numpy as np

import syncvar as sv
from syncvar.core.errors import SyncvarError
from tests.verification.programs.program_language import CROSS, OUTSIDE, REPLICA
from tests.verification.programs.reference_model import value_of

_numbers = itertools.count()


class Left(Exception):
    """What leaves `run` on one replica."""


class Replica:
    """This process's (or thread's) replica: executes programs one after another in the same job."""

    def __init__(self):
        self.rank = sv.rank()
        self.size = sv.world_size()
        self.strategies = [
            sv.get_strategy(),
            sv.MirroredStrategy(),
            sv.MultiWorkerMirroredStrategy(strict=True, reproducible=True),
        ]
        self.variables = []
        self.seen = []
        self.name = ""

    def execute(self, program, name):
        """Return this replica's outcomes, call by call. `name` is the same on all replicas, and new."""
        self.name, self.variables, self.seen = name, [], []
        for owner, made in program.variables:
            if owner:
                with self.strategies[owner].scope():
                    self.see(lambda made=made: self.create(made))
            else:
                self.see(lambda made=made: self.create(made))
        for block in program.blocks:
            self.block(block)
            for variable in self.variables:
                self.seen.append(None if variable is None else value_of(variable.local_value()))
            aligned = [strategy.reduce("SUM", 1.0, axis=None) for strategy in self.strategies]
            assert aligned[0] == aligned[1] == aligned[2], aligned
            self.seen.append(value_of(aligned[0]))
        return self.seen

    def see(self, call):
        """Make a call and write down what came of it."""
        try:
            made = call()
        except SyncvarError as error:
            self.seen.append(("error", type(error).__name__))
        else:
            self.seen.append(None if made is None else value_of(made))

    def block(self, block):
        strategy = self.strategies[block.strategy]
        place = block.place
        if place == OUTSIDE:
            self.steps(block)
        elif place == CROSS:
            with strategy.scope():
                self.steps(block)
        else:
            count = len(self.seen) + len(block.steps)
            try:
                strategy.run(self.steps if place == REPLICA else self.merged, args=(block,))
            except Left:
                self.seen += [None] * (count - len(self.seen))

    def merged(self, block):
        arguments = [self.arguments(step) for step in block.steps]

        def merge(strategy, *arguments):
            assert strategy is self.strategies[block.strategy]
            self.steps(block, arguments)

        sv.get_replica_context().merge_call(merge, args=arguments)

    def arguments(self, step):
        """Return what a step hands to merge_call: what only arguments may be there, values of the replicas' own."""
        if step.kind in ("reduce", "gather") and step.operands[self.rank].kind in (
            "array",
            "python",
        ):
            return self.built(step.operands[self.rank])
        return None

    def steps(self, block, arguments=None):
        for number, step in enumerate(block.steps):
            if step.kind == "raise":
                self.seen.append(None)
                if step.odd == self.rank:
                    raise Left
                continue
            if step.ranks is not None and self.rank not in step.ranks:
                self.seen.append(None)
                continue
            given = None if arguments is None else arguments[number]
            self.see(lambda step=step, given=given: self.step(block, step, given))

    # -- calls -------------------------------------------------------------------------------------

    def built(self, operand):
        """Return the value that an operand stands for."""
        kind = operand.kind
        if kind == "none":
            return None
        if kind == "text":
            return "text"
        if kind == "python":
            return operand.data
        if kind == "variable":
            return self.variables[operand.data]
        array = np.array(operand.data, dtype=operand.dtype)
        return {"array": lambda x: x, "mirrored": sv.Mirrored, "per_replica": sv.PerReplica}[kind](
            array
        )

    def create(self, made):
        number = len(self.variables)
        self.variables.append(None)
        if made.ranks is not None and self.rank not in made.ranks:
            return None
        variable = self.variables[number] = sv.Variable(
            self.built(made.values[self.rank]),
            dtype=made.dtype,
            name=f"{self.name}.v{number}",
            synchronization=made.synchronization,
            aggregation=made.aggregation,
        )
        return variable.local_value()

    def step(self, block, step, given):
        kind = step.kind
        if kind == "create":
            return self.create(step.made)
        if kind == "run":
            return self.strategies[block.strategy].run(lambda: np.int64(7))
        if kind == "scope":
            with self.strategies[step.variable].scope():
                return np.int64(7)
        if kind in ("reduce", "gather", "all_reduce", "all_gather"):
            operand = step.operands[self.rank]
            if operand.kind == "variable" and self.variables[operand.data] is None:
                return None
            value = self.built(operand) if given is None else given
            if step.other:
                value = {"x": value, "more": (value, [value])}
            place = (
                sv.get_replica_context()
                if kind.startswith("all_")
                else self.strategies[block.strategy]
            )
            if place is None:  # all_reduce in cross context: there is no replica context to ask
                raise sv.UsageError("no replica context")
            if kind == "all_reduce":
                made = place.all_reduce(step.op, value)
            elif kind == "reduce":
                made = place.reduce(step.op, value, axis=step.axis)
            else:
                made = getattr(place, kind)(value, axis=step.axis)
            if not step.other:
                return made
            assert value_of(made["x"]) == value_of(made["more"][0]) == value_of(made["more"][1][0])
            return made["x"]
        variable = self.variables[step.variable]
        if kind == "deepcopy":
            self.variables.append(None)
        if variable is None:
            return None
        if kind == "deepcopy":
            self.variables[-1] = copy.deepcopy(variable)
            return self.variables[-1].local_value()
        if kind == "local":
            return variable.local_value()
        if kind == "sync":
            return variable.sync()
        if kind == "read_from":
            sv.barrier()
            try:
                return variable.read_from(step.odd)
            finally:
                sv.barrier()
        if kind == "read":
            return self.read(variable, step.op)
        operation = step.op
        if kind == "crossed" and self.rank == step.odd:
            if step.other == step.variable:
                operation = "assign_sub" if operation == "assign_add" else "assign_add"
            variable = self.variables[step.other]
        x = self.built(step.operands[self.rank])
        if kind == "scatter":
            written = getattr(variable, operation)(np.array(step.indices[self.rank], np.int64), x)
        else:
            written = getattr(variable, operation)(x)
        assert written is variable
        return variable.local_value()

    @staticmethod
    def read(variable, how):
        if how == "operator":
            return (
                (variable + variable.dtype.type(0))
                if variable.dtype.kind != "b"
                else (variable | False)
            )
        if how == "asarray":
            return np.asarray(variable)
        if how == "index":
            return variable[...]
        return getattr(variable, how)()
