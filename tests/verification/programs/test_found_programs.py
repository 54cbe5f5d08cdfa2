"""Programs that random programs came down to: each failed once."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.core.errors import MismatchError
from syncvar.testing import run_ranks


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=120)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


def test_an_empty_list_goes_into_integers():
    def program():
        v = sv.Variable([], dtype="int8", synchronization="ON_READ")
        return v.assign([]).local_value().dtype.name

    assert everywhere(2, program) == ["int8"] * 2


@pytest.mark.parametrize("call", ["gather", "all_gather"])
def test_gathering_along_the_last_axis_of_values_of_unequal_dimensions(call):
    def program():
        context, strategy = sv.get_replica_context(), sv.get_strategy()
        gather = strategy.gather if call == "gather" else context.all_gather
        with pytest.raises(MismatchError):
            gather(np.zeros((1, 2, 2) if sv.rank() == 1 else (1, 2)), axis=-1)
        return gather(np.zeros((1, 2)), axis=-1).shape

    assert everywhere(3, program) == [(1, 6)] * 3


def test_a_read_on_one_rank_between_two_runs_is_told_at_once():
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            loss = sv.Variable(0.0, name="loss", synchronization="ON_READ", aggregation="MEAN")
            w = sv.Variable(0.0, name="w", aggregation="SUM")
        for step in range(3):
            strategy.run(lambda: loss.assign(1.0))
            if step == 1 and sv.rank() == 0:
                with pytest.raises(
                    MismatchError,
                    match=r"(?s)has gone on.*'w'.*Reading ON_READ 'loss' is collective.*local_value",
                ):
                    float(loss)
            try:
                strategy.run(lambda: w.assign_add(1.0))
            except MismatchError:
                assert step == 1
        return float(w)

    assert everywhere(4, program) == [8.0] * 4


def test_a_read_on_one_rank_before_runs_without_calls():
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            loss = sv.Variable(0.0, name="loss", synchronization="ON_READ", aggregation="MEAN")
        if sv.rank() == 0:
            with pytest.raises(MismatchError, match="has gone on"):
                float(loss)
        for _ in range(5):
            strategy.run(lambda: loss.assign_add(1.0))
        with pytest.raises(MismatchError):
            float(loss)
        return float(loss)

    assert everywhere(3, program) == [5.0] * 3
