"""A variable behaves as its array in Python and NumPy, except where that would hide a write."""

import copy
import math
import pickle

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.testing import run_ranks


def test_arithmetic_gives_plain_arrays():
    v = sv.Variable([1.0, 4.0])
    for made, expected in (
        (v + 1, [2, 5]),
        (1 + v, [2, 5]),
        (v - v, [0, 0]),
        (v * 2, [2, 8]),
        (8 / v, [8, 2]),
        (v**2, [1, 16]),
        (-v, [-1, -4]),
        (v // 2, [0, 2]),
        (v % 3, [1, 1]),
        (v @ v, 17),
        (v.numpy() + v, [2, 8]),
        (np.sqrt(v), [1, 2]),
        (abs(v), [1, 4]),
        (np.add.reduce(v), 5),
        (np.mean(v), 2.5),
        (np.stack([v, v])[0], [1, 4]),
        (v[1:], [4]),
        (v[...], [1, 4]),
        (v[0], 1),
    ):
        assert not isinstance(made, sv.Variable)
        assert np.array_equal(made, expected)
    out = np.zeros(2, np.float32)
    assert np.add(v, 1, out=out) is out


def test_comparison_is_elementwise_and_hash_is_by_identity():
    v, w = sv.Variable([1.0, 2.0]), sv.Variable([1.0, 3.0])
    assert (v == w).tolist() == [True, False]
    assert (v < 2).tolist() == [True, False]
    assert len({v, w, v}) == 2
    assert hash(v) == hash(v)


def test_conversions():
    assert float(sv.Variable(2.5)) == 2.5
    assert int(sv.Variable(3)) == 3
    assert complex(sv.Variable(1 + 2j)) == 1 + 2j
    assert math.sqrt(sv.Variable(4.0)) == 2
    assert [10, 20, 30][sv.Variable(1)] == 20
    assert (bool(sv.Variable(0.0)), bool(sv.Variable(2))) == (False, True)
    assert [float(x) for x in sv.Variable([1.0, 2.0])] == [1, 2]
    assert len(sv.Variable(np.zeros((3, 2)))) == 3
    assert np.asarray(sv.Variable(1.5), dtype=np.float64).dtype == np.float64
    assert np.array(sv.Variable([1.0])).flags.writeable
    scalar, vector = sv.Variable(1.0), sv.Variable([1.0, 2.0])
    for wrong in (
        lambda: len(scalar),
        lambda: list(scalar),
        lambda: float(vector),
        lambda: [0][scalar],
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="ambiguous"):
        bool(vector)


def test_in_place_operators_name_the_right_method():
    v = sv.Variable([1.0, 2.0], name="v")
    with pytest.raises(TypeError, match=r"v\.assign_add\(x\)"):
        v += 1
    with pytest.raises(TypeError, match=r"v\.assign_sub\(x\)"):
        v -= 1
    with pytest.raises(TypeError, match=r"v\.assign\(v \* x\)"):
        v *= 2
    with pytest.raises(TypeError, match=r"v\.scatter_update"):
        v[0] = 3
    with pytest.raises(TypeError, match=r"v\.assign"):
        np.add(v, 1, out=v)
    with pytest.raises(TypeError, match=r"v\.assign"):
        np.add.at(v, [0], 1)
    array = np.ones(2, np.float32)
    array += v
    assert array.tolist() == [2, 3]
    assert v.numpy().tolist() == [1, 2]


def test_pickling_points_to_checkpoints():
    v = sv.Variable(1.0)
    for wrong in (lambda: pickle.dumps(v), lambda: copy.copy(v)):
        with pytest.raises(TypeError, match=r"sv\.Checkpoint"):
            wrong()


def test_repr_never_communicates():
    def program():
        v = sv.Variable(0.0, name="loss", synchronization="ON_READ", aggregation="SUM")
        engine = current().engine
        sent = engine.frames_sent
        v.assign(sv.rank() + 0.5)
        text = repr(v)
        assert engine.frames_sent == sent
        sv.barrier()
        return text

    assert run_ranks(2, program, timeout_s=120) == [
        f"<sv.Variable 'loss' ON_READ + SUM shape=() dtype=float32 local={rank + 0.5}>"
        for rank in (0, 1)
    ]


def test_a_variable_of_a_job_that_was_left():
    def program():
        v = sv.Variable(3.0, aggregation="SUM")
        sv.shutdown()
        with pytest.raises(sv.UsageError, match="left"):
            v.assign(1.0)
        return float(v.local_value()), float(v), v.explain().numbers["replicas"]

    assert run_ranks(2, program, timeout_s=120) == [(3.0, 3.0, 2)] * 2


def test_a_lone_reader_is_told_what_to_do():
    def program():
        loss = sv.Variable(0.0, name="loss", synchronization="ON_READ", aggregation="SUM")
        if sv.rank() == 0:
            with pytest.raises(
                sv.MismatchError, match=r"ON_READ variable 'loss' \(collective .*local_value"
            ):
                float(loss)
        else:
            with pytest.raises(sv.MismatchError):
                sv.all_reduce(1.0)
        return float(loss)

    assert run_ranks(2, program, timeout_s=120) == [0.0, 0.0]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shared", [False, True], ids=["links", "shm"])
def test_a_view_shows_the_value_after_a_write_that_had_to_leave_its_memory(size, shared):
    def fn():
        v, w = (
            sv.Variable(np.zeros(3), aggregation="SUM"),
            sv.Variable(np.zeros(3), aggregation="SUM"),
        )
        for turn in range(4):
            kept = v.read_value()
            v.assign_add(np.ones(3))
            assert v.read_value(copy=False).tolist() == [(turn + 1) * size] * 3
            assert (v + 0).tolist() == v.numpy().tolist()
            assert kept.tolist() == [turn * size] * 3
        w.assign_add(v)
        return w.numpy().tolist()

    assert run_ranks(size, fn, shared=shared and size > 1) == [[4.0 * size * size] * 3] * size


def test_a_scalar_is_formatted_as_numpy_does():
    v = sv.Variable(1.23456, synchronization="NONE")
    assert (f"{v:.3f}", f"{v:>8.1f}", f"{v:e}") == ("1.235", "     1.2", "1.234560e+00")
    assert f"{sv.Mirrored(np.float64(2.5)):.2f}" == "2.50"
    assert f"{v}" == str(v) == repr(v), "without a format nothing is read"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{sv.Variable(np.zeros(2), synchronization='NONE'):.3f}"
