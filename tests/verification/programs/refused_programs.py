"""Every refusal of the variable layer, as a small program that provokes it.

Each is a function of a `Case` that makes the mistake; the text of rank 0 (or of `rank`) is kept in tests/golden/errors.txt.
`says` is what the text must contain: the line that the user should have written.
"""

import copy
import pickle
from typing import NamedTuple

import numpy as np

import syncvar as sv


class Refusal(NamedTuple):
    name: str
    mistake: object
    says: str
    size: int = 2
    rank: int = 0


REFUSALS = []


def refusal(name, says, *, size=2, rank=0):
    def keep(mistake):
        REFUSALS.append(Refusal(name, mistake, says, size, rank))
        return mistake

    return keep


def scoped(value=0.0, name="v", **keywords):
    strategy = keywords.pop("strategy", None) or sv.MirroredStrategy()
    with strategy.scope():
        return strategy, sv.Variable(value, name=name, **keywords)


# -- modes -----------------------------------------------------------------------------------------


@refusal("replica write of aggregation NONE", "aggregation=sv.VariableAggregation.SUM")
def _():
    strategy, v = scoped()
    strategy.run(lambda: v.assign_add(1.0))


@refusal("aggregated read of ON_READ + NONE", "v.local_value()")
def _():
    _, v = scoped(synchronization="ON_READ")
    v.numpy()


@refusal("sync of ON_READ + NONE", "v.local_value()")
def _():
    sv.Variable(0.0, name="v", synchronization="ON_READ").sync()


@refusal("scatter_mul under SUM", "aggregation=sv.VariableAggregation.ONLY_FIRST_REPLICA")
def _():
    strategy, v = scoped([1.0, 2.0], aggregation="SUM")
    strategy.run(lambda: v.scatter_mul([0], [2.0]))


@refusal("spmd writes that differ under NONE", "aggregation=sv.VariableAggregation.SUM")
def _():
    sv.Variable(0.0, name="v").assign(float(sv.rank()))


# -- operands --------------------------------------------------------------------------------------


@refusal("wrong shape", "np.broadcast_to(x, (2,))")
def _():
    sv.Variable([0.0, 0.0], name="v", aggregation="SUM").assign(1.0)


@refusal("an integer that no dtype holds", "pass float(x)")
def _():
    sv.Variable(0, name="v", aggregation="SUM").assign(2**70)


@refusal("an array of Python objects", "pass x.astype('int64')")
def _():
    sv.Variable([0], name="v", synchronization="NONE").assign(np.array([1], object))


@refusal("rows of integers that no dtype holds", "pass float(x)")
def _():
    sv.Variable([0, 0], name="v", synchronization="NONE").scatter_add([0], [2**70])


@refusal("a row that no integer dtype holds", "is outside the variable's rows 0 to 1")
def _():
    sv.Variable([0, 0], name="v", synchronization="NONE").scatter_add([2**70], [1])


@refusal("an initial value that is no number", "pass np.zeros(shape)")
def _():
    sv.Variable([print], name="v")


@refusal("an initial value of dates", "x.astype('int64')")
def _():
    sv.Variable(np.zeros(2, "datetime64[s]"), name="v")


@refusal("an integer that is too large for int64", "dtype='uint64'")
def _():
    sv.Variable(0, name="v", aggregation="SUM").assign(2**63)


@refusal("a number that is too large for complex64", "dtype='complex128'")
def _():
    sv.Variable(0, dtype="complex64", name="v", aggregation="SUM").assign(1e300)


@refusal("wrong shape, as another rank sees it", "np.broadcast_to(x, (2,))", rank=1)
def _():
    v = sv.Variable([0.0, 0.0], name="v", aggregation="SUM")
    v.assign(1.0 if sv.rank() == 0 else [1.0, 1.0])


@refusal("wrong dtype", "x.astype('int64')")
def _():
    sv.Variable(0, name="v", aggregation="SUM").assign(np.float64(1.5))


@refusal("a Python float into an integer variable", "astype('int64')")
def _():
    sv.Variable(0, name="v", aggregation="SUM").assign(1.5)


@refusal("a Python number that does not fit", "dtype=")
def _():
    sv.Variable(np.uint8(0), name="v", aggregation="SUM").assign(300)


@refusal("None", "np.zeros(shape)")
def _():
    sv.Variable(0.0, name="v", aggregation="SUM").assign(None)


@refusal("bool and assign_add", "dtype='int64'")
def _():
    sv.Variable(False, name="v", synchronization="ON_READ").assign_add(True)


@refusal("bool under SUM", "dtype='int64'")
def _():
    sv.Variable(False, name="v", aggregation="SUM").assign(True)


@refusal("read of bool under SUM", "dtype='int64'")
def _():
    sv.Variable(False, name="v", synchronization="ON_READ", aggregation="SUM").numpy()


