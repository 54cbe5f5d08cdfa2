"""What a worker has read stays as it was, whatever is pushed afterwards, though no copy was made when it was read."""

import numpy as np
import pytest

from syncvar.parameter_server.shard import Push, Shard, Spec

PUSHES = {
    "assign": Push("assign", np.full(6, 9.0)),
    "assign_add": Push("assign_add", np.full(6, 2.0)),
    "assign_sub": Push("assign_sub", np.full(6, 2.0)),
    "rows": Push("scatter_add", np.full(2, 5.0), np.array([1, 4])),
    "step": Push("step", np.full(6, 1.0), None, ("SGD", ()), 0.5),
    "step of rows": Push("step", np.full(2, 1.0), np.array([0, 5]), ("Momentum", ()), 0.5),
}


@pytest.mark.parametrize("how", PUSHES)
def test_what_was_read_does_not_change_and_the_result_is_the_same_as_without_readers(how):
    value = np.arange(6.0)
    read, unread = (Shard(Spec((6,), "float64", "SUM", (6,), 0), value, None) for _ in range(2))
    seen = []
    for _ in range(3):
        seen.append((read.rows(None), read.array.copy()))
        read.push(0, None, PUSHES[how])
        unread.push(0, None, PUSHES[how])
        assert np.array_equal(read.array, unread.array)
    for given, copy in seen:
        assert np.array_equal(given, copy)
        assert not given.flags.writeable


def test_nobody_who_reads_costs_no_second_array():
    shard = Shard(Spec((6,), "float64", "SUM", (6,), 0), np.arange(6.0), None)
    array = shard.array
    shard.push(0, None, PUSHES["assign_add"])
    assert shard.array is array
    assert shard.rows(None).base is array
    assert shard.rows(None).base is array
    shard.push(0, None, PUSHES["assign_add"])
    assert shard.array is not array


def test_rows_are_copied_in_their_order():
    shard = Shard(Spec((6,), "float64", "SUM", (6,), 0), np.arange(6.0), None)
    made = shard.rows(np.array([[4, 0], [4, 5]]))
    shard.push(0, None, PUSHES["rows"])
    assert made.tolist() == [[4.0, 0.0], [4.0, 5.0]]
