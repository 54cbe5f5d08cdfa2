"""Variables as operands of scatter operations, and structures through merge_call."""

from typing import Any, NamedTuple

import numpy as np

import syncvar as sv
from syncvar.testing import run_ranks


class Pair(NamedTuple):
    left: Any
    right: Any


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=20)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


def test_rows_may_be_given_by_a_variable_whose_reading_is_a_collective():
    def program():
        v = sv.Variable([0.0, 0.0, 0.0], aggregation="SUM")
        row = sv.Variable(np.array([0]), synchronization="ON_READ", aggregation="SUM")
        row.assign([1])
        return v.scatter_add(row, [1.0]).numpy().tolist()

    assert everywhere(2, program) == [[0.0, 0.0, 2.0]] * 2


def test_merge_call_gives_back_the_parts_of_structures_and_takes_named_tuples():
    def program():
        def merged(_, pair):
            return {"all": [pair.left, pair.right], "is": isinstance(pair, Pair)}

        def step():
            return sv.get_replica_context().merge_call(merged, args=(Pair(float(sv.rank()), "x"),))

        return sv.MirroredStrategy().run(step)

    assert everywhere(2, program) == [{"all": [float(rank), "x"], "is": True} for rank in range(2)]