@refusal("a PerReplica as operand", "strategy.reduce('SUM', x, axis=None)")
def _():
    strategy, v = scoped()
    with strategy.scope():
        v.assign(sv.PerReplica(1.0))


@refusal("a row out of range", "v.scatter_add(rows[keep], values[keep])")
def _():
    sv.Variable([0.0, 0.0], name="v", aggregation="SUM").scatter_add([2], [1.0])


@refusal("a negative row", "rows % 2")
def _():
    sv.Variable([0.0, 0.0], name="v", aggregation="SUM").scatter_add([-1], [1.0])


@refusal("rows of a scalar", "v.assign_add(x)")
def _():
    sv.Variable(0.0, name="v", aggregation="SUM").scatter_add([0], [1.0])


@refusal("cross writes that differ", "strategy.reduce")
def _():
    strategy, v = scoped(aggregation="SUM")
    with strategy.scope():
        v.assign(float(sv.rank()))


@refusal("crossed writes", "Write the same calls in the same order")
def _():
    a, b = (sv.Variable(0.0, name=name, aggregation="SUM") for name in "ab")
    (a if sv.rank() == 0 else b).assign_add(1.0)


# -- creation --------------------------------------------------------------------------------------


@refusal("MEAN of integers", "dtype='float32'")
def _():
    sv.Variable(0, name="v", aggregation="MEAN")


@refusal("an unknown name of an enumeration", "did you mean ON_WRITE")
def _():
    sv.Variable(0.0, synchronization="ON_WRIT")


@refusal("an unknown aggregation", "did you mean ONLY_FIRST_REPLICA")
def _():
    sv.Variable(0.0, aggregation="FIRST_REPLICA")


@refusal("a name that breaks the rule", "name='my_loss'")
def _():
    sv.Variable(0.0, name="my loss")


@refusal("text as initial value", "np.zeros(shape)")
def _():
    sv.Variable("text", name="v")


@refusal("no dtype", "dtype='float32'")
def _():
    sv.Variable(0.0, name="v", dtype="flaot32")


@refusal("initial values that differ, strict", "np.random.default_rng(seed)")
def _():
    scoped(float(sv.rank()), strategy=sv.MirroredStrategy(strict=True))


@refusal("manifests that differ", "sv.Variable(…)")
def _():
    sv.Variable([0.0] * (sv.rank() + 1), name="v", aggregation="SUM" if sv.rank() else "MEAN")


@refusal("trainable is no bool", "trainable=True")
def _():
    sv.Variable(0.0, trainable="yes")


# -- protocols -------------------------------------------------------------------------------------


@refusal("v += x", "v.assign_add(x)")
def _():
    v = sv.Variable(0.0, name="v")
    v += 1.0


@refusal("v[0] = x", "v.scatter_update(")
def _():
    sv.Variable([0.0], name="v")[0] = 1.0


@refusal("np.add(…, out=v)", "v.assign(")
def _():
    v = sv.Variable(0.0, name="v")
    np.add(1.0, 2.0, out=v)


@refusal("pickle", "sv.Checkpoint(v=v).save(path)")
def _():
    pickle.dumps(sv.Variable(0.0, name="v"))


@refusal("pickle of an optimizer that has made a step", "copy.deepcopy(optimizer)")
def _():
    optimizer = sv.optimizers.Momentum(0.1)
    optimizer.apply_gradients([(1.0, sv.Variable(0.0, name="w"))])
    pickle.dumps(optimizer)


@refusal("a deep copy of a strategy", "or write sv.MirroredStrategy() there")
def _():
    copy.deepcopy(sv.MirroredStrategy())


@refusal("a deep copy of a group", "sv.new_group(ranks)")
def _():
    copy.deepcopy(sv.new_group([0]))


@refusal("pin of a variable that is not AUTO", "synchronization=sv.VariableSynchronization.AUTO")
def _():
    sv.Variable(0.0, name="v", synchronization="ON_WRITE").pin("eager")


@refusal("pin to an unknown mode", "v.pin('deferred')")
def _():
    sv.Variable(0.0, name="v").pin("lazy")


@refusal("read_from of no replica", "0 to 1")
def _():
    sv.Variable(0.0, name="v", synchronization="NONE").read_from(2)


@refusal("arithmetic of a PerReplica", "strategy.run(fn, args=(x,))")
def _():
    sv.PerReplica(1.0) + 1.0


@refusal("NumPy function of a PerReplica", "strategy.reduce('SUM', x, axis=None)")
def _():
    np.sum(sv.PerReplica(np.ones(2)))


# -- contexts --------------------------------------------------------------------------------------


@refusal("run inside run", "call the function directly")
def _():
    strategy = sv.MirroredStrategy()
    strategy.run(lambda: strategy.run(lambda: None))


@refusal("run inside merge_call", "call the function directly")
def _():
    strategy = sv.MirroredStrategy()
    strategy.run(lambda: sv.get_replica_context().merge_call(lambda s: s.run(lambda: None)))


