"""`sv.check_equal`: what should be equal on all ranks is compared, and the first difference is named."""

import types

import numpy as np
import pytest

import syncvar as sv
from tests.support.harness import caught, everywhere

LAYOUTS = {"shm": {"shared": True}, "links": {}, "hosts": {"shared": True, "hosts": 2}}


class KerasModel:
    """What `check_equal` uses of a model of Keras."""

    def __init__(self, arrays):
        self.arrays = [np.asarray(one) for one in arrays]
        self.weights = [
            types.SimpleNamespace(path=f"dense/{number}") for number in range(len(arrays))
        ]

    def get_weights(self):
        return [one.copy() for one in self.arrays]

    def set_weights(self, arrays):
        self.arrays = [np.asarray(one) for one in arrays]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_values_pass_and_the_first_difference_is_named(layout):
    def fn():
        rank = sv.rank()
        nan = np.array([np.nan, -0.0, 1.0])
        assert sv.check_equal(
            {"w": nan, "step": 7, "kind": "sgd", "none": None, "empty": np.zeros((0, 3))}
        )
        assert sv.check_equal([], "nothing")
        large = np.zeros((300, 200))
        if rank == 1:
            large[250, 3] = 0.5
            large[299, 199] = 1.0
        error = caught(
            lambda: sv.check_equal({"a": np.ones(2), "w": large, "z": [np.array(rank)]}, "state")
        )
        assert type(error) is sv.MismatchError
        assert "state['w'] differs between the ranks, first at index (250, 3)" in str(error)
        assert "1 further arrays differ, the next is state['z'][0]" in str(error)
        assert "state['w'][250, 3] = 0.0" in str(error)
        assert "state['w'][250, 3] = 0.5" in str(error)
        error = caught(lambda: sv.check_equal(np.float32(-0.0 if rank else 0.0), "bias"))
        assert "bias = -0.0 (bytes 00000080)" in str(error)
        error = caught(lambda: sv.check_equal({"w": np.zeros(2 + (rank == 2)), "b": 1.0}, "state"))
        assert "other names, shapes or dtypes" in str(error)
        assert "state['w']: float64[3]" in str(error)
        error = caught(lambda: sv.check_equal([1.0] * (1 + (rank > 0)), "list"))
        assert "no array number 1" in str(error)
        error = caught(lambda: sv.check_equal(KerasModel([[1.0], [2.0 + rank]]), "model"))
        assert "model['dense/1'][0] = 3.0" in str(error)
        error = caught(lambda: sv.check_equal("a" if rank else "b", "mode"))
        assert "mode = 'b'" in str(error)
        long = "a" * 100
        for one, other in (
            (long, long[:-1] + "b"),
            (long, long + "a"),
            (long.encode(), long.encode() + b"a"),
        ):
            assert sv.check_equal({"text": one})
            error = caught(lambda pair=(one, other): sv.check_equal({"text": pair[rank == 2]}))
            assert type(error) is sv.MismatchError
            assert "value['text']" in str(error)
        assert sv.check_equal({"a": 1.0, "b": 2.0} if rank else {"b": 2.0, "a": 1.0})
        v = sv.Variable(np.zeros(3), synchronization="NONE", name="own")
        assert sv.check_equal([v])
        v.assign([0.0, 0.0, float(rank)])
        assert "own differs between the ranks, first at index (2,)" in str(
            caught(lambda: sv.check_equal(v))
        )

    everywhere(3, fn, timeout_s=60, **LAYOUTS[layout])


def test_every_compares_at_each_so_many_calls_of_a_line():
    def fn():
        array = np.zeros(2)
        compared = []
        for step in range(7):
            if step == 3:
                array[0] = sv.rank()
            found = caught(lambda: compared.append(sv.check_equal(array, every=5)))
            assert isinstance(found, sv.MismatchError) == (step == 5), step
        assert compared == [True, False, False, False, False, False]
        before = [sv.check_equal(one, name, every=2) for name, one in 2 * [("a", 1.0), ("b", 2.0)]]
        assert before == [True, True, False, False]

    everywhere(2, fn, timeout_s=60, shared=True)


def test_what_cannot_be_compared_is_refused_on_all_ranks():
    def fn():
        for every in (0, True, 1.5):
            assert "every must be a whole number" in str(
                caught(lambda every=every: sv.check_equal(1.0, every=every))
            )
        error = caught(
            lambda: sv.check_equal({"w": [1.0, object() if sv.rank() else 2.0]}, "state")
        )
        assert type(error) is (sv.ConfigError if sv.rank() else sv.MismatchError), error
        assert "state['w'][1]" in str(error)
        error = caught(lambda: sv.check_equal(1.0, "mine" if sv.rank() else "yours"))
        assert type(error) is sv.MismatchError
        assert sv.check_equal(np.ones(3))

    everywhere(2, fn, timeout_s=60, shared=True)
