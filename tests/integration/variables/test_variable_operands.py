"""Variables as operands of scatter operations, and structures through merge_call."""

from typing import Any, NamedTuple

import numpy as np
import pytest

import syncvar as sv
from syncvar.testing import run_ranks


class Pair(NamedTuple):
    left: Any
    right: Any


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=120)
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


def test_a_refusal_names_its_rank():
    def program():
        v = sv.Variable(np.zeros(2), aggregation="SUM")
        try:
            v.assign(np.zeros(2) if sv.rank() == 0 else np.zeros(3))
        except (sv.ConfigError, sv.MismatchError) as error:
            return type(error).__name__, getattr(error, "__notes__", [])

    assert run_ranks(2, program, timeout_s=120) == [
        ("MismatchError", []),
        ("ConfigError", ["refused on rank 1; the other ranks of the group raise MismatchError"]),
    ]


def test_a_row_is_named_as_it_was_given():
    v = sv.Variable(np.zeros(3), synchronization="NONE")
    with pytest.raises(sv.RowOutOfRange, match=f"row {2**63 + 1} is outside"):
        v.scatter_add(np.array([1, 2**63 + 1], np.uint64), np.ones(2))