@refusal("run with args that are no tuple", "args=(x,)")
def _():
    sv.MirroredStrategy().run(lambda x: x, args=1.0)


@refusal("a scope under another strategy", "sv.get_strategy()")
def _():
    one, two = sv.MirroredStrategy(), sv.MirroredStrategy()
    with one.scope(), two.scope():
        pass


@refusal("a scope in replica context", "with strategy.scope():")
def _():
    strategy = sv.MirroredStrategy()

    def step():
        with strategy.scope():
            pass

    strategy.run(step)


@refusal("a variable under another strategy", "with variable.strategy.scope():")
def _():
    _, v = scoped()
    with sv.MirroredStrategy().scope():
        v.numpy()


@refusal("run under another strategy", "sv.get_strategy().run")
def _():
    one, two = sv.MirroredStrategy(), sv.MirroredStrategy()
    with one.scope():
        two.run(lambda: None)


@refusal("reduce in replica context", "sv.get_replica_context().all_reduce(")
def _():
    strategy = sv.MirroredStrategy()
    strategy.run(lambda: strategy.reduce("SUM", 1.0, axis=None))


@refusal("gather in replica context", "sv.get_replica_context().all_gather(")
def _():
    strategy = sv.MirroredStrategy()
    strategy.run(lambda: strategy.gather([1.0], axis=0))


@refusal("all_reduce in merge context", "strategy.reduce(")
def _():
    def step():
        context = sv.get_replica_context()
        context.merge_call(lambda _: context.all_reduce("SUM", 1.0))

    sv.MirroredStrategy().run(step)


@refusal("unbalanced merges", "Write the same calls in the same order", rank=1)
def _():
    strategy = sv.MirroredStrategy()
    w = scoped(0.0, "w", strategy=strategy, aggregation="SUM")[1]

    def step():
        if sv.rank() == 0:
            sv.get_replica_context().merge_call(lambda _: None)
        w.assign_add(1.0)

    strategy.run(step)


@refusal("an exception that leaves run, as another rank sees it", "KeyError", rank=1)
def _():
    strategy, w = scoped(0.0, "w", aggregation="SUM")

    def step():
        if sv.rank() == 0:
            raise KeyError("batch")
        w.assign_add(1.0)

    strategy.run(step)


# -- values ----------------------------------------------------------------------------------------


@refusal("an unknown reduction", "one of SUM, MEAN, MIN, MAX, PROD")
def _():
    sv.get_strategy().reduce("MAEN", 1.0, axis=None)


@refusal("structures that differ", "Write the same calls")
def _():
    sv.get_strategy().reduce("SUM", {"a": 1.0} if sv.rank() else {"b": 1.0}, axis=None)


@refusal("an axis outside the value", "axis=None")
def _():
    sv.get_strategy().reduce("SUM", [1.0], axis=1)


@refusal("an axis that is no integer", "axis=0")
def _():
    sv.get_strategy().reduce("SUM", [1.0], axis="batch")


@refusal("an axis named twice", "axis=(0,)")
def _():
    sv.get_strategy().reduce("SUM", [1.0], axis=(0, 0))


@refusal("gather of scalars", "np.reshape(x, (1,))")
def _():
    sv.get_strategy().gather(1.0, axis=0)


@refusal("gather of shapes that do not fit", "only lengths along axis 0 may differ")
def _():
    sv.get_strategy().gather(np.zeros((1, 2 + sv.rank())), axis=0)


@refusal("reduction of bool", "x.astype('int64')")
def _():
    sv.get_strategy().reduce("SUM", True, axis=None)


# -- reading on one rank ---------------------------------------------------------------------------


@refusal("the classic mistake: reading a loss on rank 0 only", "loss.local_value()", size=4)
def _():
    loss = sv.Variable(0.0, name="loss", synchronization="ON_READ", aggregation="MEAN")
    weights = sv.Variable(0.0, name="weights", aggregation="SUM")
    loss.assign_add(1.0)
    if sv.rank() == 0:
        print(float(loss))
    weights.assign_add(1.0)


@refusal("the classic mistake, between two runs", "loss.local_value()", size=2)
def _():
    strategy, loss = scoped(0.0, "loss", synchronization="ON_READ", aggregation="MEAN")
    weights = scoped(0.0, "weights", strategy=strategy, aggregation="SUM")[1]
    strategy.run(lambda: loss.assign_add(1.0))
    if sv.rank() == 0:
        print(float(loss))
    strategy.run(lambda: weights.assign_add(1.0))


@refusal("the classic mistake, at the end of the program", "loss.local_value()", size=2)
def _():
    _, loss = scoped(0.0, "loss", synchronization="ON_READ", aggregation="MEAN")
    if sv.rank() == 0:
        print(float(loss))


@refusal("a deep copy on one rank only", "on every rank", size=2)
def _():
    v = sv.Variable(0.0, name="v")
    if sv.rank() == 0:
        copy.deepcopy(v)
    v.sync()
