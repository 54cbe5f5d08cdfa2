"""Members of enumerations of other libraries are taken, by their names, where our words are."""

from enum import Enum, IntEnum, StrEnum

import numpy as np
import pytest

import syncvar as sv
from syncvar.testing import run_ranks


class VariableAggregationV2(Enum):  # as in TensorFlow
    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class VariableSynchronization(Enum):
    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class ReduceOp(Enum):
    SUM = "SUM"
    MEAN = "MEAN"


class Numbered(IntEnum):
    SUM = 1
    MEAN = 2
    ON_READ = 3


class Spelled(StrEnum):
    AVERAGE_OF_ALL = "mean"
    TOTAL = "sum"


class Mixed(str, Enum):  # noqa: UP042 - as code before Python 3.11 has it
    MEAN = "average of all"
    SUM = "total"


MEANS = [
    *(VariableAggregationV2.MEAN, ReduceOp.MEAN, Numbered.MEAN),
    *(Spelled.AVERAGE_OF_ALL, Mixed.MEAN, sv.ReduceOp.MEAN),
]
SUMS = [
    *(VariableAggregationV2.SUM, ReduceOp.SUM, Numbered.SUM),
    *(Spelled.TOTAL, Mixed.SUM, sv.ReduceOp.SUM),
]


def test_variables_take_modes_of_other_libraries():
    def program():
        for mean in MEANS[:-1]:
            v = sv.Variable(0.0, aggregation=mean)
            assert v.aggregation is sv.VariableAggregation.MEAN
        for mode in (VariableSynchronization.ON_READ, Numbered.ON_READ):
            metric = sv.Variable(0.0, synchronization=mode, aggregation=VariableAggregationV2.SUM)
            assert metric.synchronization is sv.VariableSynchronization.ON_READ
            metric.assign_add(1.0 + sv.rank())
            assert float(metric.read_value()) == 3.0
        first = sv.Variable(0.0, aggregation=VariableAggregationV2.ONLY_FIRST_REPLICA)
        assert first.aggregation is sv.VariableAggregation.ONLY_FIRST_REPLICA
        return True

    assert run_ranks(2, program) == [True, True]


def test_variables_on_servers_take_modes_of_other_libraries():
    strategy = sv.ParameterServerStrategy()
    with strategy.scope():
        v = sv.Variable(0.0, aggregation=VariableAggregationV2.SUM)
        local = sv.Variable(0.0, synchronization=VariableSynchronization.NONE)
    assert v.aggregation is sv.VariableAggregation.SUM
    assert type(local) is sv.Variable


@pytest.mark.parametrize("index", range(len(MEANS)))
def test_calls_take_ops_of_other_libraries(index):
    mean, total = MEANS[index], SUMS[index]

    def program():
        rank = sv.rank()
        op = mean if rank else "mean"  # the two are one call
        x = np.array([1.0, 3.0]) * (1 + rank)
        assert sv.all_reduce(x, op).tolist() == [1.5, 4.5]
        assert sv.all_reduce({"a": x}, op)["a"].tolist() == [1.5, 4.5]
        assert sv.all_reduce(x, op, async_op=True).wait().tolist() == [1.5, 4.5]
        assert sv.reduce(x, op, root=0) is None or rank == 0
        assert sv.scan(x, total)[0] == 1.0 + 2 * rank
        assert sv.exscan(x, total)[0] == float(rank)
        assert sv.reduce_scatter(x, total).tolist() == [[3.0], [9.0]][rank]
        assert sv.all_reduce_shards({rank: x}, op).tolist() == [1.5, 4.5]
        strategy = sv.MirroredStrategy()
        assert strategy.reduce(op, float(rank), axis=None) == 0.5
        both = strategy.run(lambda: sv.get_replica_context().all_reduce(op, float(rank)))
        assert both == 0.5
        with strategy.scope():
            w = sv.Variable(0.0)
        sgd, pairs = sv.optimizers.SGD(1.0), [(np.float32(1 + rank), w)]
        strategy.run(lambda: sgd.apply_gradients(pairs, reduce=total))
        return float(w)

    assert run_ranks(2, program) == [-3.0, -3.0]


class Wrong(Enum):
    MEDIAN = "median"


@pytest.mark.parametrize("op", [Wrong.MEDIAN, 3, None])
def test_another_member_is_refused_with_the_words_that_there_are(op):
    with pytest.raises(sv.ConfigError, match="must be one of sum, mean"):
        sv.all_reduce(1.0, op)
    with pytest.raises(sv.ConfigError, match="must be one of NONE, SUM, MEAN"):
        sv.Variable(0.0, aggregation=op)
